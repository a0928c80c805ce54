"""State dicts with any value in any place."""

import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch

from lossscale_core.errors import CheckpointError
from lossscale_torch import GradScaler
from tests.adapters.torch_steps import one, ready, take_step

LONGEST = 3000


def _shared(depth):
    value = (1.0, 2.0)
    for _ in range(depth):
        value = (value, value)
    return value


TORCHS = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
BAD = {
    "10**400": 10**400,
    "no elements": torch.zeros(0),
    "expanded": torch.zeros(1).expand((7,) * 8),
    "a long string": "x" * 100_000,
    "shared tuples": _shared(30),
    "a signalling NaN": Decimal("sNaN"),
    "NaN": float("nan"),
    "a list": [1.0],
    "None": None,
    "a dict": {"a": _shared(30)},
    "bytes": bytearray(2**20),
    "a strided array": np.lib.stride_tricks.as_strided(np.zeros(1), (7,) * 12, (0,) * 12),
}


def _loaded(scaler, saved):
    """Return the warnings of `load_state_dict`, or "refused" and why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scaler.load_state_dict(saved)
        except (CheckpointError, KeyError) as error:  # the latter is torch's for a missing key
            return ["refused", str(error)]
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("follows", [True, False])
def test_a_bad_state_dict_leaves_the_scaler_as_it_was(bad, follows):
    """Any value in any place is taken, or refused by one short error."""
    scaler = ready(**({} if follows else {"policy": "dynamic"}))
    ours, value = scaler.state_dict(), BAD[bad]
    dicts = [{**whole, name: value} for whole in (TORCHS, ours) for name in whole]
    dicts += [{**ours, "policy": {**ours["policy"], name: value}} for name in ours["policy"]]
    for saved in (value, *dicts):
        said = _loaded(scaler, saved)
        assert all(len(each) < LONGEST and "\n" not in each for each in said), said
        if said[:1] == ["refused"]:
            assert repr(scaler.state_dict()) == repr(ours), said
        scaler.load_state_dict(ours)


NUMBERS = [("_growth_tracker", np.int64(3)), ("growth_interval", float("inf")), ("scale", torch.tensor(8.0))]


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_numbers_of_numpy_and_torch_are_taken(name, value):
    """As other savers write them."""
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**TORCHS, name: value})
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["_growth_tracker"] == 3


@pytest.mark.parametrize(("policy", "interval"), [("dynamic", 2000), (1024.0, 7), (None, 7)])
def test_settings_of_torchs_that_a_policy_has_or_cannot_have(policy, interval):
    """Nothing is said of them; a warning, of those that differ, would be an error here."""
    scaler = GradScaler("cpu", policy=policy)
    scaler.load_state_dict({**TORCHS, "scale": 1024.0, "growth_interval": interval})
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("is_loaded", [True, False])
def test_factors_of_one_are_taken(is_loaded):
    """As by torch's setters: `set_backoff_factor(1.0)` ends a descent. The scale moves to the next float32 at most."""
    scaler = GradScaler("cpu", 8.0)
    if is_loaded:
        scaler.load_state_dict({**TORCHS, "growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1})
    else:
        scaler.set_growth_factor(1)
        scaler.set_backoff_factor(1.0)
        scaler.set_growth_interval(1)
    _, optimizer = one()
    for value in (1.0, float("inf")):
        take_step(scaler, optimizer, value)
        assert abs(scaler.get_scale() - 8.0) <= 2.0**-20

"""State dicts with any value in any place, and state dicts in which a program has edited torch's keys."""

import warnings

import pytest
import torch

from lossscale_core.errors import CheckpointError, CheckpointWarning
from lossscale_torch import GradScaler
from tests.adapters.torch_steps import INF, one, ready, take_step

TORCHS = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}


def _shared(depth):
    value = (1.0, 2.0)
    for _ in range(depth):
        value = (value, value)
    return value


BAD = {
    "10**400": 10**400,
    "expanded": torch.zeros(1).expand((7,) * 8),
    "a long string": "x" * 100_000,
    "shared tuples": _shared(30),
    "NaN": float("nan"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("settings", [{}, {"policy": "dynamic"}], ids=["follows", "keeps"])
def test_a_bad_value_changes_nothing(bad, settings):
    """Any value in any place is taken, or refused by one short error that leaves the scaler as it was."""
    scaler = ready(**settings)
    ours = scaler.state_dict()
    dicts = [{**whole, name: bad} for whole in (TORCHS, ours) for name in whole]
    dicts += [{**ours, "policy": {**ours["policy"], name: bad}} for name in ours["policy"]]
    for saved in (bad, *dicts):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                scaler.load_state_dict(saved)
            except CheckpointError as error:
                caught.append(error)
                assert repr(scaler.state_dict()) == repr(ours)
        said = [str(getattr(each, "message", each)) for each in caught]
        assert all(len(each) < 3000 and "\n" not in each for each in said), said
        scaler.load_state_dict(ours)


def test_factors_of_one_are_taken():
    """As with torch's setters, a factor of 1 keeps the scale; it moves by one float32 number at most."""
    scaler = GradScaler("cpu", 8.0)
    scaler.load_state_dict({**TORCHS, "growth_factor": 1.0, "growth_interval": 1})
    scaler.set_backoff_factor(1.0)
    _, optimizer = one()
    for value in (1.0, INF):
        take_step(scaler, optimizer, value)
        assert abs(scaler.get_scale() - 8.0) <= 2.0**-20


EDITS = {"scale": 64.0, "_growth_tracker": 2, "growth_factor": 4.0, "backoff_factor": 0.125, "growth_interval": 4}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("policy", ["dynamic", 8.0])
def test_an_edited_key_is_used(name, policy):
    """The scaler continues as torch's scaler does, and a warning says so."""
    saved = {**GradScaler("cpu", policy=policy).state_dict(), name: EDITS[name]}
    scaler, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    torchs.load_state_dict(saved)
    with pytest.warns(CheckpointWarning, match=f"torch's {name}=.*, which is used"):
        scaler.load_state_dict(saved)
    ours = scaler.state_dict()
    assert torchs.state_dict() == {key: pytest.approx(ours[key], rel=2.0**-20) for key in TORCHS}

"""State dicts with any value in any place."""

import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale import state_from_tool
from lossscale_core import FixedScaling, NoScaling, state_from_dict
from lossscale_core.errors import CheckpointError, CheckpointWarning
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


EDITS = st.one_of(
    st.tuples(st.just("scale"), st.sampled_from([2.0**-3, 3.0, torch.tensor(64.0)])),
    st.tuples(st.just("_growth_tracker"), st.sampled_from([0, 1, np.int64(2)])),
    st.tuples(st.just("growth_factor"), st.sampled_from([1.5, 2.0, 4.0])),
    st.tuples(st.just("backoff_factor"), st.sampled_from([0.5, 0.125])),
    st.tuples(st.just("growth_interval"), st.sampled_from([0, 2, 4])),
)


@settings(deadline=None)
@given(
    EDITS, st.sampled_from([None, FixedScaling(1024.0), NoScaling()]), st.lists(st.booleans(), min_size=6, max_size=6)
)
def test_an_edited_key_of_torch_is_used(edit, policy, trace):
    """The next scales are those of torch's scaler, and a warning shows both numbers."""
    first = ready(**({"init_scale": 2.0**10, "growth_interval": 3} if policy is None else {"policy": policy}))
    take_step(first, one()[1], 1.0)
    saved = first.state_dict()
    name, value = edit
    edited, scalers = {**saved, name: value}, (GradScaler("cpu"), torch.amp.GradScaler("cpu"))
    said = _loaded(scalers[0], edited)
    assert bool(said) == (value != saved[name])
    assert all(f"torch's {name}={value:g}"[:-1] in text and "which is used" in text for text in said), said
    scalers[1].load_state_dict(edited)
    for finite in trace:
        for scaler in scalers:
            take_step(scaler, one()[1], 1.0 if finite else float("inf"))
        assert scalers[0].get_scale() == pytest.approx(scalers[1].get_scale(), rel=2.0**-20 if policy else 0.0)


@pytest.mark.parametrize(("name", "value"), [("loss_scale", 64.0), ("growth_tracker", 2), ("policy", 4)])
def test_an_edit_of_our_key_alone_only_warns(name, value):
    """Every reader uses torch's number."""
    saved = GradScaler("cpu", 8.0, growth_interval=9).state_dict()
    edited = {**saved, name: {**saved["policy"], "growth_interval": value} if name == "policy" else value}
    for read in (state_from_dict, lambda saved: state_from_tool("torch", saved)):
        with pytest.warns(CheckpointWarning, match="which is used"):
            assert read(edited)[:2] == (8.0, 0)
    scaler = GradScaler("cpu")
    assert "which is used" in _loaded(scaler, edited)[0]
    assert scaler.state_dict() == saved

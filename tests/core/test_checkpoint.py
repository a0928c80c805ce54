"""A state saved as a plain dict continues exactly where it was."""

import json

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, FixedScaling, ScaleState, init_state, state_from_dict, state_to_dict
from lossscale_core.errors import CheckpointError, CheckpointWarning
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling
from tests.strategies import overflow_traces, policies

SAVED = state_to_dict(DynamicScaling().init_state())


@given(policies("none", "fixed", "dynamic", "additive"), overflow_traces(), st.integers(0, 200))
def test_saving_and_restoring_changes_nothing(policy, trace, cut):
    """A state that is saved as JSON at any step and loaded has the same values and types."""
    state = policy.init_state()
    for step, finite in enumerate(trace):
        if step == cut:
            loaded = state_from_dict(json.loads(json.dumps(state_to_dict(state, policy))), policy)
            assert loaded == state
            assert [type(value) for value in (loaded, *loaded)] == [type(value) for value in (state, *state)]
            again = state_from_dict(state_to_dict(state))
            assert (again, type(again)) == (state, type(state))
            state = loaded
        state = policy.update(state, finite)


def test_a_saved_state_is_plain():
    """A saved state has a version and plain numbers, the same for each array namespace."""
    for xp in (np, array_api_strict):
        entries = state_to_dict(init_state("dynamic", xp=xp), "dynamic")
        assert entries.pop("policy")["kind"] == "dynamic"
        assert entries == SAVED
        assert list(entries) == ["version", *ScaleState._fields]
        assert {type(value) for value in entries.values()} == {int, float}


@pytest.mark.parametrize("convert", [np.asarray, array_api_strict.asarray])
def test_arrays_of_no_dimension_are_numbers(convert):
    """A saved entry may be an array of shape (), as from `.npz` or safetensors, but not an array of another shape."""
    state = DynamicScaling().update(DynamicScaling().init_state(), False)
    entries = {name: convert(value) for name, value in state_to_dict(state).items()}
    assert state_from_dict(entries) == state
    for name, wrong in (("version", convert(True)), ("steps", np.asarray([1]))):
        with pytest.raises(CheckpointError, match=rf"{name}=(True|array\(\[1\]\)) of the saved state must be"):
            state_from_dict({**entries, name: wrong})


@pytest.mark.parametrize(
    ("before", "policy", "scale"),
    [
        (2.0**16, FixedScaling(1024.0), 1024.0),
        (2.0**16, DynamicScaling(init_scale=2.0, max_scale=8.0), 8.0),
        # What another tool let grow or fall without bounds.
        *((1e-40, None, 2.0**-126), (1e300, None, 2.0**126)),
    ],
)
def test_a_loaded_scale_is_clamped(before, policy, scale):
    """A loaded scale outside the policy's bounds becomes the nearest bound, with a warning."""
    with pytest.warns(CheckpointWarning, match=r"loss_scale was .* and becomes"):
        assert float(state_from_dict({**SAVED, "loss_scale": before}, policy).loss_scale) == scale


def test_a_bare_policy_restores_its_state():
    """A policy without a config restores its state, also if another policy's config was saved with it."""
    own = BareAdditiveScaling()
    state = own.update(own.init_state(), False)
    entries = state_to_dict(state, own)
    assert "policy" not in entries
    assert state_from_dict(entries, own) == state
    with pytest.warns(CheckpointWarning, match="cannot be compared"):
        assert state_from_dict({**entries, "policy": {"kind": "dynamic"}}, own) == state


def test_another_policy_starts_its_trackers():
    """Under another kind of policy the scale and counts continue, and a warning says which trackers start."""
    fixed = FixedScaling(64.0)
    entries = state_to_dict(fixed.update(fixed.init_state(), True), fixed)
    with pytest.warns(CheckpointWarning, match=r"kind was 'fixed' and is 'additive'.* additions starts at 0\.0"):
        state = state_from_dict(entries, AdditiveScaling())
    assert (float(state.loss_scale), int(state.steps), float(state.additions)) == (64.0, 1, 0.0)
    with pytest.warns(CheckpointWarning, match=r"^(?!.*hysteresis).*: growth_interval was 2000 and is 500$"):
        state_from_dict(state_to_dict(state, "dynamic"), DynamicScaling(growth_interval=500))


def test_an_unknown_saved_policy_causes_warnings():
    """A saved policy of a later release causes a warning, and trackers of the same kind continue."""
    for kind, tracker in (("clever", 0), ("dynamic", 7)):
        policy = {"kind": kind, "a_later_setting": 1}
        with pytest.warns(CheckpointWarning, match="cannot be compared"):
            loaded = state_from_dict({**SAVED, "growth_tracker": 7, "policy": policy}, DynamicScaling())
        assert loaded.growth_tracker == tracker


def test_an_edited_key_of_torch_is_used():
    """A state with torch's keys loads in silence, and with torch's number and a warning if the two differ."""
    torchs = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    saved = {**state_to_dict(DynamicScaling(init_scale=8.0).init_state(), "dynamic"), **torchs}
    assert state_from_dict(saved).loss_scale == 8.0
    for scale in (4.0, 16.0):
        with pytest.warns(CheckpointWarning, match=rf"loss_scale=8\.0, and torch's scale={scale}, which is used"):
            assert state_from_dict({**saved, "scale": scale}).loss_scale == scale

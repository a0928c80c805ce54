"""The counters of losses and updates that are not finite: the rule, its errors, checkpoints, metrics and sentences."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import (
    DynamicScaling,
    NonfiniteState,
    check_nonfinite_streak,
    count_nonfinite,
    diagnose,
    init_nonfinite_state,
    metrics,
    nonfinite_state_from_dict,
    nonfinite_update,
    state_to_dict,
    step_info,
)
from lossscale_core.adapters import check_setting
from lossscale_core.errors import CheckpointError, NonfiniteStreakError, NonfiniteUpdateError, PolicyError

POLICY = DynamicScaling()
STATE = POLICY.init_state()
STEPS = {
    "applied": {"stepped": True},
    "overflow": {},
    "bad update": {"stepped": True, "update_finite": False},
    "bad loss": {"loss_finite": False},
}


def _counted(*steps, state=None):
    state = init_nonfinite_state() if state is None else state
    for step in steps:
        state = count_nonfinite(state, **STEPS[step])
    return state


def test_a_streak_of_updates_ends_with_an_applied_step_only():
    """A step that is skipped for another reason says nothing about the update."""
    assert _counted("bad update", "overflow", "bad loss", "bad update") == (2, 2, 1, 0)
    assert _counted("bad update", "applied") == (1, 0, 0, 0)


def test_a_streak_of_losses_ends_with_a_finite_loss():
    """Whatever became of that step."""
    assert _counted("bad loss", "bad loss") == (0, 0, 2, 2)
    assert _counted("bad loss", "overflow") == (0, 0, 1, 0)


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=30))
def test_arrays_count_as_the_host_does(steps):
    """With flags that are arrays or Python bools; the dtype stays int32."""
    arrays = bools = NonfiniteState(*map(np.asarray, init_nonfinite_state()))
    for step in steps:
        flags = {"loss_finite": True, "stepped": False, "update_finite": True, **STEPS[step]}
        bools = count_nonfinite(bools, **flags)
        arrays = count_nonfinite(arrays, **{name: np.asarray(flag) for name, flag in flags.items()})
    host = _counted(*steps)
    assert host == tuple(arrays) == tuple(bools)
    assert {each.dtype for each in (*host, *arrays, *bools)} == {np.dtype("int32")}


def test_a_full_counter_stays_full():
    """It does not wrap around."""
    full = NonfiniteState(*[np.int32(2**31 - 1)] * 4)
    assert _counted("bad update", state=full)[:2] == full[:2]
    assert _counted("bad loss", state=full) == full


def test_too_many_updates_in_a_row_are_an_error_without_a_limit_too():
    """They would be undone without end; losses are limited by the policy alone."""
    updates, losses = _counted(*["bad update"] * 20), _counted(*["bad loss"] * 100)
    check_nonfinite_streak(POLICY, _counted(*["bad update"] * 19))
    check_nonfinite_streak(POLICY, losses)
    with pytest.raises(NonfiniteStreakError, match=r"the last 20 updates in a row .*; look for eps=0"):
        check_nonfinite_streak(POLICY, updates)
    limited = DynamicScaling(max_overflow_streak=3)
    with pytest.raises(NonfiniteStreakError, match=r"the last 100 losses in a row .* reaches max_overflow_streak=3"):
        check_nonfinite_streak(limited, losses)
    with pytest.raises(NonfiniteStreakError, match="the last 3 updates"):
        check_nonfinite_streak(limited, _counted(*["bad update"] * 3))


def test_the_error_names_the_parameter():
    """And what to do."""
    assert isinstance(nonfinite_update("head.weight"), NonfiniteUpdateError)
    assert str(nonfinite_update("head.weight")).startswith("head.weight became NaN or infinite in a step")


def test_the_counters_are_saved():
    """Next to the policy's state as plain numbers; without them they start at zero."""
    state = _counted("bad update", "bad loss", "bad loss")
    saved = json.loads(json.dumps(state_to_dict(STATE, POLICY, nonfinite=state)))
    assert saved["nonfinite"] == {"updates": 1, "update_streak": 1, "losses": 2, "loss_streak": 2}
    assert nonfinite_state_from_dict(saved) == state
    assert nonfinite_state_from_dict(state_to_dict(STATE)) == init_nonfinite_state()


@pytest.mark.parametrize("change", [{"updates": -1}, {"losses": 2**31}, {"loss_streak": True}, {"update_streak": 5}])
def test_counters_that_make_no_sense_are_refused(change):
    """Each by its name."""
    saved = {"nonfinite": {**init_nonfinite_state()._asdict(), **change}}
    with pytest.raises(CheckpointError, match=next(iter(change))):
        nonfinite_state_from_dict(saved)
    with pytest.raises(CheckpointError, match="have no updates, update_streak, losses, loss_streak; "):
        nonfinite_state_from_dict({"nonfinite": 3})


def test_metrics_have_the_counters():
    """As plain numbers."""
    numbers = metrics(STATE, nonfinite=_counted("bad update", "bad loss"))
    assert (numbers["nonfinite_updates"], numbers["nonfinite_losses"], numbers["nonfinite_loss_streak"]) == (1, 1, 1)


def test_the_outcome_of_a_step_has_its_cause():
    """Neither is an overflow, and neither is applied."""
    for cause in ("spiked", "nonfinite_update", "nonfinite_loss"):
        for flag in (True, np.bool_(True)):
            info = step_info(STATE, STATE, **{cause: flag})
            assert (bool(info.applied), bool(info.overflowed), bool(getattr(info, cause))) == (False, False, True)
    assert step_info(STATE, POLICY.update(STATE, True), nonfinite_loss=np.bool_(False)).applied


def test_the_diagnosis_names_the_cause():
    """A sentence for each, with its remedy; from five in a row on the text begins with it."""
    after = POLICY.update(STATE, True)
    text = diagnose(POLICY, after, nonfinite=_counted("bad update", "bad loss", "bad loss"))
    assert text.startswith("healthy")
    assert "2 losses were NaN or infinite before scaling, and the loss scale was kept: look at the inputs" in text
    assert "1 update was undone, since finite gradients made a parameter or a state NaN or infinite" in text
    assert diagnose(POLICY, after, nonfinite=_counted(*["bad loss"] * 5)).startswith("loss not finite")
    assert diagnose(POLICY, after, nonfinite=_counted(*["bad update"] * 5)).startswith("update not finite")
    assert diagnose(POLICY, after, nonfinite=init_nonfinite_state()) == diagnose(POLICY, after)
    assert diagnose(POLICY, STATE, nonfinite=_counted("bad update")).startswith("no step applied yet: 1 update was")
    assert diagnose(POLICY, STATE, nonfinite=_counted(*["bad loss"] * 5)).startswith("loss not finite: 5 losses were")


@pytest.mark.parametrize(
    ("name", "good", "bad", "rule"),
    [
        ("on_nonfinite_update", "skip", "warn", "'ignore', 'raise' or 'skip'; pass 'ignore', or leave it out"),
        ("on_nonfinite_loss", "hold", True, "'back_off' or 'hold'; pass 'back_off', or leave it out"),
    ],
)
def test_the_reactions_are_checked(name, good, bad, rule):
    """By their rule, as every argument of the adapters."""
    assert check_setting(name, good) == good
    with pytest.raises(PolicyError, match=f"{name}={bad!r} must be {rule}"):
        check_setting(name, bad)

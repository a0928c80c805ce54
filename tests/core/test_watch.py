"""`ScaleWatch`: what a run logs by itself, how often."""

import contextlib
import copy
import logging
import math
import pickle

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    ScaleWatch,
    diagnose,
    init_state,
    state_to_dict,
)
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE, check_overflow_streak
from tests.strategies import overflow_traces, policies

TORCHS = DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
LOGGER = logging.getLogger("lossscale")


@contextlib.contextmanager
def _logged_records():
    """Yield the list of the records that the library logs, of every level."""
    records = []
    handler, level = logging.Handler(), LOGGER.level
    handler.emit = records.append
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def _run(policy, flags, every=1):
    """Return the records of a run with a watch that looks every few steps, and the state at the end."""
    watch, state = ScaleWatch(), policy.init_state()
    with _logged_records() as records:
        for step, finite in enumerate(flags, 1):
            state = policy.update(state, finite)
            if step % every == 0:
                watch.log(policy, state)
    return records, state


def _events(policy, flags, **how):
    return [(record.event, record.steps) for record in _run(policy, flags, **how)[0]]


FINE = [True] * 50
START, STUCK, SKIPPING = ("calibrating", 1), "stuck at min_scale", "skipping too often"
CASES = {
    "two hundred NaNs in torch's rule": (TORCHS, [False] * 200, [START, (SKIPPING, 17), (STUCK, 142)]),
    "two hundred NaNs in ours": (DynamicScaling(), [False] * 200, [START, (STUCK, 16), (STUCK, 160)]),
    "coming down at the start": (DynamicScaling(), [False] * 12 + FINE, [START, ("healthy", 13)]),
    "from far above": (
        DynamicScaling(init_scale=2.0**40, max_scale=2.0**40),
        [False] * 30 + FINE,
        [START, ("healthy", 31)],
    ),
    "nothing ever overflows": (DynamicScaling(), FINE, []),
    "no scaling, and NaN from the middle on": (
        NoScaling(),
        FINE + [False] * 300,
        [(SKIPPING, 53), (SKIPPING, 80), (SKIPPING, 350)],
    ),
    "fixed and too large": (FixedScaling(1024.0), [False] * 30, [(SKIPPING, 5)]),
    "the ceiling": (
        DynamicScaling(init_scale=8.0, max_scale=16.0, growth_interval=5),
        FINE,
        [("pressing against max_scale", 5)],
    ),
    "down to the floor at once, and up": (
        DynamicScaling(init_scale=2.0, growth_interval=9),
        [False, *FINE],
        [("healthy", 2)],
    ),
    "begun at the floor, and stuck": (DynamicScaling(init_scale=1.0), [False] * 9, [(STUCK, 5)]),
    "two streaks soon after each other": (FixedScaling(8.0), ([False] * 30 + [True]) * 2, [(SKIPPING, 5)]),
    "two streaks far from each other": (
        FixedScaling(8.0),
        ([False] * 30 + [True] * 1000) * 2,
        [(SKIPPING, 5), ("healthy", 600), (SKIPPING, 1035)],
    ),
    "through 1, slowly": (
        DynamicScaling(init_scale=2.0, min_scale=2.0**-9),
        ([True] * 99 + [False]) * 5,
        [(SKIPPING, 200)],
    ),
    "begun below 1": (DynamicScaling(init_scale=0.5, min_scale=2.0**-9), [False, *FINE], [START, ("healthy", 2)]),
    "with a cooldown": (DynamicScaling(cooldown=5), [False] * 3 + FINE, [START, ("healthy", 4)]),
    "a verdict that comes and goes": (
        FixedScaling(8.0),
        ([True] * 18 + [False]) * 50,
        [(SKIPPING, 57), ("healthy", 60)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_run_says_and_when(name):
    """Each event at the step at which it happens, and nothing else."""
    policy, flags, events = CASES[name]
    assert _events(policy, flags) == events


def test_a_look_now_and_then_says_the_same_later():
    """A watch that looks after every 16th step misses neither the fall through 1 nor the floor."""
    assert _events(TORCHS, [False] * 200, every=16) == [("calibrating", 16), (SKIPPING, 32), (STUCK, 144)]
    assert _events(DynamicScaling(), [False] * 12 + FINE, every=8) == [("calibrating", 8), ("healthy", 16)]


def test_a_line_names_the_remedy_of_diagnose():
    """The level, the step, the diagnosis word for word, and numbers for a handler that acts on them."""
    records, state = _run(TORCHS, [False] * 142)
    line = records[-1]
    assert line.getMessage() == f"lossscale, step 142: {diagnose(TORCHS, state)}"
    assert "Look for a NaN or infinity in the inputs" in line.getMessage()
    assert (line.name, line.levelno, line.loss_scale, line.overflow_streak) == ("lossscale", 30, SMALLEST_SCALE, 142)
    records, state = _run(DynamicScaling(), [False] * 12 + [True])
    assert [record.levelno for record in records] == [logging.INFO] * 2
    assert records[-1].getMessage().endswith(f"step 13: {diagnose(DynamicScaling(), state)}")


@settings(max_examples=40)
@given(policies(), overflow_traces(max_steps=250), st.integers(1, 20))
def test_any_run_says_each_verdict_once_and_streaks_seldom(policy, flags, every):
    """Whatever the policy: in 250 steps each verdict once, and again for streaks ten times as long."""
    events = [event for event, _ in _events(policy, flags, every=every)]
    assert all(events.count(event) <= (3 if event in (STUCK, SKIPPING) else 1) for event in events)
    assert "broken" not in events
    if all(flags):
        assert set(events) <= {"pressing against max_scale"}


def test_a_new_run_logs_its_events_again():
    """A state with fewer steps than the last, as after a restart from a checkpoint, has said nothing yet."""
    watch, policy = ScaleWatch(), FixedScaling(8.0)
    late, early = (_run(policy, [False] * steps)[1] for steps in (30, 25))
    with _logged_records() as records:
        for each in (late, late, early):
            watch.log(policy, each)
    assert [record.steps for record in records] == [30, 25]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda watch: pickle.loads(pickle.dumps(watch))])
def test_a_copy_remembers_what_was_said(duplicate):
    """It says nothing twice."""
    policy, watch = FixedScaling(8.0), ScaleWatch()
    state = _run(policy, [False] * 30)[1]
    with _logged_records() as records:
        watch.log(policy, state)
        duplicate(watch).log(policy, state)
    assert len(records) == 1


def test_a_watch_reads_a_state_of_arrays():
    """Any framework's; and without a limit to check the pure check reads nothing, and pure functions log nothing."""
    policy = DynamicScaling(init_scale=4.0, backoff_factor=0.375)
    state = init_state(policy, xp=array_api_strict)
    state = policy.update(state, array_api_strict.asarray(False))
    with _logged_records() as records:
        check_overflow_streak(policy, None)
        diagnose(policy, state)
        state_to_dict(state, policy)
        assert records == []
        ScaleWatch().log(policy, state)
    assert [record.event for record in records] == ["calibrating"]


def test_a_loss_that_is_not_finite_is_said_once():
    """No loss scale fixes it, and the first is said at once; a finite one is not."""
    policy, watch = DynamicScaling(), ScaleWatch()
    state = policy.init_state()
    with _logged_records() as records:
        for loss in (1.0, np.array(2.0), array_api_strict.asarray(math.nan), math.inf):
            state = policy.update(state, bool(math.isfinite(float(loss))))
            watch.log(policy, state, loss=loss)
    assert [record.event for record in records] == ["bad_loss", "calibrating"]
    assert records[0].getMessage().startswith("lossscale, step 3: the loss itself is NaN or infinite: no loss scale")


def test_the_switch_is_that_of_logging():
    """The logger has neither a handler nor a level of its own, and a level silences it."""
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == ([], logging.NOTSET, True)
    policy = FixedScaling(8.0)
    _, state = _run(policy, [False] * 30)
    with _logged_records() as records:
        LOGGER.setLevel(logging.ERROR)
        ScaleWatch().log(policy, state)
    assert records == []

"""`ScaleWatch`: what a run logs by itself, how often."""

import contextlib
import logging
import math

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
    check_limits,
    diagnose,
    init_state,
    state_to_dict,
)
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from tests.core.own_policies import BareAdditiveScaling
from tests.strategies import flags, overflow_traces, policies

TORCHS = DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
FIXED = FixedScaling(8.0)
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


def _run(policy, *runs, looks=None):
    """Return the records of runs with one watch, which looks at these steps or at all, and the last state."""
    watch = ScaleWatch()
    with _logged_records() as records:
        for run in runs:
            state = policy.init_state()
            for step, finite in enumerate(run, 1):
                state = policy.update(state, finite)
                if looks is None or step in looks:
                    watch.log(policy, state)
    return records, state


def _events(policy, *runs, looks=None):
    return [(record.event, record.steps) for record in _run(policy, *runs, looks=looks)[0]]


START, STUCK, SKIPPING = ("calibrating", 1), "stuck at min_scale", "skipping too often"
LOGS = [
    # NaN from the first step on, under torch's rule and ours
    (TORCHS, "200F", [START, (SKIPPING, 19), (STUCK, 142)]),
    (NoScaling(), "50T 300F", [(SKIPPING, 53), (SKIPPING, 80), (SKIPPING, 350)]),
    # bounds
    (DynamicScaling(init_scale=8.0, max_scale=16.0, growth_interval=5), "70T", [("pressing against max_scale", 65)]),
    (DynamicScaling(init_scale=1.0), "9F", [(STUCK, 5)]),
    (DynamicScaling(init_scale=2.0, min_scale=2.0**-9), "99T 1F " * 5, [(SKIPPING, 400)]),
    # verdicts that come back soon, late, again and again
    (FIXED, "30F 1000T " * 2, [(SKIPPING, 5), ("healthy", 130), (SKIPPING, 1034), ("healthy", 1154)]),
    (FIXED, "18T 1F " * 50, [(SKIPPING, 57), ("healthy", 61)]),
    # skips that go on, at any scale and at the floor
    (DynamicScaling(), "99T " + "5T 1F " * 20, [(SKIPPING, 153)]),
    (DynamicScaling(), "16F " + "1T 1F " * 60, [START, ("healthy", 17), (SKIPPING, 34)]),
    # another run with the same watch logs its events again, and is not judged by the steps of the run before
    (FIXED, "30F, 25F", [(SKIPPING, 25), (SKIPPING, 25)], {25, 30}),
    (TORCHS, "50T, 14F 99T", [], range(30, 114)),
]


@pytest.mark.parametrize(("policy", "runs", "events", "looks"), [(*row, None)[:4] for row in LOGS])
def test_each_event_at_its_step(policy, runs, events, looks):
    """A run logs each event at the step at which it happens, and no other event."""
    assert _events(policy, *map(flags, runs.split(",")), looks=looks) == events


def test_a_line_has_the_diagnosis():
    """A record has the level, the step, the text of `diagnose`, and numbers for a handler."""
    for runs, levels in (("142F", [20, 30, 30]), ("12F 1T", [20, 20])):
        records, state = _run(TORCHS, flags(runs))
        assert [record.levelno for record in records] == levels
        last = records[-1]
        assert last.getMessage() == f"lossscale, step {state.steps}: {diagnose(TORCHS, state)}"
        assert (last.name, last.loss_scale, last.overflow_streak) == (
            "lossscale",
            state.loss_scale,
            state.overflow_streak,
        )


@settings(max_examples=40)
@given(policies(), overflow_traces(max_steps=250), st.integers(1, 20))
def test_a_verdict_is_logged_once(policy, run, every):
    """In 250 steps each verdict is logged once, and again for streaks ten times as long."""
    events = [event for event, _ in _events(policy, run, looks=range(every, 251, every))]
    assert all(events.count(event) <= (3 if event in (STUCK, SKIPPING) else 1) for event in events)
    assert "broken" not in events
    if all(run):
        assert set(events) <= {"pressing against max_scale"}


class Unbounded(BareAdditiveScaling):
    """A policy with bounds that are not valid loss scales."""

    min_scale, max_scale, backoff_factor = 0.0, math.inf, 0.5


@pytest.mark.parametrize("policy", [Unbounded(), DynamicScaling()])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_watch_survives_broken_states(policy, scale):
    """After a broken state a watch judges the next state as the first of a run; bounds may be any numbers."""
    watch, state = ScaleWatch(), policy.init_state()
    assert watch.diagnose(policy, state._replace(loss_scale=np.float32(scale))).startswith("broken: ")
    overflow = state._replace(loss_scale=state.loss_scale / 2, steps=np.int32(1), skipped_steps=np.int32(1))
    assert watch.diagnose(policy, overflow) == diagnose(policy, overflow)


def test_a_watch_reads_arrays():
    """A watch reads the arrays of any namespace; pure functions log nothing, and read nothing without a limit."""
    policy = DynamicScaling(init_scale=4.0, backoff_factor=0.375)
    state = policy.update(init_state(policy, xp=array_api_strict), array_api_strict.asarray(False))
    with _logged_records() as records:
        check_limits(policy, None)
        diagnose(policy, state)
        state_to_dict(state, policy)
        assert records == []
        ScaleWatch().log(policy, state)
    assert [record.event for record in records] == ["calibrating"]


def test_a_bad_loss_is_logged_once():
    """The first loss that is not finite is logged at once, and only once."""
    policy, watch = DynamicScaling(), ScaleWatch()
    state = policy.init_state()
    with _logged_records() as records:
        for loss in (1.0, np.array(2.0), array_api_strict.asarray(math.nan), math.inf):
            state = policy.update(state, bool(math.isfinite(float(loss))))
            watch.log(policy, state, loss=loss)
    assert [record.event for record in records] == ["calibrating", "bad_loss"]
    assert records[1].getMessage().startswith("lossscale, step 3: the loss itself is NaN or infinite: no loss scale")


def test_the_logger_has_no_settings():
    """The logger has neither a handler nor a level of its own, and a level silences it."""
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == ([], logging.NOTSET, True)
    _, state = _run(FIXED, [False] * 30)
    with _logged_records() as records:
        LOGGER.setLevel(logging.ERROR)
        ScaleWatch().log(FIXED, state)
    assert records == []

"""`ScaleWatch`: what a run logs by itself, how often. A healthy run is called healthy."""

import logging
import math

import array_api_strict
import numpy as np
import pytest

import lossscale_core as core
from lossscale import from_tool, tools
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScaleWatch, diagnose
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from tests.strategies import flags
from tests.sweeping import IS_SWEEP

TORCHS = DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
FIXED = FixedScaling(8.0)
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
    (FIXED, "5F 990T 9F", [(SKIPPING, 5), ("healthy", 900)], {5, 900, 1004}),
    (FIXED, "18T 1F " * 50, [(SKIPPING, 57), ("healthy", 61)]),
    # skips that go on, at any scale and at the floor
    (DynamicScaling(), "99T " + "5T 1F " * 20, [(SKIPPING, 153)]),
    (DynamicScaling(), "16F " + "1T 1F " * 60, [START, ("healthy", 17), (SKIPPING, 34)]),
    # another run with the same watch logs its events again, and is not judged by the steps of the run before
    (FIXED, "30F, 25F", [(SKIPPING, 25), (SKIPPING, 25)], {25, 30}),
    (TORCHS, "50T, 14F 99T", [], range(30, 114)),
]


@pytest.fixture
def logs(caplog):
    """Return pytest's capture, with what the library logs on every level."""
    logger = logging.getLogger("lossscale")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
    caplog.set_level(logging.DEBUG, "lossscale")
    return caplog


@pytest.mark.parametrize(("policy", "runs", "events", "looks"), [(*row, range(10_000))[:4] for row in LOGS])
def test_each_event_at_its_step(policy, runs, events, looks, logs):
    """A run logs each event at the step at which it happens, and no other event."""
    watch = ScaleWatch()
    for run in runs.split(","):
        state = policy.init_state()
        for step, finite in enumerate(flags(run), 1):
            state = policy.update(state, finite)
            if step in looks:
                watch.log(policy, state)
    assert [(record.event, record.steps) for record in logs.records] == events


PRESETS = [from_tool(tool, {}) for tool in tools() if tool != "jmp"]  # jmp has no default


@pytest.mark.parametrize("every", [1, 7, 32, 200])
def test_a_healthy_run_causes_no_alarm(every):
    """No verdict is a problem while some loss scale fits the gradients, also if the run is resumed or retries steps."""
    for seed in range(250 if IS_SWEEP else 12):
        random = np.random.default_rng([every, seed])
        resumes = random.random() < 0.3  # after another policy, or after retries that are not counted
        fit, sigma = 2.0 ** random.uniform(-8.0 if resumes else 3.0, 30.0), random.uniform(0.0, 0.6)
        start = DynamicScaling(init_scale=2.0 ** random.integers(-3, 31), min_scale=SMALLEST_SCALE)
        policy = ([start] * len(PRESETS) + PRESETS)[random.integers(2 * len(PRESETS))]
        fit = max(fit, 8.0 * policy.bounds()[0])
        watch, state = ScaleWatch(), policy.init_state()
        if resumes:
            state = state._replace(loss_scale=np.float32(fit), steps=np.int32(60))
        for step in range(400):
            state = policy.update(state, bool(state.loss_scale <= fit * np.exp(sigma * random.standard_normal())))
            if step % every == 0:
                texts = watch.diagnose(policy, state), diagnose(policy, state)
                assert not any(text.startswith((STUCK, SKIPPING, "broken")) for text in texts), (seed, texts)


def test_a_watch_survives_broken_states():
    """After a broken state a watch judges the next state as the first of a run."""
    policy, watch = DynamicScaling(), ScaleWatch()
    state = policy.init_state()
    for scale in (0.0, -1.0, 1e-40, math.nan, math.inf):
        assert watch.diagnose(policy, state._replace(loss_scale=np.float32(scale))).startswith("broken: ")
        overflow = state._replace(loss_scale=state.loss_scale / 2, steps=np.int32(1), skipped_steps=np.int32(1))
        assert watch.diagnose(policy, overflow) == diagnose(policy, overflow)


def test_a_watch_reads_arrays(logs):
    """A watch reads the arrays of any namespace; pure functions log nothing, and read nothing without a limit."""
    policy = DynamicScaling(init_scale=4.0, backoff_factor=0.375)
    state = policy.update(core.init_state(policy, xp=array_api_strict), array_api_strict.asarray(False))
    core.check_limits(policy, None)
    text = diagnose(policy, state)
    core.state_to_dict(state, policy)
    assert logs.records == []
    ScaleWatch().log(policy, state)
    assert logs.record_tuples == [("lossscale", logging.INFO, f"lossscale, step 1: {text}")]
    assert (logs.records[0].loss_scale, logs.records[0].overflow_streak) == (1.5, 1)


def test_a_bad_loss_is_logged_once(logs):
    """The first loss that is not finite is logged as a warning at once, and only once."""
    policy, watch = DynamicScaling(), ScaleWatch()
    state = policy.init_state()
    for loss in (1.0, np.array(2.0), array_api_strict.asarray(math.nan), math.inf):
        state = policy.update(state, bool(math.isfinite(float(loss))))
        watch.log(policy, state, loss=loss)
    events = [(record.event, record.levelno) for record in logs.records]
    assert events == [("calibrating", logging.INFO), ("bad_loss", logging.WARNING)]
    assert logs.messages[1].startswith("lossscale, step 3: the loss itself is NaN or infinite: no loss scale")

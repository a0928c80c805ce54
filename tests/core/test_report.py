"""What a step did, in numbers and in a sentence."""

import dataclasses
import functools
import json
import re

import array_api_strict
import numpy as np
import pytest

import lossscale_core as core
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, diagnose
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE, GradientReport, OverflowReport
from lossscale_core.errors import OverflowStreakError
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling
from tests.strategies import flags

FULL = np.int32(2**31 - 1)
AT_CEILING = DynamicScaling(init_scale=LARGEST_SCALE, max_scale=LARGEST_SCALE, growth_interval=1)
UNBOUNDED = DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
FALLING = DynamicScaling(init_scale=2.0**30, growth_interval=50)
# No scale removes the NaN of a root at zero: https://github.com/jax-ml/jax/issues/26328.
NAN = (
    "for a NaN or infinity in the inputs, the forward pass and the loss; if the loss is finite, for a division by "
    "zero, or a root or a logarithm at zero, in the backward pass"
)
LOOK, UNCLEARED = f"Look {NAN}", f"Look for gradients that were not cleared after a skipped step, or {NAN}"
DIAGNOSES = [
    (DynamicScaling(), "", r"not started: no step yet; the first is scaled by 2\*\*16\."),
    (DynamicScaling(init_scale=1.0), "4F", f"not started: no step applied yet, 4 of 4 .*{LOOK}, or lower min_scale."),
    (AdditiveScaling(), "3F", r"calibrating: 3 of 3 .* comes down from 2\*\*10, now 128.*"),
    (DynamicScaling(growth_interval=1), "1T 1F " * 100, "healthy.*"),  # by design
    (DynamicScaling(growth_interval=1), "1T 2F " * 40, "skipping too often.*"),
    (DynamicScaling(hysteresis=4), "20T " + "1F 1T " * 20, "healthy.*"),  # no overflow lowers the scale
    (UNBOUNDED, "20F 300T", "skipping too often: .* has fallen to 0.0625.*"),
    (DynamicScaling(min_scale=0.1), "40F", "stuck at min_scale.*"),  # a bound that float32 does not hold
    (DynamicScaling(), "40F", f"stuck at min_scale: the last 40 .* below 1. {UNCLEARED}, or lower min_scale."),
    (UNBOUNDED, "200F", rf"stuck at min_scale: .* below 2\*\*-126. {UNCLEARED}\."),  # it cannot be lower
    (UNBOUNDED, "3T 1F 6T " * 50 + "3T 1F 1T", f"skipping too often.*{LOOK}."),
    (FixedScaling(8.0), "8F", "skipping too often: .* A scale of 8 is too large .* lower it, or use DynamicScaling."),
    (AT_CEILING, "1T", "pressing against max_scale: .* of the scaled loss; .* give the loss a larger weight."),
    (DynamicScaling(init_scale=2.0**32), "5T", "healthy.*"),  # nothing shows yet that it could grow
    # A longer growth_interval helps only a scale that has grown.
    (FALLING, "5T 1F " * 20, "healthy.*"),  # overflows that lower the first scale are normal
    (DynamicScaling(hysteresis=2), "1F 1T " * 30, "skipping too often.* Look for a diverging loss."),
    (FALLING, "50T 8F " * 2, "skipping too often.* diverging loss; a longer growth_interval tries a larger scale .*"),
    # A run in bfloat16 has no scale.
    (NoScaling(), "", "not started: no step yet."),
    (NoScaling(), "1T 1F", "healthy: 1 of 2 steps skipped."),
    (NoScaling(), "8F", rf"skipping too often: the last 8 steps in a row overflowed \(8 of 8 .*\). {UNCLEARED}."),
    # Policies of a user: by their bounds, their interval, and what an overflow costs.
    (AdditiveScaling(max_overflow_streak=3), "3F", "skipping too often: overflow_streak=3 has reached.*"),
    (BareAdditiveScaling(), "8F", f"skipping too often.*{UNCLEARED}."),
]


def _after(policy, runs):
    return functools.reduce(policy.update, flags(runs), policy.init_state())


@pytest.mark.parametrize(("policy", "runs", "pattern"), DIAGNOSES)
def test_a_diagnosis_names_the_cause(policy, runs, pattern):
    """A diagnosis has the verdict first, and an advice only if the advice can help; it has at most two sentences."""
    text = diagnose(policy, _after(policy, runs))
    assert re.fullmatch(pattern, text), text
    assert text.count(". ") <= 1


def test_an_overflow_report_has_a_verdict():
    """A report counts NaN and infinities per parameter, and its verdict says whether a smaller scale helps."""
    inf, nan = ("a", np.array([np.nan, -2.0, np.inf])), ("b", np.full((3, 1), np.nan, np.float16))
    assert list(OverflowReport([inf, nan])) == [GradientReport("a", 1, 1, 0, 2.0), GradientReport("b", 3, 0, 0, 0.0)]
    parts = np.array([complex(np.inf, 1.0), complex(-3.0, -np.inf)], np.complex64)
    assert list(OverflowReport([("c", parts)])) == [GradientReport("c", 0, 1, 1, 3.0)]
    usually = "finite loss: a smaller loss scale usually fixes this, but not gradients that were not cleared after a "
    assert OverflowReport([inf, nan], loss_finite=True).verdict == f"{usually}skipped step"
    verdict = OverflowReport([nan], loss_finite=True).verdict
    assert "a smaller loss scale fixes this unless it comes from a division by zero, or a root" in verdict
    bad = [(str(number), np.float32([np.inf, number])) for number in range(14)]
    report = OverflowReport(bad, checked=14)
    assert str(report) == f"all 14 parameters: 0 NaN, 14 +inf, 0 -inf, largest finite 13\n{report.verdict}"
    lines = str(OverflowReport(bad, checked=16, in_order=[str(number) for number in range(16)])).splitlines()
    assert (len(lines), lines[14]) == (
        16,
        "the gradient of 13 is not finite, and the gradient of 14 is (14 of 16 are not)",
    )
    report = OverflowReport(bad, checked=14, in_order=[name for name, _ in bad])
    assert "none of the 14 gradients is finite: look at the loss or the last layer" in str(report)
    assert OverflowReport([nan]).verdict == "pass loss= to learn whether the scale or the loss is the cause"


def test_metrics_have_stable_names():
    """Metrics have stable names; their values are plain numbers on the host, and arrays elsewhere."""
    numbers = core.metrics(_after(DynamicScaling(), "1T 1F 1T"), guard=SpikeGuard().init_state())
    names = "loss_scale growth_tracker hysteresis_tracker steps skipped_steps overflow_streak applied_steps"
    assert " ".join(numbers) == f"{names} spikes spike_streak norm_mean"
    assert (numbers["applied_steps"], numbers["skipped_steps"]) == (2, 1)
    assert json.loads(json.dumps(numbers)) == numbers
    assert {name for name, value in numbers.items() if type(value) is not int} == {"loss_scale", "norm_mean"}
    assert core.metrics(core.init_state(DynamicScaling(), xp=array_api_strict))["steps"].dtype == array_api_strict.int32


def test_the_policy_limits_a_streak(tmp_path):
    """`check_limits` raises at `max_overflow_streak` overflows in a row, for each source of a policy."""
    policy = DynamicScaling(max_overflow_streak=3)
    core.dump_policy(policy, tmp_path / "p.toml")
    words = r"overflow_streak=3 has reached max_overflow_streak=3 at .*2\*\*13;"
    for source in (policy, tmp_path / "p.toml"):
        core.check_limits(source, _after(policy, "1T 2F"))
        with pytest.raises(OverflowStreakError, match=words):
            core.check_limits(source, _after(policy, "3F"))
    core.check_limits("dynamic", _after(policy, "100F"))
    full = policy.init_state()._replace(overflow_streak=FULL)
    with pytest.raises(OverflowStreakError):  # a streak that cannot count further does not become negative
        core.check_limits(dataclasses.replace(policy, max_overflow_streak=int(FULL)), policy.update(full, False))


@pytest.mark.parametrize("convert", [lambda value: value, array_api_strict.asarray])
@pytest.mark.parametrize("streak", [0, FULL])
@pytest.mark.parametrize("finite", [True, False])
def test_an_applied_step_is_true(convert, streak, finite):
    """A `StepInfo` is true if and only if the step was applied, also if the counters are full."""
    policy = DynamicScaling()
    before = policy.init_state()._replace(steps=FULL, skipped_steps=FULL, overflow_streak=np.int32(streak))
    before = before._make(map(convert, before))
    after = policy.update(before, convert(finite))
    info = core.step_info(before, after)
    assert bool(info) == bool(info.applied) == finite == (not info.overflowed)
    assert (info.loss_scale_used, info.loss_scale_after) == (before.loss_scale, after.loss_scale)
    assert info.overflow_streak == after.overflow_streak
    assert {np.shape(value) for value in info} == {()}
    info = core.step_info(before, after, spiked=convert(True))
    assert (bool(info.applied), bool(info.overflowed), bool(info.spiked)) == (False, False, True)

"""What a step did, in numbers and in a sentence."""

import functools
import json

import array_api_strict
import numpy as np
import pytest

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    SpikeGuard,
    diagnose,
    dump_policy,
    init_state,
    metrics,
    policy_to_dict,
    step_info,
)
from lossscale_core.adapters import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    GradientReport,
    OverflowReport,
    check_overflow_streak,
)
from lossscale_core.errors import OverflowStreakError
from tests.core.own_policies import BareAdditiveScaling


def _after(policy, grads_finite):
    return functools.reduce(policy.update, grads_finite, policy.init_state())


def test_step_info():
    """The scale used and the next, whether it was applied, and the streak."""
    policy = DynamicScaling()
    before = _after(policy, [True, False])
    info = step_info(before, policy.update(before, False))
    assert (bool(info.applied), float(info.loss_scale_used), float(info.loss_scale_after)) == (False, 2.0**15, 2.0**14)
    assert int(info.overflow_streak) == 2
    info = step_info(before, policy.update(before, True))
    assert bool(info.applied)
    assert int(info.overflow_streak) == 0


def test_metrics_have_stable_names():
    """The names loggers and dashboards are built on."""
    numbers = metrics(_after(DynamicScaling(), [True, False, True]))
    names = "loss_scale growth_tracker hysteresis_tracker steps skipped_steps overflow_streak applied_steps"
    assert " ".join(numbers) == names
    assert (numbers["applied_steps"], numbers["skipped_steps"]) == (2, 1)


STREAK = [False] * 8
UNBOUNDED = DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
CASES = {
    "no step yet": (DynamicScaling(), [], "not started"),
    "one overflow long after the calibration": (
        DynamicScaling(init_scale=2.0**24),
        [False] * 11 + [True] * 150 + [False, True],
        "healthy",
    ),
    "a fall in steps": (DynamicScaling(), [True] + [False, False, True] * 5, "skipping too often"),
    "a short interval skips by design": (DynamicScaling(growth_interval=5), ([True] * 5 + [False]) * 20, "healthy"),
    "alternating": (DynamicScaling(), [False, True] * 16, "skipping too often"),
    "the end of a calibration under a cooldown": (
        DynamicScaling(init_scale=2.0**24, cooldown=10),
        [False] * 6 + [True],
        "healthy",
    ),
    "a long cooldown": (DynamicScaling(init_scale=2.0**24, cooldown=1000), [False] * 6 + [True] * 40, "healthy"),
    "DeepSpeed's rule": (
        DynamicScaling(init_scale=2.0**24, hysteresis=2, refill_on_finite=False, cooldown=1, growth_interval=50),
        [False] * 7 + ([True] * 51 + [False] * 2) * 2 + [True] * 5,
        "healthy",
    ),
    "Megatron-LM's rule": (
        DynamicScaling(init_scale=2.0**24, hysteresis=2, refill_on_finite=False, growth_interval=50),
        [False] * 7 + [True] * 50 + [False] * 2 + [True] * 5,
        "healthy",
    ),
    "every other step under a fixed scale": (FixedScaling(1024.0), [True, False] * 4, "skipping too often"),
    "fallen below 1, and fine since": (UNBOUNDED, [False] * 20 + [True] * 300, "skipping too often"),
    "all the way down, then fine": (DynamicScaling(), [False] * 17 + [True], "healthy"),
    "nowhere to come down from": (DynamicScaling(init_scale=1.0), [False] * 4, "not started"),
    "a normal back-off after the calibration": (
        DynamicScaling(init_scale=2.0**24, growth_interval=50),
        [False] * 6 + [True] * 50 + [False],
        "healthy",
    ),
    "a fall in short runs under a short interval": (
        DynamicScaling(init_scale=2.0**24, growth_interval=50),
        ([True] * 5 + [False]) * 20,
        "skipping too often",
    ),
    "by design every other step": (DynamicScaling(growth_interval=1), [True, False] * 100, "healthy"),
    "alternating at the floor, late": (DynamicScaling(), [True] * 20000 + [True, False] * 400, "skipping too often"),
    "a floor that is no float32": (DynamicScaling(min_scale=0.1), [False] * 40, "stuck at min_scale"),
    "begun at the ceiling": (DynamicScaling(init_scale=2.0**20, max_scale=2.0**20), [True], "healthy"),
}


@pytest.mark.parametrize("name", CASES)
def test_diagnose(name):
    """One or two sentences that begin with the verdict."""
    policy, grads_finite, verdict = CASES[name]
    sentence = diagnose(policy, _after(policy, grads_finite))
    assert sentence.startswith(verdict), sentence
    assert sentence.endswith(".")
    assert sentence.count(". ") <= 1


HIGH = DynamicScaling(init_scale=8.0, min_scale=8.0)
TOP = DynamicScaling(init_scale=LARGEST_SCALE, max_scale=LARGEST_SCALE, growth_interval=1)
# No scale removes the NaN of a root at zero: https://github.com/jax-ml/jax/issues/26328.
FALLING = DynamicScaling(init_scale=2.0**30, growth_interval=50)
ROOT = "if the loss is finite, for a division by zero, or a root or a logarithm at zero"
REMEDIES = [
    (DynamicScaling(), [False] * 40, ["forward pass", "40 steps in a row", ROOT, "or lower min_scale."], []),
    (UNBOUNDED, [False] * 200, [ROOT], ["lower min_scale"]),  # it cannot be lower
    (HIGH, STREAK, ["or lower min_scale."], []),
    (FixedScaling(0.5), STREAK, ["forward pass"], []),
    (BareAdditiveScaling(), STREAK, ["forward pass"], ["min_scale", "DynamicScaling"]),  # it adapts
    (FixedScaling(8.0), STREAK, ["DynamicScaling"], []),
    (TOP, [True], ["larger weight"], []),
    (UNBOUNDED, [False] * 20 + [True], ["forward pass"], ["growth_interval"]),
    (DynamicScaling(), [False, True] * 6, ["diverging loss"], ["growth_interval"]),  # it has never grown
    (FALLING, ([True] * 5 + [False]) * 20, ["diverging loss"], ["growth_interval"]),
    (DynamicScaling(hysteresis=2), [False, True] * 30, ["diverging loss"], ["growth_interval"]),  # nor has this one
    (FALLING, ([True] * 50 + [False] * 8) * 2, ["diverging loss", "growth_interval"], []),
    (UNBOUNDED, [n % 10 != 3 for n in range(505)], ["forward pass"], ["growth_interval"]),
    (NoScaling(), [False] * 200, [ROOT], ["scale"]),
    *((NoScaling(), flags, [], ["scale"]) for flags in ([], [True] * 9, [True, False], [False] * 3)),
]


@pytest.mark.parametrize(("policy", "flags", "said", "unsaid"), REMEDIES)
def test_a_diagnosis_names_the_cause_and_what_to_do(policy, flags, said, unsaid):
    """Below 1 the forward pass is to blame and not the growth interval; a run in bfloat16 has no scale."""
    sentence = diagnose(policy, _after(policy, flags))
    assert [words for words in [*said, *unsaid] if words in sentence] == said


def test_the_verdict_on_gradients_says_usually():
    """Without an infinity, NaN may be there at each scale."""
    inf, nan = ("a", np.array([np.nan, -2.0, np.inf])), ("b", np.full((3, 1), np.nan, np.float16))
    assert list(OverflowReport([inf, nan])) == [GradientReport("a", 1, 1, 0, 2.0), GradientReport("b", 3, 0, 0, 0.0)]
    parts = np.array([complex(np.inf, 1.0), complex(-3.0, -np.inf)], np.complex64)
    assert list(OverflowReport([("c", parts)])) == [GradientReport("c", 0, 1, 1, 3.0)]
    usually = "finite loss: a smaller loss scale usually fixes this"
    assert OverflowReport([inf, nan], loss_finite=True).verdict == usually
    verdict = OverflowReport([nan], loss_finite=True).verdict
    assert "a smaller loss scale fixes this unless it comes from a division by zero, or a root" in verdict
    bad = [(str(number), np.float32([np.inf, number])) for number in range(14)]
    report = OverflowReport(bad, checked=14)
    assert str(report) == f"all 14 parameters: 0 NaN, 14 +inf, 0 -inf, largest finite 13\n{report.verdict}"
    assert str(OverflowReport(bad, checked=15)).count("\n") == 14
    assert OverflowReport([nan]).verdict == "pass loss= to learn whether the scale or the loss is the cause"


def test_scales_are_written_as_powers_of_two():
    """2**20 rather than 1.04858e+06; a small or an odd one as it is."""
    for scale, text in ((2.0**20, "2**20"), (2.0**-126, "2**-126"), (256.0, "256"), (2.0**20 + 1, "1.04858e+06")):
        policy = DynamicScaling(init_scale=scale, min_scale=2.0**-126)
        assert diagnose(policy, _after(policy, [True])).endswith(f"the loss scale is {text}.")


def test_metrics_on_the_host_are_plain_numbers():
    """`json.dumps` takes them; arrays of other namespaces stay arrays."""
    for policy in (DynamicScaling(), NoScaling()):
        numbers = metrics(_after(policy, [True, False]), guard=SpikeGuard().init_state())
        assert json.loads(json.dumps(numbers)) == numbers
        assert {type(value) for value in numbers.values()} == {int, float}
    assert json.dumps(metrics(init_state(DynamicScaling(), xp=np)))
    assert metrics(init_state(DynamicScaling(), xp=array_api_strict))["steps"].dtype == array_api_strict.int32


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_a_scale_no_policy_reaches_is_called_broken(scale):
    """A corrupted state is answered, not crashed on."""
    state = _after(DynamicScaling(), [True, False])._replace(loss_scale=np.float32(scale))
    assert diagnose(DynamicScaling(), state).startswith("broken")


def test_the_overflow_streak_is_limited_by_the_policy():
    """The error comes with the limit's last overflow, not before, and carries the diagnosis."""
    policy = DynamicScaling(max_overflow_streak=3)
    check_overflow_streak(policy, _after(policy, [True, False, False]))
    with pytest.raises(OverflowStreakError, match=r"overflow_streak=3 has reached max_overflow_streak=3 at .*2\*\*13;"):
        check_overflow_streak(policy, _after(policy, [False] * 3))
    for unlimited in ("dynamic", 1024.0):
        check_overflow_streak(unlimited, _after(policy, [False] * 100))


@pytest.mark.parametrize("xp", [None, np, array_api_strict])
@pytest.mark.parametrize("streak", [0, 3, 2**31 - 1])
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_info_is_true_if_and_only_if_the_step_was_applied(xp, streak, finite):
    """A NamedTuple of its own would always be true; and it is known if `skipped_steps` counts no further."""
    policy, full = DynamicScaling(), np.int32(2**31 - 1)
    before = policy.init_state()._replace(steps=full, skipped_steps=full, overflow_streak=np.int32(streak))
    if xp is not None:
        before = before._make(xp.asarray(value, dtype=getattr(xp, value.dtype.name)) for value in before)
    after = policy.update(before, finite if xp is None else xp.asarray(finite))
    info = step_info(before, after)
    assert bool(info) == bool(info.applied) == finite
    assert {np.shape(value) for value in info} == {()}
    assert not step_info(before, before, spiked=True)


def test_reports_take_what_as_policy_takes(tmp_path):
    """A path, a dict, a word or a number stand for a policy in `diagnose` and `check_overflow_streak` as anywhere."""
    policy = DynamicScaling(init_scale=2.0, max_overflow_streak=3)
    dump_policy(policy, tmp_path / "p.toml")
    state = _after(policy, [False] * 3)
    for source in (tmp_path / "p.toml", policy_to_dict(policy)):
        assert diagnose(source, state) == diagnose(policy, state)
        with pytest.raises(OverflowStreakError, match="max_overflow_streak=3"):
            check_overflow_streak(source, state)

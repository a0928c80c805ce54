"""A diagnosis of a run in plain text: one of seven verdicts, the reason, and the remedy."""

import math
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._guard import SPIKES_HINT, GuardState, SpikeGuard
from lossscale_core._messages import format_number
from lossscale_core._reports import BACKWARD_CAUSES, UNCLEARED
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import ScaleState, read, require_one_state
from lossscale_core.errors import OverflowStreakError

_NAN_HINT = (
    "a NaN or infinity in the inputs, the forward pass and the loss; if the loss is finite, for " + BACKWARD_CAUSES
)
_MANY = 5
"""The number of overflows in a row, or of applied steps at the start, that counts as a pattern."""


def check_limits(
    policy: PolicyLike, state: ScaleState, *, guard: SpikeGuard | None = None, guard_state: GuardState | None = None
) -> None:
    """Raise an error if the policy's `max_overflow_streak` or the guard's `max_streak` is reached.

    Synchronises with the host if there is a limit for a state on a device. Logs nothing.

    Args:
        policy: Anything that `as_policy` accepts.
        state: The state after a step.
        guard: The spike guard of the run, if it has a guard.
        guard_state: The guard's state after the step.

    Raises:
        OverflowStreakError: The number of overflows or spikes in a row has reached its limit.
        PolicyError: `policy` is not a policy.
    """
    if message := _streak_message(BaseScaling.of(as_policy(policy)), state):
        raise OverflowStreakError(message)
    limit = None if guard is None or guard_state is None else guard.max_streak
    if limit is not None and guard_state is not None and (streak := int(read(guard_state.streak))) >= limit:
        raise OverflowStreakError(
            f"{streak} gradient norms in a row were spikes, which reaches max_streak={limit}; the mean of the norms is "
            f"{read(guard_state.mean):g}. {SPIKES_HINT}, or raise max_streak or threshold"
        )


def _streak_message(policy: BaseScaling, state: ScaleState[Any]) -> str:
    """Return an error message if the streak has reached the policy's limit, else an empty text."""
    limit = policy.max_overflow_streak
    if limit is None or (streak := int(read(state.overflow_streak))) < limit:
        return ""
    return (
        f"overflow_streak={streak} has reached max_overflow_streak={limit} at a loss scale of "
        f"{format_number(float(state.loss_scale))}; look for a NaN or infinity in the loss, or raise "
        "max_overflow_streak where init_scale is known to be far too large"
    )


def diagnose(policy: PolicyLike, state: ScaleState, *, guard: GuardState | None = None) -> str:
    """Describe the condition of a run in a few sentences, and recommend what to do.

    The function assumes that the run began with the policy's first state. Overflows that lowered the loss scale from
    there are normal. A `ScaleWatch` judges only the steps since an earlier call.

    Synchronises with the host. Logs nothing.

    Args:
        policy: Anything that `as_policy` accepts.
        state: A state of any framework.
        guard: The state of a spike guard, which adds a sentence about the spikes if there were spikes.

    Returns:
        A text that begins with a verdict and a colon. The verdicts are `not started`, `calibrating`, `stuck at
        min_scale`, `skipping too often`, `pressing against max_scale`, `healthy`, and `broken` for a scale that no
        policy reaches.

    Raises:
        PolicyError: `policy` is not a policy.
        TypeError: `state` is not a state.
    """
    numbers = numbers_of(state, "diagnose(policy, state)")
    return ": ".join(find_verdict(BaseScaling.of(as_policy(policy)), numbers, None)) + describe_spikes(guard)


def describe_spikes(guard: GuardState | None) -> str:
    """Return the sentences about the spikes with a space before each sentence; an empty text without spikes."""
    if guard is None or not int(guard.spikes):
        return ""
    spikes, streak = f"{int(guard.spikes)} spike{'s' * (int(guard.spikes) > 1)}", int(guard.streak)
    text = f" The guard refused {spikes}; the mean norm is {float(guard.mean):g}."
    return text + (f" The last {streak} norms in a row were spikes. {SPIKES_HINT}." if streak >= _MANY else "")


def numbers_of(state: Any, call: str) -> ScaleState[Any]:
    """Return the fields of any state as Python numbers; read each field once from its device."""
    require_one_state(state, call)
    return ScaleState(read(state.loss_scale), *(int(getattr(state, name)) for name in ScaleState._fields[1:]))


class _Facts(NamedTuple):
    """The facts about a run that decide its verdict and its remedy."""

    start: float
    """The first loss scale of the policy."""
    low: float
    """The smallest loss scale of the policy."""
    is_at_min: bool
    """Whether the loss scale cannot become smaller."""
    is_calibrated: bool
    """Whether the loss scale has come down from its first value, so that overflows are not normal any more."""
    has_fallen: bool
    """Whether the loss scale is far below 1, where finite losses hardly ever overflow."""
    has_grown: bool
    """Whether the loss scale was probably raised during the run, so that some overflows are tries of a larger scale."""
    skips_too_often: bool
    """Whether the number of skipped steps is larger than the start and the growth of the scale explain."""
    is_capped: bool
    """Whether the loss scale would grow further without `max_scale`."""


def find_verdict(policy: BaseScaling, state: ScaleState[Any], since: ScaleState[Any] | None) -> tuple[str, str]:
    """Return the verdict on a state, and the sentences with the reason and the remedy.

    Args:
        policy: The policy.
        state: The state, in Python numbers.
        since: An earlier state of the run, or `state` itself. If it is None, the run began with the policy's first
            state.

    Returns:
        The verdict and the sentences.
    """
    scale, steps, skipped, streak = state.loss_scale, state.steps, state.skipped_steps, state.overflow_streak
    scale_text, limit = format_number(scale), _streak_message(policy, state)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return "broken", f"the loss scale is {scale:g}, which no policy reaches. Restore an earlier checkpoint."
    if not steps:
        return "not started", f"no step yet{f'; the first is scaled by {scale_text}' if policy.scales_losses else ''}."
    facts = _facts_of(policy, state, since)

    counts, overflowing = f"{skipped} of {steps} steps skipped", f"the last {streak} steps in a row overflowed"
    hint = _hint(policy, state, facts)
    down = f"comes down from {format_number(facts.start)}, now {scale_text}"
    normal = "This is normal at the start; a smaller init_scale shortens it."
    at_start = f"{counts} while the loss scale {f'is {scale_text}' if scale >= facts.start else down}. {normal}"
    at_min = f"{overflowing} and the loss scale cannot go below {format_number(facts.low)}. {hint}"
    fallen = f", and the loss scale has fallen to {scale_text}" if facts.has_fallen else ""
    larger = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    check = "Check that these are gradients of the scaled loss; if small ones still flush to zero"
    at_max = f"a loss scale of {scale_text} could grow further ({counts}). {check}, {larger}."
    healthy = f"{counts}; the loss scale is {scale_text}." if policy.scales_losses else f"{counts}."

    verdicts = (
        (limit, "skipping too often", f"{limit}."),
        (facts.is_at_min and streak >= _MANY and facts.is_calibrated, "stuck at min_scale", at_min),
        (policy.adapts and skipped and not facts.is_calibrated, "calibrating", at_start),
        (streak >= _MANY, "skipping too often", f"{overflowing} ({counts}). {hint}"),
        (skipped == steps, "not started", f"no step applied yet, {counts}. {hint}"),
        (facts.skips_too_often or facts.has_fallen, "skipping too often", f"{counts}{fallen}. {hint}"),
        (facts.is_capped, "pressing against max_scale", at_max),
        (True, "healthy", healthy),
    )
    # The first row that holds decides: a run that is stuck or calibrating also skips often, but needs other advice.
    return next((verdict, reason) for holds, verdict, reason in verdicts if holds)


def _facts_of(policy: BaseScaling, state: ScaleState[Any], since: ScaleState[Any] | None) -> _Facts:
    scale, skipped, streak = state.loss_scale, state.skipped_steps, state.overflow_streak
    first, adapts, applied = numbers_of(policy.init_state(), "init_state"), policy.adapts, state.steps - skipped
    start = first.loss_scale
    # A float32 scale may lie above a float64 bound by rounding, so both are compared in float32.
    low, high = np.clip(policy.bounds(), SMALLEST_SCALE, LARGEST_SCALE).astype(np.float32)
    interval = policy.growth_interval if policy.growth_factor > 1.0 else LARGEST_COUNT
    start_overflows = _overflows_between(policy, first, scale)
    # In a resumed run, or if retries are not counted, overflows that are not counted may have lowered the scale.
    fits_start = skipped >= start_overflows and (scale <= start or applied >= interval)
    since = since or (first if fits_start else state)
    skips = skipped - since.skipped_steps
    # Finite losses hardly ever overflow at such a scale, unless the run began near it.
    has_fallen = adapts and fits_start and scale <= min(start, 1.0) / 8.0
    has_grown = scale > start or 0 < (skipped - start_overflows) / policy.hysteresis <= applied / interval

    # The start is over after a few applied steps, or if the smallest scale is too large as well.
    is_at_min = adapts and scale <= low
    until_stuck = _overflows_between(policy, since, float(low)) + _MANY
    is_stuck = is_at_min and (start <= low or max(skips, streak) >= until_stuck)
    never_overflowed_again = 0 < applied == state.growth_tracker + policy.cooldown
    is_calibrated = applied >= _MANY or never_overflowed_again or is_stuck or (has_fallen and streak >= _MANY)

    if adapts and since.steps - since.skipped_steps < _MANY:  # overflows that lower the scale at the start are normal
        all_back_off = not is_at_min and (policy.hysteresis == 1 or not getattr(policy, "refill_on_finite", True))
        skips = 0 if all_back_off else skips - _overflows_between(policy, since, scale)
    # Growth tries a larger scale once per interval, and each try may overflow.
    normal_rate = max(0.05 * policy.hysteresis, min(2.0 * policy.hysteresis / (policy.hysteresis + interval), 0.5))
    skips_too_often = skips > max(8 * policy.hysteresis if adapts else 2, (state.steps - since.steps) * normal_rate)
    is_capped = adapts and scale >= high > low and applied >= policy.growth_interval
    return _Facts(start, float(low), is_at_min, is_calibrated, has_fallen, has_grown, skips_too_often, is_capped)


def _hint(policy: BaseScaling, state: ScaleState[Any], facts: _Facts) -> str:
    """Return a sentence with the remedy for overflows."""
    if policy.is_constant() and state.loss_scale > 1.0:
        scale = format_number(state.loss_scale)
        return f"A scale of {scale} is too large for these gradients: lower it, or use DynamicScaling."
    # If no step was applied since the first overflow, its uncleared gradients may be the cause of all others.
    uncleared = f"{UNCLEARED}, or for " if state.overflow_streak >= max(state.skipped_steps, _MANY) else ""
    if policy.adapts and not facts.is_at_min and not facts.has_fallen:
        rarer = "; a longer growth_interval tries a larger scale less often" if facts.has_grown else ""
        return f"Look for {uncleared}a diverging loss{rarer}."
    lower = ", or lower min_scale" if facts.is_at_min and facts.low > SMALLEST_SCALE else ""
    return f"Look for {uncleared}{_NAN_HINT}{lower}."


def _overflows_between(policy: BaseScaling, since: ScaleState[Any], scale: float) -> int:
    """Return how many overflows lower the scale of `since` to `scale` without growth in between."""
    if scale >= since.loss_scale or policy.backoff_factor >= 1.0:
        return 0
    backoffs = round(math.log(scale / since.loss_scale, policy.backoff_factor))
    later = max(backoffs - 1, 0) * (policy.hysteresis if policy.refill_on_backoff else 1)
    return int(max(since.hysteresis_tracker, 1)) + later

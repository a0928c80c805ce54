"""What happened: to one step, in numbers for a log, and in a sentence or two for a person."""

import math
from typing import Any, NamedTuple

from lossscale_core._policy import DynamicScaling, ScalingPolicy, TolerantScaling
from lossscale_core._settings import LARGEST_SCALE
from lossscale_core._state import AnyScaleState, Array
from lossscale_core.errors import OverflowStreakError

_FEW_IN_A_ROW = 5
_OFTEN = 0.05


class StepInfo(NamedTuple):
    """One step's outcome; each field has shape `()` and stays on its device until it is read."""

    applied: Array
    """bool: the gradients were finite and the step was applied."""
    loss_scale_used: Array
    """float32: the scale this step was scaled and unscaled with."""
    loss_scale_after: Array
    """float32: the scale of the next step."""
    overflow_streak: Array
    """int32: overflows in a row, this step included; 0 when it was applied."""


def step_info(before: AnyScaleState, after: AnyScaleState) -> StepInfo:
    """Return what the step that led from `before` to `after` did. Does not synchronise with the host."""
    return StepInfo(
        applied=after.skipped_steps == before.skipped_steps,
        loss_scale_used=before.loss_scale,
        loss_scale_after=after.loss_scale,
        overflow_streak=after.overflow_streak,
    )


def metrics(state: AnyScaleState) -> dict[str, Array]:
    """Return the state's numbers under names that stay the same in every framework and release.

    `loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`, `overflow_streak` and a policy's own
    trackers as in the state, and `applied_steps`, each of shape `()`. Does not synchronise with the host: what is read
    later is paid for later.
    """
    return {**state._asdict(), "applied_steps": state.steps - state.skipped_steps}


def check_overflow_streak(policy: ScalingPolicy, state: AnyScaleState) -> None:
    """Raise `OverflowStreakError` once `state` has reached the policy's `max_overflow_streak`.

    For whoever has the state on the host anyway; reading it from a device would synchronise.
    """
    limit = getattr(policy, "max_overflow_streak", None)
    if limit is not None and int(state.overflow_streak) >= limit:
        raise OverflowStreakError(
            f"overflow_streak={int(state.overflow_streak)} has reached max_overflow_streak={limit}: "
            f"{diagnose(policy, state)}"
        )


def diagnose(policy: ScalingPolicy, state: AnyScaleState) -> str:
    """Say in one or two sentences how loss scaling is doing, and what to do about it.

    The answer begins with one of `not started`, `calibrating`, `stuck at min_scale`, `skipping too often`,
    `pressing against max_scale` and `healthy`. Synchronises with the host.
    """
    seen = _Seen(policy, state)
    for verdict in (_not_started, _stuck, _calibrating, _skipping, _pressing):
        if sentence := verdict(policy, seen):
            return sentence
    return f"healthy: {seen.counts}; the loss scale is {seen.scale:g}."


class _Seen:
    """A state's numbers, read once from wherever it lives."""

    def __init__(self, policy: ScalingPolicy, state: AnyScaleState) -> None:
        self.scale = float(state.loss_scale)
        self.steps = int(state.steps)
        self.skipped = int(state.skipped_steps)
        self.streak = int(state.overflow_streak)
        self.adapts = isinstance(policy, DynamicScaling | TolerantScaling)
        self.counts = f"{self.skipped} of {self.steps} steps skipped"
        in_a_row = "the last step" if self.streak == 1 else f"the last {self.streak} steps"
        self.in_a_row = f"{in_a_row} in a row overflowed"


def _not_started(_: Any, seen: _Seen) -> str | None:
    return f"not started: no step yet; the first is scaled by {seen.scale:g}." if seen.steps == 0 else None


def _stuck(policy: Any, seen: _Seen) -> str | None:
    if not seen.adapts or seen.scale > policy.min_scale or seen.streak < _FEW_IN_A_ROW:
        return None
    return (
        f"stuck at min_scale: {seen.in_a_row} and the loss scale cannot go below {policy.min_scale:g}. This usually is "
        "no scale problem but a NaN or infinity in the forward pass: look at the loss and the inputs first."
    )


def _calibrating(policy: Any, seen: _Seen) -> str | None:
    if not seen.adapts or seen.skipped < seen.steps:
        return None
    return (
        f"calibrating: {seen.counts} while the loss scale comes down from {policy.init_scale:g}, now {seen.scale:g}. "
        "This is normal at the start; a smaller init_scale shortens it."
    )


def _skipping(policy: Any, seen: _Seen) -> str | None:
    share = _unexplained_skips(policy, seen) / seen.steps
    if seen.streak < _FEW_IN_A_ROW and share <= max(_OFTEN, 2.0 * _share_by_design(policy)):
        return None
    recent = f", and {seen.in_a_row}" if seen.streak >= _FEW_IN_A_ROW else ""
    mend = (
        "Look for a diverging loss, or raise growth_interval so that the scale is tried upward less often."
        if seen.adapts
        else f"A scale of {seen.scale:g} is too large for these gradients: lower it, or use DynamicScaling."
        if seen.scale > 1.0
        else "No scale helps at 1: look for a NaN or infinity in the forward pass."
    )
    return f"skipping too often: {seen.counts}{recent}. {mend}"


def _pressing(policy: Any, seen: _Seen) -> str | None:
    if not seen.adapts or seen.scale < policy.max_scale or policy.min_scale == policy.max_scale:
        return None
    room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    return (
        f"pressing against max_scale: the loss scale is {seen.scale:g} and could grow further ({seen.counts}). "
        f"If small gradients still flush to zero, {room}."
    )


def _unexplained_skips(policy: Any, seen: _Seen) -> float:
    """Return the skips beyond those that bringing the scale down from `init_scale` took."""
    if not seen.adapts or seen.scale >= policy.init_scale:
        return seen.skipped
    backoffs = math.log(seen.scale / policy.init_scale, policy.backoff_factor)
    return max(0.0, seen.skipped - round(backoffs) * getattr(policy, "hysteresis", 1))


def _share_by_design(policy: Any) -> float:
    """Return the share of steps that a healthy run skips because the scale keeps being tried upward."""
    if not isinstance(policy, DynamicScaling | TolerantScaling):
        return 0.0
    growths_per_backoff = -math.log(policy.backoff_factor) / math.log(policy.growth_factor)
    skips = getattr(policy, "hysteresis", 1)
    return max(skips / (skips + growths_per_backoff * policy.growth_interval), getattr(policy, "tolerance", 0.0))

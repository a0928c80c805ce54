"""What happened: to one step, in numbers for a log, and in a sentence or two for a person."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._config import as_policy
from lossscale_core._policy import BaseScaling
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import AnyScaleState, Array
from lossscale_core.errors import OverflowStreakError

_FEW = 5
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


class GradientReport(NamedTuple):
    """What is not finite in one gradient."""

    name: str
    """Whose gradient it is."""
    nan: int
    """How many elements are NaN."""
    positive_inf: int
    """How many elements are +inf."""
    negative_inf: int
    """How many elements are -inf."""
    largest_finite: float
    """The largest magnitude among the finite elements, as stored; 0.0 where there are none."""


class OverflowReport(list[GradientReport]):
    """The reports on the gradients that are not finite, and what their loss says of the cause.

    Args:
        reports: one for each gradient that holds NaN or infinity.
        loss_finite: whether the loss, before it was scaled, is finite; None where nobody gave it.
    """

    def __init__(self, reports: Iterable[GradientReport] = (), *, loss_finite: bool | None = None) -> None:
        super().__init__(reports)
        self.loss_finite = loss_finite

    @property
    def verdict(self) -> str:
        """What to do, in a clause or two. The gradients alone do not tell: NaN may come of either cause."""
        if self.loss_finite is False:
            return "the loss itself is not finite: no scale mends this; look at the inputs and the forward pass"
        if not self:
            return "every gradient is finite"
        if self.loss_finite is None:
            return "pass loss= to learn whether the scale or the loss is the cause"
        return "finite loss: a smaller scale mends this"

    def __str__(self) -> str:
        lines = (
            f"{each.name}: {each.nan} NaN, {each.positive_inf} +inf, {each.negative_inf} -inf, "
            f"largest finite {each.largest_finite:g}"
            for each in self
        )
        return "\n".join([*lines, self.verdict])


def step_info(before: AnyScaleState, after: AnyScaleState) -> StepInfo:
    """Return what the step that led from `before` to `after` did. Does not synchronise with the host."""
    # An overflow makes the streak longer, whatever else is full; a full streak can only be that of an overflow.
    applied = (after.overflow_streak <= before.overflow_streak) & (after.overflow_streak < LARGEST_COUNT)
    return StepInfo(applied, before.loss_scale, after.loss_scale, after.overflow_streak)


def metrics(state: AnyScaleState) -> dict[str, Array]:
    """Return the state's numbers under names that stay the same in every framework and release.

    `loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`, `overflow_streak` and a policy's own
    trackers as in the state, and `applied_steps`, each of shape `()`. Does not synchronise with the host: what is read
    later is paid for later.
    """
    return {**state._asdict(), "applied_steps": state.steps - state.skipped_steps}


_LIMIT_MEND = (
    "look for a NaN or infinity in the loss, or raise max_overflow_streak where init_scale is known to be far too large"
)


def check_overflow_streak(policy: Any, state: AnyScaleState) -> None:
    """Raise `OverflowStreakError` once `state` has reached the `max_overflow_streak` of `policy`.

    `policy` is anything `as_policy` takes, and what is not is a `PolicyError`. For whoever has the state on the host
    anyway; reading it from a device would synchronise.
    """
    limit = BaseScaling.of(as_policy(policy)).max_overflow_streak
    if limit is None:
        return
    streak = int(state.overflow_streak)
    if streak >= limit:
        raise OverflowStreakError(
            f"overflow_streak={streak} has reached max_overflow_streak={limit}, and the loss scale is down to "
            f"{float(state.loss_scale):g}; {_LIMIT_MEND}"
        )


def diagnose(policy: Any, state: AnyScaleState) -> str:
    """Say in one or two sentences how loss scaling is doing, and what to do about it.

    `policy` is anything `as_policy` takes, and what is not is a `PolicyError`. The answer begins with one of `not
    started`, `calibrating`, `stuck at min_scale`, `skipping too often`, `pressing against max_scale`, `healthy`, and
    `broken` for a scale that no policy reaches. Synchronises with the host.
    """
    policy = BaseScaling.of(as_policy(policy))
    seen = _Seen(policy, state)
    for verdict in (_broken, _not_started, _at_limit, _stuck, _calibrating, _skipping, _pressing):
        if sentence := verdict(policy, seen):
            return sentence
    return f"healthy: {seen.counts}; the loss scale is {seen.scale:g}."


class _Seen:
    """A state's numbers, read once from wherever it lives."""

    def __init__(self, policy: BaseScaling, state: AnyScaleState) -> None:
        self.scale = float(state.loss_scale)
        self.steps = int(state.steps)
        self.skipped = int(state.skipped_steps)
        self.streak = int(state.overflow_streak)
        self.applied = self.steps - self.skipped
        self.finite_in_a_row = max(0, int(state.growth_tracker))
        self.start = float(policy.init_state().loss_scale)
        low, high = policy.bounds()
        self.at_floor = policy.adapts and self.scale <= np.float32(low)
        self.at_ceiling = policy.adapts and self.scale >= np.float32(high)
        self.counts = f"{self.skipped} of {self.steps} steps skipped"


def _broken(_: BaseScaling, seen: _Seen) -> str | None:
    if SMALLEST_SCALE <= seen.scale <= LARGEST_SCALE:
        return None
    return f"broken: the loss scale is {seen.scale:g}, which no policy reaches. Restore an earlier checkpoint."


def _not_started(_: BaseScaling, seen: _Seen) -> str | None:
    return f"not started: no step yet; the first is scaled by {seen.scale:g}." if seen.steps == 0 else None


def _at_limit(policy: BaseScaling, seen: _Seen) -> str | None:
    limit = policy.max_overflow_streak
    if limit is None or seen.streak < limit:
        return None
    return (
        f"skipping too often: {seen.streak} overflows in a row reach max_overflow_streak={limit} ({seen.counts}). "
        f"{_LIMIT_MEND[0].upper()}{_LIMIT_MEND[1:]}."
    )


def _stuck(policy: BaseScaling, seen: _Seen) -> str | None:
    if not seen.at_floor or seen.streak < _FEW:
        return None
    return (
        f"stuck at min_scale: the last {seen.streak} steps in a row overflowed and the loss scale cannot go below "
        f"{policy.min_scale:g}. {_forward_pass(policy.min_scale)}"
    )


def _calibrating(policy: BaseScaling, seen: _Seen) -> str | None:
    if not policy.adapts or seen.applied or seen.at_floor:
        return None
    return (
        f"calibrating: {seen.counts} while the loss scale comes down from {seen.start:g}, now {seen.scale:g}. "
        "This is normal at the start; a smaller init_scale shortens it."
    )


def _skipping(policy: BaseScaling, seen: _Seen) -> str | None:
    if seen.streak >= _FEW:
        what = f"the last {seen.streak} steps in a row overflowed ({seen.counts})"
    elif _unexplained_skips(policy, seen) > max(_FEW - 1, seen.steps * _tolerable_share(policy)):
        what = seen.counts
    elif seen.at_floor and seen.streak and seen.skipped >= _FEW:
        what = f"{seen.counts}, the last one at min_scale"
    else:
        return None
    if policy.adapts and not seen.at_floor:
        mend = "Look for a diverging loss; a longer growth_interval tries a larger scale less often."
    elif policy.is_constant() and seen.scale > 1.0:
        mend = f"A scale of {seen.scale:g} is too large for these gradients: lower it, or use DynamicScaling."
    else:
        mend = _forward_pass(seen.scale)
    return f"skipping too often: {what}. {mend}"


def _pressing(policy: BaseScaling, seen: _Seen) -> str | None:
    if not seen.at_ceiling or seen.at_floor or seen.applied < policy.growth_interval:
        return None
    room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    return (
        f"pressing against max_scale: the loss scale is {seen.scale:g} and could grow further ({seen.counts}). "
        f"If small gradients still flush to zero, {room}."
    )


def _forward_pass(scale: float) -> str:
    if scale > 1.0:
        return "Lower min_scale, or look for a NaN or infinity in the forward pass."
    return (
        "This usually is no scale problem but a NaN or infinity in the forward pass: "
        "look at the loss and the inputs first."
    )


def _unexplained_skips(policy: BaseScaling, seen: _Seen) -> float:
    """Return the skips beyond those that bringing the scale down from `init_scale` took.

    They are forgiven once a stretch of finite steps shows that the scale has arrived.
    """
    if not policy.adapts:
        return seen.skipped
    if seen.applied == seen.finite_in_a_row:
        return 0  # every overflow came before the first applied step
    has_settled = seen.finite_in_a_row >= min(1.0 / _OFTEN, policy.growth_interval / 2)
    if seen.scale >= seen.start or not has_settled:
        return seen.skipped
    return max(0.0, seen.skipped - policy.overflows_down_to(seen.scale))


def _tolerable_share(policy: BaseScaling) -> float:
    """Return the share of skipped steps that is no cause for concern: twice what the policy's own design skips."""
    return max(_OFTEN, min(2.0 * policy.overflow_share(), 0.5))

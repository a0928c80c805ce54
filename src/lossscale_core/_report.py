"""Per-step information, metrics for logging, and a plain-text diagnosis."""

from collections.abc import Iterable
from typing import Generic, NamedTuple

import numpy as np

from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._guard import GuardState
from lossscale_core._policy import BaseScaling
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import AnyScaleState, Array, ArrayT_co
from lossscale_core.errors import OverflowStreakError

_FEW = 5
_OFTEN = 0.05


class StepInfo(NamedTuple, Generic[ArrayT_co]):
    """The outcome of one step; each field has shape `()` and stays on its device until it is read."""

    applied: Array
    """bool: the step was applied; it was skipped if it overflowed or spiked."""
    loss_scale_used: ArrayT_co
    """float32: the scale by which this step's loss was multiplied and its gradients divided."""
    loss_scale_after: ArrayT_co
    """float32: the scale of the next step."""
    overflow_streak: ArrayT_co
    """int32: overflows in a row, this step included; 0 when it was applied."""
    overflowed: Array = False
    """bool: a gradient held NaN or infinity."""
    spiked: Array = False
    """bool: the gradients were finite, and a `SpikeGuard` refused their norm."""


class GradientReport(NamedTuple):
    """The counts of non-finite elements in one gradient."""

    name: str
    """The name of the parameter."""
    nan: int
    """The number of NaN elements."""
    positive_inf: int
    """The number of +inf elements."""
    negative_inf: int
    """The number of -inf elements."""
    largest_finite: float
    """The largest magnitude among the finite elements, as stored; 0.0 if no element is finite."""


class OverflowReport(list[GradientReport]):
    """The reports on the gradients that are not finite, and the cause that the loss indicates.

    Args:
        reports: One report for each gradient that holds NaN or infinity.
        loss_finite: Whether the loss, before it was scaled, is finite; None if the loss is unknown.
    """

    def __init__(self, reports: Iterable[GradientReport] = (), *, loss_finite: bool | None = None) -> None:
        super().__init__(reports)
        self.loss_finite = loss_finite

    @property
    def verdict(self) -> str:
        """A recommendation in one or two clauses; without the loss, the gradients do not show the cause."""
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


def step_info(
    before: AnyScaleState[ArrayT_co], after: AnyScaleState[ArrayT_co], *, spiked: Array = False
) -> StepInfo[ArrayT_co]:
    """Return the outcome of the step that changed the state from `before` to `after`.

    Does not synchronise with the host.

    Args:
        before: The state before the step.
        after: The state that the policy's `update` returned; after a spike, `before` itself.
        spiked: Whether the gradients were finite and a `SpikeGuard` refused their norm: a bool of shape `()` of the
            states' framework, or a Python bool.

    Returns:
        The outcome, with fields of shape `()` on the device of the states.
    """
    # An overflow lengthens the streak, unless it is full; only an overflow leaves a full streak.
    streak: Array = after.overflow_streak
    finite = (streak <= before.overflow_streak) & (streak < LARGEST_COUNT)
    overflowed = (streak > before.overflow_streak) | (streak >= LARGEST_COUNT)
    if spiked is False:
        return StepInfo(finite, before.loss_scale, after.loss_scale, streak, overflowed, spiked)
    accepted = not spiked if isinstance(spiked, bool) else ~spiked
    return StepInfo(finite & accepted, before.loss_scale, after.loss_scale, streak, overflowed & accepted, spiked)


def metrics(state: AnyScaleState[ArrayT_co], *, guard: GuardState[ArrayT_co] | None = None) -> dict[str, ArrayT_co]:
    """Return the numbers of a state for a log, under the same names in every framework and release.

    Does not synchronise with the host; reading a value later does.

    Args:
        state: A state of any framework.
        guard: The state of a spike guard.

    Returns:
        The fields of the state by name (`loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`,
        `overflow_streak` and a policy's own counters) and `applied_steps`, each of shape `()`. A guard adds `spikes`,
        `spike_streak` and `norm_mean`.
    """
    numbers = state._asdict()
    numbers["applied_steps"] = numbers["steps"] - numbers["skipped_steps"]
    if guard is not None:
        numbers.update(spikes=guard.spikes, spike_streak=guard.streak, norm_mean=guard.mean)
    return numbers


_LIMIT_MEND = (
    "look for a NaN or infinity in the loss, or raise max_overflow_streak where init_scale is known to be far too large"
)


def check_overflow_streak(policy: PolicyLike, state: AnyScaleState) -> None:
    """Raise an error if the state has reached the policy's `max_overflow_streak`.

    Call it where the state is on the host; reading it from a device synchronises.

    Args:
        policy: Anything that `as_policy` accepts.
        state: The state after a step.

    Raises:
        OverflowStreakError: As many steps in a row as the policy's `max_overflow_streak` overflowed.
        PolicyError: `policy` is not a policy.
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


def diagnose(policy: PolicyLike, state: AnyScaleState, *, guard: GuardState | None = None) -> str:
    """Describe in one or two sentences how loss scaling is doing, and recommend what to do.

    Synchronises with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        state: A state of any framework.
        guard: The state of a spike guard, which adds a sentence about the spikes, if there were any.

    Returns:
        A text that begins with `not started`, `calibrating`, `stuck at min_scale`, `skipping too often`, `pressing
        against max_scale`, `spiking`, `healthy`, or, for a scale that no policy reaches, `broken`.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    members = BaseScaling.of(as_policy(policy))
    numbers = _Numbers(members, state)
    spikes, is_spiking = ("", False) if guard is None else _spikes(guard)
    for verdict in (_broken, _not_started, _at_limit, _stuck, _calibrating, _skipping, _pressing):
        if sentence := verdict(members, numbers):
            return sentence + spikes
    return f"{'spiking' if is_spiking else 'healthy'}: {numbers.counts}; the loss scale is {numbers.scale:g}.{spikes}"


def _spikes(guard: GuardState) -> tuple[str, bool]:
    """Return a sentence about the spikes, or nothing if there were none, and whether the run is in a streak of them."""
    spikes, streak = int(guard.spikes), int(guard.streak)
    if not spikes:
        return "", False
    counts = (
        f" The guard refused {spikes} {'spike' if spikes == 1 else 'spikes'}; the mean norm is {float(guard.mean):g}."
    )
    if streak < _FEW:
        return counts, False
    mend = "Look for a change of the data or a learning rate that is too large."
    return f"{counts} The last {streak} norms in a row were spikes. {mend}", True


class _Numbers:
    """The numbers of a state, read once from its device."""

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


def _broken(_: BaseScaling, numbers: _Numbers) -> str | None:
    if SMALLEST_SCALE <= numbers.scale <= LARGEST_SCALE:
        return None
    return f"broken: the loss scale is {numbers.scale:g}, which no policy reaches. Restore an earlier checkpoint."


def _not_started(_: BaseScaling, numbers: _Numbers) -> str | None:
    return f"not started: no step yet; the first is scaled by {numbers.scale:g}." if numbers.steps == 0 else None


def _at_limit(policy: BaseScaling, numbers: _Numbers) -> str | None:
    limit = policy.max_overflow_streak
    if limit is None or numbers.streak < limit:
        return None
    return (
        f"skipping too often: {numbers.streak} overflows in a row reach max_overflow_streak={limit} "
        f"({numbers.counts}). {_LIMIT_MEND[0].upper()}{_LIMIT_MEND[1:]}."
    )


def _stuck(policy: BaseScaling, numbers: _Numbers) -> str | None:
    if not numbers.at_floor or numbers.streak < _FEW:
        return None
    return (
        f"stuck at min_scale: the last {numbers.streak} steps in a row overflowed and the loss scale cannot go below "
        f"{policy.min_scale:g}. {_forward_pass(policy.min_scale)}"
    )


def _calibrating(policy: BaseScaling, numbers: _Numbers) -> str | None:
    if not policy.adapts or numbers.applied or numbers.at_floor:
        return None
    return (
        f"calibrating: {numbers.counts} while the loss scale comes down from {numbers.start:g}, now {numbers.scale:g}. "
        "This is normal at the start; a smaller init_scale shortens it."
    )


def _skipping(policy: BaseScaling, numbers: _Numbers) -> str | None:
    if numbers.streak >= _FEW:
        what = f"the last {numbers.streak} steps in a row overflowed ({numbers.counts})"
    elif _unexplained_skips(policy, numbers) > max(_FEW - 1, numbers.steps * _tolerable_share(policy)):
        what = numbers.counts
    elif numbers.at_floor and numbers.streak and numbers.skipped >= _FEW:
        what = f"{numbers.counts}, the last one at min_scale"
    else:
        return None
    if policy.adapts and not numbers.at_floor:
        mend = "Look for a diverging loss; a longer growth_interval tries a larger scale less often."
    elif policy.is_constant() and numbers.scale > 1.0:
        mend = f"A scale of {numbers.scale:g} is too large for these gradients: lower it, or use DynamicScaling."
    else:
        mend = _forward_pass(numbers.scale)
    return f"skipping too often: {what}. {mend}"


def _pressing(policy: BaseScaling, numbers: _Numbers) -> str | None:
    if not numbers.at_ceiling or numbers.at_floor or numbers.applied < policy.growth_interval:
        return None
    room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
    return (
        f"pressing against max_scale: the loss scale is {numbers.scale:g} and could grow further ({numbers.counts}). "
        f"If small gradients still flush to zero, {room}."
    )


def _forward_pass(scale: float) -> str:
    if scale > 1.0:
        return "Lower min_scale, or look for a NaN or infinity in the forward pass."
    return (
        "The cause is usually not the scale but a NaN or infinity in the forward pass: "
        "look at the loss and the inputs first."
    )


def _unexplained_skips(policy: BaseScaling, numbers: _Numbers) -> float:
    """Return the skips beyond those that lowered the scale from `init_scale`.

    Those are subtracted once a run of finite steps shows that the scale has settled.
    """
    if not policy.adapts:
        return numbers.skipped
    if numbers.applied == numbers.finite_in_a_row:
        return 0  # every overflow came before the first applied step
    has_settled = numbers.finite_in_a_row >= min(1.0 / _OFTEN, policy.growth_interval / 2)
    if numbers.scale >= numbers.start or not has_settled:
        return numbers.skipped
    return max(0.0, numbers.skipped - policy.overflows_down_to(numbers.scale))


def _tolerable_share(policy: BaseScaling) -> float:
    """Return the largest fraction of skipped steps that is normal: twice the fraction that the policy plans."""
    return max(_OFTEN, min(2.0 * policy.overflow_share(), 0.5))

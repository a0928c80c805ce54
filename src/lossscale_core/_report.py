"""Per-step information, metrics for logging, and a plain-text diagnosis."""

from collections.abc import Iterable
from typing import Generic, NamedTuple

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._diagnosis import BACKWARD, STREAK_HINT, Numbers, diagnosis
from lossscale_core._guard import GuardState
from lossscale_core._messages import not_a_state, shown_number
from lossscale_core._settings import LARGEST_COUNT
from lossscale_core._state import Array, ArrayT_co, ScaleState, read
from lossscale_core.errors import OverflowStreakError


class StepInfo(NamedTuple, Generic[ArrayT_co]):
    """The outcome of one step: true if it was applied.

    Each field has shape `()` and stays on its device until it is read. `if info:` reads `applied`.
    """

    applied: Array
    """bool: the step was applied; it was skipped if it overflowed or spiked."""
    loss_scale_used: ArrayT_co
    """float32: the scale that multiplied this step's loss and divided its gradients."""
    loss_scale_after: ArrayT_co
    """float32: the scale of the next step."""
    overflow_streak: ArrayT_co
    """int32: overflows in a row, this step included; 0 when it was applied."""
    overflowed: Array = False
    """bool: a gradient held NaN or infinity."""
    spiked: Array = False
    """bool: the gradients were finite, and a `SpikeGuard` refused their norm."""

    def __bool__(self) -> bool:
        """Return whether the step was applied; waits for the device of `applied`."""
        return bool(self.applied)


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
            return "the loss itself is not finite: no loss scale fixes this; look at the inputs and the forward pass"
        if not self:
            return "every gradient is finite"
        if self.loss_finite is None:
            return "pass loss= to learn whether the scale or the loss is the cause"
        verdict = "finite loss: a smaller loss scale usually fixes this"
        if any(each.positive_inf or each.negative_inf for each in self):
            return verdict
        return f"{verdict}; NaN without an infinity may come from {BACKWARD}"

    def __str__(self) -> str:
        lines = (
            f"{each.name}: {each.nan} NaN, {each.positive_inf} +inf, {each.negative_inf} -inf, "
            f"largest finite {each.largest_finite:g}"
            for each in self
        )
        return "\n".join([*lines, self.verdict])


def step_info(
    before: ScaleState[ArrayT_co],
    after: ScaleState[ArrayT_co],
    *,
    spiked: Array = False,
) -> StepInfo[ArrayT_co]:
    """Return the outcome of the step that changed the state from `before` to `after`.

    Does not synchronise with the host.

    Args:
        before: The state before the step.
        after: The state that the policy's `update` returned; `before` itself after a spike.
        spiked: Whether the gradients were finite and a `SpikeGuard` refused their norm: a bool of shape `()` of the
            states' framework, or a Python bool.

    Returns:
        The outcome, with fields of shape `()` on the device of the states.
    """
    # An overflow lengthens the streak, unless it is full; only an overflow leaves a full streak.
    streak: Array = after.overflow_streak
    finite = (streak <= before.overflow_streak) & (streak < LARGEST_COUNT)
    overflowed = (streak > before.overflow_streak) | (streak >= LARGEST_COUNT)
    if spiked is not False:
        accepted = not spiked if isinstance(spiked, bool) else ~spiked
        finite, overflowed = finite & accepted, overflowed & accepted
    return StepInfo(finite, before.loss_scale, after.loss_scale, streak, overflowed, spiked)


def metrics(
    state: ScaleState[ArrayT_co],
    *,
    guard: GuardState[ArrayT_co] | None = None,
) -> dict[str, ArrayT_co]:
    """Return the numbers of a state for a log, under the same names in every framework and release.

    Does not synchronise with the host; reading a value later does.

    Args:
        state: A state of any framework.
        guard: The state of a spike guard.

    Returns:
        The fields of the state by name (`loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`,
        `overflow_streak` and a policy's own counters) and `applied_steps`, each of shape `()`, or a plain Python number
            if the state is on the host. A guard adds `spikes`, `spike_streak` and `norm_mean`.
    """
    try:
        numbers = state._asdict()
    except AttributeError as error:
        raise not_a_state(state, "metrics(state)") from error
    numbers["applied_steps"] = numbers["steps"] - numbers["skipped_steps"]
    if guard is not None:
        numbers.update(spikes=guard.spikes, spike_streak=guard.streak, norm_mean=guard.mean)
    # NumPy's numbers on the host become Python's, which `json.dumps` takes.
    return {name: value.item() if _is_numpys(value) else value for name, value in numbers.items()}


def _is_numpys(value: object) -> bool:
    """Return whether a value is one number of NumPy's, a scalar or an array of shape `()`."""
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)


def check_overflow_streak(policy: PolicyLike, state: ScaleState) -> None:
    """Raise an error if the state has reached the policy's `max_overflow_streak`.

    Logs nothing. Reads the state only if the policy has such a limit; reading it from a device synchronises.

    Args:
        policy: Anything that `as_policy` accepts.
        state: The state after a step.

    Raises:
        OverflowStreakError: As many steps in a row as the policy's `max_overflow_streak` overflowed.
        PolicyError: `policy` is not a policy.
    """
    members = BaseScaling.of(as_policy(policy))
    limit = members.max_overflow_streak
    if limit is None:
        return
    streak = int(read(state.overflow_streak))
    if streak >= limit:
        scale = (
            f", and the loss scale is down to {shown_number(float(state.loss_scale))}" if members.scales_losses else ""
        )
        raise OverflowStreakError(
            f"overflow_streak={streak} has reached max_overflow_streak={limit}{scale}; {STREAK_HINT}"
        )


def diagnose(
    policy: PolicyLike,
    state: ScaleState,
    *,
    guard: GuardState | None = None,
) -> str:
    """Describe the condition of a run in one or two sentences, and recommend what to do.

    Logs nothing. Synchronises with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        state: A state of any framework.
        guard: The state of a spike guard, which adds a sentence about the spikes, if there were any.

    Returns:
        A text that begins with `not started`, `calibrating`, `no step applied yet`, `stuck at min_scale`,
            `skipping too often`, `fallen below 1`, `pressing against max_scale`, `spiking`, `healthy`,
            or, for a scale that no policy reaches, `broken`.

    Raises:
        PolicyError: `policy` is not a policy.
        TypeError: `state` is not a state.
    """
    members = BaseScaling.of(as_policy(policy))
    return diagnosis(members, Numbers(members, state), guard)

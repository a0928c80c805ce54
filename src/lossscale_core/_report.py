"""Per-step information, metrics for logging, a plain-text diagnosis, and a log of its changes."""

import math
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._guard import SPIKES_HINT, GuardState
from lossscale_core._messages import shown, shown_number
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import Array, ArrayT_co, FlagT_co, ScaleState, loss_scale_of, read, require_one_state
from lossscale_core.errors import OverflowStreakError

_BACKWARD = "a division by zero, or a root or a logarithm at zero, in the backward pass"
"""What makes gradients NaN at each loss scale though the loss is finite: https://github.com/jax-ml/jax/issues/26328."""
_NOT_THE_SCALE = (
    f"Look for a NaN or infinity in the inputs, the forward pass and the loss; if the loss is finite, for {_BACKWARD}"
)
BAD_LOSS = (
    "the loss itself is NaN or infinite: no loss scale fixes this; look at the inputs and the learning rate, and at "
    "logarithms, roots and divisions in the forward pass"
)
"""The sentence for a loss that is not finite, which is logged as the event `bad_loss`."""
_FEW = 5
_OFTEN = 0.05
_APART = 1000
_TIMES_AS_LONG = 10


class StepInfo(NamedTuple, Generic[ArrayT_co, FlagT_co]):
    """The outcome of one step: true if it was applied.

    Each field has shape `()` and stays on its device until it is read. `if info:` reads `applied`.
    """

    applied: FlagT_co
    """bool: the step was applied; it was skipped if it overflowed or spiked."""
    loss_scale_used: ArrayT_co
    """float32: the scale that multiplied this step's loss and divided its gradients."""
    loss_scale_after: ArrayT_co
    """float32: the scale of the next step."""
    overflow_streak: ArrayT_co
    """int32: overflows in a row, this step included; 0 when it was applied."""
    overflowed: FlagT_co | bool = False
    """bool: a gradient held NaN or infinity."""
    spiked: FlagT_co | bool = False
    """bool: the gradients were finite, and a `SpikeGuard` refused their norm."""

    def __bool__(self) -> bool:
        """Return whether the step was applied; waits for the device of `applied`."""
        return bool(self.applied)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other if isinstance(other, bool) else tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


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
        gradients: A name and an array for each gradient that holds NaN or infinity: what `np.asarray` takes, of floats
            or complex numbers.
        loss_finite: Whether the loss, before it was scaled, is finite; None if the loss is unknown.
        checked: The number of gradients that were checked. If none of them is finite, the text has one line for all.
    """

    def __init__(
        self, gradients: Iterable[tuple[str, Any]] = (), *, loss_finite: bool | None = None, checked: int | None = None
    ) -> None:
        super().__init__(_counted(name, values) for name, values in gradients)
        self.loss_finite, self.checked = loss_finite, checked

    @property
    def verdict(self) -> str:
        """A recommendation in one or two clauses; without the loss, the gradients do not show the cause."""
        if self.loss_finite is False:
            return BAD_LOSS
        if not self:
            return "every gradient is finite"
        if self.loss_finite is None:
            return "pass loss= to learn whether the scale or the loss is the cause"
        if any(each.positive_inf or each.negative_inf for each in self):
            return "finite loss: a smaller loss scale usually fixes this"
        return f"finite loss, NaN without an infinity: a smaller loss scale fixes this unless it comes from {_BACKWARD}"

    def __str__(self) -> str:
        reports: list[GradientReport] = self
        if len(self) == self.checked and len(self) >= _FEW:
            _, nan, above, below, largest = zip(*self, strict=True)
            reports = [GradientReport(f"all {len(self)} parameters", sum(nan), sum(above), sum(below), max(largest))]
        lines = (
            f"{each.name}: {each.nan} NaN, {each.positive_inf} +inf, {each.negative_inf} -inf, "
            f"largest finite {each.largest_finite:g}"
            for each in reports
        )
        return "\n".join([*lines, self.verdict])


def require_pairs(grads_and_vars: Any, caller: str) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs in a list; raise `TypeError` for what does not hold them."""
    pairs: list[Any] = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [None]
    if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return pairs
    raise TypeError(
        f"{caller} was given {shown(grads_and_vars)}; it takes (gradient, variable) pairs; pass zip(grads, variables)"
    )


def _counted(name: str, gradient: Any) -> GradientReport:
    values = np.asarray(gradient)
    parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
    nan, above, below = (int(test(parts).sum()) for test in (np.isnan, np.isposinf, np.isneginf))
    largest = np.abs(parts, where=np.isfinite(parts), out=np.zeros_like(parts)).max(initial=0.0)
    return GradientReport(name, nan, above, below, float(largest))


def step_info(
    before: ScaleState[ArrayT_co], after: ScaleState[ArrayT_co], *, spiked: Array = False
) -> StepInfo[ArrayT_co, ArrayT_co | np.bool_]:
    """Return the outcome of the step that changed the state from `before` to `after`.

    Does not synchronise with the host.

    Args:
        before: The state before the step.
        after: The state that the policy's `update` returned; `before` itself after a spike.
        spiked: Whether the gradients were finite and a `SpikeGuard` refused their norm: a bool of shape `()` of the
            states' framework, or a Python bool.

    Returns:
        The outcome, with fields of shape `()` on the device of the states.

    Raises:
        TypeError: `before` or `after` is not a state.
        ValueError: The states are on the host, and `after` has fewer steps than `before`.
    """
    used, left = (loss_scale_of(state, "step_info(before, after)") for state in (before, after))
    streak: Array = after.overflow_streak
    steps: tuple[Array, Array] = after.steps, before.steps
    if isinstance(steps[0], np.generic) and steps[0] < steps[1]:  # on a device they are not read
        given = "{} steps after {}".format(*steps)
        raise ValueError(f"step_info was given states of {given}; call step_info(before, after), in this order")
    accepted = spiked ^ True
    # An overflow lengthens the streak, unless it is full; only an overflow leaves a full streak.
    overflowed = ((streak > before.overflow_streak) | (streak >= LARGEST_COUNT)) & accepted
    return StepInfo(overflowed ^ accepted, used, left, streak, overflowed, spiked)


def metrics(state: ScaleState[ArrayT_co], *, guard: GuardState[ArrayT_co] | None = None) -> dict[str, ArrayT_co]:
    """Return the numbers of a state for a log, under the same names in every framework and release.

    Does not synchronise with the host; reading a value later does.

    Args:
        state: A state of any framework.
        guard: The state of a spike guard.

    Returns:
        The fields of the state by name (`loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`,
        `overflow_streak` and a policy's own counters) and `applied_steps`, each of shape `()`, or a plain Python number
            if the state is on the host. A guard adds `spikes`, `spike_streak` and `norm_mean`.

    Raises:
        TypeError: `state` is not a state, or several along a leading axis.
    """
    require_one_state(state, "metrics(state)")
    numbers = state._asdict()
    numbers["applied_steps"] = numbers["steps"] - numbers["skipped_steps"]
    if guard is not None:
        numbers |= {"spikes": guard.spikes, "spike_streak": guard.streak, "norm_mean": guard.mean}
    # NumPy's numbers on the host become Python's, which `json.dumps` takes.
    numpys = (np.generic, np.ndarray)
    return {name: value.item() if isinstance(value, numpys) else value for name, value in numbers.items()}


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
    if reached := _reached_limit(BaseScaling.of(as_policy(policy)), state):
        raise OverflowStreakError(reached)


def _reached_limit(policy: BaseScaling, state: ScaleState[Any]) -> str:
    """Return what to say of a state that has reached the policy's limit, else an empty text."""
    limit = policy.max_overflow_streak
    if limit is None or (streak := int(read(state.overflow_streak))) < limit:
        return ""
    return (
        f"overflow_streak={streak} has reached max_overflow_streak={limit} at a loss scale of "
        f"{shown_number(float(state.loss_scale))}; look for a NaN or infinity in the loss, or raise "
        "max_overflow_streak where init_scale is known to be far too large"
    )


def diagnose(policy: PolicyLike, state: ScaleState, *, guard: GuardState | None = None) -> str:
    """Describe the condition of a run in one or two sentences, and recommend what to do.

    Logs nothing. Synchronises with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        state: A state of any framework.
        guard: The state of a spike guard, which adds a sentence about the spikes, if there were any.

    Returns:
        A text that begins with a verdict and a colon: `not started`, `calibrating`, `stuck at min_scale`, `skipping too
        often`, `pressing against max_scale`, `healthy`, or, for a scale that no policy reaches, `broken`.

    Raises:
        PolicyError: `policy` is not a policy.
        TypeError: `state` is not a state.
    """
    text = _diagnosis(BaseScaling.of(as_policy(policy)), _numbers(state, "diagnose(policy, state)"))
    if guard is not None and int(guard.spikes):
        spikes, streak = f"{int(guard.spikes)} spike{'s' * (int(guard.spikes) > 1)}", int(guard.streak)
        text += f" The guard refused {spikes}; the mean norm is {float(guard.mean):g}."
        text += f" The last {streak} norms in a row were spikes. {SPIKES_HINT}." if streak >= _FEW else ""
    return text


def _numbers(state: Any, call: str) -> ScaleState[Any]:
    """Return the fields of any state as Python numbers, each read once from its device."""
    require_one_state(state, call)
    return ScaleState(read(state.loss_scale), *(int(getattr(state, name)) for name in ScaleState._fields[1:]))


def _diagnosis(policy: BaseScaling, state: ScaleState[Any]) -> str:
    """Return the verdict, its reason and the recommendation for a state of Python numbers."""
    scale, steps, skipped, streak = state.loss_scale, state.steps, state.skipped_steps, state.overflow_streak
    start, shown = float(policy.init_state().loss_scale), shown_number(scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return f"broken: the loss scale is {scale:g}, which no policy reaches. Restore an earlier checkpoint."
    if not steps:
        return f"not started: no step yet{f'; the first is scaled by {shown}' if policy.scales_losses else ''}."
    if reached := _reached_limit(policy, state):
        return f"skipping too often: {reached}."

    counts, overflowing = f"{skipped} of {steps} steps skipped", f"the last {streak} steps in a row overflowed"
    applied, finite_in_a_row = steps - skipped, state.growth_tracker + policy.cooldown
    # A state holds its scale in float32. Compared with a bound in float64, a scale at the bound might be above it.
    low, high = map(np.float32, policy.bounds())
    at_floor, at_ceiling = policy.adapts and scale <= low, policy.adapts and scale >= high
    has_fallen = policy.adapts and scale < 1.0 <= start  # below 1 finite losses hardly ever overflow
    interval = policy.growth_interval if policy.growth_factor > 1.0 else LARGEST_COUNT
    down = _overflows_down(policy, scale, start)
    reversed_growths = (skipped - down) / policy.hysteresis  # unless `hysteresis` above 1 has tolerated overflows
    has_grown = scale > start or 0 < reversed_growths <= applied / interval

    if policy.is_constant() and scale > 1.0:
        hint = f"A scale of {shown} is too large for these gradients: lower it, or use DynamicScaling."
    elif policy.adapts and not at_floor and not has_fallen:
        rarer = "; a longer growth_interval tries a larger scale less often" if has_grown else ""
        hint = f"Look for a diverging loss{rarer}."
    else:
        lower = ", or lower min_scale" if at_floor and low > SMALLEST_SCALE else ""
        hint = f"{_NOT_THE_SCALE}{lower}."

    # The order matters: a run that is stuck or calibrating also skips often, but needs other advice.
    if at_floor and streak >= _FEW:
        least = shown_number(float(low))
        return f"stuck at min_scale: {overflowing} and the loss scale cannot go below {least}. {hint}"
    # After a few applied steps, or several in a row, the calibration is over.
    is_first_run = 0 < applied == finite_in_a_row  # no step has overflowed after the first finite one
    is_over = applied >= _FEW or is_first_run or at_floor or (has_fallen and streak >= _FEW)
    if policy.adapts and skipped and not is_over:
        now = f"is {shown}" if scale >= start else f"comes down from {shown_number(start)}, now {shown}"
        advice = "This is normal at the start; a smaller init_scale shortens it."
        return f"calibrating: {counts} while the loss scale {now}. {advice}"
    if streak >= _FEW:
        return f"skipping too often: {overflowing} ({counts}). {hint}"
    if not applied:
        return f"not started: no step applied yet, {counts}. {hint}"
    planned = 2.0 * policy.hysteresis / (policy.hysteresis + interval)  # growth tries a larger scale regularly
    tolerated = max(4 if policy.adapts else 2, steps * max(_OFTEN, min(planned, 0.5)))
    is_down = has_grown or finite_in_a_row >= min(20, interval / 2) or applied >= 10 * skipped  # for good
    excess = 0 if is_first_run else skipped - (down if is_down else 0)
    if excess > tolerated or has_fallen or (at_floor and streak and skipped >= _FEW):
        fallen = f", and the loss scale has fallen to {shown}" if has_fallen else ""
        return f"skipping too often: {counts}{fallen}. {hint}"
    if at_ceiling and not at_floor and applied >= policy.growth_interval:
        room = "raise max_scale" if policy.max_scale < LARGEST_SCALE else "give the loss a larger weight"
        could = f"the loss scale is {shown} and could grow further ({counts})"
        return f"pressing against max_scale: {could}. If small gradients still flush to zero, {room}."
    return f"healthy: {counts}{f'; the loss scale is {shown}' if policy.scales_losses else ''}."


def _overflows_down(policy: BaseScaling, scale: float, start: float) -> int:
    """Return how many overflows lower the scale from `start` to `scale`, if it does not grow in between."""
    if scale >= start or policy.backoff_factor >= 1.0:
        return 0
    backoffs = round(math.log(scale / start, policy.backoff_factor))
    return backoffs * policy.hysteresis if policy.refill_on_backoff else backoffs + policy.hysteresis - 1


class ScaleWatch:
    """The log of one run, through `logging.getLogger("lossscale")`.

    ```python
    watch = ScaleWatch()
    ...
    watch.log(policy, state, loss=loss)  # now and then, when the loop logs
    ```

    `GradScaler` and the `LossScaleOptimizer`s have one each. The watch logs the text of `diagnose` when its verdict
    changes, and again when the streak of overflows is ten times as long; a verdict that comes back within 1000 steps is
    not logged again. `calibrating` and `healthy` are `INFO` lines, any other verdict is a `WARNING`. So is the first
    loss that is NaN or infinite, with the event `bad_loss`. A log record has the attributes `event` (the verdict),
    `steps`, `loss_scale` and `overflow_streak`. A state with fewer steps than the last one begins another run.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._verdict = "healthy"
        self._logged: dict[str, tuple[int, int]] = {}  # the step and the streak at which a verdict was logged
        self._has_bad_loss = False

    def log(self, policy: PolicyLike, state: ScaleState, *, loss: Any = None) -> None:
        """Log the diagnosis of the state if its verdict is new. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.
            loss: The loss of the last step or a mean of losses, unscaled: a number, or an array of shape `()`.

        Raises:
            PolicyError: `policy` is not a policy.
            TypeError: `state` is not a state.
        """
        numbers = _numbers(state, "log(policy, state)")
        if numbers.steps < self._steps:
            vars(self).update(vars(ScaleWatch()))
        self._steps = numbers.steps
        if loss is not None and not self._has_bad_loss and not math.isfinite(float(loss)):
            self._has_bad_loss = True
            log_event("bad_loss", f"lossscale, step {numbers.steps}: {BAD_LOSS}")
        text = _diagnosis(BaseScaling.of(as_policy(policy)), numbers)
        before, self._verdict = self._verdict, text.partition(":")[0]
        if self._verdict == "not started":
            return
        step, streak = self._logged.get(self._verdict, (-_APART, 0))
        level = "info" if self._verdict in ("calibrating", "healthy") else "warning"
        is_longer = numbers.overflow_streak >= _TIMES_AS_LONG * max(streak, 2) and level == "warning"
        if is_longer or (before != self._verdict and numbers.steps - step >= _APART):
            self._logged[self._verdict] = numbers.steps, numbers.overflow_streak
            facts = {name: getattr(numbers, name) for name in ("steps", "loss_scale", "overflow_streak")}
            log_event(self._verdict, f"lossscale, step {numbers.steps}: {text}", level, **facts)


def log_event(event: str, text: str, level: str = "warning", **facts: Any) -> None:
    """Log a line on the logger of this library.

    Args:
        event: The attribute `event` of the log record.
        text: The line.
        level: The name of the level in lower case.
        facts: Further attributes of the log record.
    """
    import logging  # most processes log nothing, and it would add a twentieth to the time of importing the core

    getattr(logging.getLogger("lossscale"), level)(text, extra={"event": event, **facts})

"""The scaling policies, and the only place where a loss scale changes.

Every `update` is two named transitions, one after a finite step and one after an overflow, and one select between
them. It needs `xp.where` and operators, nothing else, so the same lines run on host scalars and on the arrays of any
framework, eagerly or traced: no `if` on an array, no dtype or shape that changes from one step to the next.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from lossscale_core import _settings
from lossscale_core._arrays import HOST, Namespace, host_flag, namespace
from lossscale_core._settings import setting
from lossscale_core._state import Array, ScaleState, TolerantScaleState

Transition: TypeAlias = Callable[[Any, Array, Namespace], Any]
"""Returns the state after a step, given the state before it, the count of steps with this one, and the namespace."""

_Change: TypeAlias = Callable[[Any, Array, Namespace], Array]
"""Returns a loss scale after it grew or backed off, given the policy, the scale before and the namespace."""

_FULL = _settings.LARGEST_COUNT
_FULL_SHARE = 2.0**24
"""float32 counts no further: 2**24 + 1 is 2**24 again."""


@runtime_checkable
class ScalingPolicy(Protocol):
    """What a facade needs of a policy: where to start, and what a step does to the state."""

    def init_state(self) -> Any:
        """Return the state before the first step: a NamedTuple of host scalars with the fields of `ScaleState`."""
        ...

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step.

        `grads_finite` is the framework's own bool of shape `()`, or a Python bool for a host state: True when every
        gradient element is finite, already combined over devices and ranks. `xp` is the namespace of the state's
        arrays, inferred when left out (TensorFlow's cannot be inferred); its `where` must take plain numbers, as the
        array API of 2024.12 has it. Pure. Never synchronises with the host, unless the state is on the host and the
        flag is not.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NoScaling:
    """Keep the loss scale at 1, and still skip the steps that overflow.

    The policy for bfloat16 and float32, where gradients do not underflow but may well be infinite.
    """

    def init_state(self) -> ScaleState:
        """Return the state before the first step, on the host."""
        return _init_state(1.0)

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step: only the counters move. See `ScalingPolicy.update`."""
        return _select(grads_finite, _count_finite, _count_overflow, state, xp)


@dataclasses.dataclass(frozen=True, slots=True)
class FixedScaling:
    """Keep the loss scale at `init_scale`, and skip the steps that overflow.

    Raises `PolicyError` where `init_scale` is not a number from 2**-126 to 2**126. Factors other than powers of two
    make unscaling inexact by an ulp.
    """

    init_scale: float = setting(_settings.SCALE)

    def __post_init__(self) -> None:
        _settings.settle(self)

    def init_state(self) -> ScaleState:
        """Return the state before the first step, on the host."""
        return _init_state(self.init_scale)

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step: only the counters move. See `ScalingPolicy.update`."""
        return _select(grads_finite, _count_finite, _count_overflow, state, xp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """Raise the loss scale while gradients stay finite, lower it when they overflow.

    ```
    after a finite step:  growth_tracker + 1; when it reaches growth_interval:
                          loss_scale × growth_factor (≤ max_scale), growth_tracker 0, tolerance restored
    after an overflow:    growth_tracker −cooldown; hysteresis_tracker − 1; when it reaches 0:
                          loss_scale × backoff_factor (≥ min_scale)
    ```

    The step that makes the scale grow is still unscaled by the old scale. Micikevicius et al., "Mixed Precision
    Training" (2018), section 3.2, is the source of the rule; hysteresis and cooldown are what Megatron-LM, DeepSpeed,
    apex and tf.contrib added, each with its own way of restoring the tolerance:

    | `refill_on_finite` | `refill_on_backoff` | as in |
    |---|---|---|
    | True  | False | apex (the default here) |
    | False | False | Megatron-LM, DeepSpeed |
    | True  | True  | Paddle |
    | False | True  | tf.contrib |

    Raises `PolicyError` naming the value, the rule and the mend. Factors other than powers of two make unscaling
    inexact by an ulp. Change a policy with `dataclasses.replace(policy, growth_interval=500)`.
    """

    init_scale: float = setting(_settings.SCALE, 2.0**16)
    """The loss scale of the first step; `min_scale` ≤ it ≤ `max_scale`."""
    growth_factor: float = setting(_settings.GROWTH_FACTOR, 2.0)
    """Multiplies the scale when it grows; above 1."""
    backoff_factor: float = setting(_settings.BACKOFF_FACTOR, 0.5)
    """Multiplies the scale when it backs off; between 0 and 1."""
    growth_interval: int = setting(_settings.COUNT, 2000)
    """The scale grows on this many-th finite step in a row."""
    hysteresis: int = setting(_settings.COUNT, 1)
    """The scale backs off on this many-th overflow; 1 is at once."""
    refill_on_finite: bool = setting(_settings.FLAG, True)
    """Whether any finite step restores the tolerance (growth always does)."""
    refill_on_backoff: bool = setting(_settings.FLAG, False)
    """Whether backing off restores the tolerance; without it every further overflow backs off too."""
    cooldown: int = setting(_settings.COUNT_OR_ZERO, 0)
    """Finite steps that do not count toward growth, at the start and after an overflow."""
    min_scale: float = setting(_settings.SCALE, 1.0)
    """Backing off stops here; it never raises a scale that is below already."""
    max_scale: float = setting(_settings.SCALE, 2.0**32)
    """Growth stops here."""
    max_overflow_streak: int | None = setting(_settings.COUNT_OR_NONE, None)
    """Overflows in a row after which a facade that knows the flag on the host raises `OverflowStreakError`."""

    def __post_init__(self) -> None:
        _settings.settle(self)
        _settings.require_ordered_scales(self)

    def init_state(self) -> ScaleState:
        """Return the state before the first step, on the host."""
        return _init_state(self.init_scale, growth_tracker=-self.cooldown, hysteresis_tracker=self.hysteresis)

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step. See `ScalingPolicy.update`."""
        return _select(grads_finite, self._after_finite, self._after_overflow, state, xp)

    def _after_finite(self, state: Any, steps: Array, xp: Namespace) -> ScaleState:
        grows = state.growth_tracker >= self.growth_interval - 1  # a full tracker has no room to count this step first
        loss_scale = _changed_where(grows, _grown, self, state.loss_scale, xp)
        growth_tracker = xp.where(grows, -1, state.growth_tracker) + 1
        tolerance = state.hysteresis_tracker
        if self.refill_on_finite:
            tolerance = _filled(tolerance, self.hysteresis)
        else:
            tolerance = xp.where(grows, self.hysteresis, tolerance)
        # By position: NamedTuples take twice as long to make by name.
        return ScaleState(loss_scale, growth_tracker, tolerance, steps, state.skipped_steps, state.overflow_streak * 0)

    def _after_overflow(self, state: Any, steps: Array, xp: Namespace) -> ScaleState:
        tolerance = _at_least(0, state.hysteresis_tracker - 1, xp)
        backs_off = tolerance <= 0
        loss_scale = _changed_where(backs_off, _backed_off, self, state.loss_scale, xp)
        growth_tracker = _filled(state.growth_tracker, -self.cooldown)
        if self.refill_on_backoff:
            tolerance = xp.where(backs_off, self.hysteresis, tolerance)
        skipped_steps, overflow_streak = _one_more(state.skipped_steps), _one_more(state.overflow_streak)
        return ScaleState(loss_scale, growth_tracker, tolerance, steps, skipped_steps, overflow_streak)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TolerantScaling:
    """Lower the loss scale only where the share of overflows reaches `tolerance`; raise it like `DynamicScaling`.

    ```
    after a finite step:  growth_tracker + 1; when it reaches growth_interval:
                          loss_scale × growth_factor (≤ max_scale), growth_tracker 0, steps_since_change 0
    after an overflow:    growth_tracker 0; when overflows_since_backoff / steps_since_change ≥ tolerance:
                          loss_scale × backoff_factor (≥ min_scale), both counters 0
    ```

    The share follows fairseq's `DynamicLossScaler` to the letter: it counts overflows since the last backoff over
    steps since the last change of either kind, this step included, so that after growth it may exceed 1. Beyond 2**24
    steps without a change both counters are halved, so that older steps count for half. It buys a larger scale for a
    few skipped steps. Raises `PolicyError` naming the value, the rule and the mend.
    """

    tolerance: float = setting(_settings.SHARE, 0.05)
    """The share of overflows at which the scale backs off; 0 is at once."""
    init_scale: float = setting(_settings.SCALE, 2.0**16)
    """The loss scale of the first step; `min_scale` ≤ it ≤ `max_scale`."""
    growth_factor: float = setting(_settings.GROWTH_FACTOR, 2.0)
    """Multiplies the scale when it grows; above 1."""
    backoff_factor: float = setting(_settings.BACKOFF_FACTOR, 0.5)
    """Multiplies the scale when it backs off; between 0 and 1."""
    growth_interval: int = setting(_settings.COUNT, 2000)
    """The scale grows on this many-th finite step in a row."""
    min_scale: float = setting(_settings.SCALE, 1.0)
    """Backing off stops here; it never raises a scale that is below already."""
    max_scale: float = setting(_settings.SCALE, 2.0**32)
    """Growth stops here."""

    def __post_init__(self) -> None:
        _settings.settle(self)
        _settings.require_ordered_scales(self)

    def init_state(self) -> TolerantScaleState:
        """Return the state before the first step, on the host."""
        return TolerantScaleState(*_init_state(self.init_scale), np.float32(0), np.float32(0))

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step. See `ScalingPolicy.update`."""
        return _select(grads_finite, self._after_finite, self._after_overflow, state, xp)

    def _after_finite(self, state: Any, steps: Array, xp: Namespace) -> Any:
        grows = state.growth_tracker >= self.growth_interval - 1
        since_change, overflows = _with_room(state, xp)
        return TolerantScaleState(
            loss_scale=_changed_where(grows, _grown, self, state.loss_scale, xp),
            growth_tracker=xp.where(grows, -1, state.growth_tracker) + 1,
            hysteresis_tracker=state.hysteresis_tracker,
            steps=steps,
            skipped_steps=state.skipped_steps,
            overflow_streak=state.overflow_streak * 0,
            steps_since_change=xp.where(grows, 0.0, since_change + 1.0),
            overflows_since_backoff=overflows,
        )

    def _after_overflow(self, state: Any, steps: Array, xp: Namespace) -> Any:
        since_change, overflows = (count + 1.0 for count in _with_room(state, xp))
        backs_off = overflows / since_change >= self.tolerance
        return TolerantScaleState(
            loss_scale=_changed_where(backs_off, _backed_off, self, state.loss_scale, xp),
            growth_tracker=_filled(state.growth_tracker, 0),
            hysteresis_tracker=state.hysteresis_tracker,
            steps=steps,
            skipped_steps=_one_more(state.skipped_steps),
            overflow_streak=_one_more(state.overflow_streak),
            steps_since_change=xp.where(backs_off, 0.0, since_change),
            overflows_since_backoff=xp.where(backs_off, 0.0, overflows),
        )


def _with_room(state: Any, xp: Namespace) -> tuple[Array, Array]:
    """Return the two counters of a share, both halved where float32 has no room for one step more.

    The share stays what it was, and older steps count for half from then on. An odd number of overflows is rounded up,
    so that overflows alone reach a share of 1.
    """
    is_full = state.steps_since_change >= _FULL_SHARE
    return (
        xp.where(is_full, state.steps_since_change * 0.5, state.steps_since_change),
        xp.where(is_full, (state.overflows_since_backoff + 1.0) // 2.0, state.overflows_since_backoff),
    )


def _init_state(init_scale: float, growth_tracker: int = 0, hysteresis_tracker: int = 0) -> ScaleState:
    return ScaleState(
        loss_scale=np.float32(init_scale),
        growth_tracker=np.int32(growth_tracker),
        hysteresis_tracker=np.int32(hysteresis_tracker),
        steps=np.int32(0),
        skipped_steps=np.int32(0),
        overflow_streak=np.int32(0),
    )


def _count_finite(state: Any, steps: Array, _: Namespace) -> Any:
    return state._replace(steps=steps, overflow_streak=state.overflow_streak * 0)


def _count_overflow(state: Any, steps: Array, _: Namespace) -> Any:
    return state._replace(
        steps=steps,
        skipped_steps=_one_more(state.skipped_steps),
        overflow_streak=_one_more(state.overflow_streak),
    )


def _changed_where(condition: Array, change: _Change, policy: Any, scale: Array, xp: Namespace) -> Array:
    """Return the scale after `change` where `condition` holds; on the host no other change is computed."""
    if xp is HOST:
        return change(policy, scale, xp) if condition else scale
    return xp.where(condition, change(policy, scale, xp), scale)


def _grown(policy: DynamicScaling | TolerantScaling, scale: Array, xp: Namespace) -> Array:
    # Growing from at most 2 × max_scale / growth_factor changes no result and keeps the product finite in float32.
    highest = max(2.0 * policy.max_scale / policy.growth_factor, _settings.SMALLEST_SCALE)
    grown = xp.where(scale < highest, scale, highest) * policy.growth_factor
    return _at_most(policy.max_scale, grown, xp)


def _backed_off(policy: DynamicScaling | TolerantScaling, scale: Array, xp: Namespace) -> Array:
    lowered = _at_least(policy.min_scale, scale * policy.backoff_factor, xp)
    return xp.where(lowered > scale, scale, lowered)  # an overflow never raises a scale, not even one below min_scale


def _at_least(bound: float, x: Array, xp: Namespace) -> Array:
    return xp.where(x >= bound, x, bound)


def _at_most(bound: float, x: Array, xp: Namespace) -> Array:
    return xp.where(x < bound, x, bound)


def _one_more(counter: Array) -> Array:
    """Return a counter after one more event; a full one stays full, since int32 goes on from below zero."""
    return counter - counter // _FULL + 1


def _filled(like: Array, value: int) -> Array:
    """Return a counter of this value in the dtype, shape and place of `like`."""
    return like * 0 + value if value else like * 0


def _select(
    grads_finite: Array, after_finite: Transition, after_overflow: Transition, state: Any, xp: Namespace | None
) -> Any:
    """Return the state after the transition that `grads_finite` chooses."""
    xp = namespace(state.loss_scale) if xp is None else xp
    if xp is np and state.loss_scale.shape == ():  # scalars in boxes: NumPy takes ten times as long for each of these
        scalars = state._make(value[()] for value in state)
        after = _select(grads_finite, after_finite, after_overflow, scalars, HOST)
        return state._make(map(np.asarray, after))
    steps = _one_more(state.steps)
    if xp is HOST:  # a choice made at once need not compute the step that did not happen
        return (after_finite if host_flag(grads_finite) else after_overflow)(state, steps, xp)
    choose = functools.partial(xp.where, grads_finite)
    return state._make(map(choose, after_finite(state, steps, xp), after_overflow(state, steps, xp)))

"""The scaling policies, and the only place where a loss scale changes.

Every `update` computes two transitions, for a finite step and for an overflow, and selects a result. The code uses only
`xp.where` and operators, so that it runs on host scalars and on the arrays of any framework, eagerly or traced. It does
not branch on arrays, and the fields of a state keep their dtypes and shapes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from lossscale_core._arrays import HOST, host_flag, namespace
from lossscale_core._base import BaseScaling
from lossscale_core._messages import require_flag
from lossscale_core._state import Array, HostScalar, Namespace, ScaleState, StateT, loss_scale_of, saturating_increment

Transition: TypeAlias = Callable[[Any, Array, Namespace], Any]
"""A function of the state before a step, the new count of steps and the array namespace; returns the state after."""

_UPDATE = "update(state, grads_finite)"


class _ConstantScaling(BaseScaling):
    """Skip the steps that overflow, and keep the loss scale at `init_scale`."""

    __slots__ = ()
    init_scale: float

    def bounds(self) -> tuple[float, float]:
        """Return the loss scale as both bounds."""
        return self.init_scale, self.init_scale

    def init_state(self) -> ScaleState[HostScalar]:
        """Return the state before the first step, on the host."""
        return _init_state(self.init_scale)

    def update(self, state: StateT, grads_finite: Array, *, xp: Namespace | None = None) -> StateT:
        """Return the state after a step, with new counters and the same scale. See `ScalingPolicy.update`."""
        after: StateT = _select(grads_finite, _count_finite, _count_overflow, state, xp)
        return after


@dataclasses.dataclass(frozen=True, slots=True)
class NoScaling(_ConstantScaling):
    """Keep the loss scale at 1, and still skip the steps that overflow.

    Use it for bfloat16 and float32: their gradients do not underflow but may be infinite.
    """

    kind = "none"
    scales_losses = False
    init_scale = 1.0
    """The loss scale of every step."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedScaling(_ConstantScaling):
    """Keep the loss scale at `init_scale`, and skip the steps that overflow.

    A scale that is not a power of two makes unscaling inexact by one ulp.

    Raises:
        PolicyError: `init_scale` is not a number from 2**-126 to 2**126.
    """

    kind = "fixed"
    init_scale: float
    """The loss scale of every step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling(BaseScaling):
    """Raise the loss scale while gradients stay finite, and lower it when they overflow.

    ```
    after a finite step:  growth_tracker + 1; when it reaches growth_interval:
                          loss_scale × growth_factor (≤ max_scale), growth_tracker = 0,
                          tolerance restored
    after an overflow:    growth_tracker = −cooldown; hysteresis_tracker − 1;
                          when it reaches 0: loss_scale × backoff_factor (≥ min_scale)
    ```

    The step after which the scale grows is still unscaled by the old scale. The rule follows Micikevicius et al.,
    "Mixed Precision Training" (2018), section 3.2. Megatron-LM, DeepSpeed, apex and tf.contrib added hysteresis and
    cooldown. The tolerance is the number of overflows left before the scale backs off, and these tools restore it to
    `hysteresis` at different times:

    | `refill_on_finite` | `refill_on_backoff` | as in |
    |---|---|---|
    | True  | False | apex (the default here) |
    | False | False | Megatron-LM, DeepSpeed |
    | True  | True  | Paddle |
    | False | True  | tf.contrib |

    Factors that are not powers of two make unscaling inexact by one ulp. To change a setting, make a new policy:
    `dataclasses.replace(policy, growth_interval=500)`.

    Raises:
        PolicyError: A setting breaks its rule. The message names the value, the rule and a valid value.
    """

    kind = "dynamic"
    adapts = True

    init_scale: float = 2.0**16
    """The loss scale of the first step, from `min_scale` to `max_scale`."""
    growth_factor: float = 2.0
    """Multiplies the scale when it grows; above 1."""
    backoff_factor: float = 0.5
    """Multiplies the scale when it backs off; between 0 and 1."""
    growth_interval: int = 2000
    """The number of finite steps in a row after which the scale grows."""
    hysteresis: int = 1
    """The number of overflows after which the scale backs off; with 1, every overflow backs off."""
    refill_on_finite: bool = True
    """Whether every finite step restores the tolerance; growth restores it in any case."""
    refill_on_backoff: bool = False
    """Whether backing off restores the tolerance; if it does not, every further overflow backs off."""
    cooldown: int = 0
    """The number of finite steps that do not count toward growth, at the start and after each overflow."""
    min_scale: float = 1.0
    """The smallest scale that backing off reaches; it does not raise a scale that is already smaller."""
    max_scale: float = 2.0**32
    """The largest scale that growth reaches."""
    max_overflow_streak: int | None = None
    """The number of overflows in a row at which an adapter raises `OverflowStreakError`, if the flag is on the host."""

    def init_state(self) -> ScaleState[HostScalar]:
        """Return the state before the first step, on the host."""
        return _init_state(self.init_scale, growth_tracker=-self.cooldown, hysteresis_tracker=self.hysteresis)

    def update(self, state: StateT, grads_finite: Array, *, xp: Namespace | None = None) -> StateT:
        """Return the state after a step. See `ScalingPolicy.update`."""
        after: StateT = _select(grads_finite, self._after_finite, self._after_overflow, state, xp)
        return after

    def _after_finite(self, state: Any, steps: Array, xp: Namespace) -> ScaleState:
        grows = state.growth_tracker >= self.growth_interval - 1  # adding 1 first would overflow a full int32
        grown = state.loss_scale * self.growth_factor  # may be infinite, which is not below max_scale
        grown = xp.where(grown < self.max_scale, grown, self.max_scale)
        loss_scale = xp.where(grows, grown, state.loss_scale)
        growth_tracker = xp.where(grows, -1, state.growth_tracker) + 1
        if self.refill_on_finite:
            tolerance = self.hysteresis
        else:
            tolerance = xp.where(grows, self.hysteresis, state.hysteresis_tracker)
        # Positional arguments: a NamedTuple takes twice as long to make by keywords.
        return ScaleState(loss_scale, growth_tracker, tolerance, steps, state.skipped_steps, 0)

    def _after_overflow(self, state: Any, steps: Array, xp: Namespace) -> ScaleState:
        backs_off = state.hysteresis_tracker <= 1
        lowered = state.loss_scale * self.backoff_factor
        lowered = xp.where(lowered >= self.min_scale, lowered, self.min_scale)
        # An overflow must not raise a scale below min_scale.
        lowered = xp.where(lowered > state.loss_scale, state.loss_scale, lowered)
        loss_scale = xp.where(backs_off, lowered, state.loss_scale)
        tolerance = xp.where(backs_off, self.hysteresis if self.refill_on_backoff else 0, state.hysteresis_tracker - 1)
        skipped_steps = saturating_increment(state.skipped_steps, xp=xp)
        streak = saturating_increment(state.overflow_streak, xp=xp)
        return ScaleState(loss_scale, -self.cooldown, tolerance, steps, skipped_steps, streak)


def _init_state(init_scale: float, growth_tracker: int = 0, hysteresis_tracker: int = 0) -> ScaleState:
    zero = np.int32(0)
    return ScaleState(np.float32(init_scale), np.int32(growth_tracker), np.int32(hysteresis_tracker), zero, zero, zero)


def _count_finite(state: Any, steps: Array, xp: Namespace) -> Any:
    return state._replace(steps=steps, overflow_streak=0)


def _count_overflow(state: Any, steps: Array, xp: Namespace) -> Any:
    return state._replace(
        steps=steps,
        skipped_steps=saturating_increment(state.skipped_steps, xp=xp),
        overflow_streak=saturating_increment(state.overflow_streak, xp=xp),
    )


_int32 = functools.lru_cache(np.int32)
"""Return a count as int32; cached, because making a NumPy scalar takes as long as three operations on it."""


@np.errstate(over="ignore")  # the frameworks do not warn of a product above float32's range either
def _transition_on_host(transition: Transition, state: Any, steps: Array, xp: Namespace) -> Any:
    return transition(state, steps, xp)


def _select(
    grads_finite: Array, after_finite: Transition, after_overflow: Transition, state: Any, xp: Namespace | None
) -> Any:
    """Return the state after the transition that `grads_finite` selects."""
    loss_scale = loss_scale_of(state, _UPDATE)
    xp = namespace(loss_scale) if xp is None else xp
    if xp is np and loss_scale.shape == ():  # NumPy computes on scalars ten times as fast
        scalars = state._make(value[()] for value in state)
        after = _select(grads_finite, after_finite, after_overflow, scalars, HOST)
        return state._make(map(np.asarray, after))
    steps = saturating_increment(state.steps, xp=xp)
    if xp is HOST:  # compute only the transition that the flag selects
        transition = after_finite if host_flag(grads_finite, _UPDATE) else after_overflow
        after = _transition_on_host(transition, state, steps, xp)
        return state._make([_int32(value) if type(value) is int else value for value in after])
    require_flag(grads_finite, _UPDATE)
    pairs = zip(after_finite(state, steps, xp), after_overflow(state, steps, xp), strict=True)
    return state._make(x if x is y else xp.where(grads_finite, x, y) for x, y in pairs)

"""The scaling policies, and the only place where a loss scale changes.

Every `update` is two named transitions, one after a finite step and one after an overflow, and one select between
them. It needs `xp.where` and operators, nothing else, so the same lines run on host scalars and on the arrays of any
framework, eagerly or traced: no `if` on an array, no dtype or shape that changes from one step to the next.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np

from lossscale_core import _settings
from lossscale_core._arrays import HOST, Namespace, host_flag, namespace
from lossscale_core._state import Array, ScaleState, TolerantScaleState
from lossscale_core.errors import PolicyError

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


KINDS: dict[str, type["BaseScaling"]] = {}
"""The policies that have a kind, by that kind: what a config, the schema and the strategies know."""


class BaseScaling:
    """Base of the policies, with a default for every member beyond those of `ScalingPolicy`.

    A policy of your own needs `init_state` and `update` alone, and no base. Derived from this one as a frozen
    dataclass, with a `kind` of its own, it is also read from and written to dicts and files, saved in checkpoints, part
    of the JSON Schema and drawn by `lossscale_core.testing.policies`. Its fields are its settings, each a `float`,
    `int` or `bool`; a setting that another policy has obeys the same rule here.
    """

    __slots__ = ()

    kind: ClassVar[str | None] = None
    """The name of the policy in a config; without one it has no config."""
    state_type: ClassVar[type[Any]] = ScaleState
    """The type of its state: a NamedTuple that begins with the fields of `ScaleState`."""
    adapts: ClassVar[bool] = False
    """Whether overflows and finite steps change the loss scale."""
    scales_losses: ClassVar[bool] = True
    """Whether the loss scale may be another number than 1."""
    min_scale: float = _settings.SMALLEST_SCALE
    max_scale: float = _settings.LARGEST_SCALE
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = _settings.LARGEST_COUNT
    hysteresis: int = 1
    cooldown: int = 0
    tolerance: float = 0.0
    max_overflow_streak: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = vars(cls).get("kind")
        if kind is None:
            return
        if kind in KINDS and KINDS[kind].__qualname__ != cls.__qualname__:  # slots make a dataclass anew
            raise PolicyError(f"kind={kind!r} is that of {KINDS[kind].__name__}; give {cls.__name__} another kind")
        KINDS[kind] = cls

    def __post_init__(self) -> None:
        settings = {"min_scale": self.min_scale, "max_scale": self.max_scale}
        for field, rule in _settings.rules_of(self):
            settings[field.name] = rule.settle(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, settings[field.name])
        _settings.require_ordered_scales(settings)

    @staticmethod
    def of(policy: ScalingPolicy) -> "BaseScaling":
        """Return `policy`, or a view of it that has the defaults of the members that it lacks."""
        return policy if isinstance(policy, BaseScaling) else _WithDefaults(policy)

    def init_state(self) -> Any:
        """Return the state before the first step. See `ScalingPolicy.init_state`."""
        raise NotImplementedError(f"{type(self).__name__} has no init_state; define it to return a {self.state_type}")

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step. See `ScalingPolicy.update`."""
        raise NotImplementedError(f"{type(self).__name__} has no update; define it to return the state after a step")

    def settings(self) -> dict[str, Any]:
        """Return its settings by name."""
        return {field.name: getattr(self, field.name) for field, _ in _settings.rules_of(self)}

    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest loss scale that a state under this policy may have."""
        return self.min_scale, self.max_scale

    def is_constant(self) -> bool:
        """Return whether the loss scale stays what it is at the start, so that only counters move."""
        low, high = self.bounds()
        return low == high and not self.adapts

    def overflows_down_to(self, loss_scale: float) -> float:
        """Return how many overflows bring the loss scale from the first one down to `loss_scale`."""
        if self.backoff_factor >= 1.0:
            return 0.0
        backoffs = math.log(loss_scale / float(self.init_state().loss_scale), self.backoff_factor)
        return round(backoffs) * self.hysteresis

    def overflow_share(self) -> float:
        """Return the share of steps that overflow by design, because growth tries a larger scale now and then."""
        if self.growth_factor <= 1.0 or self.backoff_factor >= 1.0:
            return self.tolerance
        growths_per_backoff = -math.log(self.backoff_factor) / math.log(self.growth_factor)
        by_growth = self.hysteresis / (self.hysteresis + growths_per_backoff * self.growth_interval)
        return max(by_growth, self.tolerance)


class _WithDefaults(BaseScaling):
    """A view of a policy that does not derive from `BaseScaling`: its own members, and defaults for the others."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        for name in (name for name in vars(BaseScaling) if not name.startswith("_") and name != "state_type"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))
        self._settings = {name: getattr(policy, name) for name in _settings.RULES if hasattr(policy, name)}

    def settings(self) -> dict[str, Any]:
        """Return those of its attributes that are settings of the library's own policies."""
        return self._settings

    @property
    def state_type(self) -> type[Any]:  # type: ignore[override]  # asked seldom, and a state may be costly to make
        """The type of its state."""
        return type(self._policy.init_state())


def is_policy(source: Any) -> TypeGuard[ScalingPolicy]:
    """Return whether `source` is a policy, and not a class of policies."""
    return isinstance(source, BaseScaling) or (isinstance(source, ScalingPolicy) and not isinstance(source, type))


@dataclasses.dataclass(frozen=True, slots=True)
class NoScaling(BaseScaling):
    """Keep the loss scale at 1, and still skip the steps that overflow.

    The policy for bfloat16 and float32, where gradients do not underflow but may well be infinite.
    """

    kind = "none"
    scales_losses = False

    def bounds(self) -> tuple[float, float]:
        """Return 1 twice: the scale that never changes."""
        return 1.0, 1.0

    def init_state(self) -> ScaleState:
        """Return the state before the first step, on the host."""
        return _init_state(1.0)

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step: only the counters move. See `ScalingPolicy.update`."""
        return _select(grads_finite, _count_finite, _count_overflow, state, xp)


@dataclasses.dataclass(frozen=True, slots=True)
class FixedScaling(BaseScaling):
    """Keep the loss scale at `init_scale`, and skip the steps that overflow.

    Raises `PolicyError` where `init_scale` is not a number from 2**-126 to 2**126. Factors other than powers of two
    make unscaling inexact by an ulp.
    """

    kind = "fixed"
    init_scale: float

    def bounds(self) -> tuple[float, float]:
        """Return the scale that never changes, twice."""
        return self.init_scale, self.init_scale

    def init_state(self) -> ScaleState:
        """Return the state before the first step, on the host."""
        return _init_state(self.init_scale)

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step: only the counters move. See `ScalingPolicy.update`."""
        return _select(grads_finite, _count_finite, _count_overflow, state, xp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling(BaseScaling):
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

    kind = "dynamic"
    adapts = True

    init_scale: float = 2.0**16
    """The loss scale of the first step; `min_scale` ≤ it ≤ `max_scale`."""
    growth_factor: float = 2.0
    """Multiplies the scale when it grows; above 1."""
    backoff_factor: float = 0.5
    """Multiplies the scale when it backs off; between 0 and 1."""
    growth_interval: int = 2000
    """The scale grows on this many-th finite step in a row."""
    hysteresis: int = 1
    """The scale backs off on this many-th overflow; 1 is at once."""
    refill_on_finite: bool = True
    """Whether any finite step restores the tolerance (growth always does)."""
    refill_on_backoff: bool = False
    """Whether backing off restores the tolerance; without it every further overflow backs off too."""
    cooldown: int = 0
    """Finite steps that do not count toward growth, at the start and after an overflow."""
    min_scale: float = 1.0
    """Backing off stops here; it never raises a scale that is below already."""
    max_scale: float = 2.0**32
    """Growth stops here."""
    max_overflow_streak: int | None = None
    """Overflows in a row after which a facade that knows the flag on the host raises `OverflowStreakError`."""

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
class TolerantScaling(BaseScaling):
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

    kind = "tolerant"
    state_type = TolerantScaleState
    adapts = True

    tolerance: float = 0.05
    """The share of overflows at which the scale backs off; 0 is at once."""
    init_scale: float = 2.0**16
    """The loss scale of the first step; `min_scale` ≤ it ≤ `max_scale`."""
    growth_factor: float = 2.0
    """Multiplies the scale when it grows; above 1."""
    backoff_factor: float = 0.5
    """Multiplies the scale when it backs off; between 0 and 1."""
    growth_interval: int = 2000
    """The scale grows on this many-th finite step in a row."""
    min_scale: float = 1.0
    """Backing off stops here; it never raises a scale that is below already."""
    max_scale: float = 2.0**32
    """Growth stops here."""

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


LIBRARY_KINDS = tuple(KINDS)
"""The kinds of the library's own policies."""


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

"""`loss_scaled`: any optax optimizer, its step applied or skipped as a whole."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from lossscale_core import GuardState, PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _axes
from lossscale_jax._accumulation import accumulate, empty_window, mean, norm_of_mean
from lossscale_jax._arguments import explain_structures, require_optimizer
from lossscale_jax._debug import unchecked
from lossscale_jax._decide import Skip, decide, select
from lossscale_jax._late import update_or_skip
from lossscale_jax._leaves import lift_leaves
from lossscale_jax._placement import place_beside
from lossscale_jax._stages import (
    Attempt,
    Drop,
    Settings,
    Stage,
    Transform,
    cast_back,
    check,
    check_by_norm,
    clipped,
    judge,
    unscaled,
)
from lossscale_jax._state import GuardedLossScaledState, LossScaledState, find_scale_states, is_own_state
from lossscale_jax._types import PyTree, Tree
from lossscale_jax._updates import no_updates, with_extra_args, with_updates
from lossscale_jax._verbs import init_state


class Optimizer(Protocol):
    """An optimizer of optax's shape."""

    @property
    def init(self) -> Callable[..., Any]:
        """Takes the parameters; returns the state before the first step."""

    @property
    def update(self) -> Callable[..., Any]:
        """Takes gradients, state and parameters; returns updates and the state after the step."""


class _Init(Protocol):
    def __call__(self, params: PyTree) -> LossScaledState: ...


class _Update(Protocol):
    def __call__(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class _ApplyGradients(Protocol):
    def __call__(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of optax that takes the gradients of a scaled loss; `loss_scaled` makes it."""

    init: _Init
    """`init(params)` returns the optimizer state before the first step."""
    update: _Update
    """`update(grads, state, params, **extra_args)` returns the updates, zero where the step is skipped, and the state
    after it."""

    # optax unpacks a transformation into two, and flax nnx rebuilds it from its two elements, so the third function is
    # found through them.
    @property
    def apply_gradients(self) -> _ApplyGradients:
        """`apply_gradients(grads, state, params, **extra_args)` returns the parameters and the state after a step.

        Both are as they were where the step is skipped. It updates and applies in one go, which saves memory and time.
        """
        wrapper = getattr(self.update, "__self__", None)
        if not isinstance(wrapper, _Wrapper):
            raise AttributeError("update was replaced, so there is no apply_gradients; call loss_scaled last")
        return wrapper.apply_gradients


def loss_scaled(
    inner: Optimizer,
    policy: PolicyLike,
    *,
    axis_name: Hashable = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    drop: Drop = "window",
    keep_dtypes: bool = False,
    guard: SpikeGuard | None = None,
    skip: Skip = "cond",
) -> LossScaledTransformation:
    """Wrap `inner` so that it takes the gradients of a scaled loss, and skips those that overflowed.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: scale(loss(params, batch), get_scale_state(opt_state)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    ```

    `inner` sees unscaled gradients, in float32 or wider. A skipped step gives zero updates and leaves the inner state
    bit for bit. An applied step may differ in its last bits from the same step without scaling, since XLA decides for
    each program where to fuse a product and a sum. Where it fuses none, the bits are the same if the loss scale is a
    power of two and the model computes in float32. Pure; does not synchronise with the host, though XLA may on GPUs: a
    step holds two `lax.cond`, unless `skip="select"`.

    Args:
        inner: Any optimizer of optax's shape, for a pytree of arrays (partition an Equinox model first).
        policy: Anything that `lossscale_core.as_policy` accepts.
        axis_name: The axis of `shard_map` or `pmap`, or a tuple of them, over which to combine the decision, where each
            device still has gradients of its own. Where you clip or accumulate, reduce the gradients first: `axis_name`
            goes with neither.
        max_norm: The global norm to which unscaled gradients are clipped, by the read that proves them finite.
        accumulation_steps: The number of micro-batches whose mean makes one step; other calls give zero updates.
        drop: What an overflow drops. `"window"` skips the whole window, which counts as one step of the policy.
            `"micro_batch"` leaves out those that overflowed and divides by the number of the others; then every
            micro-batch counts, and the scale may change within a window.
        keep_dtypes: Whether `inner` is initialised with half-precision parameters as they are and gets each gradient in
            the dtype in which it came, unscaled in float32 first. That halves the memory of the state, and loses what
            is too small for float16. By default, updates and inner state are float32.
        guard: Skips a step whose norm is far above the norms before it, and then leaves the scale state as it was. The
            norm is that of the unscaled gradients before clipping: of a window's mean where you accumulate, and with
            `axis_name` of the gradients of all devices together. The guard's own state is in `opt_state.guard_state`.
            Its `max_streak` is not checked, since a step does not read its state; call
            `lossscale_core.check_spike_streak` where you read it.
        skip: How a compiled step is skipped, with the same results up to rounding. `"cond"` takes the step in a
            conditional, so that a skipped step costs little and donated buffers are not copied. `"select"` always takes
            it, of zeros where it is skipped, and then chooses between the old and the new values: no conditional whose
            predicate XLA could read on the host, as it may on GPUs. On a CPU it takes up to 1.8 times as long and needs
            up to three times the memory. The state is the same, so that a run may change between them.

    Returns:
        An `optax.GradientTransformationExtraArgs` that can do one thing more, which saves memory and time:
        `params, opt_state = optimizer.apply_gradients(grads, opt_state, params)` updates and applies in one go. With
        parameters and state donated to `jit`, a step costs little more than reading the gradients once.

    Raises:
        TypeError: `inner` is not an optimizer.
        PolicyError: The settings make no sense, or `policy` is not a policy.
    """
    require_optimizer(inner)
    settings = Settings(axis_name, max_norm, accumulation_steps, drop, keep_dtypes, guard, skip)
    settings.validate()
    wrapper = _Wrapper(inner, as_policy(policy), settings, _stages(settings), _transforms(settings))
    return LossScaledTransformation(wrapper.init, wrapper.update)


def _stages(settings: Settings) -> tuple[Stage, ...]:
    guarded = settings.guard is not None
    if settings.accumulates:  # clipping and the guard look at the window's mean
        return (check, accumulate, *((norm_of_mean, judge) if guarded else ()))
    read = check_by_norm if guarded or settings.max_norm is not None else check
    return (read, *((judge,) if guarded else ()))


def _transforms(settings: Settings) -> tuple[Transform, ...]:
    return (
        mean if settings.accumulates else unscaled,
        *((clipped,) if settings.max_norm is not None else ()),
        *((cast_back,) if settings.keep_dtypes else ()),
    )


class _Wrapper(NamedTuple):
    """The functions of an optimizer that `loss_scaled` made."""

    inner: Optimizer
    policy: ScalingPolicy
    settings: Settings
    stages: tuple[Stage, ...]
    """What is done with the gradients until it is known whether the step is applied."""
    transforms: tuple[Transform, ...]
    """What is done with them where it is applied, before the wrapped optimizer is given them."""

    def init(self, params: PyTree) -> LossScaledState:
        inner_state = self.inner.init(self._shown(params))
        if find_scale_states(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = empty_window(params) if self.settings.accumulates else None
        guard = self.settings.guard
        guard_state = None if guard is None else jax.tree.map(jnp.asarray, guard.init_state())
        return place_beside(_state(init_state(self.policy), inner_state, window, guard_state), params)

    @explain_structures
    def update(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        attempt = self._attempt(updates, state)

        def step(source: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            return self._inner_update(source, attempt, inner_state, params, extra_args)

        def skip(applied: tuple[Tree, PyTree], _: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            # XLA lets a conditional write where its operand lies only if one branch returns that operand as it is. So a
            # skip returns gradients, and the updates take their memory; what drops them is fused into what adds them.
            # What an optimizer reduces itself has other axes or another shape; zeros will do, since they are dropped.
            return _axes.zeros_where_unlike(updates, applied[0]), inner_state

        result, inner_state = update_or_skip(
            attempt.applies, step, skip, attempt.source, state.inner_state, by=self.settings.skip
        )
        return select(attempt.applies, result, no_updates(result)), self._after(attempt, inner_state)

    @explain_structures
    def apply_gradients(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        attempt = self._attempt(grads, state)

        def step(source: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            updates, inner_state = self._inner_update(source, attempt, inner_state, params, extra_args)
            return with_updates(params, updates), inner_state

        def skip(_: Any, __: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            return params, inner_state

        operands = attempt.source, state.inner_state
        result, inner_state = decide(attempt.applies, step, skip, *operands, by=self.settings.skip)
        return result, self._after(attempt, inner_state)

    @unchecked
    def _attempt(self, grads: PyTree, state: LossScaledState) -> Attempt:
        """Return what the stages find out about the gradients."""
        self._require_own(state)
        attempt = Attempt(grads, state.scale_state, grads, state.window, state.guard_state)
        for stage in self.stages:
            attempt = stage(attempt, self.settings)
        return attempt

    def _inner_update(
        self, source: PyTree, attempt: Attempt, inner_state: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Return the wrapped optimizer's updates and its state after the step."""
        for transform in self.transforms:
            source = transform(source, attempt, self.settings)
        return with_extra_args(self.inner.update)(source, inner_state, self._shown(params), **extra_args)

    def _after(self, attempt: Attempt, inner_state: PyTree) -> LossScaledState:
        """Return the state after the call."""
        scale_state = self.policy.update(attempt.scale_state, attempt.grads_finite, xp=jnp)
        if attempt.counts is not None:
            scale_state = select(attempt.counts, scale_state, attempt.scale_state)
        window = None if attempt.window is None else attempt.window._replace(stepped=attempt.applies)
        return _state(scale_state, inner_state, window, attempt.guard_state)

    def _shown(self, params: PyTree) -> PyTree:
        """Return the parameters as the inner optimizer sees them: in the dtypes of the gradients that it is given."""
        return params if self.settings.keep_dtypes else lift_leaves(params)

    def _require_own(self, state: Any) -> None:
        """Raise where `state` was not made by `init`, or with other settings."""
        size, guard = self.settings.accumulation_steps, self.settings.guard
        if not is_own_state(state):
            raise ScaleStateError(
                f"{type(state).__name__} is not a state of loss_scaled; pass what its init returned, after the "
                "gradients. To go on from a checkpoint of the wrapped optimizer alone, pass "
                "optimizer.init(params)._replace(inner_state=...)"
            )
        if (state.window is not None) != self.settings.accumulates:
            raise PolicyError(
                f"accumulation_steps={size} does not fit a state made "
                f"{'without' if state.window is None else 'with'} accumulation; make the optimizer as it was saved"
            )
        if (state.guard_state is None) != (guard is None):
            raise PolicyError(
                f"guard={guard!r} does not fit a state made {'without' if guard else 'with'} a guard; make "
                "the optimizer as it was saved, or pass "
                "optimizer.init(params)._replace(scale_state=..., inner_state=..., window=...)"
            )


def _state(scale_state: Any, inner_state: PyTree, window: Any, guard_state: GuardState | None) -> LossScaledState:
    if guard_state is None:
        return LossScaledState(scale_state, inner_state, window)
    guarded: Any = GuardedLossScaledState(scale_state, inner_state, window, guard_state)
    return cast(LossScaledState, guarded)  # whose members it has

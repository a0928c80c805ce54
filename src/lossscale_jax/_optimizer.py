"""`loss_scaled`: a wrapper for any optax optimizer that applies or skips each step as a whole."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from lossscale_core import PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.adapters import check_setting, explain_arguments
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _axes
from lossscale_jax._accumulation import accumulate, empty_window, mean, norm_of_mean
from lossscale_jax._arguments import explain_structures, require_optimizer
from lossscale_jax._decide import Skip, decide, select
from lossscale_jax._leaves import lift_leaves
from lossscale_jax._stages import (
    Attempt,
    Drop,
    Settings,
    Stage,
    Transform,
    cast_back,
    check,
    check_by_norm,
    check_spike,
    clipped,
    unscaled,
)
from lossscale_jax._state import (
    GuardedLossScaledState,
    LossScaledState,
    find_scale_states,
    is_own_state,
    place_with,
)
from lossscale_jax._types import PyTree, Tree
from lossscale_jax._updates import no_updates, with_extra_args, with_updates
from lossscale_jax._verbs import init_state


class Optimizer(Protocol):
    """An optimizer with the interface of optax."""

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
    """An optax transformation that takes the gradients of a scaled loss; `loss_scaled` returns it."""

    init: _Init
    """`init(params)` returns the optimizer state before the first step."""
    update: _Update
    """`update(grads, state, params, **extra_args)` returns the updates and the state after the step.

    The updates of a skipped step are zero.
    """

    # optax unpacks a transformation into two functions, and flax nnx rebuilds it from them, so that the third function
    # is found through these two.
    @property
    def apply_gradients(self) -> _ApplyGradients:
        """`apply_gradients(grads, state, params, **extra_args)` returns the parameters and the state after a step.

        A skipped step leaves both unchanged. Updating and applying in one call saves memory and time.
        """
        wrapper = getattr(self.update, "__self__", None)
        if not isinstance(wrapper, _Wrapper):
            raise AttributeError("update was replaced, so that apply_gradients is not available; call loss_scaled last")
        return wrapper.apply_gradients


@explain_arguments
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
    """Wrap `inner` so that it takes the gradients of a scaled loss, and skips steps that overflow.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        grads = jax.grad(lambda params: scale(loss(params, batch), get_scale_state(opt_state)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    ```

    `inner` receives unscaled gradients, in float32 or wider. A skipped step returns zero updates and leaves the inner
    state bit for bit. An applied step may differ in its last bits from the same step without scaling, since XLA decides
    for each program where to fuse a product and a sum. Without such fusion the bits are the same if the loss scale is a
    power of two and the model computes in float32. The functions are pure and do not synchronise with the host. XLA may
    synchronise on GPUs for the two `lax.cond` of a step; `skip="select"` avoids them.

    Args:
        inner: Any optimizer with optax's interface, for a pytree of arrays (partition an Equinox model first).
        policy: Anything that `lossscale_core.as_policy` accepts.
        axis_name: The axis of `shard_map` or `pmap`, or a tuple of them, over which to combine the decision, if the
            gradients still differ between the devices. It cannot be combined with clipping or accumulation; there,
            reduce the gradients first.
        max_norm: The global norm to which unscaled gradients are clipped, in the same read as the finiteness check.
        accumulation_steps: The number of micro-batches in one step, which applies their mean; the calls before the
            last one return zero updates.
        drop: What an overflow drops. `"window"` skips the whole window, which counts as one step of the policy.
            `"micro_batch"` leaves out the micro-batches that overflowed and divides by the number of the others. Then
            every micro-batch counts as a step of the policy, and the scale may change within a window.
        keep_dtypes: Whether `inner` is initialised with half-precision parameters as they are and gets each gradient in
            the dtype in which it came, unscaled in float32 first. This halves the memory of the state, but values that
            are too small for float16 become zero. By default, updates and inner state are float32.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the
            scale state unchanged. The norm is that of the unscaled gradients before clipping: of a window's mean with
            accumulation, and of the gradients of all devices together with `axis_name`. The guard's state is in
            `opt_state.guard_state`. A step does not read it, so that `max_streak` is not checked; call
            `lossscale_core.adapters.check_spike_streak` where you read the state.
        skip: The way to skip a compiled step; the results are the same up to rounding. `"cond"` takes the step in a
            conditional, so that a skipped step costs little and donated buffers are not copied. `"select"` always takes
            the step, on zeros if it is skipped, and then chooses between the old and the new values. It has no
            conditional, so that XLA cannot read its predicate on the host, as it may on GPUs. On a CPU it takes up to
            1.8 times as long and needs up to three times the memory. The state is the same, so that a run may change
            between the two.

    Returns:
        An `optax.GradientTransformationExtraArgs` with one more function:
        `params, opt_state = optimizer.apply_gradients(grads, opt_state, params)` updates and applies in one call, which
        saves memory and time. With parameters and state donated to `jit`, a step costs little more than reading the
        gradients once.

    Raises:
        TypeError: `inner` is not an optimizer.
        PolicyError: The settings make no sense, or `policy` is not a policy.
    """
    require_optimizer(inner)
    max_norm = None if max_norm is None else check_setting("max_norm", max_norm)
    settings = Settings(axis_name, max_norm, accumulation_steps, drop, keep_dtypes, guard, skip)
    settings.validate()
    wrapper = _Wrapper(inner, as_policy(policy), settings, _stages(settings), _transforms(settings))
    return LossScaledTransformation(wrapper.init, wrapper.update)


def _stages(settings: Settings) -> tuple[Stage, ...]:
    guarded = settings.guard is not None
    if settings.accumulates:  # clipping and the guard use the norm of the window's mean
        return (check, accumulate, *((norm_of_mean, check_spike) if guarded else ()))
    read = check_by_norm if guarded or settings.max_norm is not None else check
    return (read, *((check_spike,) if guarded else ()))


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
    """The stages that decide whether the step is applied."""
    transforms: tuple[Transform, ...]
    """The transforms of the gradients of an applied step, before the wrapped optimizer receives them."""

    def init(self, params: PyTree) -> LossScaledState:
        inner_state = self.inner.init(self._cast_for_inner(params))
        if find_scale_states(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = empty_window(params) if self.settings.accumulates else None
        guard = self.settings.guard
        guard_state = None if guard is None else jax.tree.map(jnp.asarray, guard.init_state())
        return place_with(_state(init_state(self.policy), inner_state, window, guard_state), params)

    @explain_structures
    def update(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        attempt = self._attempt(updates, state)

        def step(source: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            return self._inner_update(source, attempt, inner_state, params, extra_args)

        def skip(applied: tuple[Tree, PyTree], _: PyTree, inner_state: PyTree) -> tuple[Tree, PyTree]:
            # XLA lets a conditional reuse the memory of an operand only if one branch returns it unchanged. So a
            # skip returns gradients, the updates take their memory, and the select below drops them; XLA fuses it
            # into the addition of the updates. If an optimizer reduces its updates, their axes or their shape differ,
            # and the skip returns zeros.
            return _axes.zeros_where_unlike(updates, applied[0]), inner_state

        result, inner_state = decide(
            attempt.applies, step, skip, attempt.source, state.inner_state, by=self.settings.skip
        )
        return select(attempt.applies, result, no_updates(result)), self._next_state(attempt, inner_state)

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

        result, inner_state = decide(
            attempt.applies, step, skip, attempt.source, state.inner_state, by=self.settings.skip
        )
        return result, self._next_state(attempt, inner_state)

    def _attempt(self, grads: PyTree, state: LossScaledState) -> Attempt:
        """Run the stages on the gradients."""
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
        return with_extra_args(self.inner.update)(source, inner_state, self._cast_for_inner(params), **extra_args)

    def _next_state(self, attempt: Attempt, inner_state: PyTree) -> LossScaledState:
        """Return the state after the call."""
        scale_state = self.policy.update(attempt.scale_state, attempt.grads_finite, xp=jnp)
        if attempt.counts is not None:
            scale_state = select(attempt.counts, scale_state, attempt.scale_state)
        window = None if attempt.window is None else attempt.window._replace(stepped=attempt.applies)
        return _state(scale_state, inner_state, window, attempt.guard_state)

    def _cast_for_inner(self, params: PyTree) -> PyTree:
        """Return the parameters in the dtypes of the gradients that the inner optimizer receives."""
        return params if self.settings.keep_dtypes else lift_leaves(params)

    def _require_own(self, state: Any) -> None:
        """Raise an error if `state` was not made by `init`, or was made with other settings."""
        size, guard = self.settings.accumulation_steps, self.settings.guard
        if not is_own_state(state):
            raise ScaleStateError(
                f"{type(state).__name__} is not a state of loss_scaled; pass what its init returned, after the "
                "gradients. To continue from a checkpoint of the wrapped optimizer alone, pass "
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


def _state(scale_state: Any, inner_state: PyTree, window: Any, guard_state: Any) -> LossScaledState:
    """Return the type of state that has these fields, since checkpoints of the other lack them."""
    if guard_state is None:
        return LossScaledState(scale_state, inner_state, window)
    return cast(LossScaledState, GuardedLossScaledState(scale_state, inner_state, window, guard_state))

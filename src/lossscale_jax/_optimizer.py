"""`loss_scaled`: a wrapper for any optax optimizer that applies or skips each step as a whole."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lossscale_core import PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.adapters import check_guard, check_setting, clip_divisor, decide, describe
from lossscale_core.errors import PolicyError
from lossscale_jax import _gradients, _states
from lossscale_jax._gradients import PyTree, SkipBy, Tree, as_arrays, at_least_float32, divide, map_floats, multiply
from lossscale_jax._states import LastStep, LossScaledState, Window, trained_params
from lossscale_jax._verbs import init_state, select


class _Settings(NamedTuple):
    """The checked arguments of `loss_scaled`."""

    inner: optax.GradientTransformationExtraArgs
    policy: ScalingPolicy
    axis_name: Hashable
    max_norm: float | None
    accumulation_steps: int
    guard: SpikeGuard | None
    skip_by: SkipBy | None

    @property
    def needs_norm(self) -> bool:
        """Whether a step needs the norm of its gradients."""
        return self.guard is not None or self.max_norm is not None

    def branches_on(self, value: Any) -> bool:
        """Return whether to skip by a conditional; never in an eager step, where the `value` is not traced."""
        skip_by = self.skip_by or ("select" if jax.default_backend() == "gpu" else "cond")
        return skip_by == "cond" and isinstance(value, jax.core.Tracer)


class _Update:
    """The function `update` of an optimizer, with the settings of `loss_scaled` and the function `init`.

    The settings are here because optax and flax nnx rebuild a transformation from its two functions.
    """

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings

    def __deepcopy__(self, memo: Any) -> "_Update":
        return self  # like a function, so that a copied training state has an equal optimizer

    def init(self, params: PyTree) -> LossScaledState:
        settings = self.settings
        inner_state = settings.inner.init(at_least_float32(params))
        if _states.states_of(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        window = None
        if settings.accumulation_steps > 1:
            zeros = optax.tree.zeros_like(at_least_float32(trained_params(params)))
            window = Window(zeros, jnp.int32(0), jnp.asarray(False))
        guard_state = None if settings.guard is None else jax.tree.map(jnp.asarray, settings.guard.init_state())
        # Each flag has its own array, because a buffer can be donated only once.
        applied, overflowed, spiked = (jnp.asarray(False) for _ in range(3))
        norm = jnp.float32(0.0) if settings.needs_norm else None
        last_step = LastStep(applied, overflowed, spiked, norm)
        state = LossScaledState(init_state(settings.policy), inner_state, window, guard_state, last_step)
        return _states.place_with(state, params)

    def __call__(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        return take_step(self.settings, updates, state, params, extra_args)


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """The optimizer that `loss_scaled` returns: an optax transformation for the gradients of a scaled loss."""

    init: Callable[[PyTree], LossScaledState]
    """`init(params)` returns the optimizer state before the first step."""
    update: _Update
    """`update(grads, state, params, **extra_args)` returns the updates and the state after the step.

    The updates of a skipped step are zero. Leaves of `params` that are not arrays pass through.
    """

    @property
    def policy(self) -> ScalingPolicy:
        """The policy, as in `diagnose(optimizer.policy, get_scale_state(opt_state))`."""
        return self.update.settings.policy

    def __repr__(self) -> str:
        settings = self.update.settings._asdict().items()
        arguments = (f"{name}={value!r}" for name, value in settings if name != "inner" and value is not None)
        return f"loss_scaled(..., {', '.join(arguments)})"

    def apply_gradients(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        """Return the parameters and the state after a step; a skipped step leaves parameters and inner state unchanged.

        This call takes less memory and time than `update` and `optax.apply_updates`.
        """
        if params is None:
            raise ValueError("params=None cannot be updated; call apply_gradients(grads, state, params)")
        return take_step(self.update.settings, grads, state, as_arrays(params), extra_args, applies_updates=True)


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: PolicyLike,
    *,
    axis_name: Hashable = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    guard: SpikeGuard | None = None,
    skip_by: SkipBy | None = None,
) -> LossScaledTransformation:
    """Wrap an optimizer so that it accepts the gradients of a scaled loss, and skips steps that overflow.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        state = get_scale_state(opt_state)
        grads = jax.grad(lambda params: scale(loss(params, batch), state))(params)
        return optimizer.apply_gradients(grads, opt_state, params)
    ```

    `inner` receives unscaled gradients, in float32 or wider. A skipped step returns zero updates and leaves the inner
    state unchanged, bit for bit. An applied step may differ in its last bits from the same step without scaling,
    because XLA decides for each program where to fuse a product and a sum. Without such fusion the bits are the same if
    the loss scale is a power of two and the model computes in float32. The functions are pure and do not synchronise
    with the host.

    Args:
        inner: Any optimizer with optax's interface. The parameters are a pytree of arrays; partition an Equinox model
            first.
        policy: Anything that `lossscale_core.as_policy` accepts.
        axis_name: The axis of `shard_map` or `pmap`, or a tuple of axes, over which the devices decide together. Pass
            it if the gradients still differ between the devices. It excludes `max_norm` and `accumulation_steps`; for
            these, reduce the gradients first.
        max_norm: The global norm to which unscaled gradients are clipped. The check and the norm share one read of the
            gradients.
        accumulation_steps: The number of micro-batches in one step (a window), which applies their mean; the calls
            before the last micro-batch return zero updates. An overflow skips the whole window. A window counts as one
            step of the policy.
        guard: A `SpikeGuard`, which skips a step if its gradient norm is far above the norms before it, and then leaves
            the scale state unchanged. It compares the norm of the unscaled gradients before clipping. With
            accumulation, this is the norm of the window's mean; with `axis_name`, the norm over all devices. The
            guard's state is in `opt_state.guard_state`. A step does not synchronise to check `max_streak`; call
            `lossscale_core.check_limits` where you read the state.
        skip_by: The way to skip a compiled step; the results are the same up to rounding. `"cond"` puts the step into a
            conditional, so that a skipped step costs little and donated buffers are not copied; on a GPU, XLA may read
            the predicate on the host. `"select"` always computes the step, on zeros if it is skipped, and then chooses
            between the old and the new values. The default is `"select"` if JAX's default backend is a GPU, because it
            then takes less time and half the memory, and `"cond"` otherwise: on a CPU `"select"` takes up to 1.8 times
            as long and needs up to three times the memory. The state does not depend on `skip_by`, so a resumed run may
            change it.

    Returns:
        An `optax.GradientTransformationExtraArgs` with one more function:
        `params, opt_state = optimizer.apply_gradients(grads, opt_state, params)` updates and applies in one call, which
        saves memory and time. If parameters and state are donated to `jit`, loss scaling adds little more than one read
        of the gradients.

    Raises:
        TypeError: `inner` is not an optimizer.
        PolicyError: The settings make no sense, or `policy` is not a policy.
    """
    if isinstance(inner, type) or not (hasattr(inner, "init") and hasattr(inner, "update")):
        hint = "pass an optimizer, such as optax.adamw(1e-3), and the policy after it"
        raise TypeError(f"inner={inner!r} must be an optimizer with init and update; {hint}")
    accumulation_steps = check_setting("accumulation_steps", accumulation_steps)
    if axis_name is not None and (max_norm is not None or accumulation_steps > 1):
        hint = "reduce the gradients over the axis first and leave axis_name out"
        raise PolicyError(f"max_norm and accumulation_steps need reduced gradients, unlike axis_name; {hint}")
    if skip_by not in ("cond", "select", None):
        raise PolicyError(f"skip_by={describe(skip_by)} must be 'cond' or 'select'; leave it out for the default")
    check_guard(guard)
    max_norm = None if max_norm is None else float(check_setting("max_norm", max_norm))
    inner, policy = optax.with_extra_args_support(inner), as_policy(policy)
    update = _Update(_Settings(inner, policy, axis_name, max_norm, accumulation_steps, guard, skip_by))
    return LossScaledTransformation(update.init, update)


def take_step(
    settings: _Settings, grads: Any, state: Any, params: Any, extra_args: Any, *, applies_updates: bool = False
) -> tuple[Any, LossScaledState]:
    """Return the updates of a step, or with `applies_updates` the new parameters, and the state after the step."""
    _states.require_state(state, settings.accumulation_steps, settings.guard)
    grads = as_arrays(grads)
    if state.window is not None or params is not None:
        _states.require_gradients_of(trained_params(params) if state.window is None else state.window.total, grads)
    proposal, window = _propose(settings, grads, state)
    last_step, scale_state, guard_state = _decide(settings, proposal, state)
    applied, loss_scale = last_step.applied, state.scale_state.loss_scale
    # The factor is computed outside of the step; inside, XLA would compute it again for each leaf.
    shrink = None if settings.max_norm is None else 1.0 / clip_divisor(proposal.norm, settings.max_norm, xp=jnp)

    def step(grads: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
        unscaled = divide(grads, loss_scale) if window is None else grads
        unscaled = unscaled if shrink is None else multiply(unscaled, shrink)
        updates, inner_state = settings.inner.update(unscaled, inner_state, at_least_float32(params), **extra_args)
        if not applies_updates:
            return updates, inner_state
        # `apply_updates` would add float32 to half-precision parameters, which JAX's strict promotion refuses.
        return optax.tree.cast_like(optax.apply_updates(at_least_float32(params), updates), params), inner_state

    # XLA lets a conditional reuse the memory of an operand only if one branch returns it unchanged. So a skip without
    # another fallback returns the gradients, and the updates take their memory.
    fallback = params if applies_updates else None if window is None else grads
    result, inner_state = _step_or_skip(settings, applied, step, proposal.grads, state.inner_state, fallback)
    if not applies_updates:
        # XLA fuses this into the addition. Unlike 0.0, -0.0 also leaves the sign of a zero unchanged.
        zero = lambda leaf: lax.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0)  # noqa: E731
        result = select(applied, result, jax.tree.map(zero, result))
    return result, LossScaledState(scale_state, inner_state, window, guard_state, last_step)


class _Proposal(NamedTuple):
    """The checked gradients of a call or of a window, before the decision about its step."""

    grads: PyTree
    """The scaled gradients of a call; with accumulation, the unscaled mean of the window."""
    norm: Any
    """The norm of the unscaled gradients before clipping; None if neither `max_norm` nor a guard needs it."""
    finite: Any
    """bool: whether the gradients of this call, or of its window up to now, are finite."""
    is_step: Any
    """bool: whether this call counts as a step of the policy; False before the last micro-batch of a window."""


def _propose(settings: _Settings, grads: PyTree, state: LossScaledState) -> tuple[_Proposal, Window | None]:
    """Check gradients, and return the proposal of a call, or of its window, and the window after the call."""
    loss_scale, norm = state.scale_state.loss_scale, None
    factor = 1.0 / loss_scale.astype(float)  # in float64 with x64
    if settings.needs_norm and state.window is None:
        finite, norm = _gradients.are_finite_with_norm(grads, factor, settings.branches_on)
    else:
        finite = _gradients.are_finite(grads, factor)
    finite = _gradients.all_true(finite, settings.axis_name)
    _gradients.require_reduced(finite, state.scale_state)
    if state.window is not None:
        return _accumulate(settings, divide(grads, loss_scale), finite, state.window)
    return _Proposal(grads, norm, finite, is_step=jnp.asarray(True)), None


def _accumulate(settings: _Settings, grads: PyTree, finite: Array, window: Window) -> tuple[_Proposal, Window]:
    """Add the unscaled gradients of a micro-batch; return the proposal of its window, and the window after the call."""
    # Divide each micro-batch before the addition, so that the sum of finite micro-batches is finite.
    share = multiply(grads, jnp.asarray(1.0 / settings.accumulation_steps, float))
    total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(share, window.total))
    total, seen, overflowed = select(finite, total, window.total), window.seen + 1, window.overflowed | ~finite
    is_full, norm = seen >= settings.accumulation_steps, None
    if settings.needs_norm:
        _, norm = _gradients.are_finite_with_norm(total, jnp.float32(1.0), settings.branches_on)
    window = Window(total, seen, overflowed)
    window = select(is_full, optax.tree.zeros_like(window), window)
    return _Proposal(total, norm, ~overflowed, is_step=is_full), window


def _decide(settings: _Settings, proposal: _Proposal, state: LossScaledState) -> tuple[LastStep, Any, Any]:
    """Return the outcome of a step, and the states of the policy and of the guard after it."""
    norm: Any = None
    if proposal.norm is not None:
        norm = lax.stop_gradient(_gradients.total_norm(proposal.norm, settings.axis_name).astype(jnp.float32))

    def decide_scalars(old: tuple[LastStep, Any, Any]) -> tuple[LastStep, Any, Any]:
        last_step, before, guard_state = old
        finite, proposed = proposal.finite, proposal.finite & proposal.is_step
        applied, after, guard_state = decide(
            settings.policy, settings.guard, before, guard_state, finite, norm, proposed=proposed, xp=jnp
        )
        last_norm = None if last_step.norm is None else jnp.where(applied, norm, last_step.norm)
        last_step = LastStep(applied, ~finite, proposed & ~applied, last_norm)
        return last_step, select(proposal.is_step, after, before), guard_state

    last_norm = jnp.float32(0.0) if state.last_step.norm is None else state.last_step.norm
    last_step = state.last_step._replace(norm=None if norm is None else last_norm)  # `max_norm` may differ between runs
    return _gradients.in_one_kernel(decide_scalars, (last_step, state.scale_state, state.guard_state))


def _step_or_skip(
    settings: _Settings, applied: Array, step: Any, grads: PyTree, inner_state: PyTree, fallback: PyTree
) -> tuple[PyTree, PyTree]:
    """Return `step(grads, inner_state)` if the step is applied, else `fallback` and the inner state.

    A skipped step returns the structure and the dtypes of an applied one. If `fallback` is None, it returns `grads`.
    """

    def skip(like: Any, grads: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
        return _match(grads if fallback is None else fallback, like[0]), jax.tree.map(_cast, inner_state, like[1])

    if settings.branches_on(applied):
        step = jax.jit(step, inline=True)  # so that `eval_shape` and `cond` trace it only once
        shapes = jax.eval_shape(step, grads, inner_state)
        return lax.cond(applied, step, functools.partial(skip, shapes), grads, inner_state)
    # A skipped step gets zeros, because a line search, a host callback or a check would act on NaN.
    new = step(map_floats(lambda leaf: jnp.where(applied, leaf, jnp.zeros_like(leaf)), grads), inner_state)
    return select(applied, new, skip(new, grads, inner_state))


def _match(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` with the structure, shapes and dtypes of `like`; zeros replace a tree or a leaf that cannot fit."""
    structure: Any = jax.tree.structure
    if structure(tree) != structure(like):  # for example, the gradients with optax.lookahead
        tree = optax.tree.zeros_like(like)

    def match_leaf(leaf: Any, like: Any) -> Any:
        # If the optimizer reduces gradients, these have another shape than the updates, or vary over more axes.
        fits = jnp.shape(leaf) == jnp.shape(like) and not _gradients.mesh_axes(leaf) - _gradients.mesh_axes(like)
        return _cast(leaf if fits else jnp.zeros(jnp.shape(like)), like)

    return jax.tree.map(match_leaf, tree, like)


def _cast(leaf: Any, like: Any) -> Any:
    """Return `leaf` with the dtype and the varying axes of `like`."""
    leaf = leaf if jnp.result_type(leaf) == jnp.result_type(like) else leaf.astype(jnp.result_type(like))
    return _gradients.vary(leaf, _gradients.mesh_axes(like))

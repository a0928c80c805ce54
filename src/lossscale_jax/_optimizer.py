"""`loss_scaled`: a wrapper for any optax optimizer that applies or skips each step as a whole."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lossscale_core import PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.adapters import check_guard, check_setting, clip_divisor, decide, shown
from lossscale_core.errors import PolicyError
from lossscale_jax import _gradients, _states
from lossscale_jax._gradients import PyTree, Skip, Tree, as_arrays, divide, lifted, map_gradients, multiply
from lossscale_jax._states import LossScaledState, Window, trained
from lossscale_jax._verbs import init_state, select


class _Update(Protocol):
    policy: ScalingPolicy
    apply_gradients: Callable[..., tuple[Any, LossScaledState]]

    def __call__(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that takes the gradients of a scaled loss; `loss_scaled` returns it."""

    init: Callable[[PyTree], LossScaledState]
    """`init(params)` returns the optimizer state before the first step."""
    update: _Update
    """`update(grads, state, params, **extra_args)` returns the updates and the state after the step.

    The updates of a skipped step are zero.
    """

    # optax unpacks a transformation into two functions, and flax nnx rebuilds it from them, so that everything else is
    # found through the second one.
    @property
    def policy(self) -> ScalingPolicy:
        """The policy, as in `diagnose(optimizer.policy, get_scale_state(opt_state))`."""
        return self.update.policy

    def apply_gradients(
        self, grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        """Return the parameters and the state after a step; a skipped step leaves parameters and inner state unchanged.

        Updating and applying in one call saves memory and time.
        """
        return self.update.apply_gradients(grads, state, params, **extra_args)


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: PolicyLike,
    *,
    axis_name: Hashable = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    guard: SpikeGuard | None = None,
    skip: Skip | None = None,
) -> LossScaledTransformation:
    """Wrap `inner` so that it takes the gradients of a scaled loss, and skips steps that overflow.

    ```python
    optimizer = loss_scaled(optax.adam(1e-3), "dynamic")
    opt_state = optimizer.init(params)

    def step(params, opt_state, batch):
        state = get_scale_state(opt_state)
        grads = jax.grad(lambda params: scale(loss(params, batch), state))(params)
        return optimizer.apply_gradients(grads, opt_state, params)
    ```

    `inner` receives unscaled gradients, in float32 or wider. A skipped step returns zero updates and leaves the inner
    state bit for bit. An applied step may differ in its last bits from the same step without scaling, since XLA decides
    for each program where to fuse a product and a sum. Without such fusion the bits are the same if the loss scale is a
    power of two and the model computes in float32. The functions are pure and do not synchronise with the host.

    Args:
        inner: Any optimizer with optax's interface, for a pytree of arrays (partition an Equinox model first).
        policy: Anything that `lossscale_core.as_policy` accepts.
        axis_name: The axis of `shard_map` or `pmap`, or a tuple of them, over which to combine the decision, if the
            gradients still differ between the devices. It cannot be combined with clipping or accumulation; there,
            reduce the gradients first.
        max_norm: The global norm to which unscaled gradients are clipped, in the same read as the finiteness check.
        accumulation_steps: The number of micro-batches in one step, which applies their mean; the calls before the
            last one return zero updates. An overflow skips the whole window, which counts as one step of the policy.
        guard: A `SpikeGuard`, which skips a step if its norm is far above the norms before it, and then leaves the
            scale state unchanged. The norm is that of the unscaled gradients before clipping: of a window's mean with
            accumulation, and of the gradients of all devices together with `axis_name`. The guard's state is in
            `opt_state.guard_state`. A step does not read it, so that `max_streak` is not checked; call
            `lossscale_core.adapters.check_spike_streak` where you read the state.
        skip: The way to skip a compiled step; the results are the same up to rounding. `"cond"` takes the step in a
            conditional, so that a skipped step costs little and donated buffers are not copied; XLA may read its
            predicate on the host of a GPU. `"select"` always takes the step, on zeros if it is skipped, and then
            chooses between the old and the new values. By default `"select"` where JAX's default backend is a GPU,
            where it takes less time and half the memory, and `"cond"` elsewhere: on a CPU `"select"` takes up to 1.8
            times as long and needs up to three times the memory. The state is the same, so that a run may change
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
    if isinstance(inner, type) or not (hasattr(inner, "init") and hasattr(inner, "update")):
        hint = "pass one that is made, such as optax.adamw(1e-3), and the policy after it"
        raise TypeError(f"inner={inner!r} must be an optimizer with init and update; {hint}")
    accumulation_steps = check_setting("accumulation_steps", accumulation_steps)
    if axis_name is not None and (max_norm is not None or accumulation_steps > 1):
        hint = "reduce the gradients over the axis first and leave axis_name out"
        raise PolicyError(f"max_norm and accumulation_steps take reduced gradients, and axis_name others; {hint}")
    if skip not in ("cond", "select", None):
        raise PolicyError(f"skip={shown(skip)} must be 'cond' or 'select'; leave it out for the default")
    check_guard(guard)
    policy = as_policy(policy)
    max_norm = None if max_norm is None else float(check_setting("max_norm", max_norm))
    needs_norm = guard is not None or max_norm is not None
    inner_update = optax.with_extra_args_support(inner).update

    def init(params: PyTree) -> LossScaledState:
        inner_state = inner.init(lifted(params))
        if _states.scale_states_of(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        zeros = optax.tree.zeros_like(lifted(trained(params))) if accumulation_steps > 1 else None
        window = None if zeros is None else Window(zeros, jnp.int32(0), jnp.asarray(False), jnp.asarray(False))
        guard_state = None if guard is None else jax.tree.map(jnp.asarray, guard.init_state())
        return _states.place_with(LossScaledState(init_state(policy), inner_state, window, guard_state), params)

    def take(grads: Any, state: Any, params: Any, extra_args: Any, result_of: Any, keep: Any = None) -> Any:
        """Return `result_of(updates)` if the step is applied, else `keep`, or zeros without it; and the new state."""
        _states.require_state(state, accumulation_steps, guard)
        grads = as_arrays(grads)
        scale_state, inner_state, window, guard_state = tuple[Any, ...](state)
        way: Skip = skip or ("select" if jax.default_backend() == "gpu" else "cond")
        if window is not None or params is not None:
            _states.require_gradients_of(trained(params) if window is None else window.total, grads)
        loss_scale = scale_state.loss_scale
        factor = 1.0 / loss_scale.astype(float)  # in float64 with x64
        finite, norm = _gradients.check(grads, factor, with_norm=needs_norm and window is None, skip=way)
        finite = _gradients.all_true(finite, axis_name)
        _gradients.require_reduced(finite, scale_state)
        proposal = _Proposal(grads, norm, finite, counts=jnp.asarray(True))
        if window is not None:
            unscaled = divide(grads, loss_scale)
            proposal, window = _accumulate(unscaled, finite, window, accumulation_steps, needs_norm, way)

        total: Any = None if guard is None else _gradients.total_norm(proposal.norm, axis_name).astype(jnp.float32)
        proposed = proposal.finite & proposal.counts
        applies, after, guard_state = decide(
            policy, guard, scale_state, guard_state, proposal.finite, total, proposed=proposed, xp=jnp
        )
        scale_state = select(proposal.counts, after, scale_state)
        window = None if window is None else window._replace(stepped=applies)
        # Outside of the step, so that XLA does not compute it once for each leaf.
        shrink = None if max_norm is None else 1.0 / clip_divisor(proposal.norm, max_norm, xp=jnp)

        def step(source: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            unscaled = divide(source, loss_scale) if window is None else source
            unscaled = unscaled if shrink is None else multiply(unscaled, shrink)
            updates, inner_state = inner_update(unscaled, inner_state, lifted(params), **extra_args)
            return result_of(updates), inner_state

        def skipped(applied: Any, source: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            # XLA lets a conditional reuse the memory of an operand only if one branch returns it unchanged. So a skip
            # returns the gradients if nothing is to be kept, and the updates take their memory.
            kept = (source if window is None else grads) if keep is None else keep
            return _fitted(kept, applied[0]), jax.tree.map(_cast, inner_state, applied[1])

        if way == "cond" and isinstance(applies, jax.core.Tracer):
            step = jax.jit(step, inline=True)  # traced once, for its shapes and in the conditional
            shapes = jax.eval_shape(step, proposal.source, inner_state)
            skip_step = functools.partial(skipped, shapes)
            result, inner_state = lax.cond(applies, step, skip_step, proposal.source, inner_state)
        else:  # with zeros for a line search, a host callback or checks, which would otherwise act on NaN
            harmless = map_gradients(lambda leaf: jnp.where(applies, leaf, jnp.zeros_like(leaf)), proposal.source)
            result, new_state = step(harmless, inner_state)
            old, inner_state = skipped((result, new_state), proposal.source, inner_state)
            inner_state = select(applies, new_state, inner_state)
            result = result if keep is None else select(applies, result, old)
        if keep is None:
            # XLA fuses this into the addition. -0.0, and not 0.0, also keeps the signs of zeros.
            nothing = lambda leaf: lax.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0)  # noqa: E731
            result = select(applies, result, jax.tree.map(nothing, result))
        return result, LossScaledState(scale_state, inner_state, window, guard_state)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return take(updates, state, params, extra_args, lambda result: result)

    def apply_gradients(grads: Any, state: Any, params: Any, **extra_args: Any) -> Any:
        params = as_arrays(params)
        # In float32, since `apply_updates` promotes half-precision parameters, which JAX's strict promotion refuses.
        added = lambda updates: optax.tree.cast_like(optax.apply_updates(lifted(params), updates), params)  # noqa: E731
        return take(grads, state, params, extra_args, added, keep=params)

    update.apply_gradients, update.policy = apply_gradients, policy  # type: ignore[attr-defined]
    return LossScaledTransformation(init, update)


class _Proposal(NamedTuple):
    """A step that waits for the decision: of the gradients of a call, or of those of a window."""

    source: PyTree
    """Scaled gradients, or the mean of a window, unscaled."""
    norm: Any
    """The norm of the gradients to apply; undefined if neither `max_norm` nor a guard needs it."""
    finite: Any
    """bool: whether the gradients of this call, or all of the window up to now, are finite."""
    counts: Any
    """bool: whether this call is a step of the policy; in the middle of a window it is not."""


def _accumulate(
    grads: PyTree, finite: Array, window: Window, steps: int, needs_norm: bool, way: Skip
) -> tuple[_Proposal, Window]:
    """Return the proposal of a window with the unscaled gradients of one more micro-batch, and the window after it."""
    # Divide each micro-batch before it is added, so that the sum of finite micro-batches is finite.
    share = multiply(grads, jnp.asarray(1.0 / steps, float))
    total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(share, window.total))
    total, seen, overflowed = select(finite, total, window.total), window.seen + 1, window.overflowed | ~finite
    is_full = seen >= steps
    one = jnp.float32(1.0)
    norm = _gradients.check(total, one, with_norm=True, skip=way)[1].astype(jnp.float32) if needs_norm else None
    window = Window(total, seen, overflowed, window.stepped)
    window = select(is_full, optax.tree.zeros_like(window), window)
    return _Proposal(total, norm, ~overflowed, counts=is_full), window


def _fitted(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` in the form of `like`; zeros in place of a tree, or of a leaf, of another form."""
    structure: Any = jax.tree.structure
    if structure(tree) != structure(like):  # gradients with optax.lookahead
        tree = optax.tree.zeros_like(like)

    def fitted(leaf: Any, like: Any) -> Any:
        # Of another shape, or varying over more axes, are the gradients of an optimizer that reduces them.
        fits = jnp.shape(leaf) == jnp.shape(like) and not _gradients.varying(leaf) - _gradients.varying(like)
        return _cast(leaf if fits else jnp.zeros(jnp.shape(like)), like)

    return jax.tree.map(fitted, tree, like)


def _cast(leaf: Any, like: Any) -> Any:
    """Return `leaf` in the dtype and with the varying axes of `like`."""
    leaf = leaf if jnp.result_type(leaf) == jnp.result_type(like) else leaf.astype(jnp.result_type(like))
    return _gradients.vary(leaf, _gradients.varying(like))

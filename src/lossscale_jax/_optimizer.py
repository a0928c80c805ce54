"""`loss_scaled`: a wrapper for any optax optimizer that applies or skips each step as a whole."""

import inspect
from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lossscale_core import PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.adapters import check_guard, check_setting, explain_arguments
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax._gradients import (
    LARGEST,
    PyTree,
    Skip,
    Tree,
    choose,
    each_finite,
    everywhere,
    global_norm,
    is_array,
    lift,
    map_gradients,
    name_of,
    require_reduced,
    times,
    total_norm,
    vary_over,
    varying_axes,
)
from lossscale_jax._states import LossScaledState, Window, place_with, scale_states_of
from lossscale_jax._verbs import init_state, select

_REDUCE = "reduce them first, as with jax.lax.pmean"
_ADVICE = (
    f"{_REDUCE}; or, where the wrapped optimizer reduces them or each device owns a part of the parameters, pass "
    "axis_name={names}"
)


class _Init(Protocol):
    def __call__(self, params: PyTree) -> LossScaledState: ...


class _Update(Protocol):
    policy: ScalingPolicy
    apply_gradients: Callable[..., tuple[Any, LossScaledState]]

    def __call__(
        self, updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that takes the gradients of a scaled loss; `loss_scaled` returns it."""

    init: _Init
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


@explain_arguments
def loss_scaled(
    inner: optax.GradientTransformation,
    policy: PolicyLike,
    *,
    axis_name: Hashable = None,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
    drop: Literal["window", "micro_batch"] = "window",
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
    if isinstance(inner, type) or not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner={inner!r} must be an optimizer with init and update; pass one that is made, such as "
            "optax.adamw(1e-3), and the policy after it"
        )
    if not (isinstance(accumulation_steps, int) and accumulation_steps >= 1):
        raise PolicyError(f"accumulation_steps={accumulation_steps!r} must be an integer of at least 1")
    accumulates = accumulation_steps > 1
    if axis_name is not None and (max_norm is not None or accumulates):
        raise PolicyError(
            "max_norm and accumulation_steps are for gradients that are reduced already, and axis_name for those "
            "that are not; reduce the gradients over the axis first and leave axis_name out"
        )
    if drop not in ("window", "micro_batch"):
        raise PolicyError(f"drop={drop!r} must be 'window' or 'micro_batch'")
    if not isinstance(keep_dtypes, bool):
        raise PolicyError(f"keep_dtypes={keep_dtypes!r} must be True or False")
    if skip not in ("cond", "select"):
        raise PolicyError(f"skip={skip!r} must be 'cond' or 'select'; leave it out for 'cond'")
    check_guard(guard)
    policy = as_policy(policy)
    max_norm = None if max_norm is None else float(check_setting("max_norm", max_norm))
    needs_norm = guard is not None or max_norm is not None
    advice = _REDUCE if max_norm is not None or accumulates else _ADVICE
    # `optax.with_extra_args_support` would withhold them from `optax.MultiSteps(...).gradient_transformation()`.
    known = inspect.signature(inner.update).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())

    def widened(tree: PyTree) -> PyTree:
        """Return parameters in the dtypes of the gradients that the inner optimizer receives."""
        return tree if keep_dtypes else map_gradients(lift, tree)

    def init(params: PyTree) -> LossScaledState:
        inner_state = inner.init(widened(params))
        if scale_states_of(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        zeros = optax.tree.zeros_like(map_gradients(lift, params)) if accumulates else None
        window = Window(zeros, jnp.int32(0), jnp.int32(0), jnp.asarray(False)) if accumulates else None
        guard_state = None if guard is None else jax.tree.map(jnp.asarray, guard.init_state())
        return place_with(LossScaledState(init_state(policy), inner_state, window, guard_state), params)

    def take(
        grads: PyTree,
        state: Any,
        params: PyTree,
        extra_args: dict[str, Any],
        result_of: Any,
        unchanged: Any,
    ) -> tuple[Any, Array, LossScaledState]:
        """Return `result_of(updates)`, or `unchanged(grads)` if the step is skipped; whether it is; and the state."""
        _require_fitting(state, accumulation_steps, guard)
        scale_state, inner_state, window, guard_state = state
        _require_alike(grads, window.total if params is None and accumulates else params)
        source, factor, counts = grads, 1.0 / scale_state.loss_scale, jnp.asarray(True)

        # Check each element, or compute the norm, which is finite if each element is.
        norm: Any = global_norm(grads, factor, skip=skip) if needs_norm and not accumulates else None
        finite = jnp.asarray(True) if norm is None else jnp.isfinite(norm)
        if norm is None or keep_dtypes:  # a value that is finite in float32 may be infinite in the gradient's dtype
            finite &= each_finite(grads, factor, keep_dtypes=keep_dtypes, skip=skip)
        finite = applies = everywhere(finite, axis_name)
        require_reduced(finite, scale_state, advice)

        if accumulates:
            # Divide each micro-batch before it is added, so that the sum of finite micro-batches is finite.
            share = map_gradients(lambda leaf: times(times(leaf, factor), jnp.float32(1.0 / accumulation_steps)), grads)
            total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(share, window.total))
            total, seen = select(finite, total, window.total), window.seen + 1
            good = window.finite + finite.astype(jnp.int32)
            source, factor = total, accumulation_steps / jnp.maximum(good, 1).astype(jnp.float32)
            is_full, is_whole = seen >= accumulation_steps, good == seen
            applies = is_full & (is_whole if drop == "window" else good > 0)
            finite, counts = (is_whole, is_full) if drop == "window" else (finite, counts)
            window = Window(total, seen, good, applies)
            window = select(is_full, optax.tree.zeros_like(window), window)._replace(stepped=applies)
            if needs_norm:
                norm_of_mean = lambda: global_norm(total, factor, skip=skip).astype(jnp.float32)  # noqa: E731
                norm = choose(applies, norm_of_mean, lambda: jnp.float32(jnp.inf), skip)

        if guard is not None:
            # The norm over all devices may overflow although each norm is finite, and infinity would not be a spike.
            norm_everywhere = jnp.minimum(total_norm(norm, axis_name), LARGEST)
            checked_norm = jnp.where(applies, norm_everywhere, jnp.inf).astype(jnp.float32)  # infinity changes no state
            accepted, guard_state = guard.check(guard_state, checked_norm, xp=jnp)
            counts &= accepted | ~applies | ~finite  # a spike says nothing of the scale; an overflow in its call does
            applies &= accepted
            window = None if window is None else window._replace(stepped=applies)

        def step(source: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            unscaled = map_gradients(lambda leaf: times(leaf, factor), source)
            if max_norm is not None and max_norm <= LARGEST:  # a larger one clips nothing, and is infinite in float32
                shrink = max_norm / jnp.maximum(norm, max(max_norm, float(jnp.finfo(jnp.float32).tiny)))
                unscaled = map_gradients(lambda leaf: times(leaf, shrink), unscaled)
            unscaled = optax.tree.cast_like(unscaled, grads) if keep_dtypes else unscaled
            taken = extra_args if takes_all else {name: extra_args[name] for name in extra_args if name in known}
            updates, inner_state = inner.update(unscaled, inner_state, widened(params), **taken)
            return result_of(updates), inner_state

        result, inner_state = _take_or_skip(applies, step, unchanged, source, inner_state, skip)
        scale_state = select(counts, policy.update(scale_state, finite, xp=jnp), scale_state)
        return result, applies, LossScaledState(scale_state, inner_state, window, guard_state)

    def update(
        updates: Tree, state: LossScaledState, params: PyTree = None, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        # XLA lets a conditional reuse the memory of an operand only if one branch returns it unchanged. So a skip
        # returns gradients, the updates take their memory, and the select drops them; XLA fuses it into the addition.
        kept = lambda source: updates if accumulates else source  # noqa: E731
        result, applies, state = take(updates, state, params, extra_args, lambda result: result, kept)
        # -0.0, and not 0.0, also keeps the signs of zeros.
        nothing = lambda leaf: lax.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0)  # noqa: E731
        return select(applies, result, jax.tree.map(nothing, result)), state

    def apply_gradients(
        grads: PyTree, state: LossScaledState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, LossScaledState]:
        def added(updates: PyTree) -> PyTree:
            # `apply_updates` promotes half-precision parameters implicitly, which JAX's strict promotion refuses.
            wide = map_gradients(lift, params)
            return optax.tree.cast_like(optax.apply_updates(wide, optax.tree.cast_like(updates, wide)), params)

        result, _, state = take(grads, state, params, extra_args, added, lambda source: params)
        return result, state

    update.apply_gradients, update.policy = apply_gradients, policy  # type: ignore[attr-defined]
    return LossScaledTransformation(init, update)


def _require_fitting(state: Any, accumulation_steps: int, guard: SpikeGuard | None) -> None:
    """Raise an error if `state` was not made by `init`, or was made with other settings."""
    if not isinstance(state, LossScaledState):
        raise ScaleStateError(
            f"{type(state).__name__} is not a state of loss_scaled; pass what its init returned, after the "
            "gradients. To continue from a checkpoint of the wrapped optimizer alone, pass "
            "optimizer.init(params)._replace(inner_state=...)"
        )
    if (state.window is None) != (accumulation_steps == 1):
        raise PolicyError(
            f"accumulation_steps={accumulation_steps} does not fit a state made "
            f"{'without' if state.window is None else 'with'} accumulation; make the optimizer as it was saved"
        )
    if (state.guard_state is None) != (guard is None):
        raise PolicyError(
            f"guard={guard!r} does not fit a state made {'without' if guard else 'with'} a guard; make the optimizer "
            "as it was saved, or pass opt_state._replace(guard_state=optimizer.init(params).guard_state)"
        )


def _require_alike(grads: PyTree, params: PyTree) -> None:
    """Raise `ValueError` for the first leaf in which gradients differ from parameters."""
    if params is None:
        return
    is_left_out = lambda node: not jax.tree.leaves(node)  # noqa: E731  # such as None for what is not trained
    own, given = (
        dict[Any, Any](jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_left_out)) for tree in (params, grads)
    )
    difference = "the gradients hold no array" if jax.tree.leaves(params) and not jax.tree.leaves(grads) else None
    for path in {**own, **given} if difference is None else ():
        name = name_of(path)
        param: Any = own.get(path)
        grad: Any = given.get(path)
        if path not in own:
            difference = f"the gradients have {name}, which the parameters lack"
        elif path not in given and is_array(param):
            if not any(is_left_out(given.get(path[:n], 0)) for n in range(len(path))):
                difference = f"the gradients lack {name}, which the parameters have"
        # A wrapped optimizer may take a gradient for each of n samples.
        elif is_array(param) and is_array(grad) and jnp.shape(param) not in (jnp.shape(grad), jnp.shape(grad)[1:]):
            shapes = f"shape {jnp.shape(grad)}, and the parameter has shape {jnp.shape(param)}"
            difference = f"{name} of the gradients has {shapes}"
        if difference:
            break
    if difference:
        raise ValueError(f"{difference}; pass what jax.grad returns for these parameters")


def _take_or_skip(
    applies: Array,
    step: Callable[..., Any],
    unchanged: Callable[[PyTree], PyTree],
    source: PyTree,
    inner_state: PyTree,
    skip: Skip,
) -> Any:
    """Return `step(source, inner_state)` if `applies`, else `unchanged(source), inner_state` in the same dtypes."""
    step = jax.jit(step, inline=True)  # traced once, for its shapes and in the conditional
    shapes, inner_shapes = jax.eval_shape(step, source, inner_state)

    def skipped(source: PyTree, inner_state: PyTree) -> Any:
        return jax.tree.map(_fitting, unchanged(source), shapes), jax.tree.map(_cast, inner_state, inner_shapes)

    if skip == "cond" and isinstance(applies, jax.core.Tracer):
        return lax.cond(applies, step, skipped, source, inner_state)
    # Zeros for an optimizer with a line search, a host callback or checks, which would otherwise act on NaN.
    harmless = map_gradients(lambda leaf: jnp.where(applies, leaf, jnp.zeros_like(leaf)), source)
    return select(applies, step(harmless, inner_state), skipped(source, inner_state))


def _fitting(leaf: Any, like: Any) -> Any:
    """Return `leaf` in the dtype and with the varying axes of `like`; zeros for an optimizer that reduces gradients."""
    if jnp.shape(leaf) != like.shape or varying_axes(leaf) - varying_axes(like):
        leaf = jnp.zeros(like.shape, like.dtype)
    return _cast(leaf, like)


def _cast(leaf: Any, like: Any) -> Any:
    leaf = leaf if jnp.result_type(leaf) == like.dtype else leaf.astype(like.dtype)
    return vary_over(leaf, varying_axes(like))

"""`loss_scaled`: a wrapper for any optax optimizer that applies or skips each step as a whole."""

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lossscale_core import PolicyLike, ScalingPolicy, SpikeGuard, as_policy
from lossscale_core.adapters import check_guard, check_setting, clip_divisor, decide, explain_arguments
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import _gradients
from lossscale_jax._gradients import PyTree, Skip, Tree, each_finite, lifted, map_gradients, multiply
from lossscale_jax._states import LossScaledState, Window, place_with, require_gradients_of, scale_states_of
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
            last one return zero updates.
        drop: What an overflow drops. `"window"` skips the whole window, which counts as one step of the policy.
            `"micro_batch"` leaves out the micro-batches that overflowed and divides by the number of the others. Then
            every micro-batch counts as a step of the policy, and the scale may change within a window.
        keep_dtypes: Whether `inner` is initialised with half-precision parameters as they are and gets each gradient in
            the dtype in which it came, unscaled in float32 first. This halves the memory of the state, but values that
            are too small for float16 become zero, such as an `eps` of 1e-8: then `init` raises `PolicyError`, unless
            its parameters are traced. By default, updates and inner state are float32.
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
    if not (isinstance(accumulation_steps, int) and accumulation_steps >= 1):
        raise PolicyError(f"accumulation_steps={accumulation_steps!r} must be an integer of at least 1")
    accumulates = accumulation_steps > 1
    if axis_name is not None and (max_norm is not None or accumulates):
        hint = "reduce the gradients over the axis first and leave axis_name out"
        raise PolicyError(f"max_norm and accumulation_steps take reduced gradients, and axis_name others; {hint}")
    choices = {"drop": ("window", "micro_batch"), "skip": ("cond", "select"), "keep_dtypes": (True, False)}
    for name, value in (("drop", drop), ("skip", "cond" if skip is None else skip), ("keep_dtypes", keep_dtypes)):
        if value not in choices[name]:
            raise PolicyError("{}={!r} must be {!r} or {!r}".format(name, value, *choices[name]))
    check_guard(guard)
    policy = as_policy(policy)
    max_norm = None if max_norm is None else float(check_setting("max_norm", max_norm))
    needs_norm = guard is not None or max_norm is not None
    inner_update = optax.with_extra_args_support(inner).update

    def widened(tree: PyTree) -> PyTree:
        """Return parameters in the dtypes of the gradients that the inner optimizer receives."""
        return tree if keep_dtypes else lifted(tree)

    def init(params: PyTree) -> LossScaledState:
        inner_state = inner.init(widened(params))
        if scale_states_of(inner_state):
            raise PolicyError("inner is loss-scaled already; wrap the optimizer once")
        if keep_dtypes and jnp.float16 in jax.tree.leaves(jax.tree.map(jnp.result_type, params)):
            with contextlib.suppress(TypeError, NameError):  # if it needs extra arguments or an axis, as in a step
                finite = each_finite(inner.update(optax.tree.zeros_like(params), inner_state, params)[0])
                if not isinstance(finite, jax.core.Tracer) and not finite:
                    hint = "as with eps=1e-8, which is 0 in float16; pass eps=1e-4 to it, or leave keep_dtypes out"
                    raise PolicyError(f"keep_dtypes=True, and inner makes NaN of a float16 gradient of zero, {hint}")
        zeros = optax.tree.zeros_like(lifted(params)) if accumulates else None
        window = Window(zeros, jnp.int32(0), jnp.int32(0), jnp.asarray(False)) if accumulates else None
        guard_state = None if guard is None else jax.tree.map(jnp.asarray, guard.init_state())
        return place_with(LossScaledState(init_state(policy), inner_state, window, guard_state), params)

    def take(grads: Any, state: Any, params: Any, extra_args: Any, result_of: Any, unchanged: Any) -> Any:
        """Return `result_of(updates)` if the step is applied, else `unchanged(grads)`; whether it is; and the state."""
        if not isinstance(state, LossScaledState):
            hint = "pass what its init returned, after the gradients; an inner state alone is continued by"
            example = "optimizer.init(params)._replace(inner_state=...)"
            raise ScaleStateError(f"{type(state).__name__} is not a state of loss_scaled; {hint} {example}")
        scale_state, inner_state, window, guard_state = tuple[Any, ...](state)
        if (window is None, guard_state is None) != (not accumulates, guard is None):
            was = ["without" if part is None else "with" for part in (window, guard_state)]
            raise PolicyError(
                f"accumulation_steps={accumulation_steps} and guard={guard!r} do not fit a state made {was[0]} "
                f"accumulation and {was[1]} a guard; make the optimizer as it was saved, or take what is missing from "
                "a new one: opt_state._replace(guard_state=optimizer.init(params).guard_state)"
            )
        if isinstance(inner_state, list | dict) and params is not None:
            made: Any = jax.tree.structure(jax.eval_shape(inner.init, widened(params)))
            if made != jax.tree.structure(inner_state):
                hint = "restore the checkpoint into what init returns, such as orbax's restore(path, init(params))"
                raise ScaleStateError(f"inner_state is a {type(inner_state).__name__}, not as init made it; {hint}")
        if params is not None or accumulates:
            require_gradients_of(window.total if params is None else params, grads)
        way: Skip = skip or ("select" if jax.default_backend() == "gpu" else "cond")
        source, factor, counts = grads, 1.0 / scale_state.loss_scale, jnp.asarray(True)

        # Check each element, or compute the norm, which is finite if each element is.
        norm: Any = _gradients.global_norm(grads, factor, skip=way) if needs_norm and not accumulates else None
        finite = jnp.asarray(True) if norm is None else jnp.isfinite(norm)
        if norm is None or keep_dtypes:  # a value that is finite in float32 may be infinite in the gradient's dtype
            finite &= each_finite(grads, factor, keep_dtypes=keep_dtypes, skip=way)
        finite = applies = _gradients.all_true(finite, axis_name)
        _gradients.require_reduced(finite, scale_state)

        if accumulates:
            # Divide each micro-batch before it is added, so that the sum of finite micro-batches is finite.
            share = multiply(multiply(grads, factor), jnp.float32(1.0 / accumulation_steps))
            total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(share, window.total))
            total, seen = select(finite, total, window.total), window.seen + 1
            good = window.finite + finite.astype(jnp.int32)
            source, factor = total, accumulation_steps / jnp.maximum(good, 1).astype(jnp.float32)
            is_full, is_whole = seen >= accumulation_steps, good == seen
            applies = is_full & (is_whole if drop == "window" else good > 0)
            finite, counts = (is_whole, is_full) if drop == "window" else (finite, counts)
            window = Window(total, seen, good, applies)
            window = select(is_full, optax.tree.zeros_like(window), window)
            if needs_norm:
                norm_of_mean = lambda: _gradients.global_norm(total, factor, skip=way).astype(jnp.float32)  # noqa: E731
                norm = _gradients.choose(applies, norm_of_mean, lambda: jnp.float32(jnp.inf), way)

        everywhere: Any = None if guard is None else _gradients.total_norm(norm, axis_name).astype(jnp.float32)
        applies, after, guard_state = decide(
            policy, guard, scale_state, guard_state, finite, everywhere, proposed=applies, xp=jnp
        )
        window = None if window is None else window._replace(stepped=applies)

        def step(source: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            unscaled = multiply(source, factor)
            if max_norm is not None:
                # The largest number stands for a norm beyond it.
                known = jnp.where(norm < jnp.finfo(norm.dtype).max, norm, jnp.inf)
                unscaled = multiply(unscaled, 1.0 / clip_divisor(known, max_norm, xp=jnp))
            unscaled = optax.tree.cast_like(unscaled, grads) if keep_dtypes else unscaled
            updates, inner_state = inner_update(unscaled, inner_state, widened(params), **extra_args)
            return result_of(updates), inner_state

        def skipped(applied: Any, source: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
            return jax.tree.map(_fitting, unchanged(source), applied[0]), jax.tree.map(_cast, inner_state, applied[1])

        if way == "cond" and isinstance(applies, jax.core.Tracer):
            step = jax.jit(step, inline=True)  # traced once, for its shapes and in the conditional
            skipped = functools.partial(skipped, jax.eval_shape(step, source, inner_state))
            result, inner_state = lax.cond(applies, step, skipped, source, inner_state)
        else:  # with zeros for a line search, a host callback or checks, which would otherwise act on NaN
            harmless = map_gradients(lambda leaf: jnp.where(applies, leaf, jnp.zeros_like(leaf)), source)
            applied = step(harmless, inner_state)
            result, inner_state = select(applies, applied, skipped(applied, source, inner_state))
        scale_state = select(counts, after, scale_state)
        return result, applies, LossScaledState(scale_state, inner_state, window, guard_state)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        # XLA lets a conditional reuse the memory of an operand only if one branch returns it unchanged. So a skip
        # returns gradients, the updates take their memory, and the select drops them; XLA fuses it into the addition.
        kept = lambda source: updates if accumulates else source  # noqa: E731
        result, applies, state = take(updates, state, params, extra_args, lambda result: result, kept)
        # -0.0, and not 0.0, also keeps the signs of zeros.
        nothing = lambda leaf: lax.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0)  # noqa: E731
        return select(applies, result, jax.tree.map(nothing, result)), state

    def apply_gradients(grads: Any, state: Any, params: Any, **extra_args: Any) -> Any:
        # In float32, since `apply_updates` promotes half-precision parameters, which JAX's strict promotion refuses.
        added = lambda updates: optax.tree.cast_like(optax.apply_updates(lifted(params), updates), params)  # noqa: E731
        result, _, state = take(grads, state, params, extra_args, added, lambda source: params)
        return result, state

    update.apply_gradients, update.policy = apply_gradients, policy  # type: ignore[attr-defined]
    return LossScaledTransformation(init, update)


def _fitting(leaf: Any, like: Any) -> Any:
    """Return `leaf` in the dtype and with the varying axes of `like`; zeros for an optimizer that reduces gradients."""
    fits = jnp.shape(leaf) == jnp.shape(like) and not _gradients.varying(leaf) - _gradients.varying(like)
    return _cast(leaf if fits else jnp.zeros(jnp.shape(like), jnp.result_type(like)), like)


def _cast(leaf: Any, like: Any) -> Any:
    """Return `leaf` in the dtype and with the varying axes of `like`."""
    leaf = leaf if jnp.result_type(leaf) == jnp.result_type(like) else leaf.astype(jnp.result_type(like))
    return _gradients.vary(leaf, _gradients.varying(like))

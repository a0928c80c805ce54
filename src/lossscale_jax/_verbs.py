"""The five verbs: pure functions of pytrees, correct under every transform; and the report on an overflow."""

from collections.abc import Hashable
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding
from jax.typing import ArrayLike

from lossscale_core import PolicyLike, ScaleState, as_policy
from lossscale_core.adapters import GradientReport, OverflowReport
from lossscale_jax._gradients import (
    PyTree,
    Tree,
    each_finite,
    everywhere,
    gradients_of,
    is_array,
    map_gradients,
    name_of,
    real_parts,
    times,
)


class HasLossScale(Protocol):
    """The part of a policy's state that scaling and unscaling need."""

    @property
    def loss_scale(self) -> Any:
        """float32, shape `()`."""


def loss_scale_of(state: HasLossScale, call: str) -> Array:
    """Return the loss scale of `state`; raise `TypeError` that shows the `call` if `state` is not a state."""
    if hasattr(state, "loss_scale"):
        return jnp.asarray(state.loss_scale)
    raise TypeError(
        f"{type(state).__name__} is not a scale state, since it has no loss_scale; call {call}, with a state that "
        "init_state or get_scale_state(opt_state) returned"
    )


def init_state(policy: PolicyLike, *, device: jax.Device | Sharding | None = None) -> ScaleState:
    """Return the state before the first step under `policy`.

    The leaves are strongly typed and stay so, so that a step is compiled once. Does not synchronise with the host.

    Args:
        policy: Anything that `lossscale_core.as_policy` accepts.
        device: Where to place the state; by default, JAX's default device.

    Returns:
        The policy's state, a NamedTuple of float32 and int32 arrays of shape `()`, and so a pytree.

    Raises:
        PolicyError: `policy` is not a policy.
    """

    def place(value: Any) -> Array:
        dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else jnp.int32)
        return jnp.asarray(value, dtype, device=device)

    state: ScaleState = jax.tree.map(place, as_policy(policy).init_state())
    return state


@overload
def scale(loss: ArrayLike, state: HasLossScale) -> Array: ...
@overload
def scale(loss: Tree, state: HasLossScale) -> Tree: ...
def scale(loss: Any, state: HasLossScale) -> Any:
    """Multiply `loss` by the loss scale: differentiate the result.

    Everything below float32 is converted to it first, because a scale of 2**16 is infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and float dtype, real or complex, a Python float, or a pytree of them.
        state: The scale state; with `loss_scaled`, `get_scale_state(opt_state)`.

    Returns:
        The scaled loss, in float32 or wider, in the structure of `loss`.

    Raises:
        TypeError: A leaf of `loss` is not a float, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")

    def scaled(leaf: Any) -> Array:
        if isinstance(leaf, str | bytes):  # JAX would read it as the name of a dtype
            raise TypeError(f"the loss {leaf!r} is not a number; pass what the model computes")
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.inexact):  # its gradients would be zeros, and so finite
            raise TypeError(f"a loss of dtype {array.dtype} is not a number with a gradient; pass a loss in float32")
        return times(array, loss_scale)

    return jax.tree.map(scaled, loss)


def all_finite(grads: PyTree, *, axis_name: Hashable = None) -> Array:
    """Return whether every gradient element is finite.

    The check is exact: large finite values are never flagged. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays of any float or complex dtype. Integer leaves do not count; a pytree without
            gradients is finite.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of them, over which to combine the flag.
            Arrays that are sharded under `jit` need none.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is not an array.
    """
    return everywhere(each_finite(grads), axis_name)


def unscale(grads: Tree, state: HasLossScale) -> Tree:
    """Divide `grads` by the loss scale.

    Multiplies by the reciprocal of the scale, which is always a normal float32. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays, such as `jax.grad` of the scaled loss returns.
        state: The state that scaled the loss, not the one after `policy.update`.

    Returns:
        The gradients: float16 and bfloat16 leaves in float32, others in their own dtype, integer leaves as they are.

    Raises:
        TypeError: A leaf is not an array, or `state` is not a state.
    """
    # XLA fuses a product into the operation that reads it, but would store a quotient first.
    factor = 1.0 / loss_scale_of(state, "unscale(grads, state)")
    return map_gradients(lambda leaf: times(leaf, factor), grads)


def select(grads_finite: ArrayLike, new: Tree, old: Tree) -> Tree:
    """Return `new` if `grads_finite`, else `old`: a step is applied completely or not at all.

    Pass everything that a skipped step must not change in one call: parameters, optimizer state, batch statistics,
    averages, step counters, PRNG keys. Does not synchronise with the host.

    Args:
        grads_finite: A bool array of shape `()`; or a Python bool, which returns the leaves of one side unchanged.
        new: The pytree after the step.
        old: The pytree before the step. Leaves that are not arrays, such as an activation function, must be equal.

    Returns:
        One of the two pytrees, leaf by leaf.

    Raises:
        TypeError: `grads_finite` is not a flag, but for example a pytree.
        ValueError: Structures, shapes, dtypes or leaves that are not arrays differ, or the flag has a shape.
    """
    if not is_array(grads_finite) or jnp.result_type(grads_finite) != jnp.bool_:
        kind = f"{grads_finite.dtype}" if hasattr(grads_finite, "dtype") else f"a {type(grads_finite).__name__}"
        raise TypeError(
            f"grads_finite is {kind}; call select(grads_finite, new, old), one flag first, a bool as all_finite returns"
        )
    if jnp.shape(grads_finite) != ():
        raise ValueError(f"grads_finite has shape {jnp.shape(grads_finite)}; pass one flag, of shape ()")

    def chosen(path: Any, a: Any, b: Any) -> Any:
        if not (is_array(a) and is_array(b)):
            if a is b or (not is_array(a) and not is_array(b) and a == b):
                return a
            raise ValueError(
                f"{name_of(path)} is {a!r} in new and {b!r} in old; a leaf that is not an array must not change"
            )
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"{name_of(path)} has shape {jnp.shape(a)} in new and {jnp.shape(b)} in old; pass two trees of the "
                "same shapes"
            )
        if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype:
            raise ValueError(f"{name_of(path)} is {a.dtype} in new and {b.dtype} in old; cast one of them")
        if isinstance(grads_finite, bool):
            return a if grads_finite else b
        return jnp.where(grads_finite, a, b)

    return jax.tree_util.tree_map_with_path(chosen, new, old)


def overflow_report(grads: PyTree, *, loss: Array | float | None = None) -> OverflowReport:
    """Report on each leaf that holds NaN or infinity, and on the cause.

    Call it with the gradients of a skipped step, outside of `jit`. Reads every gradient and synchronises with the host.

    Args:
        grads: A pytree of arrays.
        loss: The loss of the step, unscaled. It shows the cause. Gradients alone do not, since an overflow of the
            backward pass may leave NaN and no infinity.

    Returns:
        A list of `GradientReport`, one for each such leaf, named by its path in the pytree; empty where nothing
            overflowed. Its `verdict` says "finite loss: a smaller loss scale fixes this" or "the loss itself is not
            finite".

    Raises:
        TypeError: A leaf is not an array, or is traced: the call is within a compiled function.
    """
    leaves = gradients_of(grads)
    if any(isinstance(each, jax.core.Tracer) for each in (*leaves.values(), loss)):
        raise TypeError(
            "the gradients or the loss are traced, and have no values while a function is compiled; return them from "
            "the compiled function, and call overflow_report(grads, loss=loss) outside of it"
        )
    reports = []
    for path, leaf in leaves.items():
        if not bool(jnp.isfinite(leaf).all()):
            parts = jnp.stack(real_parts(leaf))
            nan, above, below = (int(count(parts).sum()) for count in (jnp.isnan, jnp.isposinf, jnp.isneginf))
            largest = jnp.where(jnp.isfinite(parts), jnp.abs(parts), 0.0).max()
            reports.append(GradientReport(name_of(path), nan, above, below, float(largest)))
    return OverflowReport(reports, loss_finite=None if loss is None else bool(all_finite(loss)))

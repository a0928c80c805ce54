"""The five verbs: pure functions of pytrees, right under every transform."""

import functools
from collections.abc import Hashable
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding
from jax.typing import ArrayLike

from lossscale_core import PolicyLike, ScaleState, TolerantScaleState, TolerantScaling, as_policy
from lossscale_jax import _axes
from lossscale_jax._arguments import loss_scale_of
from lossscale_jax._debug import unchecked
from lossscale_jax._gradients import finite_when_unscaled, is_array, multiply, name_of, times
from lossscale_jax._types import HasLossScale, PyTree, Tree


@overload
def init_state(policy: TolerantScaling, *, device: jax.Device | Sharding | None = None) -> TolerantScaleState: ...
@overload
def init_state(policy: PolicyLike, *, device: jax.Device | Sharding | None = None) -> ScaleState: ...
def init_state(policy: PolicyLike, *, device: jax.Device | Sharding | None = None) -> Any:
    """Return the state before the first step under `policy`.

    The leaves are strongly typed and stay so: one compilation serves the whole run. Does not synchronise with the host.

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

    return jax.tree.map(place, as_policy(policy).init_state())


@overload
def scale(loss: ArrayLike, state: HasLossScale) -> Array: ...
@overload
def scale(loss: Tree, state: HasLossScale) -> Tree: ...
def scale(loss: Any, state: HasLossScale) -> Any:
    """Multiply `loss` by the loss scale: differentiate the result.

    Everything below float32 is lifted to it first, since a scale of 2**16 is already infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and numeric dtype, a Python number, or a pytree of them.
        state: The scale state; with `loss_scaled`, `get_scale_state(opt_state)`.

    Returns:
        The scaled loss, in float32 or wider, in the structure of `loss`.

    Raises:
        TypeError: A leaf of `loss` is not a number, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")
    return jax.tree.map(lambda leaf: times(_number(leaf), jnp.asarray(loss_scale)), loss)


def all_finite(grads: PyTree, *, axis_name: Hashable = None) -> Array:
    """Return whether every gradient element is finite.

    The check is exact: large finite values are never flagged. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays of any float or complex dtype. Integer leaves do not count; the duplicates of sparse
            (BCOO) leaves are summed first; a pytree without gradients is finite.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of them, over which to combine the flag.
            Arrays that are sharded under `jit` need none.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is not an array.
    """
    return _axes.all_true(finite_when_unscaled(grads, None), axis_name)


@unchecked
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
    # XLA fuses a product into what reads it, and would store a quotient first.
    return multiply(grads, 1.0 / jnp.asarray(loss_scale_of(state, "unscale(grads, state)")))


def select(grads_finite: ArrayLike, new: Tree, old: Tree) -> Tree:
    """Return `new` where `grads_finite`, else `old`: a step is applied as a whole or not at all.

    Pass everything that a skipped step must not change in one call: parameters, optimizer state, batch statistics,
    averages, step counters, PRNG keys. Does not synchronise with the host.

    Args:
        grads_finite: A bool array of shape `()`; or a Python bool, which picks the leaves of one side untouched.
        new: The pytree after the step.
        old: The pytree before the step. Leaves that are not arrays, such as an activation function, must be equal.

    Returns:
        One of the two pytrees, leaf by leaf.

    Raises:
        TypeError: `grads_finite` is not a flag, such as a pytree in its place.
        ValueError: Structures, shapes, dtypes or leaves that are not arrays differ, or the flag has a shape.
    """
    if not is_array(grads_finite):
        raise TypeError(
            f"grads_finite is a {type(grads_finite).__name__}; call select(grads_finite, new, old), one flag first"
        )
    if jnp.shape(grads_finite) != ():
        raise ValueError(f"grads_finite has shape {jnp.shape(grads_finite)}; pass one flag, of shape ()")
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, grads_finite), new, old)


def _select_leaf(grads_finite: ArrayLike, path: Any, new: Any, old: Any) -> Any:
    if not (is_array(new) and is_array(old)):
        is_neither = not (is_array(new) or is_array(old))  # an array would be compared element by element
        if new is old or (is_neither and new == old):
            return new
        raise ValueError(
            f"{name_of(path)} is {new!r} in new and {old!r} in old; a leaf that is not an array must not change"
        )
    if jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"{name_of(path)} has shape {jnp.shape(new)} in new and {jnp.shape(old)} in old; "
            "pass two trees of the same shapes"
        )
    if hasattr(new, "dtype") and hasattr(old, "dtype") and new.dtype != old.dtype:
        raise ValueError(f"{name_of(path)} is {new.dtype} in new and {old.dtype} in old; cast one of them")
    if isinstance(grads_finite, bool):
        return new if grads_finite else old
    return jnp.where(grads_finite, new, old)


def _number(leaf: Any) -> Array:
    if isinstance(leaf, str | bytes):  # JAX would take it for the name of a dtype
        raise TypeError(f"the loss {leaf!r} is not a number; pass what the model computes")
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"a loss of dtype {array.dtype} is not a number; pass what the model computes, not a PRNG key")
    return array

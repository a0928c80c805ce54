"""Scale, check, unscale and select: pure functions of pytrees, right under every transform."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import unchecked

_EXPONENT_OF_FLOAT16 = 0x7C00


def scale(loss: Any, state: Any) -> Any:
    """Return `loss` times the loss scale: what to differentiate.

    `loss` is an array of any shape and numeric dtype, a Python number, or a pytree of them. Everything below float32 is
    lifted to it first, since a scale of 2**16 is already infinite in float16. Does not synchronise. Raises `TypeError`
    for what is not a number.
    """
    return jax.tree.map(lambda leaf: _times(_number(leaf), jnp.asarray(state.loss_scale)), loss)


def all_finite(grads: Any, *, axis_name: Any = None) -> Array:
    """Return whether every gradient element is finite, as a bool array of shape `()`.

    `grads` is a pytree of arrays of any float or complex dtype; integer leaves do not count, duplicates of sparse
    (BCOO) ones are summed first, and nothing at all is finite. With `axis_name` (one or a tuple) the flag is combined
    over these axes of `shard_map`, `pmap` or `vmap`; arrays sharded under `jit` need none. Exact: large finite values
    are never flagged. Does not synchronise.
    """
    return _axes.all_true(finite_when_unscaled(grads, None), axis_name)


@unchecked
def unscale(grads: Any, state: Any) -> Any:
    """Return `grads` divided by the loss scale, that is multiplied by its reciprocal, which is always a normal float32.

    float16 and bfloat16 leaves come back in float32, others in their own dtype; integer leaves pass through. Does not
    synchronise.
    """
    return multiplied(grads, 1.0 / jnp.asarray(state.loss_scale))  # XLA fuses a product where it would store a quotient


def select(grads_finite: Any, new: Any, old: Any) -> Any:
    """Return `new` where `grads_finite`, else `old`: a step is applied as a whole or not at all.

    `new` and `old` are pytrees alike: parameters, optimizer state, batch statistics, averages, step counters, PRNG
    keys, together in one call. Leaves that are no arrays (an activation function) must be equal. `grads_finite` is a
    bool array of shape `()`, and nothing synchronises; or a Python bool, which picks the leaves of one side untouched.
    Raises `ValueError` where structures, shapes, dtypes or such leaves differ, or the flag is not one.
    """
    if jnp.shape(grads_finite) != ():
        raise ValueError(f"grads_finite has shape {jnp.shape(grads_finite)}; pass one flag, of shape ()")
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, grads_finite), new, old)


def _select_leaf(grads_finite: Any, path: Any, new: Any, old: Any) -> Any:
    if not (_is_array(new) and _is_array(old)):
        if new is old or new == old:
            return new
        raise ValueError(f"{_name(path)} is {new!r} in new and {old!r} in old; a leaf that is no array must not change")
    if jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"{_name(path)} has shape {jnp.shape(new)} in new and {jnp.shape(old)} in old; pass two trees of one shape"
        )
    if hasattr(new, "dtype") and hasattr(old, "dtype") and new.dtype != old.dtype:
        raise ValueError(f"{_name(path)} is {new.dtype} in new and {old.dtype} in old; cast one of them")
    if isinstance(grads_finite, bool):
        return new if grads_finite else old
    return jnp.where(grads_finite, new, old)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats, real or complex; raise `TypeError` for what is no array at all."""
    if not _is_array(leaf):
        raise TypeError(f"{leaf!r} is no array; pass a pytree of arrays, such as jax.grad returns")
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


@unchecked
def finite_when_unscaled(grads: Any, loss_scale: Array | None, keep_dtypes: bool = False) -> Array:
    """Return whether every element is finite, and stays so when unscaled in float32 or wider, or in its own dtype.

    bfloat16 and float32 or wider are proven finite by their sum of squares, which costs one read at memory speed; only
    where that is not finite itself, or the scale is below 1, is every element looked at. float16 has no cheaper way.
    """
    leaves = gradient_leaves(grads)
    return (_all_finite if is_traced(leaves, loss_scale) else _all_finite_at_once)(leaves, loss_scale, keep_dtypes)


def is_traced(leaves: list[Array], loss_scale: Any) -> bool:
    """Return whether any of these arrays stands for a value that is not there yet."""
    return any(isinstance(each, jax.core.Tracer) for each in (*leaves, loss_scale))


def _all_finite(leaves: list[Array], loss_scale: Array | None, keep_dtypes: bool) -> Array:
    summed = [leaf for leaf in leaves if leaf.dtype != jnp.float16]
    proven = each_element_finite([leaf for leaf in leaves if leaf.dtype == jnp.float16])
    if summed:
        proven &= jnp.isfinite(sum_of_squares(summed))
    elif loss_scale is None:
        return proven
    if loss_scale is not None:
        proven &= loss_scale >= 1.0
    known = _axes.varying_as(jnp.asarray(True), (leaves, loss_scale))
    exact = functools.partial(each_element_finite, loss_scale=loss_scale, keep_dtypes=keep_dtypes)
    return lax.cond(proven, lambda _: known, exact, leaves)


_all_finite_at_once = jax.jit(_all_finite, static_argnums=2)  # eagerly, `cond` would be compiled anew at every call


def each_element_finite(arrays: list[Array], loss_scale: Array | None = None, keep_dtypes: bool = False) -> Array:
    """Look at every element, one by one: on a CPU, XLA's min and max may lose a NaN."""
    flags = []
    for array in arrays:
        if loss_scale is not None:
            unscaled = _times(array, 1.0 / loss_scale)
            array = unscaled.astype(array.dtype) if keep_dtypes else unscaled
        if array.dtype == jnp.float16:  # compared as integers: an exponent of ones is an infinity or a NaN
            bits = lax.bitcast_convert_type(array, jnp.uint16)
            flags.append((bits & _EXPONENT_OF_FLOAT16 != _EXPONENT_OF_FLOAT16).all())
        else:
            flags.append(jnp.isfinite(array).all())
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def sum_of_squares(arrays: list[Array]) -> Any:
    """Return the sum of the squared magnitudes of real or complex arrays, in float32 or wider."""
    squares = [_squared(part) for array in arrays for part in real_parts(lifted(array))]
    widest = jnp.float64 if any(square.dtype == jnp.float64 for square in squares) else jnp.float32
    return sum(square.astype(widest) for square in squares)


def _squared(array: Array) -> Array:
    """Return an array's product with itself: read at memory speed on a CPU, and no reshape to upset a sharding."""
    if _axes.is_sharded_in_type(array):  # where JAX would ask how to shard the product, a scalar
        return jnp.sum(jnp.square(array))
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


def real_parts(array: Array) -> tuple[Array, ...]:
    """Return a complex array's real and imaginary part, or a real one alone."""
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def gradient_leaves(grads: Any) -> list[Array]:
    """Return the leaves that hold floats; the duplicates of sparse ones are summed."""
    return [leaf for _, leaf in named_gradients(grads)]


def named_gradients(grads: Any) -> list[tuple[str, Array]]:
    """Return the same leaves with their paths."""
    sparse = sys.modules.get("jax.experimental.sparse")  # who has not imported it has none
    kinds = () if sparse is None else (sparse.BCOO,)
    named = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda node: isinstance(node, kinds))
    summed = [
        (path, leaf.sum_duplicates(nse=leaf.nse).data if isinstance(leaf, kinds) else leaf) for path, leaf in named
    ]
    return [(_name(path), jnp.asarray(leaf)) for path, leaf in summed if is_gradient(leaf) and jnp.size(leaf)]


def multiplied(grads: Any, factor: Array | None) -> Any:
    """Return gradients times a factor of shape `()`, in float32 or wider; None is a factor of 1."""
    if factor is None:
        return grads
    return jax.tree.map(lambda leaf: _times(jnp.asarray(leaf), factor) if is_gradient(leaf) else leaf, grads)


def cast_to(grads: Any, like: Any) -> Any:
    """Return gradients in the dtypes of those in `like`."""
    return jax.tree.map(
        lambda leaf, other: leaf.astype(jnp.result_type(other)) if is_gradient(other) else leaf, grads, like
    )


def lifted_leaves(tree: Any) -> Any:
    """Return a pytree with its floats in float32 or wider, as unscaled gradients are."""
    return jax.tree.map(lambda leaf: lifted(jnp.asarray(leaf)) if is_gradient(leaf) else leaf, tree)


def lifted(array: Array) -> Array:
    """Return `array` in float32, or in its own dtype where that is wider."""
    if jnp.issubdtype(array.dtype, jnp.inexact) and jnp.finfo(array.dtype).bits >= 32:
        return array
    return array.astype(jnp.float32)


def _times(array: Array, factor: Array) -> Array:
    wide = lifted(array)
    return wide * factor.astype(wide.dtype)


def _number(leaf: Any) -> Array:
    if isinstance(leaf, str | bytes):  # which JAX would take for the name of a dtype
        raise TypeError(f"the loss {leaf!r} is not a number; pass what the model computes")
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"a loss of dtype {array.dtype} is not a number; pass what the model computes, not a PRNG key")
    return array


def _is_array(leaf: Any) -> bool:
    return (hasattr(leaf, "dtype") and not isinstance(leaf, type)) or isinstance(leaf, bool | int | float | complex)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the leaf"

"""A pytree of gradients: its leaves, in which dtype to compute with them, and whether they are finite."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import unchecked
from lossscale_jax._types import PyTree, Tree

_EXPONENT_OF_FLOAT16 = 0x7C00


@unchecked
def finite_when_unscaled(
    grads: PyTree, loss_scale: Array | None, keep_dtypes: bool = False, branches: bool = True
) -> Array:
    """Return whether every element is finite, and stays so when unscaled in float32 or wider, or in its own dtype.

    All but float16 are proven finite by their sum of squares, which costs one read at memory speed; only where that is
    not finite itself, or the scale is below 1, is every element looked at. Without `branches` every element is looked
    at once, and there is no conditional.
    """
    leaves = gradient_leaves(grads)
    check = _all_finite if is_traced(leaves, loss_scale) else _all_finite_at_once
    return check(leaves, loss_scale, keep_dtypes, branches)


def _all_finite(leaves: list[Array], loss_scale: Array | None, keep_dtypes: bool, branches: bool) -> Array:
    if not branches:
        return each_element_finite(leaves, loss_scale, keep_dtypes)
    # To square float16 on a CPU takes a conversion of each element: twice the time of `isfinite`, as measured.
    summed = [leaf for leaf in leaves if leaf.dtype != jnp.float16]
    proven = each_element_finite([leaf for leaf in leaves if leaf.dtype == jnp.float16])
    if summed:
        proven &= jnp.isfinite(sum_of_squares(summed))
    elif loss_scale is None:
        return proven
    if loss_scale is not None:  # below 1, a finite gradient may overflow as it is unscaled
        proven &= loss_scale >= 1.0
    known = _axes.varying_as(jnp.asarray(True), (leaves, loss_scale))
    exact = functools.partial(each_element_finite, loss_scale=loss_scale, keep_dtypes=keep_dtypes)
    return lax.cond(proven, lambda _: known, exact, leaves)


# Eagerly, `cond` would be compiled again at every call.
_all_finite_at_once = jax.jit(_all_finite, static_argnums=(2, 3))


def each_element_finite(arrays: list[Array], loss_scale: Array | None = None, keep_dtypes: bool = False) -> Array:
    """Return whether every element is finite, by a test of each."""
    # Not by the least and the largest, which may lose a NaN in XLA on a CPU.
    flags = []
    for array in arrays:
        if loss_scale is not None:
            unscaled = times(array, 1.0 / loss_scale)
            array = unscaled.astype(array.dtype) if keep_dtypes else unscaled
        if array.dtype == jnp.float16:  # compared as integers: an exponent of ones is an infinity or a NaN
            bits = lax.bitcast_convert_type(array, jnp.uint16)
            flags.append((bits & _EXPONENT_OF_FLOAT16 != _EXPONENT_OF_FLOAT16).all())
        else:
            flags.append(jnp.isfinite(array).all())
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def sum_of_squares(arrays: Sequence[Array]) -> Array:
    """Return the sum of the squared magnitudes of one or more arrays, real or complex, in float32 or wider."""
    squares = [_squared(part) for array in arrays for part in real_parts(lift(array))]
    widest = jnp.float64 if any(square.dtype == jnp.float64 for square in squares) else jnp.float32
    return functools.reduce(jnp.add, (square.astype(widest) for square in squares))


def _squared(array: Array) -> Array:
    """Return the sum of an array's squares."""
    if _axes.is_sharded_in_type(array):  # JAX would ask how to shard the product, which is a scalar
        return jnp.sum(jnp.square(array))
    # XLA reads a product over all axes at memory speed on a CPU, and no reshape upsets a sharding. By default a TPU
    # would multiply in bfloat16, and a GPU may in TensorFloat-32.
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


def real_parts(array: Array) -> tuple[Array, ...]:
    """Return a complex array's real and imaginary part, or a real array alone."""
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def is_traced(leaves: list[Array], loss_scale: Any) -> bool:
    """Return whether any of these arrays stands for a value that is not there yet."""
    return any(isinstance(each, jax.core.Tracer) for each in (*leaves, loss_scale))


def gradient_leaves(grads: PyTree) -> list[Array]:
    """Return the leaves that hold floats; the duplicates of sparse ones are summed."""
    return [leaf for _, leaf in named_gradients(grads)]


def named_gradients(grads: PyTree) -> list[tuple[str, Array]]:
    """Return the leaves that hold floats with their paths; the duplicates of sparse ones are summed."""
    sparse = sys.modules.get("jax.experimental.sparse")  # no gradient is sparse before somebody imports it
    kinds = () if sparse is None else (sparse.BCOO,)
    named = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda node: isinstance(node, kinds))
    summed = [
        (path, leaf.sum_duplicates(nse=leaf.nse).data if isinstance(leaf, kinds) else leaf) for path, leaf in named
    ]
    return [(name_of(path), jnp.asarray(leaf)) for path, leaf in summed if is_gradient(leaf) and jnp.size(leaf)]


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats, real or complex; raise `TypeError` where it is not an array."""
    if not is_array(leaf):
        raise TypeError(f"{leaf!r} is not an array; pass a pytree of arrays, such as jax.grad returns")
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array or a Python number."""
    return (hasattr(leaf, "dtype") and not isinstance(leaf, type)) or isinstance(leaf, bool | int | float | complex)


def name_of(path: Any) -> str:
    """Return a leaf's path in words for a message."""
    return jax.tree_util.keystr(path) or "the leaf"


def multiply(grads: Tree, factor: Array) -> Tree:
    """Return gradients times a factor of shape `()`, in float32 or wider."""
    return map_gradients(lambda leaf: times(leaf, factor), grads)


def lift_leaves(tree: Tree) -> Tree:
    """Return a pytree with its floats in float32 or wider, as unscaled gradients are."""
    return map_gradients(lift, tree)


def map_gradients(function: Any, tree: Tree) -> Tree:
    """Return a pytree with `function` applied to the leaves that hold floats."""
    return jax.tree.map(lambda leaf: function(jnp.asarray(leaf)) if is_gradient(leaf) else leaf, tree)


def times(array: Array, factor: Array) -> Array:
    """Return an array times a factor of shape `()`, in float32 or wider."""
    wide = lift(array)
    return wide * factor.astype(wide.dtype)


def lift(array: Array) -> Array:
    """Return `array` in float32, or in its own dtype where that is wider."""
    if jnp.issubdtype(array.dtype, jnp.inexact) and jnp.finfo(array.dtype).bits >= 32:
        return array
    return array.astype(jnp.float32)

"""The leaves of pytrees: tests for gradients, names for messages, and the dtype for computations."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_jax._types import PyTree, Tree


def gradient_leaves(grads: PyTree) -> list[Array]:
    """Return the leaves that hold floats; duplicates in sparse leaves are summed."""
    return [leaf for _, leaf in _gradients_with_paths(grads)]


def named_gradients(grads: PyTree) -> list[tuple[str, Array]]:
    """Return the paths and leaves of those that hold floats; duplicates in sparse leaves are summed."""
    return [(name_of(path), leaf) for path, leaf in _gradients_with_paths(grads)]


def _gradients_with_paths(grads: PyTree) -> list[tuple[Any, Array]]:
    sparse = sys.modules.get("jax.experimental.sparse")  # no gradient is sparse before this module is imported
    kinds = () if sparse is None else (sparse.BCOO,)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda node: isinstance(node, kinds)):
        values = leaf.sum_duplicates(nse=leaf.nse).data if isinstance(leaf, kinds) else leaf
        if is_gradient(values) and jnp.size(values):
            found.append((path, jnp.asarray(values)))
    return found


def is_traced(leaves: list[Array], loss_scale: Any) -> bool:
    """Return whether any of these arrays is a tracer, which has no value yet."""
    return any(isinstance(each, jax.core.Tracer) for each in (*leaves, loss_scale))


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats, real or complex; raise `TypeError` if it is not an array."""
    if not is_array(leaf):
        raise TypeError(f"{leaf!r} is not an array; pass a pytree of arrays, such as jax.grad returns")
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array or a Python number."""
    return (hasattr(leaf, "dtype") and not isinstance(leaf, type)) or isinstance(leaf, bool | int | float | complex)


def name_of(path: Any) -> str:
    """Return a leaf's path as text for a message."""
    return jax.tree_util.keystr(path) or "the leaf"


def map_gradients(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """Return a pytree with `function` applied to the leaves that hold floats."""

    def mapped(leaf: Any) -> Any:
        return function(jnp.asarray(leaf)) if is_gradient(leaf) else leaf

    return jax.tree.map(mapped, tree)


def multiply(grads: Tree, factor: Array) -> Tree:
    """Return gradients times a factor of shape `()`, in float32 or wider."""
    return map_gradients(lambda leaf: times(leaf, factor), grads)


def times(array: Array, factor: Array) -> Array:
    """Return an array times a factor of shape `()`, in float32 or wider."""
    wide = lift(array)
    return wide * factor.astype(wide.dtype)


def lift_leaves(tree: Tree) -> Tree:
    """Return a pytree with its floats in float32 or wider, as unscaled gradients are."""
    return map_gradients(lift, tree)


def lift(array: Array) -> Array:
    """Return `array` in float32, or in its own dtype if that is wider."""
    if jnp.issubdtype(array.dtype, jnp.inexact) and jnp.finfo(array.dtype).bits >= 32:
        return array
    return array.astype(jnp.float32)


def real_parts(array: Array) -> tuple[Array, ...]:
    """Return a complex array's real and imaginary part, or a real array alone."""
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)

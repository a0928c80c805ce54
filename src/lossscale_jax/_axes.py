"""Named axes of `shard_map`, `pmap` and `vmap`: combining over them, and what `shard_map` tracks of them."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax._types import PyTree, Tree
from lossscale_jax._versions import vary, varying_axes


def all_true(flag: Array, axis_name: Hashable) -> Array:
    """Return whether `flag` is true everywhere along `axis_name`, or `flag` itself where that is None."""
    if axis_name is None:
        return flag
    return lax.pmin(flag.astype(jnp.int32), axis_name) == 1


def total_norm(norm: Array, axis_name: Hashable) -> Array:
    """Return the 2-norm over all devices along `axis_name`, given the norm of each device; `norm` itself for None."""
    if axis_name is None:
        return norm
    largest = lax.pmax(norm, axis_name)
    share = norm / jnp.where((largest > 0.0) & jnp.isfinite(largest), largest, 1.0)  # so that no square overflows
    return largest * jnp.sqrt(lax.psum(share * share, axis_name))


def matching(x: Tree, like: PyTree) -> Tree:
    """Return the pytree `x` in the dtypes and marked as varying over the axes of `like`, leaf by leaf."""

    def cast(leaf: Any, other: Any) -> Any:
        dtype = jnp.result_type(other)
        return leaf if jnp.result_type(leaf) == dtype else leaf.astype(dtype)

    def varied(leaf: Any, other: Any) -> Any:
        return _vary(leaf, _varying_axes(other))

    x = jax.tree.map(cast, x, like)
    return jax.tree.map(varied, x, like) if _manual_axes() else x


def zeros_where_unlike(x: Tree, like: PyTree) -> Tree:
    """Return the pytree `x`, but zeros for a leaf of another shape than in `like`, or that varies over more axes."""

    def fitting(leaf: Any, other: Any) -> Any:
        fits = jnp.shape(leaf) == jnp.shape(other) and not _varying_axes(leaf) - _varying_axes(other)
        return leaf if fits else jnp.zeros(jnp.shape(other), jnp.result_type(leaf))

    return jax.tree.map(fitting, x, like)


def vary_over(x: Tree, axis_name: Hashable) -> Tree:
    """Return the pytree `x` marked as varying over `axis_name`, so that JAX does not reduce its gradient."""
    axes = _manual_axes().intersection(axis_name if isinstance(axis_name, tuple) else (axis_name,))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), x)


def _vary(leaf: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _varying_axes(leaf)))
    return vary(leaf, missing) if missing else leaf


def _manual_axes() -> frozenset[str]:
    """Return the axes of the `shard_map` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _varying_axes(x: PyTree) -> frozenset[str]:
    """Return the mesh axes over which a leaf varies for `shard_map`; none without `check_vma`."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(x) if _manual_axes() else ():
        axes |= varying_axes(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf))
    return axes


def is_sharded_in_type(array: Array) -> bool:
    """Return whether the type of `array` says how it is sharded, as with a mesh of explicit axes."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)


def require_reduced(decisive: PyTree, shared: PyTree, advice: str, what: str = "gradients") -> None:
    """Raise `ValueError` if devices of `shard_map` with the same `shared` may have different values in `decisive`.

    `advice` says what to do; `{names}` in it is replaced by the axes. `what` names that from which `decisive` is made.
    """
    axes = sorted(_varying_axes(decisive) - _varying_axes(shared))
    if axes:
        raise ValueError(
            f"the {what} differ along mesh axis {', '.join(map(repr, axes))} while the loss scale is shared, so "
            f"devices would decide differently; {advice.format(names=repr(axes[0] if len(axes) == 1 else tuple(axes)))}"
        )

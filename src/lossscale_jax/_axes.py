"""Named axes of `shard_map`, `pmap` and `vmap`: combining over them, and what `shard_map` tracks of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def all_true(flag: Array, axis_name: Any) -> Array:
    """Return whether `flag` is true everywhere along `axis_name`; as it is where that is None."""
    if axis_name is None:
        return flag
    return lax.pmin(flag.astype(jnp.int32), axis_name) == 1


def varying_as(x: Any, like: Any) -> Any:
    """Return the pytree `x` marked as varying over every axis over which a leaf of `like` does."""
    axes: frozenset[str] = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), x)


def matching(x: Any, like: Any) -> Any:
    """Return the pytree `x` in the dtypes and marked as varying over the axes of `like`, leaf by leaf."""
    return jax.tree.map(lambda leaf, other: _vary(_of_dtype(leaf, other), varying_axes(other)), x, like)


def vary_over(x: Any, axis_name: Any) -> Any:
    """Return the pytree `x` marked as varying over `axis_name`, so that nothing reduces its gradient unasked."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axes = frozenset(names).intersection(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.tree.map(lambda leaf: _vary(leaf, axes), x)


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which `shard_map` knows `x` to vary; without `check_vma` it knows of none."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset((getattr(aval, "vma", None) or ()) if manual is None else manual.varying)


def _vary(leaf: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - varying_axes(leaf)))
    if not missing:
        return leaf
    return lax.pcast(leaf, missing, to="varying")


def _of_dtype(leaf: Any, like: Any) -> Any:
    return leaf if jnp.result_type(leaf) == like.dtype else leaf.astype(like.dtype)


def is_sharded_in_type(array: Array) -> bool:
    """Return whether the type of `array` says how it is sharded, as with a mesh of explicit axes."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)


def require_reduced(decisive: Any, shared: Any, advice: str) -> None:
    """Raise `ValueError` where `shard_map` knows that devices with the same `shared` differ in what is `decisive`.

    `advice` says what to do; `{names}` in it stands for the axes.
    """
    known = frozenset().union(*map(varying_axes, jax.tree.leaves(shared)))
    axes = sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(decisive))) - known)
    if axes:
        raise ValueError(
            f"the gradients differ along mesh axis {', '.join(map(repr, axes))} while the loss scale is shared, so "
            f"devices would decide differently; {advice.format(names=repr(axes[0] if len(axes) == 1 else tuple(axes)))}"
        )

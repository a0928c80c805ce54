"""The choice between two results by a flag: `select`, and two ways to take or skip a step."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from lossscale_jax import _axes
from lossscale_jax._leaves import is_array, map_gradients, name_of
from lossscale_jax._types import PyTree, Tree

Result = TypeVar("Result")

Skip = Literal["cond", "select"]
"""The way to skip a compiled step: a conditional around it, or a choice between its results and the old values."""


def decide(
    flag: Array, apply: Callable[..., Result], skip: Callable[..., Result], source: PyTree, *rest: PyTree, by: Skip
) -> Result:
    """Return `apply(source, *rest)` if `flag`, else `skip(applied, source, *rest)` in the same dtypes.

    `applied` has the shapes and dtypes of what `apply` returns.
    """
    way = _by_cond if by == "cond" and isinstance(flag, jax.core.Tracer) else _by_select
    return way(flag, apply, skip, source, *rest)


def _by_cond(flag: Array, apply: Callable[..., Any], skip: Callable[..., Any], *operands: PyTree) -> Any:
    """Run only the chosen branch; donated buffers are not copied."""
    apply = jax.jit(apply, inline=True)  # traced once, for its shapes and in the conditional
    applied = jax.eval_shape(apply, *operands)
    return lax.cond(flag, apply, lambda *operands: _axes.matching(skip(applied, *operands), applied), *operands)


def _by_select(flag: Array, apply: Callable[..., Any], skip: Callable[..., Any], source: PyTree, *rest: PyTree) -> Any:
    """Run `apply` in both cases, on zeros if its result is dropped, and choose between the results.

    The zeros matter for an optimizer with a line search, a host callback or checks, which would otherwise act on NaN.
    """
    applied = apply(map_gradients(lambda leaf: jnp.where(flag, leaf, jnp.zeros_like(leaf)), source), *rest)
    return select(flag, applied, _axes.matching(skip(applied, source, *rest), applied))


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

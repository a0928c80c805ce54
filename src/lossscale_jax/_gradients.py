"""Gradients in pytrees: the leaves, their dtype, whether they are finite, their norm, and the axes they vary over."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

PyTree: TypeAlias = Any
"""Nested containers of arrays; JAX has no static type for them."""

Tree = TypeVar("Tree")
"""A pytree that is returned with the same structure."""

Skip = Literal["cond", "select"]
"""The way to skip a compiled step: a conditional around it, or a choice between its results and the old values."""


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array or a Python number."""
    return (hasattr(leaf, "dtype") and not isinstance(leaf, type)) or isinstance(leaf, bool | int | float | complex)


def is_gradient(leaf: Any) -> bool:
    """Return whether `leaf` holds floats, real or complex; raise `TypeError` if it is not an array."""
    if not is_array(leaf):
        raise TypeError(f"{leaf!r} is not an array; pass a pytree of arrays, such as jax.grad returns")
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def gradients_of(grads: PyTree) -> dict[Any, Array]:
    """Return the leaves that hold floats by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {path: jnp.asarray(leaf) for path, leaf in leaves if is_gradient(leaf) and jnp.size(leaf)}


def map_gradients(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """Return a pytree with `function` applied to the leaves that hold floats."""
    return jax.tree.map(lambda leaf: function(jnp.asarray(leaf)) if is_gradient(leaf) else leaf, tree)


def name_of(path: Any) -> str:
    """Return a leaf's path as text for a message."""
    return jax.tree_util.keystr(path) or "the leaf"


def lift(array: Array) -> Array:
    """Return `array` in float32, or in its own dtype if that is wider."""
    is_wide = jnp.issubdtype(array.dtype, jnp.inexact) and jnp.finfo(array.dtype).bits >= 32
    return array if is_wide else array.astype(jnp.float32)


def lifted(tree: Tree) -> Tree:
    """Return a pytree with its floats in float32 or wider, as unscaled gradients are."""
    return map_gradients(lift, tree)


def multiply(grads: Tree, factor: Array) -> Tree:
    """Return gradients times a factor of shape `()`, in float32 or wider."""

    def multiplied(leaf: Array) -> Array:
        wide = lift(leaf)
        return wide * factor.astype(wide.dtype)

    return map_gradients(multiplied, grads)


def divide(grads: Tree, loss_scale: Array) -> Tree:
    """Return gradients divided by a loss scale, in float32 or wider; float64 without the error of a reciprocal."""
    inverse = 1.0 / loss_scale.astype(float)  # in float64 with x64

    def divided(leaf: Array) -> Array:
        if leaf.dtype != jnp.float64:
            # XLA fuses a product into the operation that reads it, but would store a quotient first.
            return multiply(leaf, inverse)
        # XLA would replace a division by a scalar by a product with its reciprocal, if it saw the scalar.
        return leaf / lax.optimization_barrier(jnp.full_like(leaf, loss_scale))

    return map_gradients(divided, grads)


def as_arrays(tree: Tree) -> Tree:
    """Return a pytree with its floats as JAX has them: without x64, a NumPy array of float64 becomes float32."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_array(leaf) and is_gradient(leaf) else leaf, tree)


def check(grads: PyTree, factor: Array, *, with_norm: bool = False, skip: Skip = "cond") -> tuple[Array, Array]:
    """Return whether every element is finite, before and after it is multiplied by `factor`, and the 2-norm after it.

    A finite sum of squares proves that all elements are finite, costs one read at memory speed, and is that of the
    norm. Elements are tested one by one if the sum is not finite, if the factor is above 1, eagerly, and always with
    "select". The norm is then computed in units of a large power of two, since the squares may overflow. It is
    undefined without `with_norm`, and infinite if it exceeds its dtype.
    """
    parts = _parts(grads)
    if not parts:
        return jnp.asarray(True), jnp.float32(0.0)
    squares = _sum_of_squares(parts)
    factor = factor.astype(squares.dtype)
    norm = jnp.sqrt(squares) * factor

    def exactly() -> tuple[Array, Array]:
        multiplied = multiply(grads, factor)
        # By a difference, which is NaN for infinity and NaN, and else 0: XLA compiles its sum to less than
        # `isfinite(...).all()`, and on a CPU a minimum or maximum may lose a NaN.
        finite = jnp.stack([jnp.isfinite((part - part).sum()) for part in _parts(multiplied)]).all()
        if not with_norm:
            return finite, norm
        # No square of an element in these units overflows, and none that counts flushes to zero. The unit is applied
        # in two halves, so that neither product leaves the range of the dtype before the last one.
        half = 2.0**270 if squares.dtype == jnp.float64 else 2.0**48
        in_units = _sum_of_squares([part.astype(squares.dtype) / half**2 for part in parts])
        return finite, jnp.where(jnp.isfinite(squares), norm, jnp.sqrt(in_units) * half * factor * half)

    if skip == "select" or not isinstance(squares, jax.core.Tracer):
        return exactly()
    proven = jnp.isfinite(squares) & (factor <= 1.0)
    return lax.cond(proven, lambda: (proven, norm), exactly)


def _parts(grads: PyTree) -> list[Array]:
    """Return the real and the imaginary parts of all gradients, in float32 or wider; small ones of one type stacked.

    XLA compiles and launches a kernel for each part, which takes longer than to read a small one.
    """
    leaves = map(lift, gradients_of(grads).values())
    parts = [part for leaf in leaves for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    groups: dict[Any, list[Array]] = {}
    for number, part in enumerate(parts):
        # The type has the sharding, too, so that a new axis in front moves nothing between devices.
        groups.setdefault(jax.typeof(part) if part.size <= 2**14 else number, []).append(part)
    return [jnp.stack(group) if len(group) > 1 else group[0] for group in groups.values()]


def _sum_of_squares(parts: list[Array]) -> Array:
    """Return the sum of the squares of one or more real arrays, in their widest dtype."""
    squares = [_squared(part) for part in parts]
    widest = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    return functools.reduce(jnp.add, [square.astype(widest) for square in squares])


def _squared(array: Array) -> Array:
    """Return the sum of an array's squares."""
    if any(axis is not None for axis in jax.typeof(array).sharding.spec):
        return jnp.sum(jnp.square(array))  # on a mesh of explicit axes a product would need a sharding for its result
    # On a CPU, XLA computes a product over all axes at memory speed, without a reshape that would change the sharding.
    # The precision is explicit, since a TPU would multiply in bfloat16 by default, and a GPU may in TensorFloat-32.
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


# ---- named axes of `shard_map`, `pmap` and `vmap` --------------------------------------------------------------------


def all_true(flag: Array, axis_name: Hashable) -> Array:
    """Return whether `flag` is true everywhere along `axis_name`, or `flag` itself where that is None."""
    return flag if axis_name is None else lax.pmin(flag.astype(jnp.int32), axis_name) == 1


def total_norm(norm: Array, axis_name: Hashable) -> Array:
    """Return the 2-norm over all devices along `axis_name`, given the norm of each device; `norm` itself for None."""
    if axis_name is None:
        return norm
    largest = lax.pmax(norm, axis_name)
    share = norm / jnp.where((largest > 0.0) & jnp.isfinite(largest), largest, 1.0)  # so that no square overflows
    return largest * jnp.sqrt(lax.psum(share * share, axis_name))


def varying(*leaves: Any) -> frozenset[str]:
    """Return the mesh axes over which arrays vary for `shard_map`; none outside of it, or without `check_vma`."""
    axes: frozenset[str] = frozenset()
    for leaf in leaves if jax.sharding.get_abstract_mesh().manual_axes else ():
        aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        manual = getattr(aval, "manual_axis_type", None)
        axes |= frozenset((getattr(aval, "vma", None) if manual is None else manual.varying) or ())  # before 0.10: vma
    return axes


def vary(leaf: Any, axes: frozenset[str]) -> Any:
    """Return an array marked as varying over mesh axes, so that JAX does not reduce its gradient."""
    missing = tuple(sorted(axes - varying(leaf))) if axes else ()
    if not missing:
        return leaf
    if not hasattr(lax, "pcast"):  # before 0.8.2
        return lax.pvary(leaf, missing)  # type: ignore[attr-defined]
    return lax.pcast(leaf, missing, to="varying")


def vary_over(tree: Any, axis_name: Hashable) -> Any:
    """Return a pytree marked as varying over `axis_name`, as far as this is of the `shard_map` that is being traced."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes).intersection(names)
    return jax.tree.map(lambda leaf: vary(leaf, axes), tree)


def require_reduced(decisive: Any, shared: Any) -> None:
    """Raise `ValueError` if devices of `shard_map` with the same `shared` may have different values in `decisive`."""
    axes = sorted(varying(*jax.tree.leaves(decisive)) - varying(*jax.tree.leaves(shared)))
    if axes:
        names = repr(axes[0] if len(axes) == 1 else tuple(axes))
        hint = f"reduce them first, as with jax.lax.pmean, or pass axis_name={names}, with every axis to combine"
        raise ValueError(
            f"the gradients or the losses differ along mesh axis {names} while the loss scale is shared, so devices "
            f"would decide differently; {hint}"
        )

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


def times(array: Array, factor: Array) -> Array:
    """Return an array times a factor of shape `()`, in float32 or wider."""
    wide = lift(array)
    return wide * factor.astype(wide.dtype)


def multiply(grads: Tree, factor: Array) -> Tree:
    """Return gradients times a factor of shape `()`, in float32 or wider."""
    return map_gradients(lambda leaf: times(leaf, factor), grads)


def divide(grads: Tree, loss_scale: Array) -> Tree:
    """Return gradients divided by a loss scale, in float32 or wider; float64 without the error of a reciprocal."""
    inverse = 1.0 / loss_scale.astype(float)  # in float64 with x64

    def divided(leaf: Array) -> Array:
        if leaf.dtype != jnp.float64:
            # XLA fuses a product into the operation that reads it, but would store a quotient first.
            return times(leaf, inverse)
        # XLA would replace a division by a scalar by a product with its reciprocal, if it saw the scalar.
        return leaf / lax.optimization_barrier(jnp.full_like(leaf, loss_scale))

    return map_gradients(divided, grads)


def as_arrays(tree: Tree) -> Tree:
    """Return a pytree with its floats as JAX has them: without x64, a NumPy array of float64 becomes float32."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if is_array(leaf) and is_gradient(leaf) else leaf, tree)


def real_parts(array: Array) -> tuple[Array, ...]:
    """Return a complex array's real and imaginary part, or a real array alone."""
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def each_finite(grads: PyTree, factor: Array | None = None, *, keep_dtypes: bool = False, skip: Skip = "cond") -> Array:
    """Return whether every element is finite; with a factor, before and after the multiplication by it.

    A finite sum of squares proves that all elements are finite, and costs one read at memory speed. Elements are tested
    one by one if the sum is not finite, if the factor is above 1, eagerly, and always with "select".
    """
    leaves = list(gradients_of(grads).values())
    exact = functools.partial(_each_element_finite, leaves, factor, keep_dtypes)
    if skip == "select" or not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return exact()
    proven = jnp.isfinite(_sum_of_squares(leaves)) & (True if factor is None else factor <= 1.0)
    return lax.cond(proven, lambda: proven, exact)


def global_norm(grads: PyTree, factor: Array, *, skip: Skip = "cond") -> Array:
    """Return the 2-norm of all gradients together, times `factor`; it is finite if and only if every element is.

    The gradients are read once. If their sum of squares overflows, they are read again, in units of a large power of
    two; `optax.global_norm` would return infinity. With "select" they are always read twice, for the same norm.
    """
    leaves = list(gradients_of(grads).values())
    if not leaves:
        return jnp.float32(0.0)
    squares = _sum_of_squares(leaves)
    factor = factor.astype(squares.dtype)
    known = jnp.sqrt(squares) * factor

    def exact() -> Array:
        # No square of an element in these units overflows, and none that counts flushes to zero. The unit is applied
        # in two halves, so that neither product leaves the range of the dtype before the last one.
        half = 2.0**270 if squares.dtype == jnp.float64 else 2.0**48
        parts = [part for leaf in leaves for part in real_parts(lift(leaf))]
        in_units = _sum_of_squares([part.astype(squares.dtype) / half**2 for part in parts])
        norm = jnp.where(jnp.isfinite(squares), known, jnp.sqrt(in_units) * half * factor * half)
        norm = jnp.minimum(norm, float(jnp.finfo(squares.dtype).max))
        # A maximum may lose a NaN in XLA on a CPU, but the sum does not.
        fits = jnp.stack([jnp.isfinite(jnp.max(jnp.abs(part)) * factor.astype(part.dtype)) for part in parts]).all()
        return jnp.where(fits & jnp.isfinite(in_units), norm, jnp.inf)

    return choose(jnp.isfinite(squares) & (factor <= 1.0), lambda: known, exact, skip)


def choose(flag: Array, yes: Callable[[], Array], no: Callable[[], Array], skip: Skip) -> Array:
    """Return `yes()` if `flag`, else `no()`: by a conditional, or with "select", or eagerly, of both results."""
    by_cond = skip == "cond" and isinstance(flag, jax.core.Tracer)
    return lax.cond(flag, yes, no) if by_cond else jnp.where(flag, yes(), no())


def _each_element_finite(leaves: list[Array], factor: Array | None = None, keep_dtypes: bool = False) -> Array:
    """Return whether every element is finite; test each one."""
    # By a sum of square roots, which cannot overflow: XLA compiles it to less than `isfinite(...).all()`, and a minimum
    # or maximum may lose a NaN in XLA on a CPU.
    flags = []
    for leaf in map(lax.stop_gradient, leaves):
        values = leaf if factor is None else times(leaf, factor)
        values = values.astype(leaf.dtype) if keep_dtypes else values
        flags += [jnp.isfinite(jnp.sqrt(jnp.abs(part)).sum()) for part in real_parts(lift(values))]
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def _sum_of_squares(arrays: list[Array]) -> Array:
    """Return the sum of the squared magnitudes of one or more arrays, real or complex, in float32 or wider."""
    squares = [_squared(part) for array in arrays for part in real_parts(lift(array))]
    widest = jnp.float64 if any(square.dtype == jnp.float64 for square in squares) else jnp.float32
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

"""Functions on gradients in pytrees: their leaves, dtypes, finiteness and norm, and the mesh axes they vary over."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

PyTree: TypeAlias = Any
"""Nested containers of arrays, for which JAX has no static type."""

Tree = TypeVar("Tree")
"""A pytree that is returned with the same structure."""

SkipBy = Literal["cond", "select"]
"""The way to skip a compiled step: a conditional around it, or a selection of its results or the old values."""

_MAX_STACKED = 2**14
"""The largest number of elements with which the arrays of a group are stacked, and summed by one operation."""
_MIN_SPLIT, _PIECES = 2**17, 8
"""Arrays with more than `_MIN_SPLIT` elements are split, so that their group has up to `_PIECES` arrays to combine."""


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array or a Python number."""
    return (hasattr(leaf, "dtype") and not isinstance(leaf, type)) or isinstance(leaf, bool | int | float | complex)


def is_float(leaf: Any) -> bool:
    """Return whether `leaf` is an array of real or complex floats, or a Python float or complex number."""
    return is_array(leaf) and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def gradients_of(grads: PyTree) -> dict[Any, Array]:
    """Return the leaves that hold floats and are not empty, by path; raise `TypeError` if a leaf is not an array."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for _, leaf in leaves:
        if not is_array(leaf):
            raise TypeError(f"{leaf!r} is not an array; pass a pytree of arrays, such as jax.grad returns")
    return {path: jnp.asarray(leaf) for path, leaf in leaves if is_float(leaf) and jnp.size(leaf)}


def map_floats(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """Apply `function` to the leaves that hold floats, and return the new pytree."""
    return jax.tree.map(lambda leaf: function(jnp.asarray(leaf)) if is_float(leaf) else leaf, tree)


def as_arrays(tree: Tree) -> Tree:
    """Convert the floats of a pytree to JAX arrays: without x64, a NumPy array of float64 becomes float32."""
    return map_floats(lambda array: array, tree)


def name_of(path: Any) -> str:
    """Return the path of a leaf as text for a message."""
    return jax.tree_util.keystr(path) or "the leaf"


def at_least_float32(tree: Tree) -> Tree:
    """Convert the floats of a pytree to float32, unless their dtype is wider."""
    return map_floats(lambda array: array if jnp.finfo(array.dtype).bits >= 32 else array.astype(jnp.float32), tree)


def multiply(grads: Tree, factor: Array) -> Tree:
    """Multiply gradients by a factor of shape `()`, in float32 or wider."""
    return map_floats(lambda wide: wide * factor.astype(wide.dtype), at_least_float32(grads))


def divide(grads: Tree, loss_scale: Array) -> Tree:
    """Divide gradients by a loss scale, in float32 or wider; multiply by its reciprocal unless they are float64."""
    inverse = 1.0 / loss_scale.astype(float)  # in float64 with x64

    def divide_leaf(leaf: Array) -> Array:
        if leaf.dtype != jnp.float64:
            # XLA fuses a product into the operation that reads it, but would store a quotient first.
            return multiply(leaf, inverse)
        # The barrier hides the scalar: XLA replaces a division by a scalar by a product with its reciprocal.
        return leaf / lax.optimization_barrier(jnp.full_like(leaf, loss_scale))

    return map_floats(divide_leaf, grads)


# ---- finiteness and norm ---------------------------------------------------------------------------------------------


def are_finite(grads: PyTree, factor: Array) -> Array:
    """Return whether every element is finite, both before and after a multiplication by `factor`."""
    counts = [_count_not_finite(group, factor) for group in _groups(grads)]
    return functools.reduce(jnp.add, counts, jnp.float32(0.0)) == 0.0


def are_finite_with_norm(grads: PyTree, factor: Array, branches_on: Callable[[Array], bool]) -> tuple[Array, Array]:
    """Return whether every element is finite, before and after a multiplication by `factor`, and the 2-norm after it.

    A finite sum of squares proves that all elements are finite, and costs one read at memory speed. If the sum is not
    finite, or if the factor is above 1, an exact computation follows: it tests the elements one by one, and computes
    the norm in units of a large power of two, since the squares may overflow. If `branches_on` returns False for the
    sum, the exact computation always runs. The norm is infinite if its dtype cannot hold it.
    """
    groups = _groups(grads)
    if not groups:
        return jnp.asarray(True), jnp.float32(0.0)
    squares = _sum_of_squares(groups)
    factor = factor.astype(squares.dtype)
    norm = jnp.sqrt(squares) * factor

    def compute_exactly() -> tuple[Array, Array]:
        # In these units no square overflows, and a square that flushes to zero is too small to change the sum. The
        # unit is applied in two halves, so that only the last product may leave the range of the dtype.
        half = 2.0**270 if squares.dtype == jnp.float64 else 2.0**48
        in_units = _sum_of_squares([[part.astype(squares.dtype) / half**2 for part in group] for group in groups])
        exact_norm = jnp.where(jnp.isfinite(squares), norm, jnp.sqrt(in_units) * half * factor * half)
        return are_finite(grads, factor), exact_norm

    is_conclusive = jnp.isfinite(squares) & (factor <= 1.0)
    if not branches_on(squares):
        return compute_exactly()
    return lax.cond(is_conclusive, lambda: (is_conclusive, norm), compute_exactly)


def _groups(grads: PyTree) -> list[list[Array]]:
    """Return the real and the imaginary parts of all gradients, in float32 or wider, in groups of one type.

    XLA compiles and launches a kernel for each group, which takes longer than reading a small group.
    """
    leaves = map(at_least_float32, gradients_of(grads).values())
    parts = [part for leaf in leaves for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    groups: dict[Any, list[Array]] = {}
    for number, part in enumerate(parts):
        # Large arrays of one type may be sharded in different ways; combining them would copy an array between devices.
        may_combine = part.size <= _MAX_STACKED or jax.device_count() == 1
        groups.setdefault((jax.typeof(part), number // 64) if may_combine else number, []).append(part)
    return list(groups.values())


def _count_not_finite(group: list[Array], factor: Array) -> Array:
    """Count the positions where an array of the group, times `factor`, is not finite; a large count is rounded.

    The bits of positive floats, read as integers, are in the order of the floats, with infinity and NaN above all
    numbers. So the largest integer at each position decides. XLA's maximum of floats would lose a NaN on a CPU.
    """
    pieces = _PIECES // len(group)
    if jax.device_count() == 1 and pieces > 1 and group[0].size > _MIN_SPLIT and group[0].size % pieces == 0:
        group = [piece for part in group for piece in jnp.split(part.reshape(-1), pieces)]
    dtype = group[0].dtype
    int_dtype = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    magnitudes = [lax.bitcast_convert_type(part, int_dtype) & jnp.iinfo(int_dtype).max for part in group]
    largest = lax.bitcast_convert_type(functools.reduce(jnp.maximum, magnitudes), dtype)
    flags = (~jnp.isfinite(largest * factor.astype(dtype))).astype(jnp.float32)
    # On a CPU, XLA computes a sum of squares at memory speed, but a plain sum one element at a time. On a GPU,
    # XLA might write the factors of a product to memory.
    return _square_sum(flags) if jax.default_backend() == "cpu" else flags.sum()


def _sum_of_squares(groups: list[list[Array]]) -> Array:
    """Return the sum of the squares of all elements in one or more groups, in the widest dtype of the groups."""
    stacks = [[jnp.stack(group)] if group[0].size <= _MAX_STACKED and len(group) > 1 else group for group in groups]
    squares = [_square_sum(array) for stack in stacks for array in stack]
    widest = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    return functools.reduce(jnp.add, [square.astype(widest) for square in squares])


def _square_sum(array: Array) -> Array:
    """Return the sum of the squares of an array."""
    if any(axis is not None for axis in jax.typeof(array).sharding.spec):
        return jnp.sum(jnp.square(array))  # with explicit mesh axes a product needs a sharding for its result
    # On a CPU, XLA computes a product over all axes at memory speed, without a reshape that would change the sharding.
    # The precision is explicit, since a TPU would multiply in bfloat16 by default, and a GPU may in TensorFloat-32.
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


def in_one_kernel(function: Callable[[Tree], Tree], scalars: Tree) -> Tree:
    """Return `function(scalars)`, which has the structure of `scalars`; derivatives with respect to them are zero.

    On a CPU, XLA compiles one kernel for each scalar result. It compiles a single kernel for a small loop, so the
    function becomes the body of a loop that runs once.
    """
    scalars = jax.tree.map(lax.stop_gradient, scalars)
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(scalars))
    if not is_traced or jax.default_backend() != "cpu":
        return function(scalars)
    results = jax.eval_shape(function, scalars)
    scalars = jax.tree.map(lambda leaf, result: vary(leaf, mesh_axes(result)), scalars, results)
    runs = lax.optimization_barrier(jnp.asarray(True))  # hides the constant, so that XLA keeps the loop
    return lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.asarray(False), function(carry[1])), (runs, scalars)
    )[1]


# ---- named axes of `shard_map`, `pmap` and `vmap` --------------------------------------------------------------------


def all_true(flag: Array, axis_name: Hashable) -> Array:
    """Return whether `flag` is true everywhere along `axis_name`; return `flag` itself if the name is None."""
    return flag if axis_name is None else lax.pmin(flag.astype(jnp.int32), axis_name) == 1


def total_norm(norm: Array, axis_name: Hashable) -> Array:
    """Combine the 2-norms of all devices along `axis_name`; return `norm` itself if the name is None."""
    if axis_name is None:
        return norm
    largest = lax.pmax(norm, axis_name)
    share = norm / jnp.where((largest > 0.0) & jnp.isfinite(largest), largest, 1.0)  # so that no square overflows
    return largest * jnp.sqrt(lax.psum(share * share, axis_name))


def mesh_axes(*leaves: Any) -> frozenset[str]:
    """Return the mesh axes over which `shard_map` says that arrays vary; none without `shard_map` or `check_vma`."""
    axes: frozenset[str] = frozenset()
    for leaf in leaves if jax.sharding.get_abstract_mesh().manual_axes else ():
        aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        manual = getattr(aval, "manual_axis_type", None)
        axes |= frozenset((getattr(aval, "vma", None) if manual is None else manual.varying) or ())  # before 0.10: vma
    return axes


def vary(leaf: Any, axes: frozenset[str]) -> Any:
    """Mark an array as varying over mesh axes, so that JAX does not reduce its gradient over them."""
    missing = tuple(sorted(axes - mesh_axes(leaf))) if axes else ()
    if not missing:
        return leaf
    if not hasattr(lax, "pcast"):  # before 0.8.2
        return lax.pvary(leaf, missing)  # type: ignore[attr-defined]
    return lax.pcast(leaf, missing, to="varying")


def vary_over(tree: Any, axis_name: Hashable) -> Any:
    """Mark a pytree as varying over the axes in `axis_name` that belong to the surrounding `shard_map`."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes).intersection(names)
    return jax.tree.map(lambda leaf: vary(leaf, axes), tree)


def require_reduced(decisive: Any, shared: Any) -> None:
    """Raise `ValueError` if `decisive` varies over a mesh axis of `shard_map` and `shared` does not."""
    axes = sorted(mesh_axes(*jax.tree.leaves(decisive)) - mesh_axes(*jax.tree.leaves(shared)))
    if axes:
        names = repr(axes[0] if len(axes) == 1 else tuple(axes))
        hint = f"reduce them first, as with jax.lax.pmean, or pass axis_name={names}, with every axis to combine"
        raise ValueError(
            f"the gradients or the losses differ along mesh axis {names} while the loss scale is shared, so devices "
            f"would decide differently; {hint}"
        )

"""Whether gradients are finite, and their global norm, whose read proves them finite."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import unchecked
from lossscale_jax._decide import Skip, decide
from lossscale_jax._leaves import gradient_leaves, is_traced, lift, real_parts, times
from lossscale_jax._types import PyTree

_EXPONENT_OF_FLOAT16 = 0x7C00


@unchecked
def finite_when_unscaled(
    grads: PyTree, loss_scale: Array | None, keep_dtypes: bool = False, by: Skip = "cond"
) -> Array:
    """Return whether every element is finite, and stays so when unscaled in float32 or wider, or in its own dtype.

    All but float16 are proven finite by their sum of squares, which costs one read at memory speed; only where that is
    not finite itself, or the scale is below 1, is every element looked at. By "select" every element is looked at once.
    """
    leaves = gradient_leaves(grads)
    check = _all_finite if is_traced(leaves, loss_scale) else _all_finite_at_once
    return check(leaves, loss_scale, keep_dtypes, by)


def _all_finite(leaves: list[Array], loss_scale: Array | None, keep_dtypes: bool, by: Skip) -> Array:
    if by == "select":
        return _each_element_finite(leaves, loss_scale, keep_dtypes)
    # To square float16 on a CPU takes a conversion of each element: twice the time of `isfinite`, as measured.
    summed = [leaf for leaf in leaves if leaf.dtype != jnp.float16]
    proven = _each_element_finite([leaf for leaf in leaves if leaf.dtype == jnp.float16])
    if summed:
        proven &= jnp.isfinite(_sum_of_squares(summed))
    elif loss_scale is None:
        return proven
    if loss_scale is not None:  # below 1, a finite gradient may overflow as it is unscaled
        proven &= loss_scale >= 1.0
    exact = functools.partial(_each_element_finite, loss_scale=loss_scale, keep_dtypes=keep_dtypes)
    return decide(~proven, exact, lambda *_: jnp.asarray(True), leaves, by=by)


@unchecked
def global_norm(grads: PyTree, loss_scale: Array | None = None, by: Skip = "cond") -> Array:
    """Return the 2-norm of all leaves together, divided by `loss_scale`; it is finite if and only if every element is.

    Reads the gradients once. Only where their sum of squares overflows are they read again, divided by the largest:
    `optax.global_norm` would be infinite there. By "select" they are always read again, to the same norm.
    """
    leaves = gradient_leaves(grads)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    return (_global_norm if is_traced(leaves, loss_scale) else _global_norm_at_once)(leaves, loss_scale, by)


def _global_norm(leaves: list[Array], loss_scale: Array | None, by: Skip) -> Array:
    leaves = [lift(leaf) for leaf in leaves]
    squares = _sum_of_squares(leaves)
    inverse = (jnp.float32(1.0) if loss_scale is None else 1.0 / loss_scale).astype(squares.dtype)

    def quick(*_: Any) -> Array:
        return jnp.sqrt(squares) * inverse

    def exact(leaves: list[Array]) -> Array:
        finite = _each_element_finite(leaves, loss_scale)  # asked for itself, since `max` may lose a NaN
        parts = [part for leaf in leaves for part in real_parts(leaf)]
        largest = jnp.stack([jnp.max(jnp.abs(part)).astype(squares.dtype) for part in parts]).max()
        root = jnp.sqrt(jnp.maximum(largest, jnp.finfo(largest).tiny))
        shrink = 1.0 / root  # and once more: the reciprocal of the largest itself may underflow
        shrunk = [part * shrink.astype(part.dtype) * shrink.astype(part.dtype) for part in parts]
        norm = jnp.minimum(root * inverse * root * jnp.sqrt(_sum_of_squares(shrunk)), jnp.finfo(largest).max)
        return jnp.where(finite, norm, jnp.inf)

    return decide(~jnp.isfinite(squares) | (inverse > 1.0), exact, quick, leaves, by=by)


def clip_factor(norm: Array, max_norm: float) -> Array:
    """Return the factor by which gradients of this norm must be multiplied for a norm of at most `max_norm`."""
    return max_norm / jnp.maximum(norm, max_norm)


# Eagerly, `cond` would be compiled again at every call.
_all_finite_at_once = jax.jit(_all_finite, static_argnums=(2, 3))
_global_norm_at_once = jax.jit(_global_norm, static_argnums=2)


def _each_element_finite(arrays: list[Array], loss_scale: Array | None = None, keep_dtypes: bool = False) -> Array:
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


def _sum_of_squares(arrays: Sequence[Array]) -> Array:
    """Return the sum of the squared magnitudes of one or more arrays, real or complex, in float32 or wider."""
    squares = [_squared(part) for array in arrays for part in real_parts(lift(array))]
    widest = jnp.float64 if any(square.dtype == jnp.float64 for square in squares) else jnp.float32
    return functools.reduce(jnp.add, [square.astype(widest) for square in squares])


def _squared(array: Array) -> Array:
    """Return the sum of an array's squares."""
    if _axes.is_sharded_in_type(array):  # JAX would ask how to shard the product, which is a scalar
        return jnp.sum(jnp.square(array))
    # XLA reads a product over all axes at memory speed on a CPU, and no reshape upsets a sharding. By default a TPU
    # would multiply in bfloat16, and a GPU may in TensorFloat-32.
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)

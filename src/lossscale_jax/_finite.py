"""The check that gradients are finite, and the global norm, which checks them in the same read."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._decide import Skip, decide
from lossscale_jax._leaves import gradient_leaves, is_traced, lift, real_parts, times
from lossscale_jax._types import PyTree

_EXPONENT_OF_FLOAT16 = 0x7C00


def finite_when_unscaled(
    grads: PyTree, loss_scale: Array | None, keep_dtypes: bool = False, by: Skip = "cond"
) -> Array:
    """Return whether every element is finite before and after unscaling, in float32 or wider, or in its own dtype.

    A finite sum of squares proves that all elements are finite, and costs one read at memory speed. Elements are tested
    one by one if the sum is not finite, if the scale is below 1, for float16, and always with "select".
    """
    leaves = gradient_leaves(grads)
    check = _all_finite if is_traced(leaves, loss_scale) else _all_finite_at_once
    return check(leaves, loss_scale, keep_dtypes, by)


def _all_finite(leaves: list[Array], loss_scale: Array | None, keep_dtypes: bool, by: Skip) -> Array:
    if by == "select":
        return _each_element_finite(leaves, loss_scale, keep_dtypes)
    # On a CPU, squaring float16 converts each element, which takes twice as long as `isfinite`.
    summed = [leaf for leaf in leaves if leaf.dtype != jnp.float16]
    proven = _each_element_finite([leaf for leaf in leaves if leaf.dtype == jnp.float16])
    if summed:
        proven &= jnp.isfinite(_sum_of_squares(summed))
    elif loss_scale is None:
        return proven
    if loss_scale is not None:  # with a scale below 1, a finite gradient may overflow when it is unscaled
        proven &= loss_scale >= 1.0
    exact = functools.partial(_each_element_finite, loss_scale=loss_scale, keep_dtypes=keep_dtypes)
    return decide(~proven, exact, lambda *_: jnp.asarray(True), leaves, by=by)


def global_norm(grads: PyTree, loss_scale: Array | None = None, by: Skip = "cond") -> Array:
    """Return the 2-norm of all leaves together, divided by `loss_scale`; it is finite if and only if every element is.

    The gradients are read once. If their sum of squares overflows, they are read again and divided by the largest
    magnitude; `optax.global_norm` would return infinity. With "select" they are always read twice, for the same norm.
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
        finite = _each_element_finite(leaves, loss_scale)  # a check of its own, since `max` may lose a NaN
        parts = [part for leaf in leaves for part in real_parts(leaf)]
        largest = jnp.stack([jnp.max(jnp.abs(part)).astype(squares.dtype) for part in parts]).max()
        root = jnp.sqrt(jnp.maximum(largest, jnp.finfo(largest).tiny))
        shrink = 1.0 / root  # in two steps: the reciprocal of the largest magnitude may underflow
        shrunk = [part * shrink.astype(part.dtype) * shrink.astype(part.dtype) for part in parts]
        norm = jnp.minimum(root * inverse * root * jnp.sqrt(_sum_of_squares(shrunk)), jnp.finfo(largest).max)
        return jnp.where(finite, norm, jnp.inf)

    return decide(~jnp.isfinite(squares) | (inverse > 1.0), exact, quick, leaves, by=by)


def clip_factor(norm: Array, max_norm: float) -> Array:
    """Return the factor that reduces gradients of this norm to a norm of at most `max_norm`."""
    return max_norm / jnp.maximum(norm, max(max_norm, float(jnp.finfo(jnp.float32).tiny)))  # 0 / 0 would be NaN


# Without `jit`, an eager `cond` would be compiled at every call.
_all_finite_at_once = jax.jit(_all_finite, static_argnums=(2, 3))
_global_norm_at_once = jax.jit(_global_norm, static_argnums=2)


def _each_element_finite(arrays: list[Array], loss_scale: Array | None = None, keep_dtypes: bool = False) -> Array:
    """Return whether every element is finite; test each one."""
    # Not by the minimum and maximum, which may lose a NaN in XLA on a CPU.
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
    if _axes.is_sharded_in_type(array):  # for a product, JAX would require a sharding of the scalar result
        return jnp.sum(jnp.square(array))
    # On a CPU, XLA computes a product over all axes at memory speed, without a reshape that would change the sharding.
    # The precision is explicit, since a TPU would multiply in bfloat16 by default, and a GPU may in TensorFloat-32.
    axes = tuple(range(array.ndim))
    return lax.dot_general(array, array, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)

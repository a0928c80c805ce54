"""The global norm of gradients, whose read proves them finite, and what clipping by it multiplies with."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import unchecked
from lossscale_jax._gradients import (
    each_element_finite,
    gradient_leaves,
    is_traced,
    lift,
    real_parts,
    sum_of_squares,
)
from lossscale_jax._types import PyTree


@unchecked
def global_norm(grads: PyTree, loss_scale: Array | None = None, branches: bool = True) -> Array:
    """Return the 2-norm of all leaves together, divided by `loss_scale`; it is finite if and only if every element is.

    Reads the gradients once. Only where their sum of squares overflows are they read again, divided by the largest:
    `optax.global_norm` would be infinite there. Without `branches` they are always read again, to the same norm.
    """
    leaves = gradient_leaves(grads)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    return (_global_norm if is_traced(leaves, loss_scale) else _global_norm_at_once)(leaves, loss_scale, branches)


def _global_norm(leaves: list[Array], loss_scale: Array | None, branches: bool) -> Array:
    leaves = [lift(leaf) for leaf in leaves]
    squares = sum_of_squares(leaves)
    inverse = (jnp.float32(1.0) if loss_scale is None else 1.0 / loss_scale).astype(squares.dtype)

    def quick(_: list[Array]) -> Array:
        return _axes.varying_as(jnp.sqrt(squares) * inverse, (leaves, inverse))

    def exact(leaves: list[Array]) -> Array:
        finite = each_element_finite(leaves, loss_scale)  # asked for itself, since `max` may lose a NaN
        parts = [part for leaf in leaves for part in real_parts(leaf)]
        largest = jnp.stack([jnp.max(jnp.abs(part)).astype(squares.dtype) for part in parts]).max()
        root = jnp.sqrt(jnp.maximum(largest, jnp.finfo(largest).tiny))
        shrink = 1.0 / root  # and once more: the reciprocal of the largest itself may underflow
        shrunk = [part * shrink.astype(part.dtype) * shrink.astype(part.dtype) for part in parts]
        norm = jnp.minimum(root * inverse * root * jnp.sqrt(sum_of_squares(shrunk)), jnp.finfo(largest).max)
        return _axes.varying_as(jnp.where(finite, norm, jnp.inf), (leaves, inverse))

    is_quick = jnp.isfinite(squares) & (inverse <= 1.0)
    return lax.cond(is_quick, quick, exact, leaves) if branches else jnp.where(is_quick, quick(leaves), exact(leaves))


_global_norm_at_once = jax.jit(_global_norm, static_argnums=2)  # eagerly, `cond` would be compiled at every call


def clip_factor(norm: Array, max_norm: float) -> Array:
    """Return the factor by which gradients of this norm must be multiplied for a norm of at most `max_norm`."""
    return max_norm / jnp.maximum(norm, max_norm)

"""Gradient accumulation: a window of micro-batches that an overflow does not poison."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_jax._debug import unchecked
from lossscale_jax._grads import lifted_leaves, multiplied, select, unscale


class Window(NamedTuple):
    """What is carried from one micro-batch to the next."""

    total: Any
    """The sum of the finite micro-batches' unscaled gradients, each divided by the window's size."""
    seen: Array
    """int32: micro-batches so far."""
    finite: Array
    """int32: how many of them were finite."""
    stepped: Array
    """bool: the last call ended a window and applied its mean."""


def empty_window(params: Any) -> Window:
    """Return a window before its first micro-batch, for gradients of the shapes of `params`, unscaled."""
    return Window(jax.tree.map(jnp.zeros_like, lifted_leaves(params)), jnp.int32(0), jnp.int32(0), jnp.asarray(False))


@unchecked
def extended(window: Window, grads: Any, grads_finite: Array, scale_state: Any, size: int) -> Window:
    """Return `window` with one more micro-batch of scaled gradients, which only counts if it is finite.

    What is summed is divided by the window's size first: finite micro-batches cannot make an infinite sum.
    """
    shares = multiplied(unscale(grads, scale_state), jnp.float32(1.0 / size))
    total = jax.tree.map(lambda total, share: total + share.astype(total.dtype), window.total, shares)
    finite = window.finite + grads_finite.astype(jnp.int32)
    return Window(select(grads_finite, total, window.total), window.seen + 1, finite, window.stepped)


def mean(window: Window, size: int) -> Any:
    """Return the mean of the finite micro-batches' gradients; zeros where there is none."""
    return multiplied(window.total, size / jnp.maximum(window.finite, 1).astype(jnp.float32))

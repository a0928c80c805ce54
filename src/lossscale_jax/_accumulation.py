"""Gradient accumulation: a window of micro-batches that an overflow does not poison."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_jax._grads import lifted, select, unscale


class Window(NamedTuple):
    """What is carried from one micro-batch to the next."""

    total: Any
    """The sum of the finite micro-batches' unscaled gradients."""
    seen: Array
    """int32: micro-batches so far."""
    finite: Array
    """int32: how many of them were finite."""


def empty_window(params: Any) -> Window:
    """Return a window before its first micro-batch, for gradients of the shapes and dtypes of `params`, unscaled."""
    zeros = jax.tree.map(lambda param: lifted(jnp.zeros_like(param)), params)
    return Window(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def extended(window: Window, grads: Any, grads_finite: Array, scale_state: Any) -> Window:
    """Return `window` with one more micro-batch of scaled gradients, which only counts if it is finite."""
    total = jax.tree.map(jnp.add, window.total, unscale(grads, scale_state))
    return Window(select(grads_finite, total, window.total), window.seen + 1, window.finite + grads_finite)


def mean(window: Window) -> Any:
    """Return the mean of the finite micro-batches' gradients; zeros where there is none."""
    return jax.tree.map(lambda total: total / jnp.maximum(window.finite, 1).astype(total.real.dtype), window.total)

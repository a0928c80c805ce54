"""Gradient accumulation: the mean of the finite micro-batches of a window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lossscale_jax._decide import decide, select
from lossscale_jax._finite import global_norm
from lossscale_jax._leaves import lift_leaves, multiply
from lossscale_jax._stages import Attempt, Settings
from lossscale_jax._types import PyTree
from lossscale_jax._verbs import unscale


class Window(NamedTuple):
    """The state of an accumulation between two micro-batches."""

    total: PyTree
    """The sum of the finite micro-batches' unscaled gradients, each divided by the window's size."""
    seen: Array
    """int32: the number of micro-batches in the window up to now."""
    finite: Array
    """int32: the number of finite micro-batches among them."""
    stepped: Array
    """bool: whether the last call completed a window and applied its mean."""


def empty_window(params: PyTree) -> Window:
    """Return a window without micro-batches, for unscaled gradients with the shapes of `params`."""
    return Window(optax.tree.zeros_like(lift_leaves(params)), jnp.int32(0), jnp.int32(0), jnp.asarray(False))


def accumulate(attempt: Attempt, settings: Settings) -> Attempt:
    """Add a micro-batch to the window if it is finite; if the window is full, apply the mean of its micro-batches."""
    window: Window = attempt.window
    # Each micro-batch is divided before it is added, so that the sum of finite micro-batches is finite.
    shares = multiply(unscale(attempt.scaled, attempt.scale_state), jnp.float32(1.0 / settings.accumulation_steps))
    total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(shares, window.total))
    window = window._replace(
        total=select(attempt.grads_finite, total, window.total),
        seen=window.seen + 1,
        finite=window.finite + attempt.grads_finite.astype(jnp.int32),
    )
    is_full = window.seen >= settings.accumulation_steps
    attempt = attempt._replace(source=window, window=select(is_full, optax.tree.zeros_like(window), window))
    if settings.drop == "micro_batch":
        return attempt._replace(applies=is_full & (window.finite > 0))
    all_were_finite = window.finite == window.seen
    return attempt._replace(grads_finite=all_were_finite, applies=is_full & all_were_finite, counts=is_full)


def mean(window: Window, _: Attempt, settings: Settings) -> PyTree:
    """Return the mean of the finite micro-batches' gradients, or zeros if no micro-batch is finite."""
    size = settings.accumulation_steps
    return multiply(window.total, size / jnp.maximum(window.finite, 1).astype(jnp.float32))


def norm_of_mean(attempt: Attempt, settings: Settings) -> Attempt:
    """Compute the norm of the window's mean, only if the mean would be applied."""
    norm = decide(
        attempt.applies,
        lambda window: global_norm(mean(window, attempt, settings), by=settings.skip),
        lambda *_: jnp.float32(jnp.inf),
        attempt.source,
        by=settings.skip,
    )
    return attempt._replace(norm=norm)

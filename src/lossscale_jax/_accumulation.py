"""Gradient accumulation: a window of micro-batches that an overflow does not poison."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lossscale_core.errors import PolicyError
from lossscale_jax._debug import unchecked
from lossscale_jax._gradients import lift_leaves, multiply
from lossscale_jax._types import HasLossScale, PyTree
from lossscale_jax._verbs import select, unscale

Drop = Literal["window", "micro_batch"]


class Window(NamedTuple):
    """What is carried from one micro-batch to the next."""

    total: PyTree
    """The sum of the finite micro-batches' unscaled gradients, each divided by the window's size."""
    seen: Array
    """int32: micro-batches so far."""
    finite: Array
    """int32: how many of them were finite."""
    stepped: Array
    """bool: the last call ended a window and applied its mean."""


class Attempt(NamedTuple):
    """What one call attempts: a step of the wrapped optimizer, a step of the policy, both or neither."""

    applies: Array
    """bool: the wrapped optimizer steps."""
    grads_finite: Array
    """bool: what the policy is told."""
    counts: Array | None
    """bool: the call is a step of the policy; None where every call is one."""
    source: PyTree
    """What the gradients of the step are computed from."""
    gradients: Callable[[PyTree], PyTree]
    """Returns the unscaled gradients of the step, given `source`; called where the step is taken."""
    window: Window | None
    """What is carried to the next call."""

    def unless(self, spiked: Array) -> "Attempt":
        """Return the attempt without its step where `spiked`; only an overflow in this very call still counts."""
        applies, counts = self.applies & ~spiked, ~(spiked & self.grads_finite)
        return self._replace(
            applies=applies,
            counts=counts if self.counts is None else self.counts & counts,
            window=None if self.window is None else self.window._replace(stepped=applies),
        )


class Accumulation(NamedTuple):
    """Makes one step of `size` micro-batches, and drops what an overflow spoils."""

    size: int
    drop: Drop

    def validate(self) -> None:
        """Raise `PolicyError` for settings that make no sense."""
        if not (isinstance(self.size, int) and self.size >= 1):
            raise PolicyError(f"accumulation_steps={self.size!r} must be an integer of at least 1")
        if self.drop not in ("window", "micro_batch"):
            raise PolicyError(f"drop={self.drop!r} must be 'window' or 'micro_batch'")

    def init(self, params: PyTree) -> Window:
        """Return a window before its first micro-batch, for gradients of the shapes of `params`, unscaled."""
        return Window(optax.tree.zeros_like(lift_leaves(params)), jnp.int32(0), jnp.int32(0), jnp.asarray(False))

    def attempt(self, window: Window, grads: PyTree, grads_finite: Array, scale_state: HasLossScale) -> Attempt:
        """Return what a call attempts that adds one micro-batch of scaled gradients to `window`."""
        window = self._extend(window, grads, grads_finite, scale_state)
        is_full = window.seen >= self.size
        if self.drop == "window":
            grads_finite = window.finite == window.seen
            applies = is_full & grads_finite
        else:
            applies = is_full & (window.finite > 0)
        after = select(is_full, optax.tree.zeros_like(window), window)._replace(stepped=applies)
        return Attempt(
            applies=applies,
            grads_finite=grads_finite,
            counts=is_full if self.drop == "window" else None,
            source=window,
            gradients=self._mean,
            window=after,
        )

    @unchecked
    def _extend(self, window: Window, grads: PyTree, grads_finite: Array, scale_state: HasLossScale) -> Window:
        """Return `window` with one more micro-batch of scaled gradients, which only counts if it is finite."""
        # Each is divided before it is added, so that finite micro-batches cannot make an infinite sum.
        shares = multiply(unscale(grads, scale_state), jnp.float32(1.0 / self.size))
        total = jax.tree.map(jnp.add, window.total, optax.tree.cast_like(shares, window.total))
        finite = window.finite + grads_finite.astype(jnp.int32)
        return Window(select(grads_finite, total, window.total), window.seen + 1, finite, window.stepped)

    def _mean(self, window: Window) -> PyTree:
        """Return the mean of the finite micro-batches' gradients; zeros where there is none."""
        return multiply(window.total, self.size / jnp.maximum(window.finite, 1).astype(jnp.float32))

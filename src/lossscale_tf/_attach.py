"""A loss that is attached to a tensor of the model, with gradients at the loss scale; and its scale in a report."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from lossscale_tf._verbs import lifted
from lossscale_tf._warning import warn_caller

_SEED: ContextVar[tf.Tensor | None] = ContextVar("seed", default=None)


class Attached:
    """The losses that are attached for one optimizer; in eager code, those that still wait for a backward pass."""

    def __init__(self) -> None:
        self._waiting: list[tuple[weakref.ref[Any], list[str]]] = []
        self._has_warned = False

    def attach(self, x: Any, aux_loss: Any, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return `x`; its backward pass adds the gradients of `aux_loss` times `loss_scale`."""
        x, aux_loss = tf.convert_to_tensor(x), tf.convert_to_tensor(aux_loss)
        for name, tensor in (("x", x), ("aux_loss", aux_loss)):
            if not tensor.dtype.is_floating:
                raise TypeError(
                    f"{name} is a tensor of {tensor.dtype.name}; attach needs floats: pass what has a gradient"
                )
        made, runs = [], []

        @tf.custom_gradient
        def attached(x: tf.Tensor, aux_loss: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def gradients(upstream: Any) -> tuple[Any, tf.Tensor]:
                runs.append("backward")
                # The graph of a concrete function would keep the seed after the report.
                seed = _SEED.get() if tf.executing_eagerly() else None
                factor = loss_scale if seed is None else tf.reshape(seed, [])
                return upstream, tf.fill(tf.shape(aux_loss), tf.cast(factor, aux_loss.dtype))

            made.append(weakref.ref(gradients))
            return x, gradients

        attached_to: tf.Tensor = attached(x, lifted(aux_loss))
        # A tape keeps the function of the gradients until it has run, or until nothing needs it.
        if tf.executing_eagerly() and _SEED.get() is None and made[0]() is not None:
            self._waiting.append((made[0], runs))
        return attached_to

    def warn_if_lost(self) -> None:
        """Warn, once, if a tape has dropped an attached loss without its backward pass. Eagerly only."""
        if not self._waiting or not tf.executing_eagerly():
            return
        waiting = [(gradients, runs) for gradients, runs in self._waiting if not runs]
        self._waiting = [each for each in waiting if each[0]() is not None]
        if len(self._waiting) < len(waiting) and not self._has_warned:
            self._has_warned = True
            warn_caller(
                "a loss that was attached got no backward pass, so that it is lost; use the result of attach, as in "
                "x = attach(x, aux_loss), and call it without a tape where nothing is trained"
            )

    # References to functions cannot be copied or pickled; a copy waits for nothing.
    def __reduce__(self) -> tuple[type["Attached"], tuple[()]]:
        return Attached, ()


@contextlib.contextmanager
def attached_losses_at(seed: tf.Tensor) -> Iterator[None]:
    """Give attached losses `seed` instead of the loss scale, in eager backward passes of this thread."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)

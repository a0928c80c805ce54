"""A loss that is attached to a tensor of the model, with gradients at the loss scale; and its scale in a report."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from lossscale_tf._verbs import lifted

_SEED: ContextVar[tf.Tensor | None] = ContextVar("seed", default=None)


def attach(x: Any, aux_loss: Any, loss_scale: tf.Tensor) -> tf.Tensor:
    """Return `x`, whose backward pass adds the gradients of `aux_loss` times `loss_scale`."""
    x, aux_loss = tf.convert_to_tensor(x), tf.convert_to_tensor(aux_loss)
    for name, tensor in (("x", x), ("aux_loss", aux_loss)):
        if not tensor.dtype.is_floating:
            raise TypeError(f"{name} is a tensor of {tensor.dtype.name}; attach needs floats: pass what has a gradient")

    @tf.custom_gradient
    def attached(x: tf.Tensor, aux_loss: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradients(upstream: Any) -> tuple[Any, tf.Tensor]:
            seed = _SEED.get()
            factor = loss_scale if seed is None else tf.reshape(seed, [])
            return upstream, tf.fill(tf.shape(aux_loss), tf.cast(factor, aux_loss.dtype))

        return x, gradients

    attached_to: tf.Tensor = attached(x, lifted(aux_loss))
    return attached_to


@contextlib.contextmanager
def attached_losses_at(seed: tf.Tensor) -> Iterator[None]:
    """Give attached losses `seed` instead of the loss scale, in eager backward passes of this thread."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)

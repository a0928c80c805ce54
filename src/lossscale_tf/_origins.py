"""The gradient before it was unscaled, noted on the unscaled tensor of a graph.

Whoever applies the gradients then unscales and clips them by one product, after the check has read the originals.
Nobody uses the unscaled tensors any more, so that TensorFlow prunes them from the graph: a write and a read of all
gradients less a step. This is the only attribute that this package sets on a tensor.
"""

from typing import Any

import tensorflow as tf

from lossscale_tf._verbs import Gradient, is_narrow


def mark_origin(unscaled: Any, grad: Any, loss_scale: tf.Tensor) -> None:
    """Note in a graph what a gradient was before it was unscaled, unless its dtype has changed."""
    if not tf.executing_eagerly() and grad is not None and unscaled.dtype == grad.dtype and not is_narrow(grad.dtype):
        unscaled._unscaled_from = (grad, loss_scale)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before they were unscaled, and the one scale by which all of them were.

    If there is no such scale, they are returned as they are, with None.
    """
    found = [getattr(grad, "_unscaled_from", None) for grad in grads]
    noted = [origin for origin in found if origin is not None]
    if len(noted) < len(grads) or len({id(loss_scale) for _, loss_scale in noted}) != 1 or tf.executing_eagerly():
        return grads, None
    return [grad for grad, _ in noted], noted[0][1]

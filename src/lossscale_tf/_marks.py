"""The marks of gradients that were unscaled."""

from typing import Any, Literal, NamedTuple

import tensorflow as tf

from lossscale_tf._verbs import WIDE, Gradient


class Mark(NamedTuple):
    """The mark of a gradient, in its attribute `_loss_scaling`."""

    loss: Any
    """The loss that it is a gradient of: its `owner`, which is what has scaled it, and its `loss_scale`."""
    kind: Literal["scaled", "unscaled", "computed"]
    """"scaled" was given to be unscaled, "unscaled" is the result, and "computed" comes from `compute_gradients`."""
    origin: Any = None
    """In a graph, the gradient before it was unscaled. When it is applied, one product unscales and clips it, and
    TensorFlow prunes the unscaled tensor, which saves a write and a read of all gradients."""


def mark_of(leaf: Any, owner: Any) -> Mark | None:
    """Return the mark that an optimizer has set on a gradient, or None."""
    found = getattr(leaf, "_loss_scaling", None)
    return found if isinstance(found, Mark) and found.loss.owner is owner else None


def mark_gradient(loss: Any, leaf: Gradient, grad: Any, kind: Any) -> None:
    """Mark a gradient before and after unscaling; in a graph with its origin, unless its dtype has changed."""
    leaf._loss_scaling = unscaled = Mark(loss, kind)
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = unscaled
    if isinstance(grad, tf.Tensor | tf.IndexedSlices):  # it may also be a number, or an array
        grad._loss_scaling = Mark(loss, "scaled")
        if not tf.executing_eagerly() and leaf.dtype == grad.dtype and leaf.dtype in WIDE:
            leaf._loss_scaling = unscaled._replace(origin=grad)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before unscaling in this graph, and their scale.

    If they have no common scale, return them unchanged, and None.
    """
    marks = [getattr(grad, "_loss_scaling", None) for grad in grads]
    found = [mark for mark in marks if isinstance(mark, Mark) and mark.origin is not None]
    if len(found) < len(grads) or len({id(mark.loss.loss_scale) for mark in found}) != 1:
        return grads, None
    return [mark.origin for mark in found], found[0].loss.loss_scale

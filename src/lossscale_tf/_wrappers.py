"""Functions that both wrappers of this package use: checks of their arguments, and marks of unscaled gradients."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from lossscale_core import BaseScaling, ScalingPolicy
from lossscale_core.adapters import format_number, warn_caller
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._verbs import WIDE, Gradient


def scales_already(optimizer: Any) -> bool:
    """Return whether an optimizer is already a loss scale optimizer of TensorFlow, Keras, tf_keras or this package."""
    # The names are compared, because tf_keras is perhaps not installed.
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)


def warn_if_resumed(policy: ScalingPolicy, state: Any, iterations: Any) -> None:
    """Warn if the inner optimizer continues a run and the scale starts over; `iterations` are its steps."""
    steps_before = int(tf.convert_to_tensor(iterations))
    if steps_before > 0 and int(state.steps) == 0 and BaseScaling.of(policy).scales_losses:
        warn_caller(
            f"the wrapped optimizer has taken {steps_before} steps before, but the loss scale starts over at "
            f"{format_number(float(state.loss_scale))}; to continue from a checkpoint, keep this optimizer in it, or "
            "its state_dict() for load_state_dict()",
            CheckpointWarning,
        )


def present_gradients(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Gradient, Any]]:
    """Return the (gradient, variable) pairs with a gradient, which is then a tensor or `IndexedSlices`."""
    present = [(grad, variable) for grad, variable in pairs if grad is not None]
    return [(x if isinstance(x, tf.IndexedSlices) else tf.convert_to_tensor(x), variable) for x, variable in present]


class Mark(NamedTuple):
    """The mark of a gradient, in its attribute `_loss_scaling`."""

    loss: Any
    """The mark of its loss, which has the `owner` that scaled the loss, and the `loss_scale`."""
    kind: Literal["scaled", "unscaled", "computed"]
    """"scaled" before `get_unscaled_gradients`, "unscaled" after it, or "computed" by `compute_gradients`."""
    origin: Any = None
    """In a graph, the gradient before it was unscaled. The step multiplies this gradient once, to unscale and clip it.
    TensorFlow then prunes the unscaled tensor, which saves a write and a read of all gradients."""


def mark_of(leaf: Any, owner: Any) -> Mark | None:
    """Return the mark that an optimizer has set on a gradient, or None.

    Ignore a mark that was set in another branch of `tf.cond`, because only that branch can use its loss scale.
    """
    mark = getattr(leaf, "_loss_scaling", None)
    if not isinstance(mark, Mark) or mark.loss.owner is not owner:
        return None
    scale, graph = mark.loss.loss_scale, tf.compat.v1.get_default_graph()
    while tf.is_symbolic_tensor(scale) and scale.graph is not graph:
        if (graph := getattr(graph, "outer_graph", None)) is None:
            return None
    return mark


def mark_gradient(loss: Any, leaf: Gradient, grad: Any, kind: Any) -> None:
    """Mark an unscaled gradient `leaf`, and `grad`, from which it was computed.

    In a graph, the mark contains `grad` as the origin of `leaf`, unless their dtypes differ.
    """
    leaf._loss_scaling = mark = Mark(loss, kind)
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = mark
    if isinstance(grad, tf.Tensor | tf.IndexedSlices):  # it may also be a number, or an array
        grad._loss_scaling = Mark(loss, "scaled")
        if not tf.executing_eagerly() and leaf.dtype == grad.dtype and leaf.dtype in WIDE:
            leaf._loss_scaling = mark._replace(origin=grad)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return the gradients before they were unscaled in this graph, and their common scale.

    If they have no common scale, return them unchanged, and None.
    """
    attributes = (getattr(grad, "_loss_scaling", None) for grad in grads)
    marks = [mark for mark in attributes if isinstance(mark, Mark) and mark.origin is not None]
    if len(marks) < len(grads) or len({id(mark.loss.loss_scale) for mark in marks}) != 1:
        return grads, None
    return [mark.origin for mark in marks], marks[0].loss.loss_scale

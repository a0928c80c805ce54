"""The marks of unscaled gradients, and the check that gradients to apply come from `compute_gradients`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lossscale_tf._verbs import Gradient, is_narrow, values_of

# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/gradients_util.py#L567
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py#L144
_OF_GRADIENTS = re.compile(r"(^|/)(gradients|gradient_tape)(_\d+)?/")
"""The names of the operations that TensorFlow adds for gradients."""


class Mark(NamedTuple):
    """The mark of an unscaled gradient: its optimizer, and in a graph the gradient before it was unscaled.

    When it is applied, TensorFlow then prunes the unscaled tensor, which saves a write and a read of all gradients.
    """

    owner: Any
    origin: Any = None
    loss_scale: Any = None


def mark(owner: Any, leaf: Gradient, grad: Gradient, loss_scale: tf.Tensor) -> None:
    """Mark an unscaled gradient."""
    is_same = not tf.executing_eagerly() and leaf.dtype == grad.dtype and not is_narrow(grad.dtype)
    leaf._loss_scaling = Mark(owner, grad, loss_scale) if is_same else Mark(owner)
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = Mark(owner)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before unscaling in this graph, and their scale.

    If they have no common scale, return them unchanged, and None.
    """
    marks = [getattr(grad, "_loss_scaling", None) for grad in grads]
    found = [each for each in marks if each is not None and each.origin is not None]
    if len(found) < len(grads) or len({id(each.loss_scale) for each in found}) != 1:
        return grads, None
    return [each.origin for each in found], found[0].loss_scale


def are_foreign(owner: Any, grads: Sequence[Gradient]) -> bool:
    """Return whether gradients of this graph are not from `compute_gradients`; those of an accumulator may be."""
    are_taken_here = False
    for tensor in _ancestors(values_of(grad) for grad in grads):
        found = getattr(tensor, "_loss_scaling", None)
        if found is not None and found.owner is owner:
            return False
        if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            are_taken_here |= bool(_OF_GRADIENTS.search(tensor.op.name))
    return are_taken_here


def _ancestors(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors of graphs from which `tensors` are computed, these among them, each once."""
    captures = (pair for graph in _graphs_around() for pair in getattr(graph, "captures", ()))
    outside = {id(inner): outer for outer, inner in captures}
    waiting, seen = list(tensors), {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen[id(tensor)] = tensor
        yield tensor
        if id(tensor) in outside:
            waiting.append(outside[id(tensor)])
        # An eager tensor that a graph has captured has no operation.
        elif isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            waiting.extend(tensor.op.inputs)


def _graphs_around() -> Iterator[Any]:
    """Yield the graph being built, and those around it; none in eager execution."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        # Only the graphs of functions have an outer graph; the graph of a session does not.
        graph = getattr(graph, "outer_graph", None)

"""The check that gradients to apply come from `compute_gradients`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lossscale_tf._marks import mark_of
from lossscale_tf._verbs import Gradient, values_of

# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/gradients_util.py#L567
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py#L144
_OF_GRADIENTS = re.compile(r"(^|/)(gradients|gradient_tape)(_\d+)?/")
"""The names of the operations that TensorFlow adds for gradients."""


def are_foreign(owner: Any, grads: Sequence[Gradient]) -> bool:
    """Return whether gradients of this graph are not from `compute_gradients`; those of an accumulator may be."""
    are_taken_here = False
    for tensor in _ancestors(values_of(grad) for grad in grads):
        if mark_of(tensor, owner) is not None:
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

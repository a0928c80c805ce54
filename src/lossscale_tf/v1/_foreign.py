"""The check that gradients to apply come from the wrapper's own `compute_gradients`."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale_tf._calls import Calls, graphs_around
from lossscale_tf._verbs import Gradient, values_of
from lossscale_tf._warning import warn_caller

# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/gradients_util.py#L567
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py#L144
_OF_GRADIENTS = re.compile(r"(^|/)(gradients|gradient_tape)(_\d+)?/")
"""The names of the operations that TensorFlow adds for gradients."""


def warn_of_foreign(calls: Calls, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Note that gradients of `variables` are applied, and warn if they cannot come from `compute_gradients`."""
    record = calls.apply(variables if tf.executing_eagerly() else ())
    is_missing, _ = calls.is_missing(record)
    is_computed_here = record.is_scaled and not record.is_from_outside
    if is_missing or (is_computed_here and not tf.executing_eagerly() and _are_foreign(calls, grads)):
        warn_caller(
            "these gradients cannot come from this optimizer's compute_gradients, so their loss was not scaled; "
            "call compute_gradients or minimize"
        )


def _are_foreign(calls: Calls, grads: Sequence[Gradient]) -> bool:
    """Return whether gradients of this graph are not from `compute_gradients`; those of an accumulator may be.

    The search goes from the gradients through the operations that they depend on.
    """
    outside = {
        id(inner): outer for graph in graphs_around() for outer, inner in getattr(graph, "captures", ()) if graph
    }
    tensors, seen, are_taken_here = [values_of(grad) for grad in grads], set(), False
    while tensors:
        tensor = tensors.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        found = calls.mark_of(tensor)
        if found is not None and found.kind == "unscaled":
            return False
        if id(tensor) in outside:
            tensors.append(outside[id(tensor)])
        # An eager tensor that a graph has captured has no operation.
        elif isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            are_taken_here |= bool(_OF_GRADIENTS.search(tensor.op.name))
            tensors.extend(tensor.op.inputs)
    return are_taken_here

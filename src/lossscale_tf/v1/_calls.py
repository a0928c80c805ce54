"""The calls of one wrapper, by which gradients that it has not computed are noticed."""

import re
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lossscale_tf._records import Records, dependencies
from lossscale_tf._verbs import Gradient, values_of
from lossscale_tf._warning import warn_caller

# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/gradients_util.py#L567
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py#L144
_OF_GRADIENTS = re.compile(r"(^|/)(gradients|gradient_tape)(_\d+)?/")
"""The names of the operations that TensorFlow adds for gradients."""


class Calls:
    """The calls of `compute_gradients` and `apply_gradients`."""

    def __init__(self) -> None:
        self._records = Records()

    def computed(self, gradients: Iterable[Gradient]) -> None:
        """Note that `compute_gradients` returns these."""
        self._records.begin("compute_gradients")
        if not tf.executing_eagerly():
            self._records.here().made += [weakref.ref(values_of(each)) for each in gradients]

    def warn_of_foreign(self, grads: list[Gradient], variables: list[Any]) -> None:
        """Note that gradients of `variables` are applied, and warn if they cannot come from `compute_gradients`."""
        record = self._records.apply(variables if tf.executing_eagerly() else ())
        if self._records.missing(record, ["compute_gradients"]) or self._are_foreign_in_graph(grads):
            warn_caller(
                "these gradients cannot come from this optimizer's compute_gradients, so their loss was not scaled; "
                "call compute_gradients or minimize"
            )

    def _are_foreign_in_graph(self, grads: list[Gradient]) -> bool:
        """Return whether gradients were taken in this graph, and not by this optimizer; an accumulator's may be its."""
        if tf.executing_eagerly():
            return False
        held = [each() for place in self._records.around() for each in place.made]
        made = [tensor for tensor in held if tensor is not None]
        if not made:
            return False
        found, operations = dependencies(grads, made)
        return not found and any(_OF_GRADIENTS.search(name) for name in operations)

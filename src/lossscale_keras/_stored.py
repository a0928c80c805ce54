"""Numbers in Keras variables: the state of a policy, the state of a guard, and the record of the last step."""

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_keras._backend import BACKEND, xp


class NoState(NamedTuple):
    """The guard state of an optimizer without a guard: no numbers."""


class LastStep(NamedTuple):
    """The record of the last step. It is not saved in checkpoints."""

    outcome: Any = np.int32(0)
    """int32: 0 before the first step, 1 for an applied step, 2 for an overflow, 3 for a spike."""
    loss_scale: Any = np.float32(0)
    """float32: the scale of its loss."""
    norm: Any = np.float32(0)
    """float32: the norm of its unscaled gradients before clipping; 0 if it was not computed."""


class StateVariables:
    """A NamedTuple of numbers in Keras variables of shape `()`, which have a prefix and the names of the fields."""

    def __init__(self, start: Any, prefix: str = "") -> None:
        self._start = start
        # With autocast, Keras would read the loss scale in float16 within a layer's call, and it may be infinite there.
        # All replicas compute the same numbers. Without an aggregation, no replica may set a mirrored variable:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/values_util.py#L329
        settings = {"trainable": False, "autocast": False, "aggregation": "only_first_replica"}
        self.variables = [
            keras.Variable(value, dtype=value.dtype.name, name=f"{prefix}{name}", **settings)
            for name, value in start._asdict().items()
        ]

    def read(self, count: int | None = None) -> Any:
        """Return the numbers as arrays of the backend. On torch these are the variables themselves, which change later.

        With a `count`, only the first numbers are read. The other fields have their values before the first step.
        """
        if BACKEND == "tensorflow":  # `ops.convert_to_tensor` returns the variable, and each use would read it
            numbers = map(xp.convert_to_tensor, self._tf_variables[:count])
        else:
            numbers = map(ops.convert_to_tensor, self.variables[:count])
        return self._start._make([*numbers, *(() if count is None else self._start[count:])])

    def copy(self) -> Any:
        """Return the numbers as new arrays of the backend."""
        return self._start._make(map(ops.copy, self.variables))

    def read_on_host(self) -> Any:
        """Return the numbers as host scalars. Synchronises with the host."""
        if BACKEND == "tensorflow":
            values = [variable.value().numpy() for variable in self._tf_variables]
        else:
            values = list(map(ops.convert_to_numpy, self.variables))
        return self._start._make([type(first)(value) for first, value in zip(self._start, values, strict=True)])

    @functools.cached_property
    def _tf_variables(self) -> list[Any]:
        # A variable of TensorFlow takes half the time of the Keras variable around it.
        return [variable.value for variable in self.variables]

    def assign(self, numbers: Any, before: Any = None) -> None:
        """Set the variables to new numbers."""
        for variable, new in zip(self.variables, numbers, strict=True):
            variable.assign(new)

    def assign_changed(self, numbers: Any, before: Any = None) -> None:
        """Set the variables to host scalars that differ; `before` are the current numbers, if they were read."""
        before = self.read_on_host() if before is None else before
        for variable, old, new in zip(self._tf_variables, before, numbers, strict=True):
            if old != new:  # an assignment takes longer than the whole update on the host
                variable.assign(new)

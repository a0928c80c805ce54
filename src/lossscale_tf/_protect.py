"""Saved values of variables, which are restored after a skipped try of a step."""

import ctypes
from typing import Any

import keras
import tensorflow as tf

from lossscale_tf._verbs import unconverted


class SavedValues:
    """The values before a try: of `variables`, and of those in `trained` that the loss writes.

    A saved value is not a copy: it shares the memory of its variable until the variable is written. Values of trained
    variables that the loss has not written are released before the optimizer runs, so that it updates in place.
    """

    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/training_op_helpers.h#L233
    @unconverted
    def __init__(self, variables: list[tf.Variable], trained: list[tf.Variable]) -> None:
        self._values = [(variable, _value_of(variable)) for variable in variables]
        self._trained = [(variable, _value_of(variable)) for variable in trained]

    @property
    def values(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """The pairs of each of `variables` and its value before."""
        return self._values

    @unconverted
    def release_unwritten(self, operations_before: int) -> None:
        """Release the values of the trained variables that the loss has not written; call it after the loss.

        In a graph, the loss is the operations after the first `operations_before`.
        """
        if tf.executing_eagerly():
            self._trained = [each for each in self._trained if _has_moved(*each)]
            return
        written = _written_by(operations_so_far()[operations_before:])
        graph = tf.compat.v1.get_default_graph()
        self._trained = [each for each in self._trained if graph.capture(each[0].handle).name in written]

    @unconverted
    def restore(self) -> tf.Tensor:
        """Restore the saved values of the variables; return False."""
        for variable, value in self._values + self._trained:
            variable.assign(value)
        return tf.constant(False)

    @unconverted
    def restore_unless(self, applied: Any) -> None:
        """Restore the saved values of the variables, unless the step is applied."""
        if not tf.executing_eagerly():
            tf.cond(applied, lambda: tf.constant(True), self.restore)
        elif not applied:
            self.restore()


def _value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable, which later writes do not change."""
    # After a sparse update every other way to read makes a copy; XLA does not compile this way.
    if tf.executing_eagerly() and hasattr(variable, "read_value_no_copy"):
        return variable.read_value_no_copy()
    return tf.identity(variable)


def _has_moved(variable: tf.Variable, value: tf.Tensor) -> bool:
    """Return whether a variable no longer uses the memory of an earlier value; True also if this is unknown."""
    try:
        return _address(_value_of(variable)) != _address(value)
    except tf.errors.OpError:  # DLPack lacks some dtypes, such as float8, and some devices
        return True


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _address(value: tf.Tensor) -> int | None:
    """Return the address of an eager tensor on its device; None if the tensor is empty."""
    # The structure in the capsule begins with the address: https://github.com/dmlc/dlpack/blob/v1.1/include/dlpack/dlpack.h
    capsule = tf.experimental.dlpack.to_dlpack(value)
    return ctypes.c_void_p.from_address(_pointer_in(capsule, b"dltensor")).value


# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/resource_variable_ops.py#L69
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "_ReadVariablesOp"}
"""The operations that only read the variables among their inputs."""


def operations_so_far() -> list[tf.Operation]:
    """Return the operations of the graph being built; none in eager execution."""
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()


def _written_by(operations: list[tf.Operation]) -> set[str]:
    """Return the names of the handles to which operations may write, also within functions, branches and loops."""
    return {
        handle.name
        for operation in operations
        if operation.type not in _READS
        for index, handle in enumerate(operation.inputs)
        if handle.dtype == tf.resource and index not in _only_read_by(operation)
    }


def _only_read_by(operation: tf.Operation) -> list[int]:
    """Return the numbers of the inputs of a function, branch or loop that are handles that it only reads."""
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/framework/auto_control_deps_utils.py#L140
    try:
        return operation.get_attr("_read_only_resource_inputs")
    except ValueError:  # for any other operation
        return []


def variables_of(item: Any) -> list[tf.Variable]:
    """Return the variables of a layer, module or random number generator that a loss may write to."""
    if isinstance(item, tf.Variable):
        return [item]
    if isinstance(item, keras.Variable):
        return [item.value]
    if hasattr(item, "non_trainable_variables"):
        if not getattr(item, "built", True):
            raise ValueError(f"{item.name!r} is not built, so that protect= cannot copy its variables; build it first")
        return [variable for each in item.non_trainable_variables for variable in variables_of(each)]
    if isinstance(item, keras.metrics.Metric):  # of Keras 3; its variables are its state
        return [variable for each in item.variables for variable in variables_of(each)]
    if isinstance(state := getattr(item, "state", None), tf.Variable | keras.Variable):
        return variables_of(state)
    raise TypeError(
        f"protect={item!r} holds no variables that could be put back; pass layers, modules, metrics, variables, or "
        "generators of random numbers"
    )


def trained_variables_of(item: Any) -> list[tf.Variable]:
    """Return the weights of a layer or module, which a loss may write, too."""
    return [variable for each in getattr(item, "trainable_variables", ()) for variable in variables_of(each)]

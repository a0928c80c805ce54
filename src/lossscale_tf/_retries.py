"""Steps that are taken again at a lower loss scale where they overflow, and variables that a skipped step leaves."""

import ctypes
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import BaseScaling, StepInfo, step_info
from lossscale_core.errors import OverflowStreakError, PolicyError, ScaleFloorError
from lossscale_tf._step import Step, merges_replicas

_unconverted = tf.autograph.experimental.do_not_convert  # converting these lines takes AutoGraph seconds, for nothing


class Tries:
    """The tries of one call of `minimize`, each of which takes a whole step: it differentiates, decides and updates.

    Args:
        step: The policy and the state of the optimizer.
        retries: The largest number of further tries; a policy that does not adapt has none.
        protect: What a skipped try leaves as it was.

    """

    def __init__(self, step: Step, retries: Any, protect: Any) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise PolicyError(f"retries={retries!r} must be a whole number from 0; pass 0 not to retry")
        self._step = step
        self._retries = retries if BaseScaling.of(step.policy).adapts else 0
        items = tf.nest.flatten(protect)
        self._variables = [each for item in items for each in _variables_of(item)]
        self._trained = [each for item in items for each in _trained_variables_of(item)]
        self.is_plain = not retries and not self._variables and not self._trained
        strategy = tf.distribute.get_strategy()
        is_looped = self._retries > 0 and not tf.executing_eagerly()
        if not self.is_plain and (strategy.num_replicas_in_sync > 1 or (is_looped and merges_replicas())):
            raise ValueError(
                f"{type(strategy).__name__} combines gradients across replicas, which cannot be "
                "done in the loop of the tries; leave retries= and protect= out, and run a step that was skipped again"
            )

    def run(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> Any:
        """Give `apply` the gradients that `differentiate` makes, again while they overflow and retries are left.

        Returns None eagerly, and the operation of all tries in a graph.
        """
        if self.is_plain:
            return apply(differentiate())
        if tf.executing_eagerly():
            return self._run_eagerly(differentiate, apply)
        return self._run_in_graph(differentiate, apply)

    def _run_eagerly(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> None:
        for left in range(self._retries, -1, -1):
            try:
                info = self._take(differentiate, apply, _Before(self._variables, self._trained))
            except (OverflowStreakError, ScaleFloorError):  # the state is updated before it is raised
                if not left:
                    raise
                continue
            if not info.overflowed:  # applied; or a spike: another scale would not make the norm smaller
                return

    def _run_in_graph(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> tf.Operation:
        before = _Before(self._variables, self._trained)  # of all tries, since each puts back what it has written

        def attempt(left: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return left - 1, self._take(differentiate, apply, before).overflowed

        def goes_on(left: tf.Tensor, overflowed: tf.Tensor) -> tf.Tensor:
            return overflowed & (left >= 0)

        start = tf.constant(self._retries), tf.constant(True)
        if self._retries:
            return tf.group(*tf.while_loop(goes_on, attempt, start, parallel_iterations=1))
        return tf.group(*attempt(*start))

    def _take(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any], before: "_Before") -> StepInfo:
        """Take one step, put back what it wrote to if it is skipped, and tell what it did."""
        operations_before = len(_operations())
        try:
            gradients = differentiate()
            before.let_go_of_unwritten(operations_before)
            info = self._apply(gradients, apply)
        except BaseException:
            if tf.executing_eagerly():  # in a graph nothing is written yet
                before.put_back()
            raise
        before.put_back_unless(info.applied)
        return info

    def _apply(self, gradients: Any, apply: Callable[[Any], Any]) -> StepInfo:
        """Apply gradients, and tell from the states before and after what that did."""
        with self._step.lock:  # another thread's step must not come between the two states
            before, spikes_before = self._read()
            apply(gradients)
            after, spikes = self._read()
        return step_info(before, after, spiked=spikes > spikes_before)

    def _read(self) -> tuple[Any, tf.Tensor]:
        guard = self._step.guard
        return self._step.state.read(), tf.constant(0) if guard is None else tf.identity(guard.state.spikes)


class _Before:
    """The values before a try of `variables`, and of those of `trained` to which the loss writes, to be put back.

    A value is no copy. It shares the memory of its variable, and a write leaves that memory alone only while a value is
    held. The values of trained variables that the loss has not written are let go before the optimizer updates them: it
    can then do so in place.
    """

    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/training_op_helpers.h#L233
    @_unconverted
    def __init__(self, variables: list[tf.Variable], trained: list[tf.Variable]) -> None:
        self._values = [(variable, _value_of(variable)) for variable in variables]
        self._trained = [(variable, _value_of(variable)) for variable in trained]

    @_unconverted
    def let_go_of_unwritten(self, operations_before: int) -> None:
        """Let go of the values of those trained variables to which the loss, now run, has not written.

        In a graph, the loss is what follows a number of operations.
        """
        if tf.executing_eagerly():
            self._trained = [each for each in self._trained if _has_moved(*each)]
            return
        written = _written_by(_operations()[operations_before:])
        graph = tf.compat.v1.get_default_graph()
        self._trained = [each for each in self._trained if graph.capture(each[0].handle).name in written]

    @_unconverted
    def put_back(self) -> tf.Tensor:
        """Give the variables the values that are held; return False."""
        for variable, value in self._values + self._trained:
            variable.assign(value)
        return tf.constant(False)

    @_unconverted
    def put_back_unless(self, applied: Any) -> None:
        """Give the variables the values that are held, unless a step is applied."""
        if not tf.executing_eagerly():
            tf.cond(applied, lambda: tf.constant(True), self.put_back)
        elif not applied:
            self.put_back()


def _value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable, which no later write changes."""
    # After a sparse update every other way to read copies; XLA does not compile this one.
    if tf.executing_eagerly() and hasattr(variable, "read_value_no_copy"):
        return variable.read_value_no_copy()
    return tf.identity(variable)


def _has_moved(variable: tf.Variable, value: tf.Tensor) -> bool:
    """Return whether a variable has left the memory of a value that it had; True also if that cannot be told."""
    try:
        return _address(_value_of(variable)) != _address(value)
    except tf.errors.OpError:  # DLPack has neither every dtype, such as float8, nor every device
        return True


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _address(value: tf.Tensor) -> int | None:
    """Return where the memory of an eager tensor begins on its device; None if the tensor is empty."""
    # The structure in the capsule begins with it: https://github.com/dmlc/dlpack/blob/v1.1/include/dlpack/dlpack.h
    capsule = tf.experimental.dlpack.to_dlpack(value)
    return ctypes.c_void_p.from_address(_pointer_in(capsule, b"dltensor")).value


# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops/resource_variable_ops.py#L69
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "_ReadVariablesOp"}
"""The operations that only read the variables among their inputs."""


def _operations() -> list[tf.Operation]:
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
    """Return which inputs of a function, a branch or a loop are handles that it only reads."""
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/framework/auto_control_deps_utils.py#L140
    try:
        return operation.get_attr("_read_only_resource_inputs")
    except ValueError:  # of any other operation
        return []


def _variables_of(item: Any) -> list[tf.Variable]:
    """Return the variables that a loss may write to: of a layer or module, of a generator of random numbers."""
    if isinstance(item, tf.Variable):
        return [item]
    if isinstance(item, keras.Variable):
        return [item.value]
    if hasattr(item, "non_trainable_variables"):
        if not getattr(item, "built", True):
            raise ValueError(f"{item.name!r} is not built, so that protect= cannot copy its variables; build it first")
        return [variable for each in item.non_trainable_variables for variable in _variables_of(each)]
    if isinstance(item, keras.metrics.Metric):  # of Keras 3, whose variables are its state
        return [variable for each in item.variables for variable in _variables_of(each)]
    if isinstance(state := getattr(item, "state", None), tf.Variable | keras.Variable):
        return _variables_of(state)
    raise TypeError(
        f"protect={item!r} holds no variables that could be put back; pass layers, modules, metrics, variables, or "
        "generators of random numbers"
    )


def _trained_variables_of(item: Any) -> list[tf.Variable]:
    return [variable for each in getattr(item, "trainable_variables", ()) for variable in _variables_of(each)]

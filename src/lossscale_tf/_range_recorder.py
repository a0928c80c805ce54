"""The recorder of `range_report`: it measures the result of each operation, and restores variables."""

import contextlib
import gc
import sys
from collections.abc import Container, Iterable, Iterator
from types import FrameType
from typing import Any

import tensorflow as tf

# TensorFlow exports no hook that sees eager operations; its own `tf.debugging.enable_check_numerics` uses this one:
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/debug/lib/check_numerics_callback.py
from tensorflow.python.framework import op_callbacks

from lossscale_core.adapters import OUTSIDE, NonfiniteInput, OperationRange, Progress
from lossscale_tf._range_inputs import Inputs, is_finite
from lossscale_tf._verbs import is_narrow

_MOVES = {
    *("_EagerConst", "BroadcastTo", "ConcatV2", "Const", "DeepCopy", "DynamicPartition", "DynamicStitch", "Empty"),
    *("ExpandDims", "Fill", "Gather", "GatherNd", "GatherV2", "Identity", "IdentityN", "IteratorGetNext", "OnesLike"),
    *("Pack", "Pad", "PadV2", "ParallelDynamicStitch", "PreventGradient", "ReadVariableOp", "Reshape"),
    *("ResourceGather", "ResourceGatherNd", "Reverse", "ReverseV2", "Slice", "Split", "SplitV", "Squeeze"),
    *("StopGradient", "StridedSlice", "Tile", "Transpose", "Unpack", "ZerosLike"),
}
"""Operations that copy a constant, or a tensor that was measured already."""
_READS = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp", "VarIsInitializedOp", "VariableShape"),
}
"""Operations that take a variable and do not change it."""


class Variables:
    """The values of all variables when the report begins; on exit the variables that were written are restored.

    A value that is read shares the variable's memory. If such a value is still referenced when TensorFlow writes to the
    variable, it allocates new memory. So only the variables that change exist twice.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self._written: set[int] = set()

    def __enter__(self) -> "Variables":
        for variable in _all_variables():
            try:
                handle = variable.handle
                if not hasattr(handle, "numpy"):  # a variable of a graph, which a report cannot run
                    continue
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
            except (AttributeError, ValueError, RuntimeError, tf.errors.OpError):
                continue  # not initialized, or distributed; the components of a distributed variable are variables, too
            self._values[handle._id] = (handle, value)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the variables that were written so far."""
        for handle, value in [self._values[each] for each in self._written if each in self._values]:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note which variables the operations write to, where no recorder does."""

        def see(op_type: Any, inputs: Any, *_: Any, graph: Any = None, **__: Any) -> None:
            if graph is None:
                self.see(tf.compat.as_str(op_type), inputs)

        op_callbacks.add_op_callback(see)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(see)

    def see(self, operation: str, inputs: Iterable[Any]) -> None:
        """Note which variables an operation has written to."""
        if operation in _READS:
            return
        given = list(inputs)
        for each in given:
            if each.dtype != tf.resource:
                continue
            if operation == "DestroyResourceOp":
                self._values.pop(each._id, None)
            elif each._id in self._values:
                self._written.add(each._id)
            elif operation == "AssignVariableOp":  # the variable is new, and this is its first value
                self._values[each._id] = (each, given[1])


def _all_variables() -> list[Any]:
    """Return all existing variables from the garbage collector, since TensorFlow has no registry of them."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, tf.Variable)}
    return [each for each in objects if type(each) in kinds]


class Recorder:
    """Measure results in float16, bfloat16 and float8, and track which tensors the loss scale multiplies."""

    def __init__(self, model: Any, variables: Variables, inputs: Inputs) -> None:
        self._model = model
        self._inputs: Inputs | None = inputs
        self._variables = variables
        self._records: list[tuple[int, OperationRange]] = []
        self._edges: list[tuple[list[int], list[int]]] = []
        self._scaled: set[int] = set()
        self._nonfinite: dict[int, OperationRange | None] = {}
        """The tensors that hold infinity or NaN, in order, each with its record if it is of low precision.

        Tensors that were computed in float32 only are left out, since they are not measured.
        """
        self._scopes = _Scopes()
        self._progress = Progress()

    def __enter__(self) -> "Recorder":
        op_callbacks.add_op_callback(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        op_callbacks.remove_op_callback(self._see)

    def take(self, needed: Iterable[tf.Tensor] | None = None) -> list[OperationRange]:
        """Return the records of the pass that has ended; with `needed`, only those that `needed` depends on.

        Eagerly TensorFlow computes the gradients of constants as well, which a compiled step leaves out.
        """
        self._progress.end()
        records, self._records = self._records, []
        edges, self._edges = self._edges, []
        self._nonfinite = {}
        if needed is not None:
            live = _ancestors(edges, {each._id for each in needed})
            records = [(output, record) for output, record in records if output in live]
        layers = _Layers(self._model)
        return [record._replace(module=layers.path_in(record.module)) for _, record in records]

    def cause(self, loss: tf.Tensor) -> OperationRange | None:
        """Return the operation in low precision that makes the loss infinite or NaN; None without one.

        Infinity and NaN pass from operation to operation to the loss, but the infinity of a mask ends at the softmax.
        Of the operations on such a path, return the first that overflows. If none overflows, return the first one: its
        input was infinite, for example a constant, which TensorFlow converts to float16 without a visible operation.
        """
        passed = _ancestors(self._edges, {loss._id}, among=self._nonfinite)
        records = [record for output, record in self._nonfinite.items() if record and output in passed]
        first = min(records, key=lambda record: not record.overflowed, default=None)
        return first and first._replace(module=_Layers(self._model).path_in(first.module))

    def nonfinite_inputs(self, loss: tf.Tensor) -> list[NonfiniteInput]:
        """Return the non-finite inputs of the forward pass; if the loss is not finite, only those that lead to it."""
        held = self._nonfinite if is_finite(loss) else _ancestors(self._edges, {loss._id}, among=self._nonfinite)
        return self._inputs.found(held) if self._inputs else []

    def begin_backward(self, seed: tf.Tensor) -> None:
        """Begin a backward pass from `seed`, which holds the loss scale."""
        self._scopes.begin_backward()
        self._inputs = None
        self._scaled = {seed._id}

    def _see(self, op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if graph is not None:  # an operation that is added to a graph runs later
            return
        operation = tf.compat.as_str(op_type)
        self._variables.see(operation, inputs)
        is_scaled = any(each._id in self._scaled for each in inputs)
        scope = self._scopes.current(inputs, attrs, outputs)
        if self._inputs is not None:
            held = self._inputs.look(operation, inputs, outputs, lambda: _Layers(self._model).path_in(scope))
            self._nonfinite.update(dict.fromkeys(held))
        is_given = any(each._id in self._nonfinite for each in inputs)
        for output in outputs:
            if is_scaled and _carries_scale(output.dtype):
                self._scaled.add(output._id)
            if not is_narrow(output.dtype) or not output.shape.num_elements():
                if is_given and (output.dtype == tf.variant or not is_finite(output)):
                    self._nonfinite[output._id] = None
            elif operation not in _MOVES:
                record = OperationRange.of(output.numpy(), operation, scope)
                overflowed = bool(record.nonfinite) and all(map(is_finite, inputs))
                record = record._replace(overflowed=overflowed, scaled=is_scaled)
                self._records.append((output._id, record))
                if record.nonfinite:
                    self._nonfinite[output._id] = record
            elif not is_finite(output):  # copied together with a constant, such as padding
                self._nonfinite[output._id] = OperationRange.of(output.numpy(), operation, scope)
        self._edges.append(([each._id for each in outputs], [each._id for each in inputs]))
        self._progress.step()


def _ancestors(
    edges: list[tuple[list[int], list[int]]], tensors: set[int], *, among: Container[int] | None = None
) -> set[int]:
    """Return these tensors and those that they depend on; each edge is the outputs and inputs of an operation.

    With `among`, follow only paths through tensors in it.
    """
    found = set(tensors)
    for outputs, inputs in reversed(edges):
        if not found.isdisjoint(outputs):
            found.update(each for each in inputs if among is None or each in among)
    return found


class _Scopes:
    """The name scope of each operation in the forward pass, and the scope that a gradient belongs to.

    Eagerly, TensorFlow opens no scope in the backward pass. But the function that computes the gradients of an
    operation receives the operation's attributes, the same object that the callback received:
    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py#L118
    """

    def __init__(self) -> None:
        self._of_attrs: dict[int, tuple[str, Any]] = {}
        self._of_tensors: dict[int, str] = {}
        self._is_backward = False
        self._last = ""

    def begin_backward(self) -> None:
        self._is_backward = True
        self._last = ""

    def current(self, inputs: Any, attrs: Any, outputs: Any) -> str:
        scope = self._scope_of_gradient()
        if scope is None:
            scope = tf.get_current_name_scope()
            if not scope and self._is_backward:
                # The functions of `tf.custom_gradient` read tensors of the forward pass; a sum of gradients does not.
                known = (self._of_tensors[each._id] for each in inputs if each._id in self._of_tensors)
                scope = next(known, self._last)
        if not self._is_backward:
            self._of_tensors.update((each._id, scope) for each in outputs)
        if attrs:  # all empty tuples are one object
            self._of_attrs[id(attrs)] = scope, attrs  # keeps the object alive, so that its id stays unique
        self._last = scope
        return scope

    def _scope_of_gradient(self) -> str | None:
        """Return the scope of the operation that is being differentiated; None outside of a gradient function."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "_gradient_function" and "attr_tuple" in frame.f_locals:
                return self._of_attrs.get(id(frame.f_locals["attr_tuple"]), (None,))[0]
            frame = frame.f_back
        return None


class _Layers:
    """The layers of a model by their names, which Keras uses as name scopes, and by their Keras paths."""

    def __init__(self, model: Any) -> None:
        layers = _layers_of(model)
        self._names = {each.name for each in layers}
        self._paths = {path for each in layers if (path := getattr(each, "path", None))}
        # A functional model is built after its layers, so that their variables have names without the model's.
        root = f"{layers[0].name}/" if layers else ""
        names = [getattr(each, "path", each.name) for each in getattr(model, "variables", ())]
        self._left_out = "" if any(each.startswith(root) for each in names) else root

    def path_in(self, scope: str) -> str:
        """Return the path of the innermost layer in a name scope; without a layer, the scope."""
        parts = scope.split("/")
        while parts and parts[-1] not in self._names:
            parts.pop()
        if not parts:
            return scope or OUTSIDE
        shorter = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((each for each in shorter if each in self._paths), "/".join(parts).removeprefix(self._left_out))


def _layers_of(model: Any) -> list[Any]:
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())
    return [model, *model.submodules] if isinstance(model, tf.Module) else []


def _carries_scale(dtype: tf.DType) -> bool:
    """Return whether a result of this dtype may be proportional to its inputs; a shape, for example, is not."""
    return dtype.is_floating or dtype.is_complex or dtype == tf.variant

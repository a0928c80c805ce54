"""The search for inputs, weights and labels that hold NaN or infinity before a forward pass computes anything."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lossscale_core import all_finite
from lossscale_core.adapters import NonfiniteInput, name_of, named_values

_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
"""Operations that read a variable."""
_GIVES = {"IteratorGetNext", "IteratorGetNextSync", *_READS}
"""Operations that only pass on an input."""


class Inputs:
    """The non-finite tensors among the inputs of a forward pass, with their names."""

    def __init__(self, model: Any, loss_fn: Callable[[], tf.Tensor]) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._known: set[int] = set()
        """The tensors that the pass has computed, or that were checked already."""
        self._variables: dict[int, int] = {}
        """The handle of the variable from which a tensor was read."""
        self._found: dict[int, tuple[Any, str]] = {}
        """The tensors that are not finite, and the names for those that have none."""

    def look(self, operation: str, inputs: Iterable[Any], outputs: Iterable[Any], place: Callable[[], str]) -> set[int]:
        """Check the inputs of an operation, and return those that are not finite and that the pass did not compute.

        `place` returns the path of its layer, for a tensor that has no name.
        """
        new = [each for each in inputs if each._id not in self._known]
        self._known.update(each._id for each in new)
        if operation in _READS:
            handle = next(each._id for each in inputs if each.dtype == tf.resource)
            self._variables.update((each._id, handle) for each in outputs)
        elif operation not in _GIVES:
            self._known.update(each._id for each in outputs)
        broken = {each._id: (each, f"an input of {place()} ({operation})") for each in new if not is_finite(each)}
        self._found.update(broken)
        return set(broken)

    def found(self, among: Iterable[int]) -> list[NonfiniteInput]:
        """Return those of these tensors that the pass did not compute, in the order of their use; one for each name.

        Call it after the pass, which may have created variables; reading a variable is an operation.
        """
        chosen, weights = set(among), self._names_of_variables()
        found: dict[str, NonfiniteInput] = {}
        for key, (tensor, otherwise) in self._found.items():
            name = weights.get(self._variables.get(key, -1)) or self._name_in_function(tensor)
            # A number without a name is a constant in the code.
            if key in chosen and (name or tensor.shape.rank):
                described = NonfiniteInput.of(tensor.numpy(), name or otherwise)
                found |= {described.name: described} if described else {}
        return list(found.values())

    def _name_in_function(self, tensor: Any) -> str | None:
        name = name_of(tensor, self._loss_fn)
        return name and f"{name} of loss_fn"

    def _names_of_variables(self) -> dict[int, str]:
        """Return the names of variables by their handles."""
        referred = [(f"{name} of loss_fn", value) for name, value in named_values(self._loss_fn)]
        weights = []
        for each in getattr(self._model, "variables", ()):
            # A variable of Keras 3 holds one of TensorFlow, outside of a layer's call.
            path, variable = (each.path, each.value) if hasattr(each, "path") else (each.name.partition(":")[0], each)
            weights.append((f"weight {path}", variable))
        return {each.handle._id: name for name, each in (*referred, *weights) if isinstance(each, tf.Variable)}


def is_finite(tensor: Any) -> bool:
    """Return whether no element of an eager tensor is NaN or infinite."""
    is_float = tensor.dtype.is_floating or tensor.dtype.is_complex
    return not is_float or bool(all_finite(tensor.numpy()))

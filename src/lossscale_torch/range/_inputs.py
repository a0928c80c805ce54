"""The search for inputs, weights and labels that hold NaN or infinity before a forward pass computes anything."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lossscale_core.adapters import NonfiniteInput, name_of, named_leaves, named_values
from lossscale_torch._gradients import values_of
from lossscale_torch.range._recorder import Call, Changes, is_finite, plain_name, storage_of, widened


class Inputs:
    """The non-finite tensors among the inputs of a forward pass, with their names.

    Tensors that the pass has computed or written do not count. Used as a context, it reads the modules' arguments.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[], Tensor], changes: Changes) -> None:
        self._model, self._loss_fn, self._changes = model, loss_fn, changes
        self._arguments: dict[int, str] = {}
        """The names of the modules' tensor arguments, by their memory."""
        self._written: set[int] = set()
        self._seen: set[tuple[object, ...]] = set()
        self._found: dict[str, NonfiniteInput] = {}
        self._kept = contextlib.ExitStack()

    def __enter__(self) -> "Inputs":
        for path, module in self._model.named_modules():
            note = functools.partial(self._note_arguments, plain_name(path) or type(module).__name__)
            self._kept.callback(module.register_forward_pre_hook(note, prepend=True, with_kwargs=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def found(self) -> list[NonfiniteInput]:
        """Return the tensors that are not finite, in the order of their use."""
        return list(self._found.values())

    def look(self, call: Call, place: str) -> None:
        """Check the inputs of an operation before it runs; `place` is its module's path."""
        if not call.facts.is_view:
            overwritten = call.written if call.facts.overwrites else ()
            for argument, tensor in call.tensors():
                if not any(tensor is each for each in overwritten) and self._is_new(tensor) and not is_finite(tensor):
                    self._add(tensor, f"argument {argument} of {call.facts.name} in {place}")
        self._written.update(map(storage_of, call.written))

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an input of the pass that was not checked before."""
        storage = storage_of(tensor)
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride()) if storage else ()
        if not storage or key in self._seen or storage in self._written or self._changes.has_made(storage):
            return False
        self._seen.add(key)
        return tensor.device.type != "meta"

    def _add(self, tensor: Tensor, otherwise: str) -> None:
        values = widened(values_of(tensor.detach())).cpu().numpy()
        name = self._name_of(tensor) or self._name_of_array(values)
        # A number without a name is a constant in the code.
        if name or tensor.ndim:
            found = NonfiniteInput.of(values, name or otherwise)
            if found:
                self._found.setdefault(found.name, found)

    def _name_of_array(self, values: Any) -> str | None:
        name = name_of(values, self._loss_fn)
        return name and f"{name} of loss_fn"

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter, buffer, variable or argument that a tensor shares its memory with."""
        storage = storage_of(tensor)
        named = (name for name, each in self._named() if _memory(each) == storage)
        return next(named, None) or self._arguments.get(storage)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._model.named_parameters():
            yield f"weight {plain_name(name)}", parameter
        for name, buffer in self._model.named_buffers():
            yield f"buffer {plain_name(name)}", buffer
        for name, value in named_values(self._loss_fn):
            yield f"{name} of loss_fn", value

    def _note_arguments(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (leaf for each in _bound(module, args, kwargs).items() for leaf in named_leaves(*each))
        for name, value in named:
            storage = _memory(value)
            if storage and not self._changes.has_made(storage):
                self._arguments.setdefault(storage, f"{name} of {path}")


def _memory(value: Any) -> int:
    """Return the result of `storage_of`; 0 for other values, and for tensors of `torch.vmap`, which have no memory."""
    if not isinstance(value, Tensor):
        return 0
    try:
        return storage_of(value)
    except NotImplementedError:
        return 0


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module by the names of its forward method."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{f"argument {index}": each for index, each in enumerate(args)}, **kwargs}

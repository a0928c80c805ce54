"""The tensors of an optimizer's parameters and state, and a copy of them from which a step is undone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import tree
from lossscale_torch._gradients import buckets, moved

Place = tuple[Any, ...]
"""Group and index of a parameter, and for its state the keys; a state of no parameter has None for the first two."""


def tensors_of(optimizer: Any) -> dict[Place, Tensor]:
    """Return the local tensors of the trained parameters and of the state, in the order of the parameters."""
    found: dict[Place, Tensor] = {}
    state = _state_of(optimizer)
    seen = set()
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            seen.add(id(param))
            if param.requires_grad or param.grad is not None:
                found.update(_dense(param, (g, i)))
                found.update(_tensors_in(state.get(param), (g, i)))
    for number, (key, entry) in enumerate(state.items()):
        if id(key) not in seen:
            found.update(_tensors_in(entry, (None, None, number if isinstance(key, Tensor) else key)))
    return found


class WeightsAndState:
    """An optimizer's parameters, state and settings before a step.

    The values are written back to the same tensors. `memory` holds the copies; given again, it is used again if the
    tensors are the same.
    """

    def __init__(self, optimizer: Any, memory: list[Tensor] | None = None) -> None:
        self._optimizer = optimizer
        self._entries = [(key, entry, _shallow(entry)) for key, entry in _state_of(optimizer).items()]
        self._groups = [(group, _shallow(_settings(group))) for group in optimizer.param_groups]
        found = tensors_of(optimizer)
        settings = (each for _, group in self._groups for each in _in_settings(group))
        dense = [each for each in (*found.values(), *settings) if each.layout is torch.strided]
        self._sparse = [(each, each.clone()) for each in found.values() if each.layout is not torch.strided]
        self._tensors = [each for bucket in buckets(dense) for each in bucket]
        kinds = [(each.shape, each.stride(), each.dtype, each.device) for each in self._tensors]
        self.memory = [] if memory is None else memory
        if kinds != [(each.shape, each.stride(), each.dtype, each.device) for each in self.memory]:
            self.memory.clear()  # before the new copies are made
            self.memory += [torch.empty_like(each, requires_grad=False) for each in self._tensors]
        self._copy(self.memory, self._tensors)
        copies = {id(each): copy for each, copy in zip(self._tensors, self.memory, strict=True)}
        copies |= {id(each): copy for each, copy in self._sparse}
        self._copies = {place: copies[id(each)] for place, each in found.items()}

    def copy_of(self, place: Place) -> Tensor | None:
        """Return the copy of the tensor that was at a place; None if there was none."""
        return self._copies.get(place)

    def restore(self) -> None:
        """Restore parameters, state and settings; state that was created since is removed."""
        self._copy(self._tensors, self.memory)
        with torch.no_grad():
            for tensor, before in self._sparse:
                tensor.copy_(before)
        state = _state_of(self._optimizer)
        state.clear()
        for key, entry, saved in self._entries:
            state[key] = _put_back(entry, saved)
        for group, settings in self._groups:
            params = group["params"]
            group.clear()
            group.update(params=params, **_shallow(settings))

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Write the values back where `flag`, shape `()`, is not 0; waits for no device."""
        for tensor, before in zip(self._tensors, self.memory, strict=True):
            torch.where(moved(flag, tensor.device) != 0.0, before, tensor, out=tensor)

    def has_other_parts(self) -> bool:
        """Return whether the optimizer has created, replaced or removed a part since, or changed a plain number."""
        state = _state_of(self._optimizer)
        before = [[key, saved] for key, _, saved in self._entries] + [settings for _, settings in self._groups]
        now = [[key, entry] for key, entry in state.items()] + [_settings(group) for group, _ in self._groups]
        old, new = list(tree.leaves(before)), list(tree.leaves(now))
        return len(old) != len(new) or not all(a is b or _are_equal(a, b) for a, b in zip(old, new, strict=True))

    @staticmethod
    @torch.no_grad()
    def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
        of_device: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # foreach kernels take one device and dtype
        for target, value in zip(targets, values, strict=True):
            pair = of_device.setdefault((target.device, target.dtype), ([], []))
            pair[0].append(target)
            pair[1].append(value)
        for some, others in of_device.values():
            torch._foreach_copy_(some, others)


def _state_of(optimizer: Any) -> Any:
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _in_settings(settings: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among a group's settings, such as a learning rate."""
    for name, value in settings.items():
        yield from (tensor for _, tensor in _tensors_in(value, (name,)))


def _tensors_in(value: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, and their places."""
    if isinstance(value, Tensor):
        yield from _dense(value, place)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(each, (*place, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors_in(each, (*place, number))


def _dense(tensor: Tensor, place: Place) -> Iterator[tuple[Place, Tensor]]:
    """Yield a tensor, or the tensors of which a subclass, such as DTensor, is made."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield place, tensor
        return
    inner = [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    inner = [(name, each) for name, each in inner if isinstance(each, Tensor)]  # a DTensor also names its mesh
    for name, each in inner:
        yield from _dense(each, place if len(inner) == 1 else (*place, name))


def _shallow(value: Any) -> Any:
    """Return the same leaves in new containers."""
    return tree.map_leaves(lambda leaf: leaf, value)


def _put_back(entry: Any, saved: Any) -> Any:
    if not isinstance(entry, dict):
        return _shallow(saved)
    entry.clear()
    entry.update(_shallow(saved))
    return entry  # other code may hold this dict


def _are_equal(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other)

"""Snapshots that are put back when a step is skipped or computed again: buffers of modules, and random states."""

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lossscale_torch._gradients import to_buckets, to_device

_SHAPE = operator.attrgetter("shape")


class Buffers:
    """Copies of the buffers under a module that can be written. Saving and putting back do not synchronise.

    One object serves many steps: the modules are searched again only if a module or a buffer was added, removed or
    replaced since.
    """

    def __init__(self, root: Module) -> None:
        self._root = root
        self._modules: list[tuple[Module, list[Module | None], list[Any]]] = []
        """Each module under the root, its children, and the names and ids of its buffers."""
        self._entries: list[tuple[Module, str, Tensor, Tensor]] = []
        """A module, the name of a buffer, the buffer, and its copy."""
        self._absent: list[tuple[Module, str]] = []
        """The buffers that are None, as those that a first forward pass makes."""
        self._joined: list[tuple[list[Tensor], list[Tensor], list[torch.Size]]] = []
        """Buffers of one device and dtype, their copies, which lie one after another in memory, and the shapes."""
        self._others: list[tuple[Tensor, Tensor]] = []
        """Buffers of other types, such as those on a mesh, and their copies."""

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers, in one call for each device and dtype."""
        if not self._is_current():
            self._collect()
        for buffers, copies, _ in self._joined:
            torch._foreach_copy_(copies, buffers)
        for buffer, copy in self._others:
            copy.copy_(buffer)

    def _is_current(self) -> bool:
        """Return whether the modules and the buffers are those of the last search."""
        for module, children, buffers in self._modules:
            if [*module._modules.values()] != children:
                return False
            if (module._buffers or buffers) and _names_and_ids(module) != buffers:
                return False
        return bool(self._modules) and all([*map(_SHAPE, buffers)] == shapes for buffers, _, shapes in self._joined)

    def _collect(self) -> None:
        """Search the modules, and make room for the copies."""
        modules = [*self._root.modules()]
        found = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
        writable = {buffer: buffer for *_, buffer in found if buffer is not None and _can_be_written(buffer)}
        self._joined, self._others = [], []
        for bucket in to_buckets(buffer for buffer in writable if type(buffer) is Tensor):
            sizes = [buffer.numel() for buffer in bucket]
            memory = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            shapes = [buffer.shape for buffer in bucket]
            copies = [part.view(shape) for part, shape in zip(memory.split(sizes), shapes, strict=True)]
            self._joined.append((bucket, copies, shapes))
            writable |= zip(bucket, copies, strict=True)
        for buffer in writable:
            if type(buffer) is not Tensor:
                writable[buffer] = buffer.clone()
                self._others.append((buffer, writable[buffer]))
        self._entries = [
            (module, name, buffer, writable[buffer])
            for module, name, buffer in found
            if buffer is not None and buffer in writable
        ]
        self._absent = [(module, name) for module, name, buffer in found if buffer is None]
        self._modules = [(module, [*module._modules.values()], _names_and_ids(module)) for module in modules]

    @torch.no_grad()
    def put_back(self, is_applied: bool | Tensor = False, *, with_caches: bool = True) -> None:
        """Make the buffers what they were, by their names, unless the flag, a bool or a bool tensor, is true.

        A new tensor that is not saved, or has another shape, is a cache; without caches it stays.
        """
        if is_applied is True:
            return
        selected: list[tuple[Tensor, Tensor]] = []
        for module, name, buffer, before in self._entries:
            now: Any = buffer if with_caches else module._buffers.get(name)  # scripted modules have no get
            if now is not buffer and _is_cache(module, name, now, buffer):
                continue
            is_resized = now is buffer and now.shape != before.shape  # as torch.ao's observers do at first
            if isinstance(is_applied, Tensor):
                if not is_resized:
                    selected.append((now, before))
                continue
            module._buffers[name] = buffer
            if is_resized:
                buffer.data = torch.empty_like(before)
            buffer.data.copy_(before)  # not counted as a change, as BatchNorm's own writes are not
        if isinstance(is_applied, Tensor):
            _select(is_applied, dict(selected))
            return
        for module, name in self._absent:  # made by the first forward pass
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = None


def _select(is_applied: Tensor, copies: dict[Tensor, Tensor]) -> None:
    """Write copies into their buffers unless a flag on a device is true, with one select for each device and dtype."""
    for bucket in to_buckets(buffer for buffer in copies if type(buffer) is Tensor):
        sizes = [buffer.numel() for buffer in bucket]
        now = torch.cat([buffer.reshape(-1) for buffer in bucket])
        before = torch.cat([copies[buffer].reshape(-1) for buffer in bucket])
        chosen = torch.where(to_device(is_applied, now.device), now, before).split(sizes)
        parts = [part.view(buffer.shape) for part, buffer in zip(chosen, bucket, strict=True)]
        torch._foreach_copy_([buffer.data for buffer in bucket], parts)
    for buffer, before in copies.items():
        if type(buffer) is not Tensor:
            buffer.data.copy_(torch.where(to_device(is_applied, buffer.device), buffer, before))


def _names_and_ids(module: Module) -> list[Any]:
    return [*module._buffers.keys(), *map(id, module._buffers.values())]


def random_states() -> Callable[[], None]:
    """Return a function that puts the random states of Python, NumPy, the CPU and all used devices back."""
    python, numpys, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = [(module, index, module.get_rng_state(index)) for module, index in _used_devices()]

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(cpu)
        for module, index, state in devices:
            module.set_rng_state(state, index)

    return put_back


def _used_devices() -> Iterable[tuple[Any, int]]:
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    return [(module, index) for index in range(module.device_count())]


def _can_be_written(buffer: Tensor) -> bool:
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_inference() or buffer.is_quantized:
        return False
    strides = buffer.stride()  # one of 0 repeats the elements of an expanded tensor
    return 0 not in strides or all(n or size <= 1 for n, size in zip(strides, buffer.shape, strict=True))


def _is_cache(module: Module, name: str, now: Tensor | None, buffer: Tensor) -> bool:
    is_alike = now is not None and (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    return not is_alike or name in module._non_persistent_buffers_set

"""What is put back when a step is skipped or computed again: the buffers of modules, and random states."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lossscale_torch._gradients import buckets, moved


class Buffers:
    """Copies of the buffers of a module, in memory that is written again at each step."""

    def __init__(self) -> None:
        self._entries: list[tuple[Module, str, Tensor, Tensor]] = []
        self._absent: list[tuple[Module, str]] = []
        self._found: list[tuple[Module, str, Tensor]] = []
        self._keys: list[Any] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    @torch.no_grad()
    def copy_from(self, root: Module) -> None:
        """Copy the buffers that can be written, by one call for each device and dtype. Does not synchronise."""
        found = [
            (module, name, buffer)
            for module in root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self._absent = [
            (module, name) for module in root.modules() for name, buffer in module._buffers.items() if buffer is None
        ]
        keys = [(id(module), name, id(buffer), buffer.shape) for module, name, buffer in found]
        if keys != self._keys:
            with torch.inference_mode(False):
                self._entries = [(*each, each[2].detach().clone()) for each in found if _can_be_written(each[2])]
            by_copy = {id(copy): buffer for _, _, buffer, copy in self._entries}
            groups = buckets(copy for *_, copy in self._entries)
            self._keys, self._groups = keys, [(group, [by_copy[id(copy)] for copy in group]) for group in groups]
            self._found = found  # so that the ids stay theirs
            return
        for copies, tensors in self._groups:
            torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the buffers what they were, by their names, whatever is there now."""
        for module, name, buffer, before in self._entries:
            module._buffers[name] = buffer
            buffer.data.copy_(before)  # not counted as a change, as BatchNorm's own writes are not
        self._remove_new()

    @torch.no_grad()
    def put_back_unless(self, is_applied: bool | Tensor) -> None:
        """Make the statistics what they were, if the flag, a bool or a bool tensor, is false."""
        for module, name, buffer, before in self._entries:
            now = module._buffers.get(name)
            # A new tensor that is not saved, or of another shape, is a cache: what belongs to it stays, too.
            if now is None or (now is not buffer and not _is_same_statistic(module, name, now, buffer)):
                continue
            if isinstance(is_applied, Tensor):
                now.data.copy_(torch.where(moved(is_applied, now.device), now, before))
            elif not is_applied:
                module._buffers[name] = buffer
                buffer.data.copy_(before)
        if is_applied is False:
            self._remove_new()

    def _remove_new(self) -> None:
        """Make the buffers None again that were None before, unless they are caches."""
        for module, name in self._absent:
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = None


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
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return buffer.layout is torch.strided and not (is_expanded or buffer.is_inference() or buffer.is_quantized)


def _is_same_statistic(module: Module, name: str, now: Tensor, buffer: Tensor) -> bool:
    is_alike = (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    return is_alike and name not in module._non_persistent_buffers_set

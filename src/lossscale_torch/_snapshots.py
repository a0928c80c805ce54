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
    """Copies of the buffers under a module that can be written; making them does not synchronise."""

    @torch.no_grad()
    def __init__(self, root: Module) -> None:
        found = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
        can_copy = [buffer for *_, buffer in found if buffer is not None and _can_be_written(buffer)]
        copies = {each: torch.empty_like(each) if type(each) is Tensor else each.clone() for each in can_copy}
        for bucket in buckets(each for each in can_copy if type(each) is Tensor):
            # One call for each device and dtype; torch has none for buffers on a mesh, as `distribute_module` makes.
            torch._foreach_copy_([copies[buffer] for buffer in bucket], bucket)
        self._entries = [(module, name, b, copies[b]) for module, name, b in found if b in copies]
        self._absent = [(module, name) for module, name, buffer in found if buffer is None]

    @torch.no_grad()
    def put_back(self, is_applied: bool | Tensor = False, *, with_caches: bool = True) -> None:
        """Make the buffers what they were, by their names, unless the flag, a bool or a bool tensor, is true.

        A new tensor that is not saved, or has another shape, is a cache; without caches it stays.
        """
        for module, name, buffer, before in self._entries:
            now: Any = buffer if with_caches else module._buffers.get(name)  # scripted modules have no get
            if now is not buffer and _is_cache(module, name, now, buffer):
                continue
            is_resized = now is buffer and now.shape != before.shape  # as torch.ao's observers do at first
            if isinstance(is_applied, Tensor):
                if not is_resized:
                    now.data.copy_(torch.where(moved(is_applied, now.device), now, before))
            elif not is_applied:
                module._buffers[name] = buffer
                if is_resized:
                    buffer.data = torch.empty_like(before)
                buffer.data.copy_(before)  # not counted as a change, as BatchNorm's own writes are not
        for module, name in self._absent if is_applied is False else ():  # made by the first forward pass
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
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_inference() or buffer.is_quantized:
        return False
    strides = buffer.stride()  # one of 0 repeats the elements of an expanded tensor
    return 0 not in strides or all(n or size <= 1 for n, size in zip(strides, buffer.shape, strict=True))


def _is_cache(module: Module, name: str, now: Tensor | None, buffer: Tensor) -> bool:
    is_alike = now is not None and (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    return not is_alike or name in module._non_persistent_buffers_set

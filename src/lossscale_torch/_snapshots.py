"""Copies of the buffers of modules and of random states, from which a skipped or repeated step restores them."""

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lossscale_torch._gradients import to_device

_SHAPE = operator.attrgetter("shape")


class Buffers:
    """Copies of the writable buffers of a module and its submodules. No method synchronises with the host."""

    @torch.no_grad()
    def __init__(self, root: Module) -> None:
        self._absent: list[tuple[Module, str]] = []
        """The buffers that are None, such as buffers that the first forward pass creates."""
        by_kind: dict[Any, list[tuple[Module, str, Tensor]]] = {}
        for module in _modules(root):
            for name, buffer in module._buffers.items():
                if buffer is None:
                    self._absent.append((module, name))
                elif _can_be_written(buffer):
                    # Plain tensors of one device and dtype are joined. Other types, such as DTensor, are copied alone.
                    kind = (buffer.device, buffer.dtype) if type(buffer) is Tensor else id(buffer)
                    by_kind.setdefault(kind, []).append((module, name, buffer))
        self._groups = [_BufferGroup(entries) for entries in by_kind.values()]

    @torch.no_grad()
    def restore(self, is_applied: bool | Tensor = False, *, with_caches: bool = True) -> None:
        """Give the buffers their earlier values, unless `is_applied`, a bool or a bool tensor, is true.

        If `is_applied` is a bool, buffers that hold another tensor get their earlier tensor, too.

        A buffer that holds a new tensor is a cache if its shape, dtype or device has changed, or if the module does not
        save it in its state dict. Caches are restored only `with_caches`.
        """
        if is_applied is True:
            return
        for group in self._groups:
            group.restore(is_applied, with_caches)
        if is_applied is False:
            for module, name in self._absent:  # the first forward pass may have created a tensor
                if name not in module._non_persistent_buffers_set:
                    module._buffers[name] = None


class _BufferGroup:
    """Copies of the plain buffers of one device and dtype, joined into one tensor, or of one buffer of another type."""

    def __init__(self, entries: list[tuple[Module, str, Tensor]]) -> None:
        self.entries, buffers = entries, [buffer for *_, buffer in entries]
        self.shapes = [*map(_SHAPE, buffers)]
        self.joined = _join(buffers) if type(buffers[0]) is Tensor else None
        self.copies = [] if self.joined is not None else [buffer.clone() for buffer in buffers]

    def restore(self, is_applied: bool | Tensor, with_caches: bool) -> None:
        """Write the copies into the buffers, unless the flag is true."""
        copies = self.copies if self.joined is None else _split(self.joined, self.shapes)
        changed = []
        for (module, name, buffer), before in zip(self.entries, copies, strict=True):
            # The `_buffers` of a scripted module have no `get`; retries do not need it.
            now: Any = buffer if with_caches else module._buffers.get(name)
            if now is not buffer and _is_cache(module, name, now, buffer):
                continue
            is_resized = now is buffer and now.shape != before.shape  # an observer of torch.ao resizes its buffers
            if isinstance(is_applied, Tensor):
                if not is_resized:
                    changed.append((now, before))
                continue
            module._buffers[name] = buffer
            if is_resized:
                buffer.data = torch.empty_like(before)
            buffer.data.copy_(before)  # through `data`, so that autograd does not count a new version
        if isinstance(is_applied, Tensor) and changed:
            buffers, befores = zip(*changed, strict=True)
            flag = to_device(is_applied, buffers[0].device)
            if self.joined is None:
                buffers[0].data.copy_(torch.where(flag, buffers[0], befores[0]))
            else:  # one kernel for all buffers
                chosen = torch.where(flag, _join(buffers), _join(befores))
                torch._foreach_copy_([buffer.data for buffer in buffers], _split(chosen, [*map(_SHAPE, buffers)]))


def _modules(root: Module) -> Iterator[Module]:
    """Yield each module once. `root.modules()` does the same, but takes three times as long."""
    stack: list[Module | None] = [root]
    visited: set[Module | None] = {None}
    while stack:
        module = stack.pop()
        if module is not None and module not in visited:
            visited.add(module)
            yield module
            stack += module._modules.values()


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector with the elements of all tensors."""
    if all([tensor.dim() == 0 for tensor in tensors]):  # noqa: C419  # a generator takes twice as long
        return torch.stack([*tensors])
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _split(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = joined.split([*map(math.prod, shapes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def random_states() -> Callable[[], None]:
    """Return a function that restores the present random states of Python, NumPy, the CPU and all devices in use."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = [(module, index, module.get_rng_state(index)) for module, index in _used_devices()]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for module, index, state in devices:
            module.set_rng_state(state, index)

    return restore


def _used_devices() -> Iterable[tuple[Any, int]]:
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    return [(module, index) for index in range(module.device_count())]


def _can_be_written(buffer: Tensor) -> bool:
    if is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_inference() or buffer.is_quantized:
        return False
    return buffer.is_contiguous() or torch._debug_has_internal_overlap(buffer) != 1  # 1: an expanded tensor


def _is_cache(module: Module, name: str, now: Tensor | None, buffer: Tensor) -> bool:
    is_alike = now is not None and (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    return not is_alike or name in module._non_persistent_buffers_set

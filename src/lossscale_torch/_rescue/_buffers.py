"""Copies of modules' buffers, restored if a step is not applied, on the host or on the device."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Module

from lossscale_torch._gradients import Bucket, buckets, is_dtensor, moved


class _Slot(NamedTuple):
    """A buffer in its module."""

    module: Any
    name: str
    buffer: Tensor

    def is_in_place(self) -> bool:
        """Return whether the module still holds the tensor that it held at the copy."""
        return getattr(self.module, self.name, None) is self.buffer

    def is_replaced_alike(self) -> bool:
        """Return whether a tensor of the same kind has replaced it: a statistic, as opposed to a cache.

        A cache is kept together with attributes that are not buffers, such as the length that it was made for, so that
        the old one must not come back alone. Modules register it as not persistent, or make it in another shape.
        """
        now = getattr(self.module, self.name, None)
        if not isinstance(now, Tensor) or _is_transient(self.module, self.name):
            return False
        return (now.shape, now.dtype, now.device) == (self.buffer.shape, self.buffer.dtype, self.buffer.device)


class _NewBuffer(NamedTuple):
    """A buffer that was created after the copy."""

    module: Any
    name: str
    buffer: Tensor
    version: int
    was_none: bool
    """Whether it was registered as None at the copy; otherwise it was not registered."""

    def remove(self) -> None:
        """Remove it, unless other code has written to it or replaced it since."""
        if self.module._buffers.get(self.name) is self.buffer and self.buffer._version == self.version:
            if self.was_none:
                setattr(self.module, self.name, None)
            else:
                delattr(self.module, self.name)


class _Copy(NamedTuple):
    """Some buffers of one device and dtype, their dense, local values, and a copy of these, one after the other."""

    slots: list[_Slot]
    values: list[Tensor]
    flat: Tensor


class SavedBuffers:
    """The buffers of some modules, as they were when each module was saved.

    Every dense buffer of any dtype is copied, since counters and flags belong to the statistics. Buffers that
    cannot be written in place are not restored: sparse, expanded, quantized and uninitialised ones, and those created
    in inference mode. A buffer that was created after the copy is removed, unless it is not persistent, as a cache.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, dict[str, Tensor | None]]] = []
        self._new: list[_NewBuffer] | None = None  # since the copy, until the step ended
        self._tensors: set[int] = set()
        self._copies: list[_Copy] = []
        self._versions: dict[int, int] | None = None

    @torch.no_grad()
    def save(self, modules: Iterable[Module]) -> None:
        """Copy the buffers of modules, but for buffers that were copied before."""
        slots: dict[int, _Slot] = {}  # by the id of what holds the values
        values: list[Tensor] = []
        for module in modules:
            self._held.append((module, dict(module._buffers)))
            if module._buffers:
                for name, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in self._tensors:
                        self._tensors.add(id(buffer))
                        local = _writable(buffer)
                        if local is not None:
                            slots[id(local)] = _Slot(module, name, buffer)
                            values.append(local)
        for bucket in buckets(values):
            self._copies.append(_Copy([slots[id(each)] for each in bucket], bucket, _flattened(bucket)))

    def seal(self) -> None:
        """Mark the end of the step: buffers that other code writes from now on are no longer restored."""
        self._versions = {id(slot): slot.buffer._version for copy in self._copies for slot in copy.slots}
        self._new = self._new_buffers()

    @torch.no_grad()
    def restore(self) -> None:
        """Write the saved values to the buffers, and remove buffers that were created since."""
        for new in self._new_buffers() if self._new is None else self._new:
            new.remove()
        for copy in reversed(self._copies):
            targets, back = [], []
            for slot, values, before in self._unedited(copy):
                if not slot.is_in_place():
                    if not slot.is_replaced_alike():
                        continue
                    setattr(slot.module, slot.name, slot.buffer)
                targets.append(values)
                back.append(before)
            _write(targets, back)

    @torch.no_grad()
    def keep_where(self, applied: Tensor) -> None:
        """Write the saved values to the buffers where `applied`, bool of shape `()`, is False; waits for no device.

        Buffers that were created since stay, since the decision is only on the device.
        """
        for copy in reversed(self._copies):
            flag = moved(applied, copy.flat.device)
            targets, back = [], []
            for slot, values, before in self._unedited(copy):
                if slot.is_in_place():
                    targets.append(values)
                    back.append(before)
                elif slot.is_replaced_alike():
                    now = getattr(slot.module, slot.name)
                    setattr(slot.module, slot.name, torch.where(flag, now, before))
            if targets:
                chosen = torch.where(flag, _flattened(targets), _flattened(back))
                _write(targets, _unflatten_dense_tensors(chosen, targets))

    def _new_buffers(self) -> list[_NewBuffer]:
        return [
            _NewBuffer(module, name, buffer, buffer._version, name in held)
            for module, held in self._held
            for name, buffer in module._buffers.items()
            if buffer is not None and held.get(name) is None
            if not _is_transient(module, name) and not buffer.is_inference()
        ]

    def _unedited(self, copy: _Copy) -> Iterable[tuple[_Slot, Tensor, Tensor]]:
        """Yield each buffer that was not written to by hand since the step ended, its values, and those of the copy."""
        before = _unflatten_dense_tensors(copy.flat, copy.values)
        for slot, values, saved in zip(copy.slots, copy.values, before, strict=True):
            if self._versions is None or self._versions[id(slot)] == slot.buffer._version:
                yield slot, values, saved


def unknown_modules(module: Module, known: dict[int, Module]) -> list[Module]:
    """Return a module and those within it that are not in `known`, by their ids, and enter them there."""
    unknown, waiting = [], [module]  # faster than `Module.modules`, which makes up a name for each
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in known:
            known[id(each)] = each
            unknown.append(each)
            if each._modules:
                waiting.extend(each._modules.values())  # type: ignore[arg-type]  # None is passed over
    return unknown


def _is_transient(module: Any, name: str) -> bool:
    return name in getattr(module, "_non_persistent_buffers_set", ())


def _writable(buffer: Tensor) -> Tensor | None:
    """Return the dense, local values of a buffer, in its own memory; None where they cannot be written in place."""
    if type(buffer) is not Tensor:
        if not is_dtensor(buffer):
            return None
        buffer = buffer.to_local()  # type: ignore[attr-defined]
    if buffer.layout is not torch.strided or buffer.is_inference() or buffer.is_quantized:
        return None
    if buffer.is_contiguous():
        return buffer
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return None if is_expanded else buffer


def _flattened(bucket: Bucket) -> Tensor:
    """Return a copy of all values, one after the other."""
    flat = _flatten_dense_tensors(bucket)
    return flat.clone() if len(bucket) == 1 else flat  # a single tensor is not copied by it


def _write(targets: list[Tensor], values: Iterable[Tensor]) -> None:
    """Write values in place, without counting it as a change.

    BatchNorm does not count it when it writes its statistics, either. The graph of a loss that is still to run backward
    may hold them, and would refuse to: https://github.com/pytorch/pytorch/issues/22095
    """
    if targets:
        torch._foreach_copy_([each.data for each in targets], list(values))

"""Copies of modules' buffers, to be put back where a step is not applied: on the host, or on the device."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lossscale_torch._gradients import Bucket, buckets, is_dtensor, moved


class _Slot(NamedTuple):
    """A buffer in its module, and the memory that holds its values."""

    module: Any
    name: str
    buffer: Tensor
    values: Tensor

    def is_in_place(self) -> bool:
        """Return whether the module still holds the tensor that it held at the copy."""
        return getattr(self.module, self.name, None) is self.buffer

    def is_replaced_alike(self) -> bool:
        """Return whether a new value of the same kind has taken its place: a statistic, as opposed to a cache.

        A cache is kept together with attributes that are not buffers, such as the length that it was made for, so that
        the old one must not come back alone. Modules register it as not persistent, or make it in another shape.
        """
        now = getattr(self.module, self.name, None)
        if not isinstance(now, Tensor) or self.name in getattr(self.module, "_non_persistent_buffers_set", ()):
            return False
        return (now.shape, now.dtype, now.device) == (self.buffer.shape, self.buffer.dtype, self.buffer.device)


class _Copy(NamedTuple):
    """Some buffers of one device and dtype, and their values at the copy, one after the other."""

    slots: list[_Slot]
    flat: Tensor

    def pieces(self) -> list[Tensor]:
        """Return the values of each buffer, in its shape."""
        sizes = [slot.values.numel() for slot in self.slots]
        parts = self.flat.split(sizes)
        return [part.view(slot.values.shape) for part, slot in zip(parts, self.slots, strict=True)]


class SavedBuffers:
    """The buffers of some modules, as they were when each module was saved.

    Every dense buffer is copied, whatever its dtype: counters and flags belong to the statistics beside them. What
    cannot be written in place is left alone: sparse, expanded, quantized and uninitialised buffers, and those that were
    made in inference mode.
    """

    def __init__(self) -> None:
        self._tensors: set[int] = set()
        self._copies: list[_Copy] = []
        self._versions: dict[int, int] | None = None

    @torch.no_grad()
    def save(self, modules: Iterable[Module]) -> None:
        """Copy the buffers of modules, but for buffers that were copied before."""
        slots = [slot for module in modules for slot in self._new_slots(module)]
        if slots:
            by_values = {id(slot.values): slot for slot in slots}
            for bucket in buckets(slot.values for slot in slots):
                self._copies.append(_Copy([by_values[id(values)] for values in bucket], _joined(bucket)))

    def seal(self) -> None:
        """Note that the step has ended: a buffer that is written to from now on, by hand, is not put back any more."""
        self._versions = {id(slot): slot.buffer._version for copy in self._copies for slot in copy.slots}

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the saved values to the buffers."""
        for copy in reversed(self._copies):
            back, targets = [], []
            for slot, piece in zip(copy.slots, copy.pieces(), strict=True):
                if self._is_edited(slot):
                    continue
                if not slot.is_in_place():
                    if not slot.is_replaced_alike():
                        continue
                    setattr(slot.module, slot.name, slot.buffer)
                back.append(piece)
                targets.append(slot.values)
            _write(targets, back)

    @torch.no_grad()
    def keep_where(self, applied: Tensor) -> None:
        """Write the saved values to the buffers where `applied`, bool of shape `()`, is False; waits for no device."""
        for copy in reversed(self._copies):
            slots: list[tuple[_Slot, Tensor]] = []
            flag = moved(applied, copy.flat.device)
            for slot, piece in zip(copy.slots, copy.pieces(), strict=True):
                if self._is_edited(slot):
                    continue
                if slot.is_in_place():
                    slots.append((slot, piece))
                elif slot.is_replaced_alike():
                    now = getattr(slot.module, slot.name)
                    setattr(slot.module, slot.name, torch.where(flag, now, piece))
            targets = [slot.values for slot, _ in slots]
            if targets:
                chosen = torch.where(flag, _joined(targets), _joined([piece for _, piece in slots]))
                parts = chosen.split([each.numel() for each in targets])
                _write(targets, [part.view(each.shape) for part, each in zip(parts, targets, strict=True)])

    def _new_slots(self, module: Module) -> list[_Slot]:
        slots = []
        for name, buffer in module._buffers.items() if module._buffers else ():
            if buffer is None or id(buffer) in self._tensors:
                continue
            values = _writable(buffer)
            if values is not None:
                self._tensors.add(id(buffer))
                slots.append(_Slot(module, name, buffer, values))
        return slots

    def _is_edited(self, slot: _Slot) -> bool:
        return self._versions is not None and self._versions[id(slot)] != slot.buffer._version


def _writable(buffer: Tensor) -> Tensor | None:
    """Return the dense, local values of a buffer, in its own memory; None where they cannot be written in place."""
    if is_dtensor(buffer):
        buffer = buffer.to_local()  # type: ignore[attr-defined]
    if type(buffer) is not Tensor or buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_inference():
        return None
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        return None
    # Without the version counter: BatchNorm writes its statistics without it, too, and the graph of another loss that
    # is still to run backward may hold them: https://github.com/pytorch/pytorch/issues/22095
    return buffer.data


def _joined(bucket: Bucket) -> Tensor:
    return torch.cat([each.reshape(-1) for each in bucket])


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)

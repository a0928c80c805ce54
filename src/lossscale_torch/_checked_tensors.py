"""The check of parameters and optimizer state before and after a step: it finds those that became NaN or infinite."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_torch._gradients import buckets, parameter_name
from lossscale_torch._norm import has_float64
from lossscale_torch._state import is_being_recorded, is_readable
from lossscale_torch._weights import Place, WeightsAndState, tensors_of

_SMALL = 4096  # elements; the norm of fewer takes about as long as copying them does


class _Part(NamedTuple):
    """The floats of one device among an optimizer's parameters and state."""

    places: list[Place]
    tensors: list[Tensor]
    finite: Tensor
    """bool, of shape `(tensors,)`: whether each was finite."""


class _Known(NamedTuple):
    """The result for a `_Part`, kept until the next step; it does not keep the tensors alive."""

    references: list[Any]
    versions: list[int]
    finite: Tensor


class CheckedTensors:
    """The check of one optimizer's tensors: those that were finite before a step must be finite after it.

    If the values before the step were copied, the copies show which were finite. Otherwise they are looked at before
    the first step, and then only what other code has written since the last one.
    """

    def __init__(self) -> None:
        self.memory: list[Tensor] | None = None
        """The memory of the last copy, on a CPU, where allocating takes longer than copying."""
        self._known: dict[Any, _Known] = {}
        self._before: dict[Any, _Part] = {}
        self._after: dict[Any, _Part] = {}

    def look(self, optimizer: Any) -> None:
        """Look at the tensors before a step; those that no code has written since the last step are known."""
        self._before, self._after = {}, {}
        for device, (places, tensors) in _floats(optimizer).items():
            known = self._known.get(device)
            finite = known.finite if known is not None and _are_unchanged(known, tensors) else _finite(tensors)
            self._before[device] = _Part(places, tensors, finite)

    def found(self, optimizer: Any, copied: WeightsAndState | None) -> dict[Any, Tensor]:
        """Return for each device 1.0 if the step has made a tensor not finite that was finite or new, else 0.0."""
        found, self._after = {}, {}
        for device, (places, tensors) in _floats(optimizer).items():
            self._after[device] = part = _Part(places, tensors, _finite(tensors))
            if copied is not None:
                self._before.pop(device, None)
                is_known = is_readable(part.finite) and not is_being_recorded()
                if not (is_known and part.finite.all()):
                    copies = {place: copy for place in places if (copy := copied.copy_of(place)) is not None}
                    if copies:
                        self._before[device] = _Part([*copies], [*copies.values()], _finite([*copies.values()]))
            found[device] = (self._were_finite(device) & ~part.finite).any().float()
        return found

    def first_name(self, optimizer: Any) -> str:
        """Return the name of the first parameter or state that the step has made not finite. Synchronises."""
        bad = set()
        for device, part in self._after.items():
            flags = (self._were_finite(device) & ~part.finite).tolist()
            bad |= {place for place, flag in zip(part.places, flags, strict=True) if flag}
        for place in tensors_of(optimizer):
            if place in bad:
                return _name(optimizer, place)
        return "a parameter or a state of another rank"

    def take(self) -> None:
        """Store the result of the check after the step."""
        self._known = {
            device: _Known(list(map(weakref.ref, part.tensors)), [t._version for t in part.tensors], part.finite)
            for device, part in self._after.items()
        }
        self._before, self._after = {}, {}

    def _were_finite(self, device: Any) -> Tensor:
        """Return whether each tensor after the step was finite before it; True for those that the step created."""
        after, before = self._after[device], self._before.get(device)
        if before is not None and after.places == before.places:
            return before.finite
        ones = torch.ones((), dtype=torch.bool, device=device)
        flags = {} if before is None else dict(zip(before.places, before.finite.unbind(), strict=True))
        return torch.stack([flags.get(place, ones) for place in after.places])


def _floats(optimizer: Any) -> dict[Any, tuple[list[Place], list[Tensor]]]:
    """Return the places and the tensors of floats for each device."""
    found: dict[Any, tuple[list[Place], list[Tensor]]] = {}
    for place, tensor in tensors_of(optimizer).items():
        if tensor.is_floating_point() or tensor.is_complex():
            places, tensors = found.setdefault(tensor.device, ([], []))
            places.append(place)
            tensors.append(tensor)
    return found


@torch.no_grad()
def _finite(tensors: list[Tensor]) -> Tensor:
    """Return whether each tensor of a device is finite: bool, shape `(tensors,)`. Does not wait for the device."""
    real = [_real(each) for each in tensors]
    if is_readable(real[0]) and not is_being_recorded():
        if all(_norm(bucket).isfinite() for bucket in buckets(real)):
            return torch.ones(len(real), dtype=torch.bool)
        return torch.stack([torch.isfinite(each).all() for each in real])  # the squares of large numbers overflow
    flags: dict[int, Tensor] = {}
    for bucket in buckets(each for each in real if each.numel()):
        # In float64 no square of a float32 overflows; otherwise the largest element shows it.
        is_wide = bucket[0].dtype is torch.float64 or not has_float64(bucket[0].device)
        norms = (
            torch._foreach_norm(bucket, torch.inf) if is_wide else torch._foreach_norm(bucket, 2.0, dtype=torch.float64)
        )
        flags.update(zip(map(id, bucket), torch.isfinite(torch.stack(norms)).unbind(), strict=True))
    yes = torch.ones((), dtype=torch.bool, device=real[0].device)
    return torch.stack([flags.get(id(each), yes) for each in real])


def _norm(bucket: list[Tensor]) -> Tensor:
    """Return the 2-norm of a bucket, float32 or float64, on a CPU; small tensors are joined."""
    small = [each.reshape(-1) for each in bucket if each.numel() < _SMALL]
    joined = [each for each in bucket if each.numel() >= _SMALL] + ([torch.cat(small)] if small else [])
    dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None
    return torch.stack(torch._foreach_norm(joined, 2.0, dtype=dtype)).norm()


def _real(tensor: Tensor) -> Tensor:
    """Return the values as real floats that kernels take."""
    tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    tensor = tensor.detach().resolve_neg().resolve_conj()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize < 2 else tensor  # float8 has no norm


def _are_unchanged(known: _Known, tensors: list[Tensor]) -> bool:
    return len(known.references) == len(tensors) and all(
        reference() is tensor and version == tensor._version
        for reference, version, tensor in zip(known.references, known.versions, tensors, strict=True)
    )


def _name(optimizer: Any, place: Place) -> str:
    """Return the name of a parameter, or of a state, for a message."""
    g, i, *keys = place
    if g is None:
        return f"state {_path(keys)} of the optimizer"
    name = parameter_name(optimizer.param_groups[g], g, i)
    return f"state {_path(keys)} of {name}" if keys else name


def _path(keys: list[Any]) -> str:
    return f"{keys[0]!r}" + "".join(f"[{key!r}]" for key in keys[1:])

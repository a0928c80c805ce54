"""The spike guard of a scaler: a state for each optimizer, on the host or on its device."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossscale_core import GuardState, SpikeGuard, state_to_dict
from lossscale_core.adapters import check_guard, check_spike_streak, guard_state_from_dict
from lossscale_torch._members import Member
from lossscale_torch._state import as_tensors, is_being_recorded, write

_LARGEST = torch.finfo(torch.float32).max


class Guards:
    """A `SpikeGuard` and its states, one for each optimizer, in the order of their first norms.

    A state stays on the host while norms are known there. The first norm that is only on the device moves the state to
    tensors, which are then written in place, since a recorded CUDA graph reads and writes this memory. The state of a
    deleted optimizer is reused for the next new one.
    """

    def __init__(self, guard: SpikeGuard | None, members: dict[int, Member]) -> None:
        check_guard(guard)
        self.guard = guard
        self._members = members
        self._states: list[Any] = []
        self._saved: Any = None  # the entry of a checkpoint, for a scaler without a guard
        self._norms: dict[int, float] = {}  # the last norm of each state on the host, for an error message

    def is_spike(self, member: Member, norm: float | Tensor) -> bool | Tensor:
        """Return whether a norm is a spike: a bool, or a bool tensor of shape `()`. Does not wait for a device."""
        if self.guard is None:
            return False
        place = self._place_of(member, self.guard)
        if isinstance(norm, Tensor) and norm.is_cpu and not is_being_recorded():
            norm = norm.item()
        if not isinstance(norm, Tensor) and math.isfinite(norm):
            norm = min(norm, _LARGEST)  # a norm beyond float32 is a spike, not an overflow
        if isinstance(norm, Tensor) or isinstance(self._states[place].mean, Tensor):
            return self._check_on_device(self.guard, place, norm)
        accepted, self._states[place] = self.guard.check(self._states[place], norm)
        self._norms[place] = norm
        return math.isfinite(norm) and not accepted

    def check(self) -> None:
        """Raise `SpikeStreakError` if a state on the host has reached the guard's `max_streak`."""
        if self.guard is not None and self.guard.max_streak is not None:
            for place, norm in self._norms.items():
                if not isinstance(self._states[place].mean, Tensor):
                    check_spike_streak(self.guard, self._states[place], norm)

    def first(self) -> GuardState | None:
        """Return the state of the first optimizer, on its device. Does not synchronise."""
        return self._states[0] if self._states else None

    def worst(self) -> GuardState | None:
        """Return the state with the longest streak, and among them the most spikes. Synchronises if on a device."""
        return max(map(_read, self._states), key=lambda state: (state.streak, state.spikes), default=None)

    def saved(self, state: Any) -> dict[str, Any]:
        """Return the entry of a state dict: one dict, or for several optimizers a list. Synchronises if on a device.

        `state` is that of the scaler.
        """
        if self.guard is None:
            return {} if self._saved is None else {"guard": self._saved}
        states = list(map(_read, self._states)) or [self.guard.init_state()]
        entries = [state_to_dict(state, guard=each)["guard"] for each in states]
        return {"guard": entries[0] if len(entries) == 1 else entries}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the entry of a state dict; without a guard, keep it for the next one."""
        entry = saved.get("guard")
        if self.guard is None:
            self._saved = entry
            return
        entries = entry if isinstance(entry, list | tuple) else [entry]
        version = saved.get("version", 1)
        restored: list[Any] = [guard_state_from_dict({"version": version, "guard": each}) for each in entries]
        for place, state in enumerate(self._states):
            after = restored[place] if place < len(restored) else self.guard.init_state()
            if isinstance(state.mean, Tensor):  # a graph may hold these tensors
                for tensor, value in zip(state, after, strict=True):
                    write(tensor, value.item())
            else:
                self._states[place] = after
        self._states += restored[len(self._states) :]

    def copied(self, members: dict[int, Member]) -> "Guards":
        """Return a copy with states on the host, for a scaler with other members."""
        copy = Guards(self.guard, members)
        copy._saved, copy._states = self._saved, [_read(each) for each in self._states]
        return copy

    def _place_of(self, member: Member, guard: SpikeGuard) -> int:
        if member.place is None:
            taken = {each.place for each in list(self._members.values())}
            member.place = next(place for place in range(len(self._states) + 1) if place not in taken)
            if member.place == len(self._states):
                self._states.append(guard.init_state())
        return member.place

    def _check_on_device(self, guard: SpikeGuard, place: int, norm: Any) -> Tensor:
        state = self._states[place]
        if not isinstance(state.mean, Tensor):
            state = self._states[place] = as_tensors(state, norm.device)
        norm = torch.as_tensor(norm, device=state.mean.device)
        is_finite = torch.isfinite(norm)
        norm = torch.where(is_finite, norm.clamp(max=_LARGEST), norm).float()
        accepted, after = guard.check(state, norm, xp=torch)
        torch._foreach_copy_(list(state), list(after))
        return is_finite & ~accepted


def _read(state: GuardState) -> GuardState:
    if not isinstance(state.mean, Tensor):
        return state
    start = SpikeGuard().init_state()
    return GuardState(*(type(first)(value.item()) for first, value in zip(start, state, strict=True)))

"""The spike guard of a scaler: a state for each optimizer, on the host or on its device."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lossscale_core import GuardState, SpikeGuard, check_spike_streak, guard_state_from_dict, state_to_dict
from lossscale_core.errors import CallOrderError, PolicyError
from lossscale_torch._gradients import is_dtensor
from lossscale_torch._optimizers import is_being_recorded, weak_reference

_LARGEST = torch.finfo(torch.float32).max


class Guards:
    """A `SpikeGuard` and its state for each optimizer, in the order in which they were first judged.

    A state stays on the host while norms are known there. The first norm that only the device knows moves it to
    tensors, which are written in place from then on: a recorded CUDA graph reads and writes this memory.
    """

    def __init__(self, guard: SpikeGuard | None = None, saved: Any = None) -> None:
        if not isinstance(guard, SpikeGuard | None):
            raise PolicyError(f"guard={guard!r} must be a SpikeGuard; pass SpikeGuard(), or leave it out")
        self.guard = guard
        self._states: list[Any] = []
        self._places: dict[int, tuple[Any, int]] = {}
        self._kept = saved  # what a checkpoint holds for a scaler that has no guard
        self._norms: dict[int, float] = {}  # the last one of each state on the host, for an error to name

    def judge(self, optimizer: Any, norm: Any) -> bool | Tensor:
        """Return whether a norm, a number or a tensor, is a spike: a bool, or a bool tensor of shape `()`.

        Does not wait for a device.
        """
        if self.guard is None:
            return False
        place = self._place_of(optimizer, self.guard)
        if is_dtensor(norm):
            norm = norm.full_tensor()
        if isinstance(norm, Tensor) and norm.is_cpu and not is_being_recorded():
            norm = norm.item()
        if not isinstance(norm, Tensor) and math.isfinite(norm):
            norm = min(norm, _LARGEST)  # what float32 cannot hold is a spike and not an overflow
        if isinstance(norm, Tensor) or isinstance(self._states[place].mean, Tensor):
            return self._judge_on_device(self.guard, place, norm)
        accepted, self._states[place] = self.guard.judge(self._states[place], norm)
        self._norms[place] = norm
        return math.isfinite(norm) and not accepted

    def check(self) -> None:
        """Raise `SpikeStreakError` where a state on the host has reached the guard's `max_streak`."""
        if self.guard is not None and self.guard.max_streak is not None:
            for place, norm in self._norms.items():
                if not isinstance(self._states[place].mean, Tensor):
                    check_spike_streak(self.guard, self._states[place], norm)

    def first(self) -> GuardState | None:
        """Return the state of the optimizer that was judged first, where it is. Does not synchronise."""
        return self._states[0] if self._states else None

    def worst(self) -> GuardState | None:
        """Return the state with the longest streak, and among them the most spikes. Synchronises if on a device."""
        return max(map(_read, self._states), key=lambda state: (state.streak, state.spikes), default=None)

    def saved(self, state: Any) -> dict[str, Any]:
        """Return the entry of a state dict: one dict, or for several optimizers a list. Synchronises if on a device."""
        if self.guard is None:
            return {} if self._kept is None else {"guard": self._kept}
        states = [_read(each) for each in self._states] or [self.guard.init_state()]
        entries = [state_to_dict(state, guard=each)["guard"] for each in states]
        return {"guard": entries[0] if len(entries) == 1 else entries}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from the entry of a state dict; without a guard, keep it for the next one."""
        if self.guard is None:
            self._kept = saved.get("guard")
            return
        entry = saved.get("guard")
        entries = entry if isinstance(entry, list | tuple) else [entry]
        version = saved.get("version", 1)
        restored: list[Any] = [guard_state_from_dict({"version": version, "guard": each}) for each in entries]
        for place, state in enumerate(self._states):
            after = restored[place] if place < len(restored) else self.guard.init_state()
            if isinstance(state.mean, Tensor):  # a graph may hold these tensors
                for tensor, value in zip(state, after, strict=True):
                    tensor.fill_(value.item())
            else:
                self._states[place] = after
        self._states += restored[len(self._states) :]

    def copied(self) -> "Guards":
        """Return a copy with states on the host, which knows no optimizer yet."""
        copy = Guards(self.guard, self._kept)
        copy._states = [_read(each) for each in self._states]
        return copy

    def _place_of(self, optimizer: Any, guard: SpikeGuard) -> int:
        reference, place = self._places.get(id(optimizer), (None, 0))
        if reference is None or reference() is not optimizer:
            taken = {place for reference, place in self._places.values() if reference() is not None}
            place = next(number for number in range(len(taken) + 1) if number not in taken)
            self._places[id(optimizer)] = (weak_reference(optimizer), place)
            if place == len(self._states):
                self._states.append(guard.init_state())
        return place

    def _judge_on_device(self, guard: SpikeGuard, place: int, norm: Any) -> Tensor:
        state = self._states[place]
        if not isinstance(state.mean, Tensor):
            state = self._states[place] = _placed(state, norm.device)
        norm = torch.as_tensor(norm, device=state.mean.device)
        is_finite = torch.isfinite(norm)
        norm = torch.where(is_finite, norm.clamp(max=_LARGEST), norm).float()
        accepted, after = guard.judge(state, norm, xp=torch)
        torch._foreach_copy_(list(state), list(after))
        return is_finite & ~accepted


def _placed(state: GuardState, device: torch.device) -> GuardState[Tensor]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CallOrderError(
            "the state of the spike guard is still on the host, and a graph that is being captured would write it anew "
            "at each replay; take one step with this optimizer before capturing one"
        )
    with torch.inference_mode(False):  # they outlive a validation loop that may be running
        # Not by `torch.full`, which a graph that is being recorded would replay, and begin the guard anew.
        dtypes = [torch.float32 if "float" in value.dtype.name else torch.int32 for value in state]
        pairs = zip(state, dtypes, strict=True)
        return GuardState(*(torch.tensor(value.item(), dtype=dtype).to(device) for value, dtype in pairs))


def _read(state: GuardState) -> GuardState:
    if not isinstance(state.mean, Tensor):
        return state
    start = SpikeGuard().init_state()
    return GuardState(*(type(first)(value.item()) for first, value in zip(start, state, strict=True)))

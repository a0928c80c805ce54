"""The policy's state, as scalars on the host or as tensors on a device, and how a step changes it in either place.

Scale and growth tracker are torch's own two tensors in both cases. A flag that the host knows is a tensor on the CPU.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import _disable_current_modes

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import moved
from lossscale_torch._step_info import StepInfo

READY, UNSCALED, STEPPED = OptState  # access to an enum's members by name is slow
SPIKE = "spike"
"""The text under which the veto of the guard is recorded."""
_HAS_CUDA = torch.backends.cuda.is_built()
_LARGEST_COUNT = 2**31 - 1
_WITH_UPDATE_KERNEL = ("cpu", "cuda", "mps", "xpu")

Found = tuple[bool, bool, bool, bool]
"""Whether there were gradients, one of them overflowed, a hook vetoed the step, and the veto is that of a guard."""


# The flags of a step.


def found_on_host(records: Iterable[dict[str, Any]]) -> Found | None:
    """Return what the flags say, or None if one of them is on a device."""
    had_gradients = overflowed = vetoed = spiked = False
    for record in records:
        for key, flag in record["found_inf_per_device"].items():
            if not flag.is_cpu:
                return None
            is_set = flag.item() != 0.0  # NaN is not 0.0, either
            if type(key) is not str:
                had_gradients, overflowed = True, overflowed or is_set
            elif is_set:
                vetoed, spiked = True, spiked or key == SPIKE
    return had_gradients, overflowed, vetoed, spiked and not overflowed


def may_have_moved(record: dict[str, Any]) -> bool:
    """Return whether an optimizer was applied, or was called and may have been."""
    return bool(record.get("applied", "kind" in record))


def read(tensors: list[Tensor], device: torch.device) -> list[float]:
    """Return numbers of shape `()`; all devices together are waited for once."""
    if all([each.is_cpu for each in tensors]):  # noqa: C419  # a generator takes twice as long
        return [each.item() for each in tensors]
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in tensors) else torch.float32
    numbers: list[float] = torch.stack([moved(each, device).to(dtype).reshape(()) for each in tensors]).tolist()
    return numbers


def combined(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest of some flags, which are 0.0, above it or NaN: float32, shape `()`, on `device`."""
    found = [moved(flag, device) for flag in flags]
    if not found:
        return torch.zeros((), dtype=torch.float32, device=device)
    if len(found) == 1:
        return found[0]
    return functools.reduce(torch.maximum, [flag.reshape(()) for flag in found])  # NaN, too, is a maximum


# A step on a device.


class OnDevice:
    """A state on a device, in persistent tensors: a recorded CUDA graph reads and writes this memory.

    Making one, and assigning to it, is not a part of a graph that is being recorded.
    """

    is_recorded = False
    """Whether a replay may write to these tensors, which does not count as a new version."""
    after: tuple[Tensor, int] | None = None
    """A copy of the loss scale after the last step, and the version of torch's tensor at that time."""

    def __init__(self, state: Any, policy: Any, device: torch.device) -> None:
        whole = [value.dtype.kind != "f" for value in state[2:]]
        self.has_moves = _has_moves(state) and _is_torchs_rule(policy, device)
        # The memory of the whole numbers among the fields. Sums and products, unlike `update`, may leave int32.
        kind = torch.int64 if self.has_moves else torch.int32
        with unrecorded(device):
            counts = [int(v) for v, is_whole in zip(state[2:], whole, strict=True) if is_whole]
            self.counts = torch.tensor(counts, dtype=kind).to(device)
            self.moves: list[Tensor] = [each.to(device) for each in _moves(policy, state)]
            self.not_and_same = torch.tensor([True, False]).to(device)
            counters = iter(self.counts.unbind())
            rest = [
                next(counters) if is_whole else torch.tensor(value.item(), dtype=torch.float32).to(device)
                for value, is_whole in zip(state[2:], whole, strict=True)
            ]
        self.fields = state._make([None, None, *rest])

    def tensors(self, scale: Tensor, tracker: Tensor) -> Any:
        """Return the policy's state, with torch's tensors as its first two fields."""
        return self.fields._make((scale, tracker, *self.fields[2:]))

    def move(self, plus: Tensor, times: Tensor) -> Tensor:
        """Multiply the counts and add to them; return the overflows in a row, in memory that does not change."""
        if self.is_recorded:
            torch.addcmul(plus, self.counts, times, out=self.counts)
            return cast(Tensor, self.fields.overflow_streak.clone())
        self.counts = torch.addcmul(plus, self.counts, times)
        self.fields = self.fields._make((None, None, *self.counts.unbind()))
        return cast(Tensor, self.fields.overflow_streak)

    def assigned(self, state: Any, policy: Any) -> "OnDevice":
        """Return this state with the numbers of another, in its own tensors if they can hold them."""
        other = OnDevice(state, policy, self.counts.device)
        if other.fields._fields != self.fields._fields:
            return other
        with unrecorded(self.counts.device):
            for tensor, value in zip((*self.fields[2:], *self.moves), (*other.fields[2:], *other.moves), strict=True):
                tensor.copy_(value)
        self.has_moves, self.after = other.has_moves, None
        return self


def to_host(tensors: Any, policy: Any) -> Any:
    """Return a state of tensors as host scalars; waits for their device, once for numbers and once for whole ones."""
    kinds = [each.dtype.is_floating_point for each in tensors]
    floats = torch.stack([each for each, is_float in zip(tensors, kinds, strict=True) if is_float])
    counts = torch.stack([each.long() for each, is_float in zip(tensors, kinds, strict=True) if not is_float])
    of_floats, of_counts = iter(floats.cpu().tolist()), iter(counts.clamp_(max=_LARGEST_COUNT).cpu().tolist())
    numbers = [next(of_floats if is_float else of_counts) for is_float in kinds]
    return tensors._make(type(like)(number) for like, number in zip(policy.init_state(), numbers, strict=True))


def copies(tensors: Any) -> Any:
    """Return copies of a state of tensors, float32 and int32. Does not synchronise."""
    return tensors._make(
        each.clamp(max=_LARGEST_COUNT).to(torch.int32) if each.dtype is torch.int64 else each.clone()
        for each in tensors
    )


def advance_on_device(policy: Any, state: OnDevice, tensors: Any, records: Any, is_counted: bool) -> StepInfo:
    """Update a state in place, and return the outcome. Does not synchronise."""
    scale, device = tensors.loss_scale, tensors.loss_scale.device
    flags = [(key, flag) for record in records for key, flag in record["found_inf_per_device"].items()]
    overflow = combined((flag for key, flag in flags if type(key) is not str), device)
    is_good, is_bad = torch.logical_xor(overflow, state.not_and_same).unbind()  # NaN is not 0.0, either
    vetoes = [flag for key, flag in flags if type(key) is str]
    vetoed = torch.logical_and(is_good, combined(vetoes, device)) if vetoes else None
    used = state.after[0] if state.after is not None and state.after[1] == scale._version else scale.clone()
    if is_counted and state.has_moves and _is_torchs_rule(policy, device):
        moves = torch.where(is_bad, state.moves[0], state.moves[1])
        if vetoed is not None:
            moves = torch.where(vetoed, state.moves[2], moves)
            tensors.growth_tracker.add_(vetoed, alpha=-1)  # the kernel adds 1, which is then below the interval
        # The kernel would multiply in float64 by factors that are not rounded.
        factors = float(np.float32(policy.growth_factor)), float(np.float32(policy.backoff_factor))
        torch._amp_update_scale_(scale, tensors.growth_tracker, overflow, *factors, policy.growth_interval)
        scale.clamp_(policy.min_scale, policy.max_scale)
        streak = state.move(*moves.unbind())
    else:
        if is_counted:
            after = policy.update(tensors, is_good, xp=torch)
            if vetoed is not None:
                after = after._make(map(functools.partial(torch.where, vetoed), tensors, after))
            scale.copy_(after[0])
            torch._foreach_copy_(list(tensors[1:]), list(after[1:]))
        streak = tensors.overflow_streak.clone()
    scale_after = scale.clone() if is_counted else used
    state.after = None if state.is_recorded else (scale_after, scale._version)
    if vetoed is None:
        return StepInfo(is_good, used, scale_after, streak, is_bad)
    spikes = [flag for key, flag in flags if key == SPIKE]
    spiked = vetoed if len(spikes) == len(vetoes) else torch.logical_and(vetoed, combined(spikes, device))
    return StepInfo(is_good ^ vetoed, used, scale_after, streak, is_bad, spiked)


def _is_torchs_rule(policy: Any, device: torch.device) -> bool:
    """Return whether torch's kernel and a clamp move the scale as the policy does."""
    return (
        type(policy) is DynamicScaling
        and (policy.hysteresis, policy.cooldown) == (1, 0)
        and (policy.refill_on_finite or policy.refill_on_backoff)
        and policy.max_scale * policy.growth_factor <= torch.finfo(torch.float32).max
        and device.type in _WITH_UPDATE_KERNEL
    )


def _has_moves(state: Any) -> bool:
    """Return whether each count of a state moves by a sum and a product; a loaded one may be full or tolerate more."""
    return bool(state.hysteresis_tracker <= 1 and all(value < _LARGEST_COUNT // 2 for value in state[2:]))


def _moves(policy: Any, state: Any) -> Tensor:
    """Return what an overflow, a finite step and a vetoed one add to the counts, and multiply them by.

    int64, shape (3, 2, counts), from the policy's own update; for one that torch's kernel cannot follow, of no use.
    """
    moves = np.zeros((3, 2, len(state) - 2), np.int64)
    moves[2, 1] = 1
    if type(policy) is DynamicScaling:
        for row, grads_finite in enumerate((False, True)):
            of_zeros, of_ones = (
                np.array(policy.update(state._make([*state[:2], *[np.int32(n)] * len(state[2:])]), grads_finite)[2:])
                for n in (0, 1)
            )
            moves[row] = of_zeros, of_ones - of_zeros
    return torch.from_numpy(moves)


# Code that is recorded.


def is_being_recorded() -> bool:
    """Return whether the running code may be replayed without Python: in a CUDA graph, or under a dispatch mode."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def assign(tensor: Tensor, value: float) -> None:
    """Write a number in place; a graph that is being recorded does not contain this."""
    if _len_torch_dispatch_stack() == 0 and not tensor.is_cuda:
        tensor.fill_(value)
    else:
        with unrecorded(tensor.device):
            tensor.fill_(value)


@contextlib.contextmanager
def unrecorded(device: torch.device) -> Iterator[None]:
    """Keep the operations within the context out of a graph that is being recorded; each replay would repeat them.

    Raises `CallOrderError` while CUDA captures a graph, since CUDA cannot leave operations out.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CallOrderError(
            "the state of the scaler is still on the host, and a graph that is being captured would write it again at "
            "each replay; take one step with this optimizer before capturing one"
        )
    # The tensors made here outlive a validation loop that may be running.
    with torch.inference_mode(False), _disable_current_modes():
        yield

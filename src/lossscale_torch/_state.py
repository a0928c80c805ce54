"""The policy's state: on the host while it knows each flag, and from the first that it does not know on the device.

Scale and growth tracker are torch's own two tensors in both cases. What the host has read of a device is kept until the
end of the step.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import _disable_current_modes

import lossscale_core
from lossscale_core import BaseScaling, DynamicScaling, step_info
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import moved

READY, UNSCALED, STEPPED = OptState  # access to an enum's members by name is slow
SPIKE = "spike"
"""The text under which a guard's veto is recorded."""
_HAS_CUDA = torch.backends.cuda.is_built()
_LARGEST_COUNT = 2**31 - 1
_WITH_UPDATE_KERNEL = ("cpu", "cuda", "mps", "xpu")


class StepInfo(lossscale_core.StepInfo):
    """One step's outcome, and that of each optimizer.

    The fields are those of `lossscale_core.StepInfo`: plain Python numbers, which `json.dumps` takes, if they are
    known on the host; after a fused optimizer, tensors of shape `()` that stay on their device until they are read.
    """

    by_optimizer: dict[int, Any] | None = None
    """Whether each optimizer's step was applied, by its id."""
    of_others: bool = False
    """What holds for an optimizer that was not stepped."""

    def has_stepped(self) -> bool:
        """Return whether the step of an optimizer may have been applied."""
        return any(applied is not False for applied in (self.by_optimizer or {}).values())

    def applied_of(self, optimizer: torch.optim.Optimizer) -> bool | torch.Tensor:
        """Return whether this optimizer's step was applied: a bool, or a bool tensor of shape `()` on its device.

        `applied` is True only if every optimizer's step was applied; one may have moved and another not. False for an
        optimizer that was not stepped since the update before; True if the scaler is disabled. Does not synchronise.
        """
        if self.by_optimizer is None:  # a copy that `_replace` made
            return self.applied
        return self.by_optimizer.get(id(optimizer), self.of_others)


class Attempt:
    """What is known of the tries of one step: the loop variable of `GradScaler.attempts`, one object for all tries."""

    number: int = 0
    """The number of the present try, from 0."""
    info: StepInfo | None = None
    """The outcome of the last try; None before its `update`. It is true if the step was applied."""

    def __init__(self) -> None:
        self._infos: list[StepInfo] = []

    @property
    def scales(self) -> list[float]:
        """The loss scale of each try so far. Reading it synchronises after a fused optimizer."""
        return [float(info.loss_scale_used) for info in self._infos]


class Placed(NamedTuple):
    """A state on a device, in persistent tensors: a recorded CUDA graph reads and writes this memory."""

    fields: Any
    """The policy's state; instead of its first two fields torch's own tensors are used."""
    counts: Tensor
    """int64: the memory of the whole numbers among the fields."""
    finite: Tensor
    """What a finite step adds to the four counts, and what it multiplies them by: int64, shape (2, 4)."""
    overflow: Tensor
    """The same for an overflow."""
    is_usual: bool
    """Whether the tolerance is one that these tensors follow, and the counts are far from where int32 is full."""

    def for_policy(self, state: Any, policy: Any) -> "Placed":
        """Return this state, for a policy that `state`, host scalars, belongs to; its tensors stay if they can."""
        other = placed(state, policy, self.counts.device)
        if other.fields._fields != self.fields._fields:
            return other
        write(self[2:4], other[2:4])
        return self._replace(is_usual=other.is_usual)


class Readings:
    """The numbers of device tensors that the host has read in this step, while no one has written to them since."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Tensor, int, float]] = {}

    def read(self, tensors: list[Tensor], device: torch.device) -> list[float]:
        """Return numbers of shape `()`; all devices together are waited for once."""
        if all([each.is_cpu for each in tensors]):  # noqa: C419  # a generator takes twice as long
            values = [each.item() for each in tensors]
        else:
            dtype = torch.float64 if any(each.dtype is torch.float64 for each in tensors) else torch.float32
            values = torch.stack([moved(each, device).to(dtype).reshape(()) for each in tensors]).tolist()
        for tensor, value in zip(tensors, values, strict=True):
            self.note(tensor, value)
        return values

    def known(self, tensor: Tensor) -> float | None:
        """Return a number that the host can tell without a wait, else None.

        The memory of a CPU is always read, but not by running code that is recorded.
        """
        return tensor.item() if tensor.is_cpu and not is_being_recorded() else self._kept(tensor)

    def is_any_set(self, flags: Iterable[Tensor]) -> bool | None:
        """Return whether a flag is not 0.0; NaN is not, either. None if the host cannot tell without a wait."""
        is_set, is_recorded = False, is_being_recorded()
        for flag in flags:
            value = flag.item() if flag.is_cpu and not is_recorded else self._kept(flag)
            if value is None:
                return None
            is_set = is_set or value != 0.0
        return is_set

    def value(self, tensor: Tensor) -> float:
        """Return a number; waits for its device unless it is known."""
        known = self.known(tensor)
        return tensor.item() if known is None else known

    def note(self, tensor: Tensor, value: float) -> None:
        """Remember a number that the host has just read or written."""
        self._read[id(tensor)] = tensor, tensor._version, value

    def forget(self) -> None:
        """Forget all numbers at the end of a step."""
        self._read.clear()

    def _kept(self, tensor: Tensor) -> float | None:
        known = self._read.get(id(tensor))
        return known[2] if known is not None and known[0] is tensor and known[1] == tensor._version else None


class Flags(NamedTuple):
    """The flags of a step, float32 of shape `()`, 0.0 or not; empty without gradients."""

    overflows: list[Tensor]
    vetoes: list[Tensor]
    """All vetoes, those of guards, too."""
    spikes: list[Tensor]

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> "Flags":
        """Return the flags of some records."""
        overflows, vetoes, spikes = [], [], []
        for record in records:
            for key, flag in record["found_inf_per_device"].items():
                if type(key) is not str:
                    overflows.append(flag)
                else:
                    vetoes.append(flag)
                    if key == SPIKE:
                        spikes.append(flag)
        return cls(overflows, vetoes, spikes)

    def on_host(self, readings: Readings) -> tuple[bool, bool, bool] | None:
        """Return whether a flag of each kind is set, or None if the host cannot tell without a wait."""
        overflowed = readings.is_any_set(self.overflows)
        if overflowed is None or not self.vetoes:
            return None if overflowed is None else (overflowed, False, False)
        vetoed, spiked = readings.is_any_set(self.vetoes), readings.is_any_set(self.spikes)
        return None if vetoed is None or spiked is None else (overflowed, vetoed, spiked and not overflowed)


def advance_on_host(policy: Any, state: Any, overflowed: bool, vetoed: bool, spiked: bool) -> tuple[Any, StepInfo]:
    """Return the state after a step, host scalars, and the outcome in plain numbers."""
    if vetoed and not overflowed:
        return state, stay_on_host(state, overflowed, vetoed, spiked)
    used = after_scale = state.loss_scale.item()
    after = policy.update(state, not overflowed)
    if after.loss_scale is not state.loss_scale:
        after_scale = float(after.loss_scale)
    return after, StepInfo(not overflowed, used, after_scale, int(after.overflow_streak), overflowed)


def stay_on_host(state: Any, overflowed: bool, vetoed: bool, spiked: bool) -> StepInfo:
    """Return the outcome of a step that changes no counter, in plain numbers."""
    scale = state.loss_scale.item()
    return StepInfo(not (overflowed or vetoed), scale, scale, state.overflow_streak.item(), overflowed, spiked)


def advance_on_device(policy: Any, state: Placed, live: Any, flags: Flags) -> StepInfo:
    """Update a state in place, and return the outcome. Does not synchronise."""
    device = live.loss_scale.device
    overflow = combined(flags.overflows, device)
    vetoed = (overflow == 0.0) & (combined(flags.vetoes, device) != 0.0) if flags.vetoes else None
    if state.is_usual and _is_torchs_rule(policy, device):
        info = _advance_by_kernel(policy, state, live, overflow, vetoed)
    else:
        before = copies(live)
        after = policy.update(before, overflow == 0.0, xp=torch)
        if vetoed is not None:
            after = after._make(map(functools.partial(torch.where, vetoed), before, after))
        write(live, after)
        info = StepInfo(*step_info(before, after))
    if vetoed is None:
        return info
    return info._replace(applied=info.applied & ~vetoed, spiked=vetoed & (combined(flags.spikes, device) != 0.0))


def stay_on_device(live: Any, flags: Flags) -> StepInfo:
    """Return the outcome of a step that changes no counter. Does not synchronise."""
    now = copies(live)
    overflowed, vetoed, spiked = (combined(kind, now.loss_scale.device) != 0.0 for kind in flags)
    is_applied = ~(overflowed | vetoed)
    return StepInfo(is_applied, now.loss_scale, now.loss_scale, now.overflow_streak, overflowed, spiked & ~overflowed)


def with_optimizers(info: StepInfo, records: dict[int, Any], readings: Readings) -> StepInfo:
    """Return the outcome with that of each optimizer that was stepped or skipped."""
    applied: dict[int, Any] = {}
    for key, record in records.items():
        if record["stage"] is STEPPED:
            applied[key] = found = (
                record["applied"] if "applied" in record else _applied(record, records, info, readings)
            )
            if found is False and info.applied is not False:
                info = info._replace(applied=False)
    info.by_optimizer = applied
    return info


def _applied(record: dict[str, Any], records: dict[int, Any], info: StepInfo, readings: Readings) -> Any:
    """Return whether a kernel has stepped, or a subclass: they decide by the flags."""
    flags = [*record["found_inf_per_device"].values()]
    if (is_set := readings.is_any_set(flags)) is not None:
        return not is_set
    return info.applied if len(records) == 1 else combined(flags, flags[0].device) == 0.0


def _is_torchs_rule(policy: Any, device: torch.device) -> bool:
    """Return whether torch's kernel and a clamp move the scale as the policy does."""
    return (
        type(policy) is DynamicScaling
        and (policy.hysteresis, policy.cooldown) == (1, 0)
        and (policy.refill_on_finite or policy.refill_on_backoff)
        and policy.max_scale * policy.growth_factor <= torch.finfo(torch.float32).max
        and device.type in _WITH_UPDATE_KERNEL
    )


def _advance_by_kernel(policy: Any, state: Placed, live: Any, overflow: Tensor, vetoed: Tensor | None) -> StepInfo:
    """Update by torch's own kernel, in ten calls of torch; `vetoed` is a flag under which nothing changes."""
    scale, tracker = live[:2]
    used, counted, is_bad = scale.clone(), tracker if vetoed is None else tracker.clone(), overflow != 0.0
    # The kernel would multiply in float64 by factors that are not rounded.
    growth, backoff = float(np.float32(policy.growth_factor)), float(np.float32(policy.backoff_factor))
    torch._amp_update_scale_(scale, tracker, overflow, growth, backoff, policy.growth_interval)
    scale.clamp_(policy.min_scale, policy.max_scale)
    plus, times = torch.where(is_bad, state.overflow, state.finite).unbind()
    if vetoed is None:
        torch.addcmul(plus, state.counts, times, out=state.counts)
    else:
        scale.copy_(torch.where(vetoed, used, scale))
        tracker.copy_(torch.where(vetoed, counted, tracker))
        state.counts.copy_(torch.where(vetoed, state.counts, torch.addcmul(plus, state.counts, times)))
    return StepInfo(~is_bad, used, scale.clone(), live.overflow_streak.clone(), is_bad)


def placed(state: Any, policy: Any, device: torch.device) -> Placed:
    """Return a state of host scalars in new tensors on a device; a graph that is recorded does not repeat it."""
    whole = [value.dtype.kind != "f" for value in state[2:]]
    with unrecorded(device):
        counts = torch.tensor([int(v) for v, is_whole in zip(state[2:], whole, strict=True) if is_whole]).to(device)
        places = iter(range(len(counts)))
        rest = [
            counts[next(places)] if is_whole else torch.tensor(value.item(), dtype=torch.float32).to(device)
            for value, is_whole in zip(state[2:], whole, strict=True)
        ]
        is_usual = all(value < _LARGEST_COUNT // 2 for value in state[2:]) and state.hysteresis_tracker <= 1
        settings = BaseScaling.of(policy).settings()
        keeps, refills = (int(settings.get(name, False)) for name in ("refill_on_finite", "refill_on_backoff"))
        # tolerance, steps, skipped steps, streak
        finite = torch.tensor([[keeps, 1, 0, 0], [1 - keeps, 1, 1, 0]]).to(device)
        overflow = torch.tensor([[refills, 1, 1, 1], [0, 1, 1, 1]]).to(device)
    return Placed(state._make([None, None, *rest]), counts, finite, overflow, bool(is_usual))


def to_host(live: Any, policy: Any) -> Any:
    """Return a state of tensors as host scalars; waits for their device."""
    return live._make(_host_scalar(first, value) for first, value in zip(policy.init_state(), live, strict=True))


def _host_scalar(first: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.item()
    return type(first)(min(value, _LARGEST_COUNT) if isinstance(value, int) else value)


def copies(live: Any) -> Any:
    """Return copies of a state of tensors, float32 and int32. Does not synchronise."""
    return live._make(
        each.clamp(max=_LARGEST_COUNT).to(torch.int32) if each.dtype is torch.int64 else each.clone() for each in live
    )


def write(live: Any, values: Any) -> None:
    """Write tensors or host scalars to a state of tensors, in place."""
    for tensor, value in zip(live, values, strict=True):
        if isinstance(value, Tensor):
            tensor.copy_(value)
        else:
            fill(tensor, value.item())


def fill(tensor: Tensor, value: float) -> None:
    """Write a number in place; a graph that is being recorded does not contain this."""
    if _len_torch_dispatch_stack() == 0 and not tensor.is_cuda:
        tensor.fill_(value)
    else:
        with unrecorded(tensor.device):
            tensor.fill_(value)


def is_being_recorded() -> bool:
    """Return whether the running code may be replayed without Python: in a CUDA graph, or under a dispatch mode."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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


def combined(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a flag that is not 0.0 if one of the flags is not, NaN included: float32, shape `()`, on `device`."""
    found = [moved(flag, device) for flag in flags]
    if len(found) == 1:
        return found[0]
    if not found:
        return torch.zeros((), dtype=torch.float32, device=device)
    return (torch.stack([flag.reshape(()) for flag in found]) != 0.0).any().float()

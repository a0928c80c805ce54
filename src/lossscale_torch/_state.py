"""The state of a scaler: host scalars while its flags are known on the host, tensors on the device from then on.

`HostState` and `DeviceState` have the same methods. Both keep the loss scale and the growth tracker in two persistent
tensors, which are made once and written in place: a recorded CUDA graph, and code that keeps one of them, reads this
memory.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from lossscale_core import BaseScaling, DynamicScaling, ScaleState, ScalingPolicy, step_info
from lossscale_core.errors import CallOrderError
from lossscale_torch._step_info import StepInfo

_HAS_CUDA = torch.backends.cuda.is_built()
_LARGEST_COUNT = 2**31 - 1
_WITH_UPDATE_KERNEL = ("cpu", "cuda", "mps", "xpu")


class LossScale(NamedTuple):
    """The factor that gradients are multiplied by."""

    tensor: Tensor
    """float32, shape `()`."""
    value: float | None = None
    """The same as a number; None if it is not known on the host."""
    known_inverse: Tensor | None = None
    """Its reciprocal, if that was computed before."""

    def inverse(self) -> Tensor:
        """Return the factor that unscales: float32, shape `()`."""
        return self.tensor.reciprocal() if self.known_inverse is None else self.known_inverse


class Tensors(NamedTuple):
    """The persistent tensors of a scaler, each of shape `()`."""

    loss_scale: Tensor
    """float32."""
    growth_tracker: Tensor
    """int32."""


class HostState:
    """A state of host scalars; the persistent loss scale is written only when its value changes.

    Callers may write to tensors that were returned to them. On a CPU the host notices that at once. On a device it
    reads the tensors where a step waits for its flag anyway.
    """

    is_on_host = True

    def __init__(self, policy: ScalingPolicy, state: Any = None) -> None:
        self.policy = policy
        self.tensors: Tensors | None = None
        self._state = policy.init_state() if state is None else state
        self._before: Any = None  # the state and the flag that further updates of the same step start from
        self._finite = True
        self._present: LossScale | None = None
        self.is_handed_out = False
        """Whether others may write to the tensors."""
        self._versions_read: tuple[int, int] | None = None  # of shared tensors, when the scalars were their values

    def with_policy(self, policy: ScalingPolicy) -> "HostState":
        """Return the state under another policy."""
        self.policy = policy
        return self

    def place(self, device: torch.device | str) -> None:
        """Make the persistent tensors on `device`."""
        with torch.inference_mode(False):  # they outlive a validation loop that may be running
            scale = torch.full((), self._state.loss_scale.item(), dtype=torch.float32, device=device)
            tracker = torch.full((), self._state.growth_tracker.item(), dtype=torch.int32, device=device)
        self.tensors, self._present = Tensors(scale, tracker), None

    def replace_loss_scale(self, tensor: Tensor | None) -> None:
        """Take `tensor`, float32 with one element, for the persistent loss scale; None forgets both tensors."""
        if tensor is None:
            self.tensors = None
            return
        if self.tensors is None or self.tensors.loss_scale.device != tensor.device:
            self.place(tensor.device)
        self.hand_out()
        tracker = self.tensors.growth_tracker  # type: ignore[union-attr]  # it was placed
        self.tensors = Tensors(tensor.detach().float().reshape(()), tracker)

    def hand_out(self) -> None:
        """Bring both tensors up to date: other code may read and write them from now on."""
        if self.tensors is not None:
            if not self.is_handed_out:
                write(self.tensors.growth_tracker, self._state.growth_tracker.item())
            self.is_handed_out, self._versions_read, self._present = True, None, None

    def refresh(self) -> None:
        """Read the tensors if callers may have written to them; waits for their device if they are shared."""
        if self.is_handed_out and self.tensors is not None:
            scale, tracker = self.tensors.loss_scale.item(), self.tensors.growth_tracker.item()
            if scale != self._state.loss_scale or tracker != self._state.growth_tracker:
                self._state = self._replaced(loss_scale=scale, growth_tracker=tracker)
            self._versions_read = self._versions()

    def is_known(self) -> bool:
        """Return whether the scalars are right, having read tensors that the host can read without a wait."""
        if not self.is_handed_out or self.tensors is None:
            return True
        if is_readable(self.tensors.loss_scale):
            self.refresh()
        return self._versions_read == self._versions()

    def _versions(self) -> tuple[int, int]:
        tensors: Tensors = self.tensors  # type: ignore[assignment]  # it was placed
        return tensors.loss_scale._version, tensors.growth_tracker._version

    def present(self) -> LossScale:
        """Return the present loss scale; its tensor is the persistent one. Does not synchronise."""
        tensors: Tensors = self.tensors  # type: ignore[assignment]  # it was placed
        if self.is_handed_out or is_being_recorded():  # the tensor may hold another value later
            return LossScale(tensors.loss_scale)
        if self._present is None:
            value = self._state.loss_scale.item()
            with torch.inference_mode(False):
                self._present = LossScale(tensors.loss_scale, value, tensors.loss_scale.reciprocal())
        return self._present

    def update(self, overflowed: bool, spiked: bool = False) -> StepInfo:
        """Update by flags of a step that the host knows, and return its outcome. Does not synchronise."""
        if spiked and not overflowed:
            return self.stay()._replace(applied=False, spiked=True)
        before, finite = self._state, not overflowed
        if self._before is not None:
            before, finite = self._before, self._finite and finite
        after = self.policy.update(before, finite)
        info = _info(before, after, finite)
        self._before, self._finite = before, finite
        self._set(after)
        return info

    def begin_step(self) -> None:
        """Note that the next update belongs to another step than the last one."""
        self._before = None

    def stay(self) -> StepInfo:
        """Return the outcome of a step that changes no counter. Does not synchronise."""
        scale = number(self._state.loss_scale)
        return StepInfo(True, scale, scale, number(self._state.overflow_streak), False)

    def update_to(self, new_scale: float | Tensor, overflowed: bool, spiked: bool) -> StepInfo:
        """Set the loss scale instead of updating it, and return the outcome. Waits for a tensor's device."""
        before = number(self._state.loss_scale)
        self.set(loss_scale=within_bounds(float(new_scale), self.policy))
        after, streak = number(self._state.loss_scale), number(self._state.overflow_streak)
        return StepInfo(not (overflowed or spiked), before, after, streak, overflowed, spiked and not overflowed)

    def set(self, **fields: float) -> None:
        """Set fields of the state to plain numbers; waits for the device if other code shares the tensors."""
        self.refresh()
        self._set(self._replaced(**fields))

    def read(self) -> Any:
        """Return the state as host scalars; waits for the device if other code shares the tensors."""
        self.refresh()
        return self._state

    def peek(self) -> Any:
        """Return the state as host scalars where that waits for no device, else None."""
        return self._state if self.is_known() else None

    def snapshot(self) -> Any:
        """Return the state where it is: host scalars. Does not synchronise."""
        self.is_known()
        return self._state

    def restore(self, policy: ScalingPolicy, state: Any) -> "HostState":
        """Return the state under `policy` set to `state`, host scalars; the tensors stay, and are written in place."""
        self._before = None
        self._set(state)
        return self.with_policy(policy)

    def on_device(self, has_spikes: bool) -> "DeviceState":
        """Return the state in tensors on the device; a graph that is being recorded does not record the copies."""
        tensors: Tensors = self.tensors  # type: ignore[assignment]  # it was placed
        if not self.is_handed_out:
            write(tensors.growth_tracker, self._state.growth_tracker.item())
        is_whole = self.is_known() and self._before is None and not has_spikes
        if is_whole and suits_kernel(self.policy, self._state, tensors.loss_scale.device):
            return KernelState(self.policy, tensors, self._state)
        state = DeviceState(self.policy, tensors, self._state)
        if self._before is not None:
            state.continue_from(self._before, self._finite)
        return state

    def _replaced(self, **fields: float) -> Any:
        self._before = None
        types = {name: type(getattr(self._state, name)) for name in fields}
        return self._state._replace(**{name: types[name](value) for name, value in fields.items()})

    def _set(self, state: Any) -> None:
        before, self._state = self._state, state
        if self.tensors is None:
            return
        if self.is_handed_out:  # others may have written anything
            if not (is_readable(self.tensors.loss_scale) and self.tensors.loss_scale.item() == state.loss_scale):
                write(self.tensors.loss_scale, state.loss_scale.item())
            write(self.tensors.growth_tracker, state.growth_tracker.item())
            self._versions_read = self._versions()
        # A scale that has not changed is the same object, which is asked first: NumPy's scalars are slow to compare.
        elif state.loss_scale is not before.loss_scale and state.loss_scale != before.loss_scale:
            write(self.tensors.loss_scale, state.loss_scale.item())
            self._present = None


class DeviceState:
    """A state of tensors, which each update writes in place."""

    is_on_host = is_handed_out = False

    def __init__(self, policy: ScalingPolicy, tensors: Tensors, state: Any) -> None:
        self.policy, self.tensors = policy, tensors
        self._before: Any = None
        self._finite: Any = None
        self._keep(state)

    def with_policy(self, policy: ScalingPolicy) -> "DeviceState":
        """Return the state under another policy."""
        self.policy = policy
        return self

    def continue_from(self, before: Any, finite: bool) -> None:
        """Count the next update as one of the same step as the last, which began with `before`, host scalars."""
        device = self.tensors.loss_scale.device
        self._before, self._finite = as_tensors(before, device), torch.full((), finite, device=device)

    def replace_loss_scale(self, tensor: Tensor | None) -> None:
        """Write the value of `tensor`, float32 with one element, to the persistent loss scale."""
        if tensor is not None:
            self.tensors.loss_scale.copy_(tensor.detach().reshape(()))

    def hand_out(self) -> None:
        """Do nothing: the tensors are up to date."""

    def refresh(self) -> None:
        """Do nothing: the tensors are the state."""

    def is_known(self) -> bool:
        """Return False: the host does not know the state."""
        return False

    def present(self) -> LossScale:
        """Return the present loss scale; its tensor is the persistent one. Does not synchronise."""
        return LossScale(self.tensors.loss_scale)

    def update(self, overflowed: bool | Tensor, spiked: bool | Tensor = False) -> StepInfo:
        """Update by flags: bools, or tensors of shape `()` that hold 0.0 or 1.0; return the outcome.

        Does not synchronise.
        """
        device = self.tensors.loss_scale.device
        before, finite = self.snapshot(), as_flag(overflowed, device) == 0.0
        if self._before is not None:
            before, finite = self._before, finite & self._finite
        after = self.policy.update(before, finite, xp=torch)
        if spiked is not False:
            spiked = (as_flag(spiked, device) != 0.0) & finite
            after = after._make(torch.where(spiked, *pair) for pair in zip(self._live(), after, strict=True))
        self._write(after)
        self._before, self._finite = before, finite
        return StepInfo(*step_info(before, after, spiked=spiked))

    def begin_step(self) -> None:
        """Note that the next update belongs to another step than the last one."""
        self._before = self._finite = None

    def stay(self) -> StepInfo:
        """Return the outcome of a step that changes no counter. Does not synchronise."""
        now = self.snapshot()
        return StepInfo(*step_info(now, now))

    def update_to(self, new_scale: float | Tensor, overflowed: bool | Tensor, spiked: bool | Tensor) -> StepInfo:
        """Set the loss scale instead of updating it, and return the outcome. Does not synchronise."""
        before, scale = self.snapshot(), self.tensors.loss_scale
        if isinstance(new_scale, Tensor):
            scale.copy_(new_scale.detach().reshape(()).float().clamp(*scale_bounds(self.policy)))
        else:
            scale.fill_(within_bounds(new_scale, self.policy))
        self.begin_step()
        overflow = as_flag(overflowed, scale.device) != 0.0
        spike = (as_flag(spiked, scale.device) != 0.0) & ~overflow
        applied = ~(overflow | spike)
        return StepInfo(applied, before.loss_scale, scale.clone(), before.overflow_streak, overflow, spike)

    def set(self, **fields: float) -> None:
        """Set fields of the state to plain numbers, in place."""
        self.begin_step()
        self._write(self._live()._replace(**fields))

    def read(self) -> Any:
        """Return the state as host scalars; waits for the device."""
        start = self.policy.init_state()
        return start._make(type(first)(value.item()) for first, value in zip(start, self._live(), strict=True))

    def peek(self) -> Any:
        """Return the state as host scalars where that waits for no device, else None."""
        if not all(map(is_readable, self.tensors)):
            return None
        with _disable_current_modes():  # which would count, or record, a read of the host's own memory
            return self.read()

    def snapshot(self) -> Any:
        """Return the state where it is: copies of the tensors. Does not synchronise."""
        live = self._live()
        return live._make(each.clone() for each in live)

    def restore(self, policy: ScalingPolicy, state: Any) -> "DeviceState":
        """Return the state under `policy` set to `state`, host scalars; the tensors stay, and are written in place."""
        self.policy = policy
        self.begin_step()
        if state._fields != self._live()._fields:
            self._keep(state)
        self._write(state)
        return self

    def on_device(self, has_spikes: bool) -> "DeviceState":
        """Return itself."""
        return self

    def _keep(self, state: Any) -> None:
        """Make the tensors other than the persistent ones, and set them to `state`, host scalars."""
        self._placed = as_tensors(state, self.tensors.loss_scale.device)._replace(**self.tensors._asdict())

    def _live(self) -> Any:
        """Return the state as tensors, which may be the persistent ones."""
        return self._placed

    def _write(self, state: Any) -> None:
        """Write a state, of tensors or numbers, in place."""
        for target, value in zip(self._placed, state, strict=True):
            if isinstance(value, Tensor):
                target.copy_(value)
            else:
                write(target, number(value))


class KernelState(DeviceState):
    """A state under the dynamic rule without hysteresis and cooldown, which torch's own kernel updates.

    Where `suits_kernel` holds, `torch._amp_update_scale_` and a clamp move scale and tracker as `DynamicScaling` does,
    bit for bit. A scale that others write beyond the policy's bounds is brought within them by the next update.
    """

    policy: DynamicScaling
    _is_recorded = False  # then the graph keeps these tensors and this kernel after any load

    def with_policy(self, policy: ScalingPolicy) -> DeviceState:
        """Return the state under another policy; waits for the device."""
        return self.restore(policy, self.read())

    def update(self, overflowed: bool | Tensor, spiked: bool | Tensor = False) -> StepInfo:
        """Update by a flag as `DeviceState.update` does, in ten calls of torch, or in eight that are recorded.

        There are three more if only growth restores the tolerance. A guard never comes with this state, so that nothing
        is `spiked`.
        """
        scale, tracker, rule = *self.tensors, self.policy
        flag = as_flag(overflowed, scale.device)
        if self._before is not None:
            return self._continue_step(flag != 0.0)
        used, streak_before = scale.clone(), self._streak.clone()
        # The kernel would multiply in float64 by factors that are not rounded.
        growth_factor, backoff_factor = float(np.float32(rule.growth_factor)), float(np.float32(rule.backoff_factor))
        torch._amp_update_scale_(scale, tracker, flag, growth_factor, backoff_factor, rule.growth_interval)
        scale.clamp_(rule.min_scale, rule.max_scale)
        flags = flag.eq(self._one_and_zero)
        self._counts.add_(flags)
        overflow, applied = flags.unbind()
        torch.addcmul(overflow, self._streak, overflow, out=self._streak)  # (streak + 1) × overflow
        if not (rule.refill_on_finite or rule.refill_on_backoff):  # growth restores the tolerance, overflows use it up
            self._tolerance.bitwise_or_(tracker == 0).mul_(applied)
        if is_being_recorded():  # each replay writes its own results to the tensors
            self._is_recorded = True
            return StepInfo(applied, used, scale, self._streak, overflow)
        self._before = used, streak_before, applied
        return StepInfo(applied, used, scale.clone(), self._streak.clone(), overflow)

    def restore(self, policy: ScalingPolicy, state: Any) -> DeviceState:
        """Return the state under `policy` set to `state`, which may need another class."""
        if not (self._is_recorded or suits_kernel(policy, state, self.tensors.loss_scale.device)):
            return DeviceState(policy, self.tensors, state).restore(policy, state)
        return super().restore(policy, state)

    def _continue_step(self, overflow: Tensor) -> StepInfo:
        """Update once more in the same step: an overflow after a finite update makes the whole step an overflow."""
        used, streak, was_applied = self._before
        is_new, now = overflow & was_applied, self._live()
        # An overflow keeps nothing of the fields that this leaves as the finite update has made them.
        before = now._replace(loss_scale=used, steps=now.steps - 1, overflow_streak=streak.to(torch.int32))
        after = self.policy.update(before, ~is_new, xp=torch)
        self._write(now._make(torch.where(is_new, *pair) for pair in zip(after, now, strict=True)))
        applied, now = was_applied & ~overflow, self.snapshot()
        self._before = used, streak, applied
        return StepInfo(applied, used, now.loss_scale, now.overflow_streak, ~applied)

    def _keep(self, state: Any) -> None:
        device = self.tensors.loss_scale.device
        skipped, applied = int(state.skipped_steps), int(state.steps) - int(state.skipped_steps)
        with unrecorded(device):
            self._one_and_zero = torch.tensor([1.0, 0.0]).to(device)
            self._counts = torch.tensor([skipped, applied]).to(device)
            self._streak = torch.tensor(int(state.overflow_streak)).to(device)
            self._tolerance = torch.tensor(int(state.hysteresis_tracker), dtype=torch.int32).to(device)

    def _live(self) -> Any:
        skipped, applied = self._counts.unbind()
        steps, skipped, streak = (
            each.clamp(max=_LARGEST_COUNT).to(torch.int32) for each in (skipped + applied, skipped, self._streak)
        )
        tolerance = self._tolerance
        if self.policy.refill_on_backoff:
            tolerance = torch.ones_like(tolerance)
        elif self.policy.refill_on_finite:
            tolerance = (streak == 0).to(torch.int32)
        return ScaleState(*self.tensors, tolerance, steps, skipped, streak)

    def _write(self, state: Any) -> None:
        applied = state.steps - state.skipped_steps
        targets = (*self.tensors, self._tolerance, *self._counts.unbind(), self._streak)
        for target, value in zip(
            targets, (*state[:3], state.skipped_steps, applied, state.overflow_streak), strict=True
        ):
            if isinstance(value, Tensor):
                target.copy_(value)
            else:
                write(target, number(value))


def suits_kernel(policy: ScalingPolicy, state: Any, device: torch.device) -> bool:
    """Return whether torch's kernel and a clamp update exactly as `policy` does from `state` on, host scalars."""
    if type(policy) is not DynamicScaling or device.type not in _WITH_UPDATE_KERNEL:
        return False
    tolerance = 1 if policy.refill_on_backoff or not state.overflow_streak else 0
    is_free = not (policy.refill_on_finite or policy.refill_on_backoff)
    return bool(
        (policy.hysteresis, policy.cooldown) == (1, 0)
        and policy.max_scale * policy.growth_factor <= torch.finfo(torch.float32).max
        and policy.min_scale <= state.loss_scale <= policy.max_scale
        and 0 <= state.growth_tracker < policy.growth_interval  # the kernel compares with ==
        and (state.hysteresis_tracker == tolerance or (is_free and state.hysteresis_tracker == 0))
        and max(state.steps, state.overflow_streak) < _LARGEST_COUNT // 2  # far from where int32 is full
    )


def is_being_recorded() -> bool:
    """Return whether the running code may be replayed without Python: in a CUDA graph, or under a dispatch mode."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_readable(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without a wait; one of a subclass may have no values."""
    return type(tensor) is Tensor and tensor.is_cpu


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


def write(tensor: Tensor, value: float) -> None:
    """Write a number in place; a graph that is being recorded does not contain this."""
    if _len_torch_dispatch_stack() == 0 and not tensor.is_cuda:
        tensor.fill_(value)
        return
    with unrecorded(tensor.device):
        tensor.fill_(value)


def as_tensors(state: Any, device: torch.device) -> Any:
    """Return a state of host scalars in new tensors of shape `()`, float32 or int32."""
    dtypes = [torch.float32 if "float" in value.dtype.name else torch.int32 for value in state]
    with unrecorded(device):
        return state._make(
            torch.tensor(value.item(), dtype=dtype).to(device) for value, dtype in zip(state, dtypes, strict=True)
        )


def number(value: Any) -> Any:
    """Return a host scalar as the plain Python number that it is; a tensor stays on its device."""
    return value.item() if isinstance(value, np.generic) else value


def within_bounds(scale: float, policy: ScalingPolicy) -> float:
    """Return `scale` brought within the policy's bounds, if it has any."""
    low, high = scale_bounds(policy)
    return min(max(float(scale), low), high)


def scale_bounds(policy: ScalingPolicy) -> tuple[float, float]:
    """Return the least and the largest loss scale that may be set under a policy."""
    members = BaseScaling.of(policy)
    return members.min_scale, members.max_scale


def _info(before: Any, after: Any, finite: bool) -> StepInfo:
    """Return the outcome of a step, from the states before and after it, host scalars."""
    used = after_scale = number(before.loss_scale)
    if after.loss_scale is not before.loss_scale:
        after_scale = number(after.loss_scale)
    return StepInfo(finite, used, after_scale, number(after.overflow_streak), not finite)


def as_flag(flag: bool | Tensor, device: torch.device) -> Tensor:
    """Return a flag as a tensor: 0.0 or 1.0, float32, shape `()`."""
    if isinstance(flag, Tensor):
        return flag.float()
    return torch.full((), float(flag), dtype=torch.float32, device=device)

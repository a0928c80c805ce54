"""A scaler's state: on the host while flags arrive there, and in persistent tensors on its device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_core import BaseScaling, ScalingPolicy, step_info
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import moved
from lossscale_torch._lookahead import Lookahead, info_of, plain
from lossscale_torch._step_info import StepInfo

_ADVICE = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)


class CapturedScale(NamedTuple):
    """A loss scale: what multiplied a loss, and what its gradients are divided by."""

    scale: Tensor
    """float32, shape `()`: a copy that is not written to; from `ScalerState.present`, the persistent tensor itself."""
    may_be_below_one: bool
    """Whether it may be below 1, where unscaling can overflow; known without waiting for a device."""
    known_inverse: Tensor | None = None
    """The factor that unscales, where it was computed before."""

    def inverse(self) -> Tensor:
        """Return the factor that unscales: float32, shape `()`."""
        return self.scale.reciprocal() if self.known_inverse is None else self.known_inverse

    def moved_to(self, device: torch.device) -> "CapturedScale":
        """Return the same on another device."""
        if self.scale.device == device:
            return self
        return CapturedScale(moved(self.scale, device), self.may_be_below_one)


class ScalerState:
    """A policy, its state, and the tensors that hold it on a device.

    The tensors are made once, by `place`, and from then on written in place: a recorded CUDA graph and whoever keeps
    one of them read and write this memory. While every flag is known on the host, the state is updated there, in
    microseconds, and only the loss scale is written to its tensor. The first flag that only the device knows makes the
    tensors the truth for good, and so does handing one of them out: a replayed graph, a collective or a kernel may then
    change it without a trace.

    Updates that follow one another without `begin_step` count as one step whose flag is theirs combined, so that a
    scale backs off once however many optimizers overflowed.
    """

    def __init__(self, policy: ScalingPolicy, state: Any = None) -> None:
        self.policy = policy
        self.is_on_host = True
        """Whether reading the state costs no synchronisation."""
        self.loss_scale: Tensor | None = None
        """The persistent tensor that multiplies losses: float32, shape `()`; None until it is placed."""
        self._host = policy.init_state() if state is None else state
        self._placed: Any = None
        self._uploaded: Any = None  # what the tensors hold while the host's scalars count
        self._captured: CapturedScale | None = None  # a copy of the placed loss scale, while the host knows it
        self._before: Any = None
        self._finite: Any = None

    @property
    def policy(self) -> ScalingPolicy:
        """The policy, which may be replaced."""
        return self._policy

    @policy.setter
    def policy(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self.limits_streaks = BaseScaling.of(policy).max_overflow_streak is not None
        self._ahead = Lookahead(policy)

    def place(self, device: torch.device | str) -> None:
        """Make the persistent tensors, on `device`."""
        self._host = self.read()
        self.is_on_host = True
        with torch.inference_mode(False):  # they outlive a validation loop that may be running
            self._placed = _as_tensors(self._host, device)
        self._uploaded, self._captured = self._host, None
        self.loss_scale = self._placed.loss_scale

    def require_placed(self, caller: str) -> Tensor:
        """Return the persistent loss scale, or raise torch's error where no loss was scaled yet."""
        if self.loss_scale is None:
            raise AssertionError(f"Attempted {caller} but _scale is None.  {_ADVICE}")
        return self.loss_scale

    def capture(self, is_recorded: bool) -> CapturedScale:
        """Return a copy of the loss scale, for backward to keep and for unscaling; the tensor itself may change.

        While the state is on the host, one copy serves until the loss scale changes. A recorded call copies anew at
        each replay.
        """
        if is_recorded or not self.is_on_host:
            return self.present()._replace(scale=self._placed.loss_scale.clone())
        if self._captured is None:
            with torch.inference_mode(False):  # the copy outlives a validation loop that may be running
                copy = self._placed.loss_scale.clone()
                self._captured = CapturedScale(copy, self.may_be_below_one(), copy.reciprocal())
        return self._captured

    def present(self) -> CapturedScale:
        """Return the loss scale as its persistent tensor holds it, at each replay of a graph that records its use."""
        return CapturedScale(self._placed.loss_scale, self.may_be_below_one())

    def replace_loss_scale(self, tensor: Tensor | None) -> None:
        """Take `tensor`, float32 with one element, for the persistent loss scale; None forgets all tensors."""
        if tensor is None:
            self._host, self.is_on_host = self.read(), True
            self._placed = self.loss_scale = None
            return
        if self._placed is None or self._placed.loss_scale.device != tensor.device:
            self.place(tensor.device)
        self.hand_out()
        self.loss_scale = tensor.detach().float().reshape(())
        self._placed = self._placed._replace(loss_scale=self.loss_scale)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._placed.loss_scale.device

    @property
    def growth_tracker(self) -> Tensor | None:
        """The persistent tensor of the growth tracker: int32, shape `()`; None until it is placed."""
        return None if self._placed is None else self._placed.growth_tracker

    def hand_out(self) -> None:
        """Make the tensors the truth, and bring them up to date: other code may write to them from now on."""
        if not self.is_on_host or self._placed is None:
            return
        for name in self._host._fields:
            self._upload(name)
        self.is_on_host = False
        if self._before is not None:
            self._before = _as_tensors(self._before, self._placed.loss_scale.device)

    def begin_step(self) -> None:
        """Say that the next update belongs to another step than the last."""
        self._before = self._finite = None

    def is_mid_step(self) -> bool:
        """Return whether the next update belongs to the same step as the last."""
        return self._before is not None

    def update(self, grads_finite: bool | Tensor, spiked: bool | Tensor = False) -> StepInfo:
        """Update by a Python bool, or by a bool tensor of shape `()`; return what happened. Does not synchronise.

        Where `spiked` and no gradient overflowed, the state stays as it is.
        """
        if isinstance(grads_finite, Tensor) or not self.is_on_host:
            return self._update_on_device(grads_finite, spiked)
        if spiked and grads_finite:
            return self.stay()._replace(applied=False, spiked=True)
        if self._before is None:
            before, finite = self._host, grads_finite
        else:
            before, finite = self._before, self._finite and grads_finite
        if finite and before is self._host:
            after, info = self._ahead.after_finite(before)
        else:
            after = self._policy.update(before, finite)
            info = info_of(before, after, finite)
        self._before, self._finite = before, finite
        self._set_host(after)
        return info

    def read(self) -> Any:
        """Return the state as host scalars; waits for the device while its tensors are the truth."""
        if self.is_on_host:
            return self._host
        start = self.policy.init_state()
        return start._make(type(first)(value.item()) for first, value in zip(start, self._placed, strict=True))

    def peek(self) -> Any:
        """Return the state as host scalars where that waits for no device, else None."""
        if self.is_on_host:
            return self._host
        # A tensor of a subclass, such as a fake one, may have no values.
        if not all(type(each) is Tensor and each.is_cpu for each in self._placed):
            return None
        start = self.policy.init_state()
        pairs = zip(start, self._placed, strict=True)
        return start._make(type(first)(value.detach().numpy()) for first, value in pairs)

    def read_loss_scale(self) -> float:
        """Return the loss scale; waits for the device while its tensors are the truth."""
        return float(self._host.loss_scale if self.is_on_host else self._placed.loss_scale)

    def snapshot(self) -> Any:
        """Return the state where it is: host scalars, or copies of the tensors. Does not synchronise."""
        return self._host if self.is_on_host else self._placed._make(each.clone() for each in self._placed)

    def set(self, **fields: Any) -> None:
        """Set fields of the state to plain numbers, in place where they are tensors."""
        self.begin_step()
        if self.is_on_host:
            types = {name: type(getattr(self._host, name)) for name in fields}
            self._set_host(self._host._replace(**{name: types[name](value) for name, value in fields.items()}))
        else:
            for name, value in fields.items():
                getattr(self._placed, name).fill_(value)

    def update_to(self, new_scale: Any, grads_finite: bool | Tensor, device_type: str) -> StepInfo:
        """Set the loss scale instead of updating it; raise torch's error for what is not a scale."""
        _require_scale(new_scale, device_type)
        before = self.snapshot()
        if isinstance(new_scale, Tensor):
            self.begin_step()
            self.hand_out()
            low, high = scale_bounds(self.policy)
            self._placed.loss_scale.copy_(new_scale.detach().reshape(()).float().clamp(low, high))
        else:
            self.set(loss_scale=within_bounds(new_scale, self.policy))
        after = self.snapshot()
        overflowed = ~grads_finite if isinstance(grads_finite, Tensor) else not grads_finite
        scales = plain(before.loss_scale), plain(after.loss_scale)
        return StepInfo(grads_finite, *scales, plain(after.overflow_streak), overflowed)

    def stay(self) -> StepInfo:
        """Return the outcome of a step that counts for nothing. Does not synchronise."""
        now = self.snapshot()
        return StepInfo(*map(plain, step_info(now, now)))

    def restore(self, policy: ScalingPolicy, state: Any) -> None:
        """Go on under `policy` from `state`, host scalars; tensors that are placed stay and are written in place."""
        on_host, device = self.is_on_host, None if self._placed is None else self._placed.loss_scale.device
        if device is not None and self._placed._fields != state._fields:
            kept = {"loss_scale": self._placed.loss_scale, "growth_tracker": self._placed.growth_tracker}
            self._placed, self._uploaded = _as_tensors(state, device)._replace(**kept), state
        self.policy, self.is_on_host = policy, True
        self.begin_step()
        self._host = state
        if device is not None:
            for name in state._fields:
                getattr(self._placed, name).fill_(getattr(state, name).item())
            self._uploaded, self._captured = state, None
        self.is_on_host = on_host

    def may_be_below_one(self) -> bool:
        """Return whether the loss scale may be below 1, where unscaling can overflow. Waits for no device."""
        if self.is_on_host:
            return bool(self._host.loss_scale < 1.0)
        if self._placed.loss_scale.is_cpu:
            return bool(self._placed.loss_scale.detach().numpy() < 1.0)  # the host reads its own memory
        return BaseScaling.of(self.policy).min_scale < 1.0

    def _set_host(self, state: Any) -> None:
        self._host = state
        # A scale that has not changed is the same object, which is asked first: NumPy's scalars are slow to compare.
        if self._placed is not None and state.loss_scale is not self._uploaded.loss_scale:
            self._upload("loss_scale")

    def _upload(self, name: str) -> None:
        """Write a field of the host's state to its tensor, unless it holds that value already."""
        value = getattr(self._host, name)
        if value == getattr(self._uploaded, name):
            return
        target = getattr(self._placed, name)
        if target.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CallOrderError(
                f"the {name} of the scaler is still on the host, and a graph that is being captured would write it "
                "anew at each replay; take one step with this optimizer before capturing one"
            )
        target.fill_(value.item())
        self._captured = None
        self._uploaded = self._uploaded._replace(**{name: value})

    def _update_on_device(self, grads_finite: bool | Tensor, spiked: bool | Tensor) -> StepInfo:
        self.hand_out()
        device = self._placed.loss_scale.device
        if isinstance(grads_finite, bool):
            grads_finite = torch.full((), grads_finite, device=device)
        before, finite = self._before, grads_finite
        if before is None:
            before = self.snapshot()
        else:
            finite = finite & self._finite
        after = self.policy.update(before, finite, xp=torch)
        if spiked is not False:
            spiked = torch.as_tensor(spiked, device=device) & grads_finite
            after = after._make(torch.where(spiked, *pair) for pair in zip(self._placed, after, strict=True))
        torch._foreach_copy_(list(self._placed), list(after))
        self._before, self._finite = before, finite
        return StepInfo(*step_info(before, after, spiked=spiked))


def _as_tensors(state: Any, device: torch.device | str) -> Any:
    dtypes = [torch.float32 if "float" in value.dtype.name else torch.int32 for value in state]
    pairs = zip(state, dtypes, strict=True)
    return state._make(torch.full((), value.item(), dtype=dtype, device=device) for value, dtype in pairs)


def _require_scale(new_scale: Any, device_type: str) -> None:
    """Raise torch's error for what is not a loss scale, with what was given and the rule after torch's sentence."""
    if isinstance(new_scale, Tensor):
        is_scale = new_scale.device.type == device_type and new_scale.numel() == 1 and not new_scale.requires_grad
    else:
        is_scale = not isinstance(new_scale, bool) and isinstance(new_scale, int | float) and new_scale > 0
    if is_scale:
        return
    given = repr(new_scale)
    if isinstance(new_scale, Tensor):
        needs = "with" if new_scale.requires_grad else "without"
        given = f"a tensor of shape {tuple(new_scale.shape)} on {new_scale.device} {needs} requires_grad"
    raise AssertionError(
        f"{_NEW_SCALE} It is {given}; pass a positive number, or a tensor of one element on {device_type}."
    )


def within_bounds(scale: float, policy: Any) -> float:
    """Return `scale` brought within the policy's bounds, if it has any."""
    low, high = scale_bounds(policy)
    return min(max(float(scale), low), high)


def scale_bounds(policy: Any) -> tuple[float, float]:
    """Return the least and the largest loss scale that may be set under a policy."""
    members = BaseScaling.of(policy)
    return members.min_scale, members.max_scale

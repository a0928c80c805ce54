"""`Watch`: the log of a run, warnings about steps that lose something, and the error of a streak of overflows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale_core import BaseScaling, GuardState, ScaleState, ScaleWatch, ScalingPolicy, check_limits
from lossscale_core.adapters import BAD_LOSS, format_number, log_event, warn_caller
from lossscale_core.errors import CheckpointWarning
from lossscale_torch._gradients import params_of
from lossscale_torch._record import UNSCALED, OptimizerStep
from lossscale_torch._state import DeviceFields, is_capturing
from lossscale_torch._step_info import StepInfo
from lossscale_torch.hooks import Hook

if TYPE_CHECKING:
    from lossscale_torch._extras._attempts import Tries
    from lossscale_torch._scaler import GradScaler

CHECK_EVERY = 32
"""Updates between two looks at the state; a look takes about as long as an update."""
_MANY_UPDATES = 20
FAULTS = {
    "no_gradients": "found no gradient in any optimizer: parameters are frozen or unused, the loss was detached, or an "
    "optimizer holds other parameters than the model",
    "unfinished_step": "ended a step that unscale_() had begun, and that was neither taken nor skipped; call "
    "scaler.step(optimizer)",
}
"""Faults of an update, by the names of their events."""


class Watch(Hook):
    """Logs the events of a run, and raises the error of a streak of overflows if the host knows the state.

    A state on a device is copied without a wait, and logged at a later update, when the copy has arrived.
    """

    retries = 0
    """The attempts that ended in an applied step; the state counts the attempts before them as skipped steps."""
    tries: "Tries | None" = None
    """The loop over `attempts`, which sees the outcome of each attempt, and lets this watch see that of the loop."""
    has_bad_loss = False
    """Whether the loss of the last step was NaN or infinite, and the host knows it."""
    is_new = True
    """Whether no step was checked so far."""
    _has_logged_loss = False
    _late: "LateCopy | None" = None

    def __init__(self) -> None:
        self._watch, self._left = ScaleWatch(), CHECK_EVERY
        self.faults: dict[str, int] = {}
        """The faults of the last update, and how many updates in a row have had them."""

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """Warn if the first step of a new scaler is not the first step of its optimizer."""
        self.is_new = False
        scales = BaseScaling.of(scaler.policy).scales_losses  # otherwise nothing is lost
        if scales and step.flags and _has_stepped(step.optimizer):
            warn_caller(
                f"the optimizer has taken steps before, but its scaler starts over with a loss scale of "
                f"{format_number(scaler._init_scale)}; make one scaler for all steps, before the loop, and to continue "
                "from a checkpoint save scaler.state_dict() in it and pass it to scaler.load_state_dict()",
                CheckpointWarning,
            )

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Look at the outcome of a step. Waits for the device after an overflow, to read the losses."""
        if self.tries is not None:
            self.tries.note(info)
            return
        if info.applied is True and info.had_gradients and self._left > 1:
            self._left -= 1
            self.has_bad_loss, self.faults = False, {}
        else:
            self.look(scaler, info, info.overflowed is True and not scaler._are_losses_finite())

    def look(self, scaler: "GradScaler", info: StepInfo, has_bad_loss: bool) -> None:
        """Check the outcome, the state if the policy has a limit, and at each 32nd update what is to be logged."""
        self._left -= 1
        self.has_bad_loss = has_bad_loss
        if has_bad_loss and not self._has_logged_loss:
            self._has_logged_loss = True
            state: Any = scaler._state.fields
            where = f", step {state.steps}" if hasattr(state, "steps") else ""  # a state on a device would wait
            log_event("bad_loss", f"lossscale{where}: {BAD_LOSS}")
        has_stepped = not info.had_gradients and any(flag is not False for flag in (info.by_optimizer or {}).values())
        is_unfinished = any(step["stage"] is UNSCALED for step in scaler.optimizer_steps())
        faults = [event for event, is_so in zip(FAULTS, (has_stepped, is_unfinished), strict=True) if is_so]
        self.faults = {event: self.faults.get(event, 0) + 1 for event in faults}
        for event in faults:
            if self.faults[event] == _MANY_UPDATES:
                log_event(event, f"{_MANY_UPDATES} updates in a row {FAULTS[event]}")
        if has_stepped and scaler._losses:
            _warn_of_gradient_hooks(scaler.optimizer_steps())
        if isinstance(info.applied, Tensor):
            if not is_capturing() and isinstance(scaler._state.fields, DeviceFields):
                self._look_late(scaler, scaler._state.fields)
            return
        limit = BaseScaling.of(scaler.policy).max_overflow_streak
        if self._left > 0 and limit is None:
            return
        on_host = scaler._state.on_host()
        if limit is not None:
            check_limits(scaler.policy, on_host)
        if self._left <= 0:
            self._left = CHECK_EVERY
            self.log(scaler.policy, on_host)

    def _look_late(self, scaler: "GradScaler", fields: DeviceFields) -> None:
        """Log a state that has arrived from the device, and copy the present one if it is time."""
        if self._late is not None:
            numbers = self._late.numbers()
            if numbers is None:
                return
            self._late = None
            self._log_late(scaler, fields, numbers)
        if scaler._scale.device.type in LateCopy.DEVICES and self._is_time():
            self._left = CHECK_EVERY
            self._late = LateCopy(self._late_tensors(scaler, fields))

    def _is_time(self) -> bool:
        return self._left <= 0

    def _late_tensors(self, scaler: "GradScaler", fields: DeviceFields) -> list[Tensor]:
        return [fields.counts, scaler._scale, scaler._growth_tracker]

    def _log_late(self, scaler: "GradScaler", fields: DeviceFields, numbers: list[float]) -> None:
        self.log(scaler.policy, fields.with_numbers(numbers[:-2], numbers[-2], numbers[-1]))

    def log(self, policy: ScalingPolicy, state: ScaleState) -> None:
        """Log the events of a state on the host."""
        self._watch.log(policy, self._without_retries(state))

    def diagnose(self, policy: ScalingPolicy, state: ScaleState, guard: GuardState | None) -> str:
        """Log the events of a state on the host, and return the diagnosis."""
        return self._watch.diagnose(policy, self._without_retries(state), guard=guard)

    def _without_retries(self, state: ScaleState) -> ScaleState:
        """Return a state that counts the attempts of a step as one."""
        steps, skipped = (type(n)(max(n - self.retries, 0)) for n in (state.steps, state.skipped_steps))
        return state._replace(steps=steps, skipped_steps=skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of attempts that the state counts and this watch does not, if there are any."""
        return {"retries": self.retries} if self.retries else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Leave out the attempts of the saved run, which this scaler continues."""
        self.is_new, self._late, self._watch = False, None, ScaleWatch()
        retries = state_dict.get("retries")
        self.retries = retries if type(retries) is int and retries > 0 else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tries": None, "_late": None}  # a copy of the scaler is in no loop


class LateCopy:
    """Numbers on their way from a device; the host does not wait for them."""

    DEVICES = ("cuda", "xpu")
    """The devices that copy to pinned memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensors[0].device)
        self._event.record()

    def numbers(self) -> list[float] | None:
        """Return the numbers if they have arrived."""
        return (
            [number for copy in self._copies for number in copy.reshape(-1).tolist()] if self._event.query() else None
        )


def _warn_of_gradient_hooks(steps: Iterable[OptimizerStep]) -> None:
    """Warn of optimizers that step in the backward pass, as those of sd-scripts, OneTrainer and torch itself."""
    params = [param for step in steps if step.optimizer is not None for param in params_of(step.optimizer)]
    names = "_post_accumulate_grad_hooks", "_in_backward_optimizers"
    if any(getattr(param, name, None) for param in params for name in names):
        warn_caller(
            "the loss was scaled and step() found no gradients, but parameters have gradient hooks: an optimizer that "
            "steps in such a hook applies scaled gradients; let scaler.step() step it, or make the scaler with "
            "enabled=False"
        )


def _has_stepped(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer's state shows a step; do not wait for a count on a device.

    Optimizers of torch keep a count "step" for each parameter, SGD and Muon only a momentum from the first step on.
    """
    state = getattr(optimizer, "state", None)
    states = state.values() if isinstance(state, Mapping) else ()
    return any(_is_positive(each.get("step", 1)) for each in states if isinstance(each, Mapping) and each)


def _is_positive(count: Any) -> bool:
    if isinstance(count, Tensor):
        return not count.is_cpu or bool((count > 0).any())
    return isinstance(count, int | float) and count > 0

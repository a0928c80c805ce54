"""`Watch`: logs the events of a run, warns of steps that have no effect, and stops a run that overflows too often."""

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
"""The number of updates between two checks of the state; a check takes about as long as an update."""
_MANY_UPDATES = 20
"""The number of faulty updates in a row after which a fault is logged."""
FAULTS = {
    "no_gradients": "found no gradient in any optimizer: parameters are frozen or unused, the loss was detached, or an "
    "optimizer holds other parameters than the model",
    "unfinished_step": "ended a step that unscale_() had begun and that was neither taken nor skipped; call "
    "scaler.step(optimizer)",
}
"""The faults of an update: the name of the log event, and the end of a sentence that begins with the update."""


class Watch(Hook):
    """Logs the events of a run. Raises `OverflowStreakError` if the host knows the state and it reaches the limit.

    If the state is on a device, the watch copies it without waiting, and logs it at a later update, when the copy has
    arrived.
    """

    retries = 0
    """The number of skipped steps in the state that `attempts` has repeated and then applied."""
    tries: "Tries | None" = None
    """The loop over `attempts` that is running. It receives each outcome, and the watch logs only its end."""
    has_bad_loss = False
    """Whether a loss of the last step was NaN or infinite; False also if the host did not check."""
    is_new = True
    """Whether this scaler has not taken a step yet, and no state was loaded."""
    _has_logged_loss = False
    _late: "LateCopy | None" = None

    def __init__(self) -> None:
        self._watch, self._updates_until_check = ScaleWatch(), CHECK_EVERY
        self.faults: dict[str, int] = {}
        """For each fault of the last update, the number of updates in a row with this fault."""

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """Warn if the first step of a new scaler is not the first step of its optimizer."""
        self.is_new = False
        scales = BaseScaling.of(scaler.policy).scales_losses  # without a loss scale, the new scaler loses nothing
        if scales and step.flags and _has_stepped(step.optimizer):
            warn_caller(
                f"the optimizer has taken steps before, but its scaler starts over with a loss scale of "
                f"{format_number(scaler._init_scale)}; make one scaler for all steps, before the loop; to continue "
                "from a checkpoint, save scaler.state_dict() in it and pass it to scaler.load_state_dict()",
                CheckpointWarning,
            )

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Check the outcome of a step. Waits for a device only after an overflow, to read the losses."""
        if self.tries is not None:
            self.tries.note(info)
            return
        if info.applied is True and info.had_gradients and self._updates_until_check > 1:
            self._updates_until_check -= 1
            self.has_bad_loss, self.faults = False, {}
        else:
            self.check(scaler, info, info.overflowed is True and not scaler._are_losses_finite())

    def check(self, scaler: "GradScaler", info: StepInfo, has_bad_loss: bool) -> None:
        """Note the faults of a step, check the limit of the policy, and log the state at each 32nd update."""
        self._updates_until_check -= 1
        self.has_bad_loss = has_bad_loss
        if has_bad_loss and not self._has_logged_loss:
            self._has_logged_loss = True
            state: Any = scaler._state.fields
            where = f", step {state.steps}" if hasattr(state, "steps") else ""  # the fields on a device have no count
            log_event("bad_loss", f"lossscale{where}: {BAD_LOSS}")
        has_stepped = not info.had_gradients and any(flag is not False for flag in (info.by_optimizer or {}).values())
        is_unfinished = any(step["stage"] is UNSCALED for step in scaler.optimizer_steps())
        faults = [event for event, is_present in zip(FAULTS, (has_stepped, is_unfinished), strict=True) if is_present]
        self.faults = {event: self.faults.get(event, 0) + 1 for event in faults}
        for event in faults:
            if self.faults[event] == _MANY_UPDATES:
                log_event(event, f"{_MANY_UPDATES} updates in a row {FAULTS[event]}")
        if has_stepped and scaler._losses:
            _warn_of_gradient_hooks(scaler.optimizer_steps())
        if isinstance(info.applied, Tensor):
            if not is_capturing() and isinstance(scaler._state.fields, DeviceFields):
                self._check_late(scaler, scaler._state.fields)
            return
        limit = BaseScaling.of(scaler.policy).max_overflow_streak
        if self._updates_until_check > 0 and limit is None:
            return
        on_host = scaler._state.on_host()
        if limit is not None:
            check_limits(scaler.policy, on_host)
        if self._updates_until_check <= 0:
            self._updates_until_check = CHECK_EVERY
            self.log(scaler.policy, on_host)

    def _check_late(self, scaler: "GradScaler", fields: DeviceFields) -> None:
        """Log a copy of the state that has arrived from the device, and start another copy at each 32nd update."""
        if self._late is not None:
            numbers = self._late.numbers()
            if numbers is None:
                return
            self._late = None
            self._log_late(scaler, fields, numbers)
        if scaler._scale.device.type in LateCopy.DEVICES and self._is_time():
            self._updates_until_check = CHECK_EVERY
            self._late = LateCopy(self._late_tensors(scaler, fields))

    def _is_time(self) -> bool:
        return self._updates_until_check <= 0

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
        """Return a state that counts all attempts of a step as one step."""
        steps, skipped = (type(n)(max(n - self.retries, 0)) for n in (state.steps, state.skipped_steps))
        return state._replace(steps=steps, skipped_steps=skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of retries, unless it is 0; the state in the same dict counts them as steps."""
        return {"retries": self.retries} if self.retries else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the number of retries from a checkpoint."""
        self.is_new, self._late, self._watch = False, None, ScaleWatch()
        retries = state_dict.get("retries")
        self.retries = retries if type(retries) is int and retries > 0 else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tries": None, "_late": None}  # a copy of the scaler is not in the loop


class LateCopy:
    """A copy of numbers from a device to the host that runs while the host continues."""

    DEVICES = ("cuda", "xpu")
    """The device types that can copy to pinned memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensors[0].device)
        self._event.record()

    def numbers(self) -> list[float] | None:
        """Return the numbers, or None if the copy has not ended. Does not wait."""
        if not self._event.query():
            return None
        return [number for copy in self._copies for number in copy.reshape(-1).tolist()]


def _warn_of_gradient_hooks(steps: Iterable[OptimizerStep]) -> None:
    """Warn if gradient hooks step optimizers in the backward pass, as sd-scripts, OneTrainer and torch offer it."""
    params = [param for step in steps if step.optimizer is not None for param in params_of(step.optimizer)]
    names = "_post_accumulate_grad_hooks", "_in_backward_optimizers"
    if any(getattr(param, name, None) for param in params for name in names):
        warn_caller(
            "the loss was scaled and step() found no gradients, but parameters have gradient hooks: an optimizer that "
            "steps in such a hook applies scaled gradients; let scaler.step() step it, or make the scaler with "
            "enabled=False"
        )


def _has_stepped(optimizer: Optimizer | None) -> bool:
    """Return whether the state of an optimizer proves an earlier step. Does not wait for a device.

    The optimizers of torch store a count "step" for each parameter. SGD and Muon store only a momentum, which does not
    exist before the first step.
    """
    state = getattr(optimizer, "state", None)
    states = state.values() if isinstance(state, Mapping) else ()
    return any(_is_positive(entry.get("step", 1)) for entry in states if isinstance(entry, Mapping) and entry)


def _is_positive(count: Any) -> bool:
    if isinstance(count, Tensor):
        return not count.is_cpu or bool((count > 0).any())
    return isinstance(count, int | float) and count > 0

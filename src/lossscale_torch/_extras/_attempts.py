"""`attempts`: a loop that repeats a step at the lower loss scale if its gradients overflow."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lossscale_core import BaseScaling, ScaleState
from lossscale_core.adapters import check_setting, format_number, warn_caller
from lossscale_core.errors import CallOrderError, RetriesExhaustedError
from lossscale_torch._gradients import params_of
from lossscale_torch._record import STEPPED, OptimizerStep, read_numbers
from lossscale_torch._snapshots import Buffers, random_states
from lossscale_torch._step_info import StepInfo

if TYPE_CHECKING:
    from lossscale_torch._scaler import GradScaler


class Attempt:
    """The loop variable of `GradScaler.attempts`. One object describes all tries of a step."""

    number: int = 0
    """The number of the current try, counted from 0."""
    info: StepInfo | None = None
    """The outcome of the current try, which is true if the step was applied; None before `update`."""

    def __init__(self) -> None:
        self._infos: list[StepInfo] = []

    @property
    def scales(self) -> list[float]:
        """The loss scale of each try so far, as Python numbers. Synchronises after the step of a fused optimizer."""
        return [float(info.loss_scale_used) for info in self._infos]


def attempts(scaler: "GradScaler", modules: Sequence[Module], retries: int, raise_at_end: bool) -> Iterator[Attempt]:
    """Return the iterator of `GradScaler.attempts`."""
    check_setting("retries", retries)
    for module in modules:
        if not isinstance(module, Module):
            raise TypeError(f"attempts() was given {type(module).__name__}; it takes modules: scaler.attempts(model)")
    return _attempts(scaler, modules, retries, raise_at_end)


def _attempts(scaler: "GradScaler", modules: Sequence[Module], retries: int, raise_at_end: bool) -> Iterator[Attempt]:
    if not scaler.is_enabled():
        attempt = Attempt()
        yield attempt
        attempt.info = scaler.last_step
        return
    tries, after_first = Tries(scaler, modules), None
    attempt = tries.attempt
    try:
        scaler._watch.tries = tries  # this also replaces a loop that the program left before its end
        for attempt.number in range(retries + 1):
            if attempt.number:
                tries.begin_another()
            yield attempt
            tries.require_one_update()
            if tries.is_over or tries.is_at_floor:
                break
            after_first = after_first or scaler._state.on_host()
    finally:
        tries.end(after_first)
    if tries.applied and tries.is_over:  # otherwise `end` has restored the state after the first try
        scaler._watch.retries += attempt.number
    scaler._watch.check(scaler, scaler.last_step, tries.has_bad_loss)
    if not tries.is_over:
        text = (
            f"the gradients of a step overflowed in {attempt.number + 1} tries, at the loss scales "
            f"{', '.join(map(format_number, attempt.scales))}; the step is skipped and the scale backs off once; look "
            "for NaN in the backward pass; if the scale began too high and has not reached its minimum, pass a larger "
            "retries="
        )
        if raise_at_end:
            raise RetriesExhaustedError(text)
        warn_caller(text)


class Tries:
    """The tries of one step, and copies of the data that each try starts from.

    The watch of the scaler passes each outcome to this object, and logs only the outcome of the whole loop.
    """

    updates = 0
    """The number of calls of `update` in this try."""
    factor = 1.0
    """The current loss scale, divided by the loss scale of the first try."""
    is_over = has_bad_loss = False
    is_at_floor = False
    """Whether the loss scale is at its minimum, so that another try would not differ."""

    def __init__(self, scaler: "GradScaler", modules: Sequence[Module]) -> None:
        self.scaler, self.attempt = scaler, Attempt()
        self.restore_random_states, self.buffers = random_states(), [*map(Buffers, modules)]
        params = [param for optimizer in scaler._waiting.optimizers for param in params_of(optimizer)]
        self.waiting = {param: None if param.grad is None else param.grad.clone() for param in params}
        """Copies of the gradients of the optimizers in `optimizers=`, which may hold gradients of earlier batches."""
        self.records: dict[int, OptimizerStep] = {}
        """The records of the last try, by the ids of the optimizers."""
        self.applied: list[int] = []
        """The ids of the optimizers that have applied gradients in a try. Later tries do not step them."""

    @property
    def optimizers(self) -> list[Optimizer]:
        return [step.optimizer for step in self.records.values() if step.optimizer is not None]

    def begin_another(self) -> None:
        """Restore buffers, random states and gradients, and mark the optimizers that the last try has stepped."""
        self.restore_random_states()
        for buffers in self.buffers:
            buffers.restore()
        for param in (param for optimizer in self.optimizers for param in params_of(optimizer)):
            param.grad = None
        for param, grad in self.waiting.items():
            param.grad = None if grad is None else grad * self.factor
        self.attempt.info, self.updates = None, 0
        for key in self.applied:
            step = self.scaler._per_optimizer_states[key] = self.records[key]
            for param in params_of(step.optimizer):
                param.grad = None
            step["stage"], step["found_inf_per_device"] = STEPPED, {}
            step.applied, step.is_done, step.has_divided = True, True, False

    def note(self, info: StepInfo) -> None:
        """Store the outcome of a try. Waits for the device once, after the step of a fused optimizer."""
        self.updates += 1
        if self.updates > 1:  # the body ends several steps, or the program left the loop earlier
            self.scaler._watch.tries = None
            return
        scaler, self.attempt.info = self.scaler, info
        self.attempt._infos.append(info)
        by_optimizer = info.by_optimizer or {}
        outcomes: list[bool | float | Tensor] = [info.overflowed, *info[1:3], *by_optimizer.values()]
        if any(isinstance(outcome, Tensor) for outcome in outcomes):
            device = scaler._scale.device
            outcomes = [*read_numbers([torch.as_tensor(outcome, device=device) for outcome in outcomes], device)]
        overflowed, used, after, *applied = outcomes
        self.factor *= float(after) / float(used)
        self.records = scaler._per_optimizer_states
        outcomes_by_key = zip(by_optimizer, applied, strict=True)
        self.applied = [key for key, is_applied in outcomes_by_key if is_applied and self.records[key].had_gradients]
        policy = BaseScaling.of(scaler.policy)
        self.is_at_floor = float(used) <= policy.bounds()[0]
        self.is_over = not (overflowed and policy.adapts)
        if not self.is_over:
            self.has_bad_loss = not scaler._are_losses_finite()
            self.is_over = scaler._ranks.any_of(self.has_bad_loss, self.optimizers, scaler._scale.device)

    def require_one_update(self) -> None:
        """Raise `CallOrderError` unless the body called `update` once, and no other loop began in it."""
        if self.updates < 2 and self.scaler._watch.tries is not self:
            raise CallOrderError(
                "a loop over attempts() began inside another loop over attempts() of the same scaler; end the outer "
                "loop first"
            )
        if self.updates != 1:
            raise CallOrderError(
                f"the body of a loop over attempts() called update() {self.updates} times and must call it once; put "
                "all micro-batches of a step into one body, with scaler.step and scaler.update (with Accelerate, all "
                "bodies of accumulate() up to the body that steps)"
            )

    def end(self, after_first: ScaleState | None) -> None:
        """End the loop: restore the buffers if no optimizer was applied, and drop a try without an `update`.

        A second call does nothing. `after_first` is the state after the first try, to which the scaler returns if all
        tries overflowed.
        """
        if self.scaler._watch.tries is not self:
            return
        self.scaler._watch.tries = None
        if after_first and not self.is_over:  # a step that overflows at every scale must back off only once
            self.scaler._load(after_first, self.scaler.policy)
        records = self.scaler._per_optimizer_states
        # Other records after the update of this try belong to a later step: the program has left the loop, but has kept
        # its iterator.
        if self.updates == 0 or records is self.records or not records:
            if not self.applied and not any(step.may_have_stepped for step in self.scaler.optimizer_steps()):
                for buffers in self.buffers:
                    buffers.restore()
            self.scaler._abandon()

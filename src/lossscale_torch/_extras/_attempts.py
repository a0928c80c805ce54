"""`attempts`: a loop around a step that takes it again at the lower loss scale after an overflow."""

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
        scaler._watch.tries = tries  # a loop that was left without its end does not stand in the way
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
    if tries.applied and tries.is_over:  # else the state is that after the first try, and counts no other
        scaler._watch.retries += attempt.number
    scaler._watch.look(scaler, scaler.last_step, tries.has_bad_loss)
    if not tries.is_over:
        text = (
            f"the gradients of a step overflowed in {attempt.number + 1} tries, at the loss scales "
            f"{', '.join(map(format_number, attempt.scales))}; the step is skipped and the scale backs off once; look "
            "for NaN in the backward pass, or pass more retries= if the scale began too high and has not reached its "
            "minimum"
        )
        if raise_at_end:
            raise RetriesExhaustedError(text)
        warn_caller(text)


class Tries:
    """The tries of one step, with copies of what each begins with. The watch sees the outcome of the loop only."""

    updates = 0
    """The updates in this try."""
    factor = 1.0
    """The present loss scale, divided by that of the first try."""
    is_over = has_bad_loss = False
    is_at_floor = False
    """Whether a further try would have the same loss scale."""

    def __init__(self, scaler: "GradScaler", modules: Sequence[Module]) -> None:
        self.scaler, self.attempt = scaler, Attempt()
        self.put_random_states_back, self.buffers = random_states(), [*map(Buffers, modules)]
        params = [param for optimizer in scaler._waiting.optimizers for param in params_of(optimizer)]
        self.waiting = {param: None if param.grad is None else param.grad.clone() for param in params}
        """Copies of the gradients of optimizers that may wait, by their parameters."""
        self.records: dict[int, OptimizerStep] = {}
        """The records of the last try."""
        self.applied: list[int] = []
        """The optimizers with gradients that were applied in a try; later tries leave them alone."""

    @property
    def optimizers(self) -> list[Optimizer]:
        return [step.optimizer for step in self.records.values() if step.optimizer is not None]

    def begin_another(self) -> None:
        """Put back what the last try has changed, and leave alone the optimizers that it has applied."""
        self.put_random_states_back()
        for buffers in self.buffers:
            buffers.put_back()
        for param in (param for optimizer in self.optimizers for param in params_of(optimizer)):
            param.grad = None
        for param, grad in self.waiting.items():
            param.grad = None if grad is None else grad * self.factor
        self.attempt.info, self.updates = None, 0
        for key in self.applied:
            done = self.scaler._per_optimizer_states[key] = self.records[key]
            for param in params_of(done.optimizer):
                param.grad = None
            done["stage"], done["found_inf_per_device"] = STEPPED, {}
            done.applied, done.is_done, done.has_divided = True, True, False

    def note(self, info: StepInfo) -> None:
        """Note the outcome of a try. Waits for the device, once, after a fused optimizer."""
        self.updates += 1
        if self.updates > 1:  # the body ends several steps, or was left long ago
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
        """Raise an error unless the body was one step of this loop alone."""
        if self.updates < 2 and self.scaler._watch.tries is not self:
            raise CallOrderError(
                "a loop over attempts() began inside a loop over attempts() of the same scaler; leave one before the "
                "other begins"
            )
        if self.updates != 1:
            raise CallOrderError(
                f"the body of a loop over attempts() ended {self.updates} steps by update() and must end one; put all "
                "micro-batches of a step into one body, with scaler.step and scaler.update (with Accelerate, all "
                "bodies of accumulate() up to the one that steps)"
            )

    def end(self, after_first: ScaleState | None) -> None:
        """Put the buffers back unless an optimizer was applied, and end a try that was begun; once."""
        if self.scaler._watch.tries is not self:
            return
        self.scaler._watch.tries = None
        if after_first and not self.is_over:  # what overflows at each scale must not cost more than one backoff
            self.scaler._load(after_first, self.scaler.policy)
        records = self.scaler._per_optimizer_states
        # After the update of a try, another open step is not of this loop, which was left and held.
        if self.updates == 0 or records is self.records or not records:
            if not self.applied and not any(step.may_have_moved for step in self.scaler.optimizer_steps()):
                for buffers in self.buffers:
                    buffers.put_back()
            self.scaler._abandon()

"""`attempts`: a loop around a step that takes it again at the lower loss scale after an overflow."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn import Module

from lossscale_core import BaseScaling
from lossscale_core.adapters import check_setting, shown_number
from lossscale_core.errors import CallOrderError, RetriesExhaustedError
from lossscale_torch._gradients import params_of
from lossscale_torch._snapshots import Buffers, random_states
from lossscale_torch._state import Attempt, StepInfo
from lossscale_torch.hooks import Hook, SameOnRanks


class _Tries(Hook):
    """Counts the updates of a body, and tells whether its step may be taken again."""

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.optimizers: list[Any] = []
        self.copies: dict[Module, Buffers] = {}
        self.is_hopeless = False

    def after_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Note the optimizer, whose gradients another try makes anew."""
        if self.attempt is not None:
            self.optimizers.append(optimizer)

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """Note the outcome. Waits for the device after a fused optimizer."""
        if self.attempt is not None:
            self.attempt.info = info
            self.attempt._infos.append(info)
            self.is_hopeless = not (info.overflowed and BaseScaling.of(scaler.policy).adapts) or self._has_bad_loss(
                scaler
            )

    def _has_bad_loss(self, scaler: Any) -> bool:
        """Return whether a rank's loss is NaN or infinite, which no loss scale changes."""
        ranks = next(hook for hook in scaler._hooks if isinstance(hook, SameOnRanks))
        return ranks.any_of(not scaler._are_losses_finite(), self.optimizers, scaler._scale.device)

    def __reduce__(self) -> Any:
        return _Tries, ()


def attempts(scaler: Any, modules: Sequence[Module], retries: int, raise_at_end: bool) -> Iterator[Attempt]:
    """Return the iterator of `GradScaler.attempts`."""
    check_setting("retries", retries)
    for each in modules:
        if not isinstance(each, Module):
            raise TypeError(f"attempts() was given {type(each).__name__}; it takes modules: scaler.attempts(model)")
    tries = next((hook for hook in scaler._hooks if isinstance(hook, _Tries)), None) or _Tries()
    if tries.attempt is not None:
        raise CallOrderError("this scaler is inside a loop over attempts() already; leave it before another begins")
    if tries not in scaler._hooks:
        scaler._hooks.append(tries)
    return _attempts(scaler, tries, modules, retries, raise_at_end) if scaler.is_enabled() else _one_attempt(scaler)


def _one_attempt(scaler: Any) -> Iterator[Attempt]:
    attempt = Attempt()
    yield attempt
    attempt.info = scaler.last_step


def _attempts(
    scaler: Any, tries: _Tries, modules: Sequence[Module], retries: int, raise_at_end: bool
) -> Iterator[Attempt]:
    tries.attempt = attempt = Attempt()
    copies = [tries.copies.setdefault(module, Buffers()) for module in modules]
    put_back = random_states()
    for module, copy in zip(modules, copies, strict=True):
        copy.copy_from(module)
    after_first = None
    try:
        for attempt.number in range(retries + 1):
            if attempt.number:
                put_back()
                for copy in copies:
                    copy.put_back()
                for param in (param for optimizer in tries.optimizers for param in params_of(optimizer)):
                    param.grad = None
            attempt.info, tries.optimizers = None, []
            yield attempt
            _require_one_update(scaler, len(attempt._infos) - attempt.number)
            if tries.is_hopeless:
                return
            after_first = scaler._state_on_host() if after_first is None else after_first
        # A gradient that overflows at each scale must not cost more than one backoff.
        scaler._put(after_first)
        _end(attempt, raise_at_end)
    finally:
        tries.attempt = None
        scaler._drop_step()


def _require_one_update(scaler: Any, count: int) -> None:
    if count != 1:
        several = (
            f", of updates_per_step={scaler._updates_per_step} calls each," if scaler._updates_per_step > 1 else ""
        )
        raise CallOrderError(
            f"the body of a loop over attempts() ended {count} steps by update(){several} and must end one; put all "
            "micro-batches of a step into one body, with scaler.step and scaler.update (with Accelerate, all bodies of "
            "accumulate() up to the one that steps)"
        )


def _end(attempt: Attempt, raise_at_end: bool) -> None:
    scales = ", ".join(map(shown_number, attempt.scales))
    text = (
        f"the gradients of a step overflowed in {attempt.number + 1} tries, at the loss scales {scales}; the step is "
        "skipped and the scale backs off once; look for NaN in the backward pass, or pass more retries= if the scale "
        "began too high"
    )
    if raise_at_end:
        raise RetriesExhaustedError(text)
    warnings.warn(text, stacklevel=3)  # at the loop

"""What a guarded optimizer says of the steps that it skips: the first with its cause, later ones as a scaler does."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from lossscale_core.adapters import log_event
from lossscale_core.errors import OverflowStreakError
from lossscale_torch._gradients import params_of, values_of
from lossscale_torch._report import pairs
from lossscale_torch._state import is_being_recorded, read
from lossscale_torch._step_info import StepInfo
from lossscale_torch.hooks import Guard, Hook

_MANY = 4
_EVERY = 32


def names_of(optimizer: Any, names: Module | Iterable[tuple[str, Tensor]] | None) -> list[str]:
    """Return a name for each parameter of an optimizer, or its place and its shape.

    Raises `TypeError` if `names` is neither a module nor pairs of a name and a parameter.
    """
    named = names.named_parameters() if isinstance(names, Module) else () if names is None else names
    known = {id(param): name for name, param in pairs(named, "guarded(names=)")}
    return [
        known.get(id(param))
        or _name_in(group, place)
        or f"parameter {place} of group {number} (shape {tuple(param.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    ]


def _name_in(group: dict[str, Any], place: int) -> Any:
    return group["param_names"][place] if "param_names" in group else None  # from PyTorch 2.6 on


class SkipLog(Hook):
    """Logs the first skipped step on one rank, or raises an error at it; the watch logs what follows.

    What is on a device is copied without a wait, and said at a later step, when it has arrived.
    """

    def __init__(self, names: list[str], raises: bool) -> None:
        self.names, self.raises = names, raises
        self.steps = 0
        self.has_logged = False
        self._late: LateCopy | None = None

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """Say a skipped step, or raise `OverflowStreakError`. Reads the gradients if the host knows the outcome."""
        self.steps += 1
        (record,) = scaler._per_optimizer_states.values()
        name = type(record["optimizer"]).__name__
        if isinstance(info.applied, Tensor) and self.raises:
            torch._assert_async(info.applied, f"a step of {name} had gradients that are not finite, or a spike")
        if is_being_recorded():
            return
        if isinstance(info.applied, Tensor):
            self._look_late(scaler, record["optimizer"])
        elif not info.applied and (self.raises or not self.has_logged):
            if info.spiked:
                cause = f"its gradient norm of {float(record['norm']):g} is far above those before"
            else:
                cause = f"the gradients of {self._bad_ones(record['optimizer'])} are not finite"
            if self.raises:
                raise OverflowStreakError(
                    f"step {self.steps} of {name} was not taken: {cause}. Parameters and the optimizer's state are as "
                    "they were; look at the loss, the learning rate and the data"
                )
            self._tell(scaler, record["optimizer"], f"step {self.steps} of {name} was skipped: {cause}")

    def _bad_ones(self, optimizer: Any) -> str:
        params = params_of(optimizer)
        names = [*self.names, *("a parameter that was added later" for _ in params[len(self.names) :])]
        there = [(name, param.grad) for name, param in zip(names, params, strict=False) if param.grad is not None]
        flags = [torch.isfinite(values_of(grad)).all() for _, grad in there]
        finite = read(flags, flags[0].device) if flags else []
        bad = [name for (name, _), is_finite in zip(there, finite, strict=True) if not is_finite]
        more = f" and {len(bad) - _MANY} more" if len(bad) > _MANY else ""
        return ", ".join(bad[:_MANY]) + more if bad else "another rank"

    def _look_late(self, scaler: Any, optimizer: Any) -> None:
        """Say what has arrived from the device, and copy what is there now: at first each time, later now and then."""
        if self._late is not None:
            counts = self._late.numbers()
            if counts is None:
                return
            state = scaler.policy.init_state()
            state = state._replace(**dict(zip(state._fields[2:], map(np.int32, counts), strict=False)))
            skipped = state.skipped_steps + sum(counts[len(state) - 2 :])
            self._late = None
            if skipped and not self.has_logged:
                text = f"{skipped} of the first {self.steps} steps of {type(optimizer).__name__} were skipped"
                self._tell(
                    scaler, optimizer, f"{text}: gradients were not finite, or their norm was far above those before"
                )
            elif self.has_logged:
                scaler._watch.log(scaler.policy, state)
        if scaler._state.counts.device.type in LateCopy.DEVICES and (not self.has_logged or self.steps % _EVERY == 0):
            guards = [hook.first() for hook in scaler._hooks if isinstance(hook, Guard)]
            self._late = LateCopy([scaler._state.counts, *(each.spikes.reshape(1) for each in guards if each)])

    def _tell(self, scaler: Any, optimizer: Any, text: str) -> None:
        self.has_logged = True
        if _speaks(scaler, optimizer):
            log_event("skipped_step", f"{text}; parameters and the optimizer's state stay as they were")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_late": None}


def _speaks(scaler: Any, optimizer: Any) -> bool:
    """Return whether this is the first rank of those that decide together, or of all."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return all(distributed.get_rank(group) == 0 for group in scaler._ranks.groups([optimizer]) or [None])


class LateCopy:
    """Numbers on their way from a device; the host does not wait for them."""

    DEVICES = ("cuda", "xpu")
    """The devices that copy to pinned memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensors[0].device)
        self._event.record()

    def numbers(self) -> list[int] | None:
        """Return the numbers if they have arrived."""
        return [number for copy in self._copies for number in copy.tolist()] if self._event.query() else None

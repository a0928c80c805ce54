"""The outcome of a step, as `GradScaler.update` returns it."""

from typing import Any

import torch

import lossscale_core


class StepInfo(lossscale_core.StepInfo):
    """One step's outcome, and that of each optimizer.

    The fields are those of `lossscale_core.StepInfo`: plain Python numbers, which `json.dumps` takes, if they are
    known on the host; after a fused optimizer, tensors of shape `()` that stay on their device until they are read.
    """

    _flags: dict[int, Any] | None = None
    _default: bool = False

    def applied_of(self, optimizer: torch.optim.Optimizer) -> bool | torch.Tensor:
        """Return whether this optimizer's step was applied: a bool, or a bool tensor of shape `()` on its device.

        `applied` is True only if every optimizer's step was applied; one may have moved and another not. False for an
        optimizer that was not stepped since the update before; True if the scaler is disabled. Does not synchronise.
        """
        if self._flags is None:  # a copy that `_replace` made has one flag for all of them
            return self.applied
        flag = self._flags.get(id(optimizer), self._default)
        return flag == 0.0 if isinstance(flag, torch.Tensor) else flag


def with_optimizers(info: StepInfo, flags: dict[int, Any], default: bool = False) -> StepInfo:
    """Set a flag for each optimizer that was stepped on `info`, and return it, or a copy where one was left out.

    A flag is a bool, True where the step was applied, or a tensor that holds 0.0 there; others have the default.
    """
    for flag in flags.values():
        if flag is False:
            info = info._replace(applied=False)
    info._flags, info._default = flags, default
    return info

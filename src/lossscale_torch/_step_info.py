"""`StepInfo`: the outcome of a step, and that of each optimizer in it."""

from typing import Any

import torch

import lossscale_core
from lossscale_core.errors import CallOrderError


class StepInfo(lossscale_core.StepInfo[float | torch.Tensor, bool | torch.Tensor]):
    """One step's outcome, and that of each optimizer.

    The fields are those of `lossscale_core.StepInfo`: plain Python numbers, which `json.dumps` takes, if they are
    known on the host; after a fused optimizer, tensors of shape `()` that stay on their device until they are read.
    """

    by_optimizer: dict[int, Any] | None = None
    """Whether each optimizer's step was applied, by its id; None before the first step."""
    had_gradients: bool = True
    """Whether an optimizer had gradients to check."""
    norm: torch.Tensor | None = None
    """Of a step of a `guarded` optimizer: the norm of the gradients before clipping, of shape `()`, where they are."""

    def applied_of(self, optimizer: torch.optim.Optimizer) -> bool | torch.Tensor:
        """Return whether this optimizer's step was applied: a bool, or a bool tensor of shape `()` on its device.

        `applied` is True only if every optimizer's step was applied; one may have moved and another not. Does not
        synchronise.

        Raises:
            CallOrderError: For an optimizer that the scaler was not given since the update before.
        """
        if self.by_optimizer is None:  # a copy that `_replace` made
            return self.applied
        applied = self.by_optimizer.get(id(optimizer))
        if applied is None:
            raise CallOrderError(
                f"applied_of() was given a {type(optimizer).__name__} that took no part in this step; pass the object "
                "that was passed to scaler.step()"
            )
        return applied

"""`StepInfo`: the outcome of an update, and of each optimizer in it."""

from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

import lossscale_core
from lossscale_core.errors import CallOrderError

Number = float | Tensor
Flag = bool | Tensor


class _Fields(NamedTuple):
    """The fields of `lossscale_core.StepInfo`, and three fields for PyTorch."""

    applied: Flag
    loss_scale_used: Number
    loss_scale_after: Number
    overflow_streak: Number
    overflowed: Flag = False
    spiked: Flag = False
    by_optimizer: dict[int, Flag] | None = None
    had_gradients: bool = True
    norm: Tensor | None = None


class StepInfo(_Fields, lossscale_core.StepInfo[Number, Flag]):  # type: ignore[misc]  # the fields of both
    """The outcome of a step, for all optimizers together and for each optimizer.

    The first six fields are the fields of `lossscale_core.StepInfo`. If the host knows them, they are Python numbers,
    which `json.dumps` accepts. After a fused optimizer they are tensors of shape `()`, which stay on their device until
    they are read.

    Attributes:
        by_optimizer: Whether each optimizer's step was applied, by its id; None before the first step.
        had_gradients: Whether an optimizer had gradients to check.
        norm: After a step of a `guarded` optimizer, the norm of the gradients before clipping: shape `()`, on the
            device of the gradients.
    """

    __slots__ = ()

    def applied_of(self, optimizer: Optimizer) -> Flag:
        """Return whether this optimizer's step was applied: a bool, or a bool tensor of shape `()` on its device.

        `applied` is True only if every optimizer's step was applied: one optimizer may step while another skips. Does
        not synchronise.

        Raises:
            CallOrderError: The scaler was not given this optimizer between the last two updates.
        """
        if self.by_optimizer is None:
            return self.applied
        applied = self.by_optimizer.get(id(optimizer))
        if applied is None:
            raise CallOrderError(
                f"applied_of() was given a {type(optimizer).__name__} that took no part in this step; pass the object "
                "that was passed to scaler.step()"
            )
        return applied

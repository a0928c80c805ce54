"""A report on the parameters whose gradients overflowed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lossscale_core import GradientReport
from lossscale_torch._gradients import values_of


def overflow_report(named_parameters: Iterable[tuple[str, Tensor]]) -> list[GradientReport]:
    """Return a report on each parameter whose gradient holds NaN or infinity, in the order given.

    Call it after a skipped step, with `model.named_parameters()`; where nothing overflowed the list is empty. Look
    at the loss beside it: with a finite loss the scale was too large, also where gradients hold NaN and no infinity.
    Reads every gradient and synchronises with the host.
    """
    return [
        _report(name, values)
        for name, param in named_parameters
        if param.grad is not None
        for values in [values_of(param.grad.detach())]
        if not bool(torch.isfinite(values).all())
    ]


def _report(name: str, values: Tensor) -> GradientReport:
    finite = values[torch.isfinite(values)]
    return GradientReport(
        name,
        nan=int(torch.isnan(values).sum()),
        positive_inf=int(torch.isposinf(values).sum()),
        negative_inf=int(torch.isneginf(values).sum()),
        largest_finite=float(finite.abs().max()) if finite.numel() else 0.0,
    )

"""Clipping by the norm of all gradients together, with the multiply that unscales them."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lossscale_core import LARGEST_SCALE
from lossscale_torch._gradients import Gradients, params_of
from lossscale_torch._norm import norm_on_device, unscaled_norm


class Clipping(NamedTuple):
    """The arguments of `torch.nn.utils.clip_grad_norm_`."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    def needs_torchs(self, gradients: Gradients) -> bool:
        """Return whether the norm proves nothing, or is that of complex numbers and not of their parts."""
        return not self.norm_type > 0.0 or (self.norm_type != 2.0 and gradients.are_complex)

    def apply_torchs(self, optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
        """Clip gradients that are unscaled already, as torch does."""
        params = [param for optimizer in optimizers for param in params_of(optimizer)]
        return torch.nn.utils.clip_grad_norm_(params, self.max_norm, self.norm_type, self.error_if_nonfinite)

    def raise_nonfinite(self) -> None:
        """Raise torch's error for a norm that is not finite."""
        raise RuntimeError(
            f"The total norm of order {self.norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


class Clipped(NamedTuple):
    """The outcome of clipping."""

    norm: Tensor
    """The norm of the unscaled gradients before clipping, shape `()`."""
    found_inf: Tensor
    """float32, shape `()`: 1.0 where a gradient was not finite; then all of them are as they were."""
    finite: bool | None
    """Whether the gradients were finite, where the host knows."""
    grad_scale: Tensor | None
    """The factor by which a fused optimizer must still divide the gradients; None where they are clipped."""


def clipping(max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> Clipping:
    """Return how to clip; raise `ValueError` for a norm that cannot be clipped to."""
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm={max_norm!r} must be a number from 0; pass math.inf to measure without clipping")
    return Clipping(float(max_norm), float(norm_type), error_if_nonfinite)


def unscale_and_clip_on_host(gradients: Gradients, scale: Tensor, how: Clipping, is_deferred: bool) -> Clipped:
    """Unscale and clip in place, or leave the multiply to a fused optimizer. Synchronises with the host once."""
    norm, loss_scale = unscaled_norm(gradients, scale, how.norm_type)
    finite, grad_scale = math.isfinite(norm), None
    if finite:
        factor = min(1.0, how.max_norm / (norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        if is_deferred and factor * LARGEST_SCALE > loss_scale:
            grad_scale = torch.full((), loss_scale / factor, dtype=torch.float32, device=scale.device)
        else:
            gradients.multiply_(factor / loss_scale)
    dtype = torch.float64 if torch.float64 in gradients.dtypes else torch.float32
    found = torch.full((), float(not finite), dtype=torch.float32, device=scale.device)
    return Clipped(torch.tensor(norm, dtype=dtype, device=scale.device), found, finite, grad_scale)


def unscale_and_clip_on_device(gradients: Gradients, scale: Tensor, how: Clipping, is_deferred: bool) -> Clipped:
    """Unscale and clip in place, or leave the multiply to a fused optimizer. Does not synchronise."""
    norm = norm_on_device(gradients, how.norm_type, scale.device) / scale
    finite = torch.isfinite(norm)
    factor = (how.max_norm / (norm + 1e-6)).clamp(max=1.0)
    grad_scale = None
    if is_deferred:
        grad_scale = torch.where(finite, scale / factor, 1.0).float()  # infinite where clipped to nothing
    else:
        gradients.multiply_(torch.where(finite, factor / scale, 1.0).float())
    return Clipped(norm.float(), (~finite).float(), None, grad_scale)

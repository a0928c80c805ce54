"""Clipping by the norm of all gradients together, with the multiply that unscales them."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_core import LARGEST_SCALE
from lossscale_torch._gradients import Gradients, is_dtensor, params_of
from lossscale_torch._norm import can_stay_on_device, has_float64, norm_on_device, sharded_norm, unscaled_norm
from lossscale_torch._ranks import groups_over, meshes_of
from lossscale_torch._state import LossScale


class Clipping(NamedTuple):
    """The arguments of `torch.nn.utils.clip_grad_norm_`."""

    max_norm: float
    """The largest norm to leave; infinity measures only."""
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def apply_torchs(self, optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
        """Clip gradients that are unscaled already, as torch does; return their norm, on every rank the whole."""
        params = [param for optimizer in optimizers for param in params_of(optimizer)]
        grads = [param.grad for param in params if param.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads, self.norm_type, self.error_if_nonfinite)
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        if self.max_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        return norm

    def raise_nonfinite(self) -> None:
        """Raise torch's error for a norm that is not finite."""
        raise RuntimeError(
            f"The total norm of order {self.norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


MEASURING = Clipping(math.inf)


class Clipped(NamedTuple):
    """The outcome of clipping in one read."""

    norm: Tensor
    """The norm of the unscaled gradients before clipping, shape `()`."""
    value: float | None
    """The norm, where the host knows it."""
    found: dict[Any, Tensor]
    """1.0 where a gradient was not finite, and then all of them are as they were; empty without gradients."""
    deferred: Tensor | None
    """The factor by which a fused optimizer must still divide the gradients; None where they are clipped."""
    known_to: list[Any]
    """The process groups whose ranks know the same norm."""


def clipping(max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> Clipping:
    """Return how to clip; raise `ValueError` for a norm that cannot be clipped to."""
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm={max_norm!r} must be a number from 0; pass math.inf to measure without clipping")
    return Clipping(float(max_norm), float(norm_type), error_if_nonfinite)


@torch.no_grad()
def unscale_and_clip(
    optimizers: list[Any], scale: LossScale, how: Clipping, allow_half: bool, on_host: bool, defers: bool
) -> Clipped | None:
    """Unscale and clip with one read; return None, with nothing changed, where one read cannot do it.

    That is where the norm does not tell whether the gradients are finite, or only on the host and `on_host` is False.
    With `defers` a fused optimizer is left to multiply. Ranks that share a mesh come to the same answer, whatever
    gradients each of them has.
    """
    gradients = Gradients(optimizers, allow_half)  # refuses before any of them is unscaled
    meshes = meshes_of(optimizers)
    params = [param for optimizer in optimizers for param in params_of(optimizer)] if meshes else []
    dtypes = {param.dtype.to_real() for param in params} or gradients.dtypes
    are_complex = any(param.is_complex() for param in params) or gradients.are_complex
    # The largest part of a complex number is not its magnitude.
    is_proof = how.norm_type == 2.0 or (how.norm_type == math.inf and not are_complex)
    device = scale.tensor.device
    can_stay = can_stay_on_device(dtypes, device)
    if not is_proof or not (on_host or can_stay) or (meshes and not has_float64(device)):
        return None
    clip = _InPlace(gradients, how, defers, [group for mesh in meshes for group in groups_over(mesh)])
    if meshes:
        norm = sharded_norm(gradients, params, meshes, scale, how.norm_type, can_stay and not scale.tensor.is_cpu)
        if on_host:
            return clip.on_host(*torch.stack([norm, scale.tensor.double()]).tolist(), device)
        return clip.on_device(norm, scale.tensor)
    if on_host:
        return clip.on_host(*unscaled_norm(gradients, scale, how.norm_type), device)
    return clip.on_device(norm_on_device(gradients, scale, how.norm_type), scale.tensor)


class _InPlace(NamedTuple):
    """Gradients whose norm is known, to be unscaled and clipped, or left to a fused optimizer."""

    gradients: Gradients
    how: Clipping
    defers: bool
    known_to: list[Any]

    def on_host(self, norm: float, loss_scale: float, device: torch.device) -> Clipped:
        finite, deferred = math.isfinite(norm), None
        if finite:
            factor = min(1.0, self.how.max_norm / (norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
            # The kernel multiplies by the reciprocal of the factor, which must be a normal number of float32.
            if self.defers and factor * LARGEST_SCALE > loss_scale:
                deferred = torch.full((), loss_scale / factor, dtype=torch.float32, device=device)
            else:
                self.gradients.multiply_(factor / loss_scale)
        dtype = torch.float64 if torch.float64 in self.gradients.dtypes else torch.float32
        found = torch.full((), float(not finite), dtype=torch.float32, device=device)
        return self._clipped(torch.tensor(norm, dtype=dtype, device=device), norm, found, deferred)

    def on_device(self, norm: Tensor, scale: Tensor) -> Clipped:
        finite = torch.isfinite(norm)
        factor, deferred = (self.how.max_norm / (norm + 1e-6)).clamp(max=1.0), None
        if self.defers:
            deferred = torch.where(finite, scale / factor, 1.0).float()  # infinite where clipped to nothing
        else:
            self.gradients.multiply_(torch.where(finite, factor / scale, 1.0).float())
        return self._clipped(norm.float(), None, (~finite).float(), deferred)

    def _clipped(self, norm: Tensor, value: float | None, flag: Tensor, deferred: Tensor | None) -> Clipped:
        found = {flag.device: flag} if self.gradients.buckets or self.known_to else {}
        return Clipped(norm, value, found, deferred, self.known_to)

"""Clipping by the norm of all gradients together, in the same multiplication as unscaling."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_core.adapters import check_setting
from lossscale_torch._gradients import Gradients, is_dtensor, params_of
from lossscale_torch._norm import can_stay_on_device, has_float64, norm_on_device, sharded_norm, unscaled_norm
from lossscale_torch._ranks import groups_over, meshes_of
from lossscale_torch._state import LossScale


class Clipping(NamedTuple):
    """The arguments of `torch.nn.utils.clip_grad_norm_`."""

    max_norm: float
    """The largest norm after clipping; with infinity the norm is only measured."""
    norm_type: float = 2.0

    def apply_torchs(self, optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
        """Clip gradients that are unscaled already, as torch does; return their norm over all ranks."""
        params = [param for optimizer in optimizers for param in params_of(optimizer)]
        grads = [param.grad for param in params if param.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads, self.norm_type)
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        if self.max_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        return norm


MEASURING = Clipping(math.inf)


class Clipped(NamedTuple):
    """The outcome of clipping in one read."""

    norm: Tensor
    """The norm of the unscaled gradients before clipping, shape `()`."""
    value: float | None
    """The norm as a number, if it is known on the host."""
    found: dict[Any, Tensor]
    """1.0 if a gradient was not finite, so that all are unchanged, else 0.0; empty without gradients."""
    has_gradients: bool
    """Whether there were gradients on this rank."""
    known_to: Sequence[Any] = ()
    """The process groups with ranks that have computed the same norm."""


def clipping(max_norm: Any, norm_type: float) -> Clipping:
    """Return the arguments of clipping; raise `PolicyError` for a norm that gradients cannot be clipped to."""
    is_number = getattr(max_norm, "shape", None) == () or (isinstance(max_norm, Tensor) and max_norm.numel() == 1)
    value = max_norm.item() if is_number else max_norm
    if type(value) is not float or not value >= 0.0:
        value = check_setting("max_norm", value)
    return Clipping(float(value), float(norm_type))


@torch.no_grad()
def unscale_and_clip(
    optimizers: list[Any], scale: LossScale, how: Clipping, allow_half: bool, on_host: bool
) -> Clipped | None:
    """Unscale and clip with one read; return None and change nothing if one read is not enough.

    One read is not enough if the norm does not show whether the gradients are finite, or shows it only on the host and
    `on_host` is False.
    """
    gradients = Gradients(optimizers, allow_half)  # raises errors before a gradient is unscaled
    meshes = meshes_of(optimizers)
    if meshes:
        return _clip_shards(gradients, optimizers, meshes, scale, how, on_host)
    # The largest part of a complex number is not its magnitude.
    if how.norm_type != 2.0 and (how.norm_type != math.inf or gradients.are_complex):
        return None
    if on_host:
        norm, loss_scale = unscaled_norm(gradients, scale, how.norm_type)
        return _clip_on_host(gradients, how, norm, loss_scale, scale.tensor)
    if not can_stay_on_device(gradients.dtypes, scale.tensor.device):
        return None
    return _clip_on_device(gradients, how, norm_on_device(gradients, scale, how.norm_type), scale.tensor)


def _clip_shards(
    gradients: Gradients,
    optimizers: list[Any],
    meshes: list[Any],
    scale: LossScale,
    how: Clipping,
    on_host: bool,
) -> Clipped | None:
    """Do as `unscale_and_clip` does, by the norm over all ranks, with the same result on each rank."""
    params: list[Any] = [param for optimizer in optimizers for param in params_of(optimizer)]
    are_complex = any(param.is_complex() for param in params)
    device = scale.tensor.device
    can_stay = can_stay_on_device({param.dtype.to_real() for param in params}, device)
    if how.norm_type != 2.0 and (how.norm_type != math.inf or are_complex):
        return None
    if not has_float64(device) or not (on_host or can_stay):
        return None
    norm = sharded_norm(gradients, params, meshes, scale, how.norm_type, can_stay and device.type != "cpu")
    if on_host:
        value, loss_scale = torch.stack([norm, scale.tensor.double()]).tolist()
        clipped = _clip_on_host(gradients, how, value, loss_scale, scale.tensor)
    else:
        clipped = _clip_on_device(gradients, how, norm, scale.tensor)
    flag = (~torch.isfinite(norm)).float()  # also known on a rank without gradients
    known_to = [group for mesh in meshes for group in groups_over(mesh)]
    return clipped._replace(found={device: flag}, known_to=known_to)


def _clip_on_host(gradients: Gradients, how: Clipping, norm: float, loss_scale: float, scale: Tensor) -> Clipped:
    finite = math.isfinite(norm)
    if finite:
        factor = min(1.0, how.max_norm / (norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        gradients.multiply_(factor / loss_scale)
    found = {scale.device: torch.full_like(scale, float(not finite))} if gradients.buckets else {}
    is_double = any(bucket[0].dtype is torch.float64 for bucket in gradients.buckets)
    result = torch.full_like(scale, norm, dtype=torch.float64 if is_double else torch.float32)
    return Clipped(result, norm, found, bool(found))


def _clip_on_device(gradients: Gradients, how: Clipping, norm: Tensor, scale: Tensor) -> Clipped:
    finite = torch.isfinite(norm)
    factor = (how.max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients.multiply_(torch.where(finite, factor / scale, 1.0).float())
    found = {scale.device: (~finite).float()} if gradients.buckets else {}
    return Clipped(norm.float(), None, found, bool(found))

"""The norm of gradients and whether they are finite, from one read."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lossscale_torch._gradients import Bucket, Gradients, moved

_JOIN_BELOW = 4096  # elements; calling `torch.dot` for fewer takes about as long as copying them does
_LARGEST_ORDER = 7.0  # the largest float32 to this power still is a float64, however many are summed
_HAVE_FLOAT64 = ("cpu", "cuda")  # MPS and Intel Arc have none


class UnscaledNorm(NamedTuple):
    """The norm of some gradients divided by their loss scale, on the host."""

    value: float
    """Not finite if and only if some unscaled gradient element is not."""
    scale: float
    """The loss scale that the gradients are still multiplied by."""


@torch.no_grad()
def unscaled_norm(gradients: Gradients, scale: Tensor, norm_type: float) -> UnscaledNorm:
    """Return the norm of gradients divided by `scale`, a tensor of shape `()`. Synchronises with the host once.

    Each gradient is read once; twice where a sum of powers overflows without an infinity among the gradients, and below
    a scale of 1, where a finite gradient may become infinite by being unscaled.
    """
    some = _without_empty(gradients.buckets)
    if not some:
        return UnscaledNorm(0.0, scale.item())
    norms, loss_scale = _read([_bucket_norm(bucket, norm_type) for bucket in some], scale)
    norm = _combined(norms, norm_type)
    if not math.isfinite(norm) and not math.isinf(norm_type):
        norm = _norm_of_large(some, norm_type)  # their squares may have overflowed, and they themselves not
    if loss_scale < 1.0 and any(_largest(b) / loss_scale > torch.finfo(b[0].dtype).max for b in some):
        norm = math.inf
    return UnscaledNorm(norm / loss_scale, loss_scale)


def has_float64(device: torch.device) -> bool:
    """Return whether a device can compute in float64."""
    return device.type in _HAVE_FLOAT64


def can_stay_on_device(dtypes: set[torch.dtype], norm_type: float, device: torch.device) -> bool:
    """Return whether `norm_on_device` tells of every overflow, and of nothing else: float64 must exist and have room.

    `dtypes` are those of the gradients.
    """
    if not has_float64(device) or torch.float64 in dtypes:
        return False
    return math.isinf(norm_type) or norm_type <= _LARGEST_ORDER


@torch.no_grad()
def norm_on_device(gradients: Gradients, scale: Tensor, norm_type: float, may_be_below_one: bool) -> Tensor:
    """Return the norm of gradients divided by `scale`: float64, shape `()`, on its device; waits for nothing.

    Each gradient is read once; twice where the scale may be below 1, since a finite gradient may become infinite there
    by being unscaled.
    """
    device = scale.device
    norms, overflows = [torch.zeros((), dtype=torch.float64, device=device)], torch.zeros_like(scale, dtype=torch.bool)
    for bucket in _without_empty(gradients.buckets):
        norms += [moved(each, device) for each in torch._foreach_norm(bucket, norm_type, dtype=torch.float64)]
        if may_be_below_one:
            largest = moved(torch.stack(torch._foreach_norm(bucket, math.inf)).amax(), device).double() / scale
            overflows = overflows | (largest > torch.finfo(bucket[0].dtype).max)
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) / scale
    return torch.where(overflows & torch.isfinite(norm), math.inf, norm)


def _without_empty(buckets: list[Bucket]) -> list[Bucket]:
    return [some for bucket in buckets if (some := [each for each in bucket if each.numel()])]


def _read(norms: list[Tensor], scale: Tensor) -> tuple[list[float], float]:
    """Return the norms and the scale as Python floats; one device waits once for all of them."""
    if all(norm.device == scale.device and norm.dtype is scale.dtype for norm in norms):
        *values, loss_scale = torch.stack([*norms, scale]).tolist()
        return values, loss_scale
    return [norm.item() for norm in norms], scale.item()


def _combined(norms: list[float], norm_type: float) -> float:
    """Return the norm of norms: NaN if one is NaN, else infinity if one is infinite."""
    if any(map(math.isnan, norms)):
        return math.nan
    largest = max(norms)
    if math.isinf(norm_type) or largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1.0 / norm_type)


def _norm_of_large(buckets: list[Bucket], norm_type: float) -> float:
    """Return the norm of gradients whose powers overflow: that of the gradients divided by the largest."""
    largest = _combined([_largest(bucket) for bucket in buckets], math.inf)
    if not math.isfinite(largest):
        return largest
    small = [[(each if each.dtype.itemsize > 2 else each.float()) / largest for each in bucket] for bucket in buckets]
    return largest * _combined([_bucket_norm(bucket, norm_type).item() for bucket in small], norm_type)


def _largest(bucket: Bucket) -> float:
    return _bucket_norm(bucket, math.inf).item()


def _bucket_norm(bucket: Bucket, norm_type: float) -> Tensor:
    if norm_type == 2.0 and bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
        return _norm_by_dots(bucket)
    dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None  # a half norm is infinite from 65520 on
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, norm_type, dtype=dtype)), norm_type)


def _norm_by_dots(bucket: Bucket) -> Tensor:
    """Return the 2-norm by dot products, which read at memory speed on a CPU; small tensors are joined for one."""
    flat = [each.view(-1) if each.is_contiguous() else each.reshape(-1) for each in bucket]
    joined = [each for each in flat if each.numel() >= _JOIN_BELOW]
    small = [each for each in flat if each.numel() < _JOIN_BELOW]
    if small:
        joined.append(torch.cat(small))
    return torch.stack([torch.dot(each, each) for each in joined]).sum().sqrt()

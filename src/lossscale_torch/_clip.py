"""Norm and finiteness from one read of the gradients, and one multiply for unscaling and clipping."""

import math

import torch
from torch import Tensor

from lossscale_torch._grads import moved

_JOIN_BELOW = 4096
_LARGEST_ORDER = 7.0  # the largest float32 to this power still is a float64, however many are summed


@torch.no_grad()
def total_norm(buckets: list[list[Tensor]], norm_type: float) -> float:
    """Return the norm of all gradients together, not finite exactly where one of their elements is not.

    Each of `buckets` holds dense, real tensors of one device and dtype. A sum of powers may overflow without an
    infinity among the gradients: then it is taken again in float64, of gradients divided by the largest. Reads each
    gradient once. Synchronises with the host once.
    """
    buckets = _without_empty(buckets)
    if not buckets:
        return 0.0
    norm = _norm(buckets, norm_type)
    if math.isfinite(norm) or math.isinf(norm_type):
        return norm
    largest = _norm(buckets, math.inf)
    if not math.isfinite(largest):
        return largest
    return largest * _norm([[each.double() / largest for each in bucket] for bucket in buckets], norm_type)


def unscaled_norm(buckets: list[list[Tensor]], scale: float, norm_type: float) -> float:
    """Return the norm of the gradients divided by `scale`; infinite where one of them would be, in its own dtype.

    That is possible only below a scale of 1, and there costs a second read.
    """
    if scale < 1.0 and any(total_norm([b], math.inf) / scale > torch.finfo(b[0].dtype).max for b in buckets):
        return math.inf
    return total_norm(buckets, norm_type) / scale


def is_exact_on_device(grads: list[Tensor], norm_type: float) -> bool:
    """Return whether `norm_on_device` is finite exactly where every gradient is: float64 has the room, and is there."""
    has_room = math.isinf(norm_type) or norm_type <= _LARGEST_ORDER
    return has_room and all(grad.dtype is not torch.float64 and grad.device.type != "mps" for grad in grads)


@torch.no_grad()
def norm_on_device(buckets: list[list[Tensor]], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all gradients together as a float64 tensor of shape `()` on `device`; waits for nothing."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for bucket in _without_empty(buckets):
        norms += [moved(each, device) for each in torch._foreach_norm(bucket, norm_type, dtype=torch.float64)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


@torch.no_grad()
def multiply_(buckets: list[list[Tensor]], factor: float) -> None:
    """Multiply all gradients in place by one number."""
    for bucket in buckets:
        torch._foreach_mul_(bucket, factor)


def _without_empty(buckets: list[list[Tensor]]) -> list[list[Tensor]]:
    return [some for bucket in buckets if (some := [each for each in bucket if each.numel()])]


def _norm(buckets: list[list[Tensor]], norm_type: float) -> float:
    norms = [_bucket_norm(bucket, norm_type).to(buckets[0][0].device, torch.float64) for bucket in buckets]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type))


def _bucket_norm(bucket: list[Tensor], norm_type: float) -> Tensor:
    if norm_type == 2.0 and bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
        return _norm_by_dots(bucket)
    dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, norm_type, dtype=dtype)), norm_type)


def _norm_by_dots(bucket: list[Tensor]) -> Tensor:
    """Return the 2-norm by dot products, which read at memory speed on a CPU; small tensors are joined for one."""
    flat = [each.view(-1) if each.is_contiguous() else each.reshape(-1) for each in bucket]
    joined = [each for each in flat if each.numel() >= _JOIN_BELOW]
    small = [each for each in flat if each.numel() < _JOIN_BELOW]
    if small:
        joined.append(torch.cat(small))
    return torch.stack([torch.dot(each, each) for each in joined]).sum().sqrt()

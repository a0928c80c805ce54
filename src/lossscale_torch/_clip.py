"""Norm and finiteness from one read of the gradients, and one multiply for unscaling and clipping."""

import math

import torch
from torch import Tensor

_JOIN_BELOW = 4096


def total_norm(buckets: list[list[Tensor]], norm_type: float) -> float:
    """Return the norm of all gradients together, not finite exactly where one of their elements is not.

    Each of `buckets` holds dense, real tensors of one device and dtype. A sum of squares may overflow without an
    infinity among the gradients: then it is taken again in float64. Reads each gradient once. Synchronises with the
    host once.
    """
    if not buckets:
        return 0.0
    norm = _norm(buckets, norm_type, in_float64=False)
    return norm if math.isfinite(norm) or math.isinf(norm_type) else _norm(buckets, norm_type, in_float64=True)


def unscaled_norm(buckets: list[list[Tensor]], scale: float, norm_type: float) -> float:
    """Return the norm of the gradients divided by `scale`; infinite where one of them would be, in its own dtype.

    That is possible only below a scale of 1, and there costs a second read.
    """
    if scale < 1.0 and any(_norm([b], math.inf, False) / scale > torch.finfo(b[0].dtype).max for b in buckets):
        return math.inf
    return total_norm(buckets, norm_type) / scale


def multiply_(buckets: list[list[Tensor]], factor: float) -> None:
    """Multiply all gradients in place by one number."""
    for bucket in buckets:
        torch._foreach_mul_(bucket, factor)


def _norm(buckets: list[list[Tensor]], norm_type: float, in_float64: bool) -> float:
    norms = [_bucket_norm(bucket, norm_type, in_float64).to(buckets[0][0].device, torch.float64) for bucket in buckets]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type))


def _bucket_norm(bucket: list[Tensor], norm_type: float, in_float64: bool) -> Tensor:
    if norm_type == 2.0 and not in_float64 and bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
        return _norm_by_dots(bucket)
    dtype = torch.float64 if in_float64 else torch.float32 if bucket[0].dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, norm_type, dtype=dtype)), norm_type)


def _norm_by_dots(bucket: list[Tensor]) -> Tensor:
    """Return the 2-norm by dot products, which read at memory speed on a CPU; small tensors are joined for one."""
    flat = [each.view(-1) if each.is_contiguous() else each.reshape(-1) for each in bucket]
    joined = [each for each in flat if each.numel() >= _JOIN_BELOW]
    small = [each for each in flat if each.numel() < _JOIN_BELOW]
    if small:
        joined.append(torch.cat(small))
    return torch.stack([torch.dot(each, each) for each in joined]).sum().sqrt()

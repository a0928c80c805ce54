"""Norm and finiteness from one read of the gradients, and one multiply for unscaling and clipping."""

import math

import torch
from torch import Tensor

from lossscale_torch import _grads

_JOIN_BELOW = 4096


def total_norm(grads: list[Tensor], norm_type: float) -> float:
    """Return the norm of all `grads` (real, dense) together, not finite exactly where one of their elements is not.

    A sum of squares may overflow without an infinity among the gradients: then it is taken again in float64. Reads each
    gradient once. Synchronises with the host once.
    """
    if not grads:
        return 0.0
    norm = _two_norm(grads) if norm_type == 2.0 else _norm(grads, norm_type, None)
    if math.isfinite(norm) or math.isinf(norm_type):
        return norm
    return _norm(grads, norm_type, torch.float64)


def multiply_(grads: list[Tensor], factor: float) -> None:
    """Multiply all `grads` in place by one number."""
    for bucket in _grads.buckets(grads):
        torch._foreach_mul_(bucket, factor)


def _two_norm(grads: list[Tensor]) -> float:
    if grads[0].dtype is not torch.float32 or grads[0].is_cuda or not _grads.are_one_bucket(grads):
        return _norm(grads, 2.0, torch.float32 if all(grad.dtype.itemsize < 4 for grad in grads) else None)
    flat = [grad.view(-1) if grad.is_contiguous() else grad.reshape(-1) for grad in grads]
    large = [each for each in flat if each.numel() >= _JOIN_BELOW]
    small = [each for each in flat if each.numel() < _JOIN_BELOW]
    squares = [torch.dot(each, each) for each in (large + [torch.cat(small)] if small else large)]
    return math.sqrt(float(torch.stack(squares).sum()))


def _norm(grads: list[Tensor], norm_type: float, dtype: torch.dtype | None) -> float:
    norms = []
    for bucket in _grads.buckets(grads):
        each = torch._foreach_norm(bucket, norm_type, dtype=dtype)
        norms.append(torch.linalg.vector_norm(torch.stack(each), norm_type).to(grads[0].device, torch.float64))
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type))

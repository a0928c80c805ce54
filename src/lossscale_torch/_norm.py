"""The norm of gradients, which shows in one read whether they are finite: on one rank, or on all of a mesh."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lossscale_torch._gradients import Bucket, Gradients, is_dtensor, moved
from lossscale_torch._ranks import groups_over
from lossscale_torch._state import LossScale
from lossscale_torch._versions import all_gather

_JOIN_BELOW = 4096  # elements; calling `torch.dot` for fewer takes about as long as copying them does
_SMALL = 2.0**-40  # below it, squares that float32 flushes to zero may be a part of the norm
_HAVE_FLOAT64 = ("cpu", "cuda")  # MPS and Intel Arc have none


def unscaled_norm(gradients: Gradients, scale: LossScale, norm_type: float) -> tuple[float, float]:
    """Return the norm of gradients divided by `scale`, and the scale as a number. Synchronises once.

    `norm_type` is 2 or infinity. The norm is not finite if and only if some unscaled gradient element is not. Each
    gradient is read once; twice where squares overflow or underflow.
    """
    some = _without_empty(gradients.buckets)
    norms, loss_scale = _read([_bucket_norm(bucket, norm_type) for bucket in some], scale)
    norm = norms[0] if len(norms) == 1 else _joined_on_host(norms, norm_type)
    if norm_type == 2.0 and not _SMALL <= norm < math.inf:  # NaN, too
        norm = _norm_by_largest(some)
    return norm / loss_scale, loss_scale


def can_stay_on_device(dtypes: set[torch.dtype], device: torch.device) -> bool:
    """Return whether `norm_on_device` detects every overflow: float64 must exist, and have room for the squares."""
    return has_float64(device) and torch.float64 not in dtypes


def has_float64(device: torch.device) -> bool:
    """Return whether a device can compute in float64."""
    return device.type in _HAVE_FLOAT64


def norm_on_device(gradients: Gradients, scale: LossScale, norm_type: float) -> Tensor:
    """Return the norm of gradients divided by `scale`: float64, shape `()`, on its device. Does not synchronise.

    Each gradient is read once.
    """
    device = scale.tensor.device
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for bucket in _without_empty(gradients.buckets):
        norms += [moved(each, device) for each in torch._foreach_norm(bucket, norm_type, dtype=torch.float64)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) / scale.tensor


def sharded_norm(
    gradients: Gradients,
    params: list[Any],
    meshes: list[Any],
    scale: LossScale,
    norm_type: float,
    stays_on_device: bool,
) -> Tensor:
    """Return the norm of all ranks' unscaled gradients: float64, shape `()`; not finite if one of them is not.

    `gradients` are those of `params` on this rank. Every rank of a mesh must call; each mesh costs one collective. Of
    a norm over smaller meshes, which the ranks of a larger one may know differently, the largest counts, so that all
    of them continue with the same. Unless `stays_on_device`, synchronises with the host.
    """
    total = torch.zeros((), dtype=torch.float64, device=scale.tensor.device)
    locals_ = _local_norms(gradients, params, meshes, scale, norm_type, stays_on_device)
    for norm, mesh in zip(locals_, meshes, strict=True):
        for group in groups_over(mesh):
            # Gathered and not reduced, so that every rank sums in one order and ends with the same bits.
            everyone = _gathered(torch.stack([norm, total]), group)
            norm, total = _joined(everyone[:, 0], norm_type), everyone[:, 1].amax()
        total = _joined(torch.stack([norm, total]), norm_type)
    return total


def _local_norms(
    gradients: Gradients,
    params: list[Any],
    meshes: list[Any],
    scale: LossScale,
    norm_type: float,
    stays_on_device: bool,
) -> list[Tensor]:
    """Return this rank's share of the norm on each mesh; ranks that hold the same part have equal shares."""
    norms: list[list[Tensor]] = [[] for _ in meshes]
    for (place, copies), part in _parts(gradients, params, meshes).items():
        if stays_on_device:
            norm = norm_on_device(part, scale, norm_type)
        else:
            value, _ = unscaled_norm(part, scale, norm_type)
            norm = torch.full((), value, dtype=torch.float64, device=scale.tensor.device)
        norms[place].append(norm * copies ** (-1.0 / norm_type))
    zero = torch.zeros((), dtype=torch.float64, device=scale.tensor.device)
    return [_joined(torch.stack(some), norm_type) if some else zero for some in norms]


def _parts(gradients: Gradients, params: Iterable[Any], meshes: list[Any]) -> dict[tuple[int, int], Gradients]:
    """Return the gradients by the place of their mesh in `meshes` and by how many ranks hold the same part."""
    by_key: dict[tuple[int, int], list[Any]] = {}
    places = {mesh: place for place, mesh in enumerate(meshes)}
    for param in params:
        if param.grad is not None:
            by_key.setdefault(_key(param, places), []).append(param)
    if len(by_key) == 1:
        return dict.fromkeys(by_key, gradients)
    return {key: Gradients.of_params(some) for key, some in by_key.items()}


def _key(param: Any, places: dict[Any, int]) -> tuple[int, int]:
    """Return the place of a parameter's mesh and its copies; one that is not sharded is on all ranks of the last."""
    if not is_dtensor(param) or param.device_mesh not in places:
        last = next(reversed(places))
        return places[last], last.size()
    mesh, copies = param.device_mesh, 1
    for dim, placement in enumerate(param.grad.placements):
        copies *= mesh.size(dim) if placement.is_replicate() else 1
    return places[mesh], copies


def _gathered(row: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks of a group."""
    everyone = row.new_empty(torch.distributed.get_world_size(group) * len(row))
    all_gather(everyone, row, group)
    return everyone.view(-1, len(row))


def _joined(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of norms; their squares neither overflow nor underflow."""
    largest = norms.amax()
    is_usual = (largest > 0.0) & torch.isfinite(largest)
    return torch.where(is_usual, largest * torch.linalg.vector_norm(norms / largest, norm_type), largest)


def _joined_on_host(norms: list[float], norm_type: float) -> float:
    """Return the norm of norms: NaN if one is NaN, else infinity if one is infinite."""
    if any(map(math.isnan, norms)):
        return math.nan
    return max(norms, default=0.0) if math.isinf(norm_type) else math.hypot(*norms)


def _norm_by_largest(buckets: list[Bucket]) -> float:
    """Return the 2-norm of gradients with squares that overflow or underflow; divide by the largest element first."""
    largest = _joined_on_host([_largest(bucket) for bucket in buckets], math.inf)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    small = [[(each if each.dtype.itemsize > 2 else each.float()) / largest for each in bucket] for bucket in buckets]
    return largest * _joined_on_host([_bucket_norm(bucket, 2.0).item() for bucket in small], 2.0)


def _largest(bucket: Bucket) -> float:
    return _bucket_norm(bucket, math.inf).item()


def _bucket_norm(bucket: Bucket, norm_type: float) -> Tensor:
    if norm_type == 2.0 and bucket[0].dtype is torch.float32 and bucket[0].is_cpu:
        return _norm_by_dots(bucket)
    dtype = torch.float32 if bucket[0].dtype.itemsize < 4 else None  # a half norm is infinite from 65520 on
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, norm_type, dtype=dtype)), norm_type)


def _norm_by_dots(bucket: Bucket) -> Tensor:
    """Return the 2-norm by dot products, which read at memory speed on a CPU; small tensors are joined for one."""
    flat, small = [], []
    for each in bucket:
        if each.numel() < _JOIN_BELOW:
            small.append(each)
        else:
            flat.append(each.reshape(-1))
    if small:
        flat.append(_flatten_dense_tensors(small))
    dots = [torch.dot(each, each) for each in flat]
    return (dots[0] if len(dots) == 1 else torch.stack(dots).sum()).sqrt()


def _read(norms: list[Tensor], scale: LossScale) -> tuple[list[float], float]:
    """Return the norms and the scale as Python floats; one device waits once for all of them."""
    if scale.value is not None and len(norms) <= 1:
        return [norm.item() for norm in norms], scale.value
    if all(norm.device == scale.tensor.device and norm.dtype is scale.tensor.dtype for norm in norms):
        *values, loss_scale = torch.stack([*norms, scale.tensor]).tolist()
        return values, loss_scale
    return [norm.item() for norm in norms], scale.tensor.item()


def _without_empty(buckets: list[Bucket]) -> list[Bucket]:
    if all(map(Tensor.numel, itertools.chain.from_iterable(buckets))):
        return buckets
    return [some for bucket in buckets if (some := [each for each in bucket if each.numel()])]

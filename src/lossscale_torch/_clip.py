"""Unscaling and clipping by the norm of all gradients together: one read and one multiplication where that suffices."""

import itertools
import math
from typing import Any, cast

import torch
from torch import Tensor

from lossscale_core.adapters import check_setting
from lossscale_torch._gradients import HAVE_FLOAT64, Gradients, is_dtensor, lifted, params_of
from lossscale_torch._optimizers import Fused, kind_of
from lossscale_torch._ranks import groups_of
from lossscale_torch._state import UNSCALED, combined, is_being_recorded

_SMALL = 2.0**-40  # below it, squares that float32 flushes to zero may be a part of the norm


def clip(scaler: Any, optimizers: list[Any], max_norm: Any, norm_type: float, is_guarded: bool = False) -> Tensor:
    """Unscale and clip; return the norm before clipping.

    For a guarded optimizer a norm is finite if the gradients are, and a fused one clips by its own kernel.
    """
    if not optimizers:
        raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
    max_norm, norm_type = _max_norm(max_norm), float(norm_type)
    if not scaler.is_enabled():
        return _clip_as_torch(optimizers, max_norm, norm_type)
    records = [*map(scaler._open, optimizers, ["unscale_and_clip_"] * len(optimizers))]
    is_open = ["was_applied" not in record for record in records]  # in an earlier try of this step
    if not any(is_open) and "norm" in records[0]:
        return cast(Tensor, records[0]["norm"])
    optimizers, records = [*itertools.compress(optimizers, is_open)], [*itertools.compress(records, is_open)]
    norm = None
    if scaler._unscales_as_torch():
        norm = _clip_in_one_read(scaler, optimizers, records, max_norm, norm_type, is_guarded)
    if norm is None:
        norm = _clip_in_two_passes(scaler, optimizers, records, max_norm, norm_type)
        for record in records:
            record["norm"] = norm
    return norm


@torch.no_grad()
def _clip_in_one_read(
    scaler: Any, optimizers: list[Any], records: Any, max_norm: float, order: float, is_guarded: bool
) -> Tensor | None:
    """Return None, and change nothing, where the norm does not show whether the gradients are finite."""
    gradients = Gradients(optimizers, scaler._half_gradients)  # raises errors before a gradient is unscaled
    groups = groups_of(optimizers)
    # The largest part of a complex number is not its magnitude.
    if order != 2.0 and (order != math.inf or gradients.are_complex):
        return None
    scale, device = scaler._scale, scaler._scale.device
    is_double = torch.float64 in [bucket[0].dtype for bucket in gradients.buckets]
    stays = (not scale.is_cpu or is_being_recorded()) and all(kind_of(each) is Fused for each in optimizers)
    if (groups and not _are_shards(optimizers, groups)) or ((stays or groups) and device.type not in HAVE_FLOAT64):
        return None
    if stays and is_double:
        return None  # no wider dtype has room for the squares
    is_wide = bool(stays or groups)
    scaled = gradients.wide_norm(order, device) if is_wide else gradients.norm(order, device)
    if groups:
        scaled = _norm_over(groups[0], scaled, order)
    factor: Tensor | float
    if stays:
        norm, flag, factor = _factor_on_device(scaled / scale, scale, max_norm)
    else:
        (value,) = scaler._read([], scaled)  # the one wait of a step
        loss_scale, is_exact = scaler._scale_on_host(), is_wide and not is_double
        if is_guarded and not is_wide and not _SMALL <= value < math.inf:
            is_exact = math.isnan(value)
            if not is_exact and device.type in HAVE_FLOAT64:
                (value,), is_exact = scaler._read([], gradients.wide_norm(order, device)), True
        is_finite = math.isfinite(value)
        if not (is_finite and value >= _SMALL) and not is_exact:
            return None
        value /= loss_scale
        norm, flag = torch.full_like(scale, value, dtype=scaled.dtype), torch.tensor(float(not is_finite))
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        factor = min(1.0, max_norm / (value + 1e-6)) / loss_scale if is_finite else 1.0
    is_left_to_kernel = is_guarded and kind_of(optimizers[0]) is Fused
    if is_left_to_kernel:
        records[0]["factor"] = torch.as_tensor(1.0 / factor, dtype=torch.float32)
    elif isinstance(factor, Tensor) or factor != 1.0:
        gradients.multiply_(factor)
    norm = norm if is_double else norm.float()
    for optimizer, record in zip(optimizers, records, strict=True):
        if groups or [param for param in params_of(optimizer) if param.grad is not None]:
            record["found_inf_per_device"] = {device: flag.clone()}
            record["stage"], record["known_to"] = UNSCALED, groups
            record.pop("given_up", None)
            record["norm"] = norm if stays else torch.tensor(value, dtype=norm.dtype)
    return norm


def _factor_on_device(norm: Tensor, scale: Tensor, max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, the flag and the factor of gradients whose norm, in float64, the host does not read."""
    finite = norm < math.inf  # false for NaN, too, and one kernel where `isfinite` takes four
    factor = torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale, 1.0)
    return norm, (~finite).float(), factor.float()


def _are_shards(optimizers: list[Any], groups: list[Any]) -> bool:
    """Return whether each parameter is a different shard on each rank of the one group."""
    return len(groups) == 1 and all(
        is_dtensor(param)
        and all(each.is_shard() or param.device_mesh.size(dim) == 1 for dim, each in enumerate(param.placements))
        for optimizer in optimizers
        for param in params_of(optimizer)
    )


def _norm_over(group: Any, norm: Tensor, order: float) -> Tensor:
    """Return the norm over the ranks of a group from that of each; all ranks get the same bits."""
    is_finite = torch.isfinite(norm)
    row = torch.stack([torch.where(is_finite, norm**2 if order == 2.0 else norm, 0.0), (~is_finite).to(norm.dtype)])
    operation = torch.distributed.ReduceOp.SUM if order == 2.0 else torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(row, op=operation, group=group)
    total, not_finite = row.unbind()
    return torch.where(not_finite == 0.0, total.sqrt() if order == 2.0 else total, math.nan)


def _clip_in_two_passes(scaler: Any, optimizers: list[Any], records: Any, max_norm: float, order: float) -> Tensor:
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = _clip_as_torch(optimizers, max_norm, order)
    if len(optimizers) > 1:  # one norm of all of them, and so one decision
        device = scaler._scale.device
        flag = combined((f for each in records for f in each["found_inf_per_device"].values()), device)
        for record in records:
            if record["found_inf_per_device"]:
                record["found_inf_per_device"] = {device: flag.clone()}
    return norm


def _clip_as_torch(optimizers: list[Any], max_norm: float, order: float) -> Tensor:
    """Clip gradients that are unscaled already, as torch does; return their norm over all ranks."""
    params = [param for each in optimizers for param in params_of(each)]
    grads = [param.grad for param in params if param.grad is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in grads]
    # An empty tensor has no infinity norm.
    grads = [each for each in values if each.numel()]
    norm: Any = torch.nn.utils.get_total_norm(grads, order)
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    if max_norm < math.inf:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return lifted(norm)


def _max_norm(value: Any) -> float:
    """Return the number to clip to; raise `PolicyError` for one that gradients cannot be clipped to."""
    is_number = getattr(value, "shape", None) == () or (isinstance(value, Tensor) and value.numel() == 1)
    value = value.item() if is_number else value
    return float(value if type(value) is float and value >= 0.0 else check_setting("max_norm", value))

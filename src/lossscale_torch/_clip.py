"""Unscaling and clipping by the norm of all gradients together: one read and one multiplication where that suffices."""

import itertools
import math
from typing import Any, cast

import torch
from torch import Tensor

from lossscale_core.adapters import check_setting, shown
from lossscale_core.errors import PolicyError
from lossscale_torch._gradients import EXACT_UP_TO, Gradients, params_of
from lossscale_torch._optimizers import Fused, kind_of, require_optimizer
from lossscale_torch._state import UNSCALED, combined, is_being_recorded

_LARGEST = torch.finfo(torch.float32).max


def clip(scaler: Any, optimizers: list[Any], max_norm: Any, norm_type: float, is_guarded: bool = False) -> Tensor:
    """Unscale and clip; return the norm before clipping. A guarded optimizer, if fused, clips by its own kernel."""
    if not optimizers:
        raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
    max_norm, order = _max_norm(max_norm), float(norm_type)
    if not order > 0.0:
        raise PolicyError(f"norm_type={shown(norm_type)} must be above 0; pass 2.0, or math.inf for the largest")
    if not scaler.is_enabled():
        for optimizer in optimizers:
            require_optimizer(optimizer, "unscale_and_clip_")
        return _clip_unscaled(scaler, optimizers, max_norm, order)
    records = [*map(scaler._open, optimizers, ["unscale_and_clip_"] * len(optimizers))]
    is_open = ["was_applied" not in record for record in records]  # in an earlier try of this step
    if not any(is_open) and "norm" in records[0]:
        return cast(Tensor, records[0]["norm"])
    optimizers, records = [*itertools.compress(optimizers, is_open)], [*itertools.compress(records, is_open)]
    # Higher powers of gradients that are still scaled leave float64.
    if scaler._unscales_as_torch() and not EXACT_UP_TO < order < math.inf:
        return _clip_scaled(scaler, optimizers, records, max_norm, order, is_guarded)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm, device = _clip_unscaled(scaler, optimizers, max_norm, order), scaler._scale.device
    # One norm of all of them, and so one decision.
    flag = combined((f for each in records for f in each["found_inf_per_device"].values()), device)
    for record in records:
        record["norm"] = norm
        if record["found_inf_per_device"] and len(records) > 1:
            record["found_inf_per_device"] = {device: flag.clone()}
    return norm


@torch.no_grad()
def _clip_scaled(
    scaler: Any, optimizers: list[Any], records: Any, max_norm: float, order: float, is_guarded: bool
) -> Tensor:
    """Unscale and clip by one multiplication, after all that may raise an error."""
    gradients = Gradients(optimizers, scaler._half_gradients)
    scale, ranks = scaler._scale, scaler._ranks
    device, groups = scale.device, ranks.groups(optimizers, of_norm=True)
    is_on_device = (not scale.is_cpu or is_being_recorded()) and all(kind_of(each) is Fused for each in optimizers)
    read = None if is_on_device else lambda norm: scaler._read([], norm)[0]
    scaled, is_good = gradients.norm(order, scaler._one, groups, ranks.norm_group, read)  # the one wait of a step
    dtype = gradients.norm_dtype(device)
    factor: Tensor | float
    if is_on_device:
        value, flag = scaled / scale, torch.where(is_good, 0.0, scaler._one)
        factor = torch.where(is_good, _clip_factor(value, max_norm) / scale, 1.0)
        norm = value.to(dtype)
    else:
        if isinstance(scaled, Tensor):
            scaled, is_good = scaler._read([], scaled, is_good)
        loss_scale, flag = scaler._scale_on_host(), torch.tensor(float(not is_good))
        value = scaled / loss_scale
        factor = _clip_factor(value, max_norm) / loss_scale if is_good else 1.0
        norm = torch.full_like(scale, math.inf if value > _LARGEST and dtype is torch.float32 else value, dtype=dtype)
    if is_guarded and kind_of(optimizers[0]) is Fused:
        divisor = 1.0 / factor if is_on_device or factor else math.inf
        records[0]["factor"] = torch.as_tensor(divisor, dtype=torch.float32)
    elif isinstance(factor, Tensor) or factor != 1.0:
        gradients.multiply_(factor)
    for optimizer, record in zip(optimizers, records, strict=True):
        has_divided = any(param.grad is not None for param in params_of(optimizer))
        if groups or has_divided:
            record["has_divided"] = has_divided
            record["found_inf_per_device"] = {device: flag if record is records[0] else flag.clone()}
            record["stage"], record["known_to"] = UNSCALED, groups
            record.pop("given_up", None)
            record["norm"] = norm if is_on_device else torch.tensor(value, dtype=dtype)
    return norm


@torch.no_grad()
def _clip_unscaled(scaler: Any, optimizers: list[Any], max_norm: float, order: float) -> Tensor:
    """Clip gradients that are unscaled already; return their norm."""
    gradients, ranks = Gradients(optimizers), scaler._ranks
    device = next((param.device for each in optimizers for param in params_of(each)), torch.device("cpu"))
    groups, one = ranks.groups(optimizers, of_norm=True), torch.ones((), dtype=torch.float32, device=device)
    norm: Tensor = gradients.norm(order, one, groups, ranks.norm_group)[0]
    if max_norm < math.inf:
        gradients.multiply_(_clip_factor(norm, max_norm))
    return norm.to(gradients.norm_dtype(device))


def _clip_factor(norm: Any, max_norm: float) -> Any:
    """Return the factor, a number or a tensor, that clips gradients to `max_norm`; an infinite norm becomes 0."""
    if max_norm == math.inf:
        return 1.0
    factor = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
    return factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)


def _max_norm(value: Any) -> float:
    """Return the number to clip to; raise `PolicyError` for one that gradients cannot be clipped to."""
    is_number = getattr(value, "shape", None) == () or (isinstance(value, Tensor) and value.numel() == 1)
    value = value.item() if is_number else value
    return float(value if type(value) is float and value >= 0.0 else check_setting("max_norm", value))

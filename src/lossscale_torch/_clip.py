"""Unscale and clip gradients by their common norm, usually with one read and one multiplication."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale_core.adapters import check_setting, describe
from lossscale_core.errors import PolicyError
from lossscale_torch._gradients import MAX_EXACT_ORDER, Gradients, has_gradients, params_of
from lossscale_torch._record import FUSED, UNSCALED, OptimizerStep, combine, kind_of, require_optimizer
from lossscale_torch._state import is_capturing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lossscale_torch._scaler import GradScaler

_LARGEST = torch.finfo(torch.float32).max


def clip(
    scaler: "GradScaler", optimizers: Sequence[Optimizer], max_norm: Any, norm_type: float, is_guarded: bool = False
) -> Tensor:
    """Unscale and clip; return the norm before clipping. For a guarded fused optimizer, its kernel clips."""
    if not optimizers:
        raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
    limit, order = float(check_setting("max_norm", max_norm)), float(norm_type)
    if not order > 0.0:
        raise PolicyError(f"norm_type={describe(norm_type)} must be above 0; pass 2.0, or math.inf for the largest")
    if not scaler.is_enabled():
        for optimizer in optimizers:
            require_optimizer(optimizer, "unscale_and_clip_")
        return _clip_unscaled(scaler, optimizers, limit, order)
    steps, done_norm = [], None
    # An optimizer may be in the list twice.
    for optimizer in {id(optimizer): optimizer for optimizer in optimizers}.values():
        step = scaler._open(optimizer, "unscale_and_clip_")
        if not step.is_done:
            if len(scaler._steps) > 1:
                scaler._steps.claim_gradients(step, scaler.policy)
            steps.append(step)
        elif done_norm is None:
            done_norm = step.norm
    if not steps:
        return torch.zeros_like(scaler._scale) if done_norm is None else done_norm
    optimizers = [step.optimizer for step in steps]
    # Powers above 6 of gradients that are still scaled may exceed the range of float64.
    if scaler._has_original_unscale() and not MAX_EXACT_ORDER < order < math.inf:
        return _clip_scaled(scaler, steps, limit, order, is_guarded)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm, device = _clip_unscaled(scaler, optimizers, limit, order), scaler._scale.device
    # The optimizers have one norm, and so one decision.
    flag = combine((flag for step in steps for flag in step.flags.values()), device)
    for step in steps:
        step.norm = norm
        if step.flags and len(steps) > 1:
            step["found_inf_per_device"] = {device: flag.clone()}
    return norm


@torch.no_grad()
def _clip_scaled(
    scaler: "GradScaler", steps: Sequence[OptimizerStep], max_norm: float, order: float, is_guarded: bool
) -> Tensor:
    """Unscale and clip by one multiplication, which comes after everything that may raise an error."""
    optimizers = [step.optimizer for step in steps]
    gradients = Gradients(optimizers, scaler._half_gradients)
    state, ranks, groups = scaler._state, scaler._ranks, scaler._ranks.groups(optimizers, of_norm=True)
    scale, are_fused = state.scale, {*map(kind_of, optimizers)} == {FUSED}
    is_on_device = are_fused and (not scale.is_cpu or is_capturing())
    to_host = None if is_on_device else lambda norm: state.read([], norm)[0]  # the only wait of a step
    left_out, ranks.left_out = ranks.left_out, False
    scaled, is_finite = gradients.norm(order, state.unit, groups, ranks.norm_group, to_host, left_out)
    dtype = gradients.norm_dtype(scale.device)
    factor: float | Tensor
    if is_on_device:
        value, flag = scaled / scale, torch.where(is_finite, 0.0, state.unit)
        factor = torch.where(is_finite, _clip_factor(value, max_norm) / scale, 1.0)
        norm = norm_of_step = value.to(dtype)
    else:
        if isinstance(scaled, Tensor):
            scaled, is_finite = state.read([], scaled, is_finite)
        loss_scale, flag = cast(float, state.scale_on_host()), torch.tensor(float(not is_finite))
        value = scaled / loss_scale
        factor = _clip_factor(value, max_norm) / loss_scale if is_finite else 1.0
        norm_of_step = torch.tensor(value, dtype=dtype)
        norm = torch.full_like(scale, math.inf if value > _LARGEST and dtype is torch.float32 else value, dtype=dtype)
    if is_guarded and are_fused:
        divisor = 1.0 / factor if is_on_device or factor else math.inf
        steps[0].divisor = torch.as_tensor(divisor, dtype=torch.float32)
    elif isinstance(factor, Tensor) or factor != 1.0:
        gradients.multiply_(factor)
    for step in steps:
        has_divided = has_gradients(step.optimizer)
        if groups or has_divided:
            step["stage"], step["found_inf_per_device"] = UNSCALED, {scale.device: flag}
            step.combined_over, step.norm = groups, norm_of_step
            step.has_divided, step.has_dropped = has_divided, False
            flag = flag.clone() if len(steps) > 1 else flag  # other packages write to the flags of an optimizer
    return norm


@torch.no_grad()
def _clip_unscaled(scaler: "GradScaler", optimizers: Sequence[Optimizer], max_norm: float, order: float) -> Tensor:
    """Clip gradients that are unscaled already; return their norm."""
    gradients = Gradients(optimizers)
    params = (param for optimizer in optimizers for param in params_of(optimizer))
    device = next((param.device for param in params), torch.device("cpu"))
    groups, unit = scaler._ranks.groups(optimizers, of_norm=True), torch.ones((), dtype=torch.float32, device=device)
    norm, _ = gradients.norm(order, unit, groups, scaler._ranks.norm_group)
    if max_norm < math.inf:
        gradients.multiply_(_clip_factor(norm, max_norm))
    return norm.to(gradients.norm_dtype(device))


@torch.no_grad()
def total_norm(scaler: "GradScaler", optimizer: Optimizer, groups: "Sequence[ProcessGroup]") -> Tensor:
    """Return the 2-norm of unscaled gradients on all ranks: shape `()`, on the scale's device. Does not synchronise."""
    gradients, unit = Gradients([optimizer]), scaler._state.unit
    to_host = Tensor.item if unit.is_cpu and not is_capturing() else None
    norm, _ = gradients.norm(2.0, unit, groups, scaler._ranks.norm_group, to_host)
    return norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=gradients.norm_dtype(unit.device))


def _clip_factor(norm: float | Tensor, max_norm: float) -> float | Tensor:
    """Return the factor, a number or a tensor, that clips gradients to `max_norm`; it is 0 for an infinite norm."""
    if max_norm == math.inf:
        return 1.0
    factor = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
    return factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)

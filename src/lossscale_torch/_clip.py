"""Clipping by the norm of all gradients together, with the multiply that unscales them."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_core import LARGEST_SCALE
from lossscale_torch._decision import OptimizerRecord, found_inf, with_spike
from lossscale_torch._gradients import Gradients, is_dtensor, params_of
from lossscale_torch._meshes import meshes_of
from lossscale_torch._norm import can_stay_on_device, has_float64, norm_on_device, unscaled_norm
from lossscale_torch._optimizers import is_being_recorded, is_fused
from lossscale_torch._records import OptimizerRecords
from lossscale_torch._sharded_norm import Agreed, local_norms
from lossscale_torch._state import CapturedScale


class Clipping(NamedTuple):
    """The arguments of `torch.nn.utils.clip_grad_norm_`."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    @property
    def is_measuring(self) -> bool:
        """Whether the norm is wanted only, and the gradients stay as they are."""
        return math.isinf(self.max_norm)

    def needs_torchs(self, are_complex: bool) -> bool:
        """Return whether the norm proves nothing, or is that of complex numbers and not of their parts."""
        return not self.norm_type > 0.0 or (self.norm_type != 2.0 and are_complex)

    def apply_torchs(self, optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
        """Clip gradients that are unscaled already, as torch does; return their norm, on every rank the whole."""
        params = [param for optimizer in optimizers for param in params_of(optimizer)]
        grads = [param.grad for param in params if param.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads, self.norm_type, self.error_if_nonfinite)
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        if not self.is_measuring:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        return norm

    def raise_nonfinite(self) -> None:
        """Raise torch's error for a norm that is not finite."""
        raise RuntimeError(
            f"The total norm of order {self.norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


MEASURING = Clipping(math.inf, 2.0, error_if_nonfinite=False)
"""Measures the norm, and clips to none."""


class Clipped(NamedTuple):
    """The outcome of clipping."""

    norm: Tensor
    """The norm of the unscaled gradients before clipping, shape `()`."""
    found_inf: Tensor
    """float32, shape `()`: 1.0 where a gradient was not finite; then all of them are as they were."""
    value: float | None
    """The norm, where the host knows it."""
    grad_scale: Tensor | None
    """The factor by which a fused optimizer must still divide the gradients; None where they are clipped."""


def clipping(max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> Clipping:
    """Return how to clip; raise `ValueError` for a norm that cannot be clipped to."""
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm={max_norm!r} must be a number from 0; pass math.inf to measure without clipping")
    return Clipping(float(max_norm), float(norm_type), error_if_nonfinite)


def unscale_and_clip(
    records: OptimizerRecords, optimizers: list[Any], how: Clipping, allow_half: bool, is_deferred: bool
) -> Tensor | None:
    """Unscale and clip with one read, and note what was found; return the norm, or None where one read cannot do it.

    That is where it cannot both take the norm and tell whether the gradients are finite. With `is_deferred` a fused
    optimizer is left to multiply. Ranks that share a mesh come to the same answer, whatever gradients each of them has.
    """
    ours: list[OptimizerRecord] = [records.by_id[id(optimizer)] for optimizer in optimizers]
    gradients = Gradients.to_unscale(optimizers, allow_half)  # refuses before any of them is unscaled
    if any(record.captured is not ours[0].captured for record in ours):
        return None
    captured = records.losses.scale_of(ours[0])
    scale = captured.scale
    meshes = meshes_of(optimizers)
    if meshes and not has_float64(scale.device):
        return None
    params = [param for optimizer in optimizers for param in params_of(optimizer)] if meshes else []
    dtypes, are_complex = _kinds_of(params) if meshes else (gradients.dtypes, gradients.are_complex)
    # A guard judges anew at each replay of a graph, where the host reads nothing.
    is_replayed = records.guards.guard is not None and is_being_recorded()
    on_host = (scale.is_cpu and not is_replayed) or not all(map(is_fused, optimizers))
    can_wait = can_stay_on_device(dtypes, how.norm_type, scale.device)
    if how.needs_torchs(are_complex) or not (on_host or can_wait):
        return None
    agreed = None
    if meshes:
        is_fast_on_host = on_host and scale.is_cpu
        norms = local_norms(gradients, params, meshes, captured, how.norm_type, can_wait and not is_fast_on_host)
        agreed = records.agreed(optimizers, meshes, norms, how.norm_type)
    clipped = (_clip_on_host if on_host else _clip_on_device)(gradients, captured, how, is_deferred, agreed)
    spiked = records.guards.judge(optimizers[0], clipped.norm if clipped.value is None else clipped.value)
    _note(records, optimizers, clipped, spiked, has_none=not gradients.buckets, agreed=agreed)
    if how.error_if_nonfinite and bool(clipped.found_inf):
        how.raise_nonfinite()
    return clipped.norm


def _note(
    records: OptimizerRecords,
    optimizers: list[Any],
    clipped: Clipped,
    spiked: bool | Tensor,
    has_none: bool,
    agreed: Agreed | None,
) -> None:
    """Note for each optimizer what was found, and what is left to a fused one."""
    flag = clipped.found_inf if spiked is False else with_spike(clipped.found_inf, spiked)
    known = None if clipped.value is None or isinstance(spiked, Tensor) else math.isfinite(clipped.value) and not spiked
    for place, optimizer in enumerate(optimizers):
        record: OptimizerRecord = records.by_id[id(optimizer)]
        if agreed is None:
            found = {} if has_none else {flag.device: flag.clone()}
            records.note(optimizer, record, found, known, spiked is True)
        else:
            records.note_agreed(optimizer, record, agreed, place, flag, has_none, known, spiked is True)
        record.is_judged = True
        record.grad_scale = clipped.grad_scale


def _kinds_of(params: list[Tensor]) -> tuple[set[torch.dtype], bool]:
    """Return the dtypes of parameters, as those of `Gradients`, and whether some are complex."""
    dtypes = {param.dtype for param in params}
    return {each.to_real() for each in dtypes}, any(each.is_complex for each in dtypes)


def clip_after_unscaling(records: OptimizerRecords, optimizers: list[Any], how: Clipping) -> Tensor:
    """Clip gradients that are unscaled already in a second pass; an overflow in one optimizer is one in all of them."""
    ours: list[OptimizerRecord] = [records.by_id[id(optimizer)] for optimizer in optimizers]
    if len(ours) > 1:
        flag = found_inf(ours, records.device)
        for record in ours:
            record.note({flag.device: flag.clone()})
    norm = how.apply_torchs(optimizers)
    if records.guards.guard is not None:
        records.judge(optimizers, norm.full_tensor() if is_dtensor(norm) else norm)  # type: ignore[attr-defined]
    return norm


def _clip_on_host(
    gradients: Gradients, captured: CapturedScale, how: Clipping, is_deferred: bool, agreed: Agreed | None
) -> Clipped:
    """Unscale and clip in place, or leave the multiply to a fused optimizer. Synchronises with the host once."""
    scale = captured.scale
    norm, loss_scale = unscaled_norm(gradients, scale, how.norm_type) if agreed is None else agreed.read(scale)
    finite, grad_scale = math.isfinite(norm), None
    if finite:
        factor = min(1.0, how.max_norm / (norm + 1e-6))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        # The kernel multiplies by the reciprocal of the factor, which must be a normal number of float32.
        if is_deferred and factor * LARGEST_SCALE > loss_scale:
            grad_scale = torch.full((), loss_scale / factor, dtype=torch.float32, device=scale.device)
        else:
            gradients.multiply_(factor / loss_scale)
    dtype = torch.float64 if torch.float64 in gradients.dtypes else torch.float32
    found = torch.full((), float(not finite), dtype=torch.float32, device=scale.device)
    return Clipped(torch.tensor(norm, dtype=dtype, device=scale.device), found, norm, grad_scale)


def _clip_on_device(
    gradients: Gradients, captured: CapturedScale, how: Clipping, is_deferred: bool, agreed: Agreed | None
) -> Clipped:
    """Unscale and clip in place, or leave the multiply to a fused optimizer. Does not synchronise."""
    scale, below_one = captured.scale, captured.may_be_below_one
    norm = norm_on_device(gradients, scale, how.norm_type, below_one) if agreed is None else agreed.norm
    finite = torch.isfinite(norm)
    factor = (how.max_norm / (norm + 1e-6)).clamp(max=1.0)
    grad_scale = None
    if is_deferred:
        grad_scale = torch.where(finite, scale / factor, 1.0).float()  # infinite where clipped to nothing
    else:
        gradients.multiply_(torch.where(finite, factor / scale, 1.0).float())
    return Clipped(norm.float(), (~finite).float(), None, grad_scale)

"""Unscaling an optimizer's gradients and finding out whether they are finite: in place, or for a fused optimizer."""

from typing import Any

import torch

from lossscale_torch._decision import OptimizerRecord
from lossscale_torch._gradients import Gradients
from lossscale_torch._records import OptimizerRecords


def unscale(
    records: OptimizerRecords,
    optimizer: Any,
    record: OptimizerRecord,
    scaler: torch.amp.GradScaler,
    allow_half: bool,
    replaced: frozenset[str],
) -> None:
    """Divide the gradients of an optimizer by their loss scale, in place, and note whether they are finite.

    The scaler's `_unscale_grads_` does it, and returns a flag for each device. Gradients that were unscaled before an
    `update` that was another optimizer's are left as they are.
    """
    if record.is_carried:
        record.is_carried = False
        return
    captured = records.losses.scale_of(record)
    if captured.known_inverse is None:  # what is recorded must write its zero anew at each replay
        inverse, found_inf = captured.inverse(), torch.zeros_like(captured.scale)
    else:
        inverse, found_inf = captured.known_inverse, records.flags.take(captured.scale.device)
    if "_unscale_grads_" in replaced:  # a subclass may write to the factor, which other steps share, and keep the flag
        found = scaler._unscale_grads_(optimizer, inverse.clone(), found_inf, allow_half)
    else:
        found = scaler._unscale_grads_(optimizer, inverse, found_inf, allow_half)
        record.borrowed = found_inf
    if captured.may_be_below_one:  # there a finite gradient may overflow by being unscaled
        Gradients([optimizer]).check_again(found)
    records.note(optimizer, record, found)


def check_again(records: OptimizerRecords, optimizer: Any) -> dict[Any, Any]:
    """Check as `check` does, but leave the optimizer's stage; return the flags, which others may raise."""
    record = records.of(optimizer, "_check_inf_per_device")
    stage = record["stage"]
    check(records, optimizer, record)
    record["stage"] = stage
    records.are_flags_shared = True
    return record["found_inf_per_device"]


def check(records: OptimizerRecords, optimizer: Any, record: OptimizerRecord) -> None:
    """Note whether the gradients are finite, and will be when a fused optimizer unscales them; leave them alone."""
    captured = records.losses.scale_of(record)
    found = Gradients([optimizer]).found_inf(captured.inverse() if captured.may_be_below_one else None)
    records.note(optimizer, record, found)
    record.grad_scale = captured.scale.clone()  # an optimizer may write to it, and other steps share the original

"""What a scaler notes about each optimizer between two updates."""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from lossscale_torch._grads import moved

READY, UNSCALED, STEPPED = OptState  # an enum's members are slow to reach by name


class OptimizerRecord(dict[str, Any]):
    """What is known of one optimizer since the last update: torch's own keys, and what was decided."""

    finite: bool | None = None
    """Whether its gradients are finite on every rank, once the host knows."""
    grad_scale: Tensor | None = None
    """What a fused optimizer has left to divide its gradients by."""


def new_record() -> OptimizerRecord:
    """Return the record of an optimizer that nobody has touched since the last update."""
    return OptimizerRecord(stage=READY, found_inf_per_device={})


def known_on_host(record: OptimizerRecord) -> bool:
    """Return whether a record's gradients are finite; waits for the device the first time it is asked."""
    if record.finite is None:
        record.finite = True
        for flag in record["found_inf_per_device"].values():
            if flag.item() != 0.0:
                record.finite = False
    return record.finite


def all_finite(records: list[OptimizerRecord], scale: Any) -> bool | Tensor:
    """Return the records' flags combined: on the host where all are known there, else on the device of `scale`."""
    known = [record.finite for record in records]
    if None not in known:
        return False not in known
    flags = [moved(flag, scale.device) for record in records for flag in record["found_inf_per_device"].values()]
    return torch.stack(flags).amax() == 0.0

"""Calling the step of an optimizer that decides by itself whether to skip."""

import warnings
from typing import Any

from lossscale_torch._decision import OptimizerRecord, found_inf
from lossscale_torch._optimizers import call_fused_step
from lossscale_torch._records import OptimizerRecords

_LEGACY = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)


def step_fused(
    records: OptimizerRecords, optimizer: Any, record: OptimizerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step a fused optimizer, which skips by itself where the flag is raised."""
    record.flag = found_inf(records.deciding(record), records.device)
    return call_fused_step(optimizer, record.grad_scale, record.flag, args, kwargs)


def step_by_itself(
    scaler: Any, optimizer: Any, record: OptimizerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer of torch's older contract, which is handed the scaler and calls its methods."""
    warnings.warn(_LEGACY, FutureWarning, stacklevel=4)  # past this function and both of `step`
    record.flag = True
    return optimizer.step(*args, **kwargs, grad_scaler=scaler)

"""The step of a fused optimizer: its kernel divides the gradients by a factor, and skips the step if a flag is 1.0."""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lossscale_torch._gradients import to_device
from lossscale_torch._record import OptimizerStep, combine


def step_fused(optimizer: Any, step: OptimizerStep, scale: Tensor, args: Any, kwargs: Any) -> Any:
    """Step with the factor and the flag as attributes of the optimizer, as torch's own scaler does.

    A factor that the user has set before is multiplied in.
    """
    factor = scale if step["stage"] is OptState.READY else step.divisor  # that of a clip, if it left one
    # An interrupted step leaves its flag set, and perhaps a factor, which is then not the user's.
    is_left_over = getattr(optimizer, "found_inf", None) is not None
    preset = None if is_left_over else getattr(optimizer, "grad_scale", None)
    if preset is not None:
        factor = preset if factor is None else factor * preset
    flag = combine(step.flags.values(), scale.device)
    found: Any = torch.ne(flag, 0.0, out=torch.empty_like(flag, dtype=torch.float32))  # NaN is not 0.0, either
    found.is_left_over = True  # if it is there before the next step, which an interrupted one began
    known = len(getattr(optimizer, "state", ()))
    try:
        # Set first and deleted last: an interrupted step always leaves the flag. The kernel skips at 1.0 only.
        optimizer.found_inf, optimizer.grad_scale = found, factor
        result = optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
    if len(getattr(optimizer, "state", ())) > known:
        _zero_unwritten_momentum(optimizer, known, found)
    return result


def _zero_unwritten_momentum(optimizer: Optimizer, known: int, found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; does not wait for the flag.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would then use it uninitialised.
    """
    for state in [*optimizer.state.values()][known:]:
        momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
        if momentum is not None:
            momentum.copy_(torch.where(to_device(found_inf, momentum.device) == 0.0, momentum, 0.0))

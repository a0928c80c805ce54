"""What a scaler must know of an optimizer, of torch's or a stranger's with no more than `param_groups` and `step`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lossscale_torch._gradients import moved

_FUSED = "_step_supports_amp_scaling"


def is_fused(optimizer: Any) -> bool:
    """Return whether an optimizer takes the flag and the factor itself, on its device.

    A wrapper that only passes on what it is asked for does not count: the flag and the factor would be set on the
    wrapper, and the optimizer inside would never see them.
    """
    if _FUSED in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), _FUSED):
        return bool(getattr(optimizer, _FUSED))
    return False


@functools.cache
def takes_scaler(step: Callable[..., Any]) -> bool:
    """Return whether an optimizer's `step` is of torch's older contract, which hands it the scaler."""
    return "grad_scaler" in inspect.signature(step).parameters


def has_zero_rates(optimizer: Any) -> bool:
    """Return whether every learning rate is zero; one that lives on a device is not waited for."""
    for group in optimizer.param_groups:
        rate = group.get("lr", 1.0)
        if isinstance(rate, Tensor):
            rate = rate.detach().numpy().sum() if rate.is_cpu else 1.0
        if rate != 0.0:
            return False
    return True


def is_capturing() -> bool:
    """Return whether a CUDA graph is being recorded, in which nothing can be read on the host."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def zero_unwritten_momentum(new_states: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; without waiting to know.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would use it as it is from then on.
    """
    for state in new_states:
        momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
        if momentum is not None:
            momentum.copy_(torch.where(moved(found_inf, momentum.device) == 0.0, momentum, 0.0))

"""Questions to an optimizer, of torch's or of another package's with no more than `param_groups` and `step`."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from lossscale_torch._gradients import moved

_FUSED = "_step_supports_amp_scaling"
_HAS_CUDA = torch.backends.cuda.is_built()
_in_a_step: dict[int, Any] = {}  # fused optimizers that hold a factor and a flag of ours


def is_fused(optimizer: Any) -> bool:
    """Return whether an optimizer takes the flag and the factor itself, on its device.

    A wrapper that only passes on what it is asked for does not count: the flag and the factor would be set on the
    wrapper, and the optimizer inside would never see them.
    """
    if not getattr(optimizer, _FUSED, False):
        return False
    return _FUSED in getattr(optimizer, "__dict__", ()) or hasattr(type(optimizer), _FUSED)


def weak_reference(optimizer: Any) -> Callable[[], Any]:
    """Return a reference that does not keep an optimizer alive; a class with `__slots__` may have no room for one."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


@functools.cache
def takes_scaler(step: Callable[..., Any]) -> bool:
    """Return whether an optimizer's `step` is of torch's older contract, which hands it the scaler."""
    return "grad_scaler" in inspect.signature(step).parameters


def takes_factor(optimizer: Any) -> bool:
    """Return whether an optimizer's kernel divides its gradients by a factor that it is given."""
    return is_fused(optimizer) and not takes_scaler(type(optimizer).step)


def has_zero_rates(optimizer: Any) -> bool:
    """Return whether every learning rate is zero; one that lives on a device is not waited for."""
    for group in optimizer.param_groups:
        rate = group.get("lr", 1.0)
        if isinstance(rate, Tensor):
            rate = rate.detach().float().numpy().sum() if rate.is_cpu else 1.0
        if rate != 0.0:
            return False
    return True


def is_being_recorded() -> bool:
    """Return whether what runs now may run again without any Python: in a CUDA graph, or under a dispatch mode."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def call_fused_step(
    optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a fused optimizer's step with the factor to divide its gradients by, or None, and the flag.

    Both are attributes of the optimizer, as torch's own scaler sets them, and are gone again whatever interrupts the
    step. A factor that the user has set before is multiplied in.
    """
    preset = _take_preset(optimizer)
    if preset is not None:
        grad_scale = preset if grad_scale is None else grad_scale * preset
    known_states = len(optimizer.state)
    _in_a_step[id(optimizer)] = optimizer
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        # Nothing is called before these are gone: CPython handles Ctrl-C only when a call begins or ends.
        del optimizer.grad_scale, optimizer.found_inf
        _in_a_step.pop(id(optimizer), None)
    if len(optimizer.state) > known_states:
        _zero_unwritten_momentum(list(optimizer.state.values())[known_states:], found_inf)
    return result


def _take_preset(optimizer: Any) -> Any:
    """Return the factor that the user has set; what a step that was interrupted has left is removed instead."""
    if _in_a_step.pop(id(optimizer), None) is optimizer:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
    return getattr(optimizer, "grad_scale", None)


def _zero_unwritten_momentum(new_states: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; without waiting to know.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would use it as it is from then on.
    """
    for state in new_states:
        momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
        if momentum is not None:
            momentum.copy_(torch.where(moved(found_inf, momentum.device) == 0.0, momentum, 0.0))

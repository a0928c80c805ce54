"""How an optimizer is stepped: by the scaler or not at all, by its own kernel, or by itself with the scaler."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import warn_caller
from lossscale_torch._gradients import moved
from lossscale_torch._state import READY, combined

_FUSED = "_step_supports_amp_scaling"
_LEGACY = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)


class Plain:
    """An ordinary optimizer: the scaler calls its `step` or skips it."""

    check = "unscale_"
    """The scaler's method that checks unchecked gradients."""

    @staticmethod
    def take(scaler: Any, optimizer: Any, record: Any, args: Any, kwargs: Any) -> Any:
        """Step if no flag is set; waits for the device."""
        return scaler._maybe_opt_step(optimizer, record, *args, **kwargs)


class Fused:
    """A fused optimizer: its kernel divides by a factor, and skips the step itself if a flag is 1.0."""

    check = "_check_inf_per_device"

    @staticmethod
    def take(scaler: Any, optimizer: Any, record: Any, args: Any, kwargs: Any) -> Any:
        """Step with the factor and the flag as attributes of the optimizer, as torch's own scaler does.

        A factor that the user has set before is multiplied in.
        """
        scale = scaler._scale
        factor = scale if record["stage"] is READY else record.get("factor")  # that of a clip, if it left one
        # An interrupted step leaves its flag set, and perhaps a factor, which is then not the user's.
        is_own = getattr(optimizer, "found_inf", None) is not None
        preset = None if is_own else getattr(optimizer, "grad_scale", None)
        if preset is not None:
            factor = preset if factor is None else factor * preset
        flag = combined(record["found_inf_per_device"].values(), scale.device)
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
            _zero_unwritten_momentum([*optimizer.state.values()][known:], found)
        return result


class Legacy:
    """An optimizer of torch's older contract: `step` receives the scaler and calls its methods."""

    check = ""  # the optimizer checks

    @staticmethod
    def take(scaler: Any, optimizer: Any, record: Any, args: Any, kwargs: Any) -> Any:
        """Step with the scaler as an argument."""
        warn_caller(_LEGACY, FutureWarning)
        return optimizer.step(*args, **kwargs, grad_scaler=scaler)


def kind_of(optimizer: Any) -> type[Plain] | type[Fused] | type[Legacy]:
    """Return the class that steps an optimizer.

    A wrapper that only forwards attribute reads is not fused: the flag and the factor would be set on the wrapper, and
    the inner optimizer would not receive them.
    """
    if not getattr(optimizer, _FUSED, False):
        return Plain
    if _FUSED not in getattr(optimizer, "__dict__", ()) and not hasattr(type(optimizer), _FUSED):
        return Plain
    return Legacy if _takes_scaler(getattr(optimizer.step, "__func__", optimizer.step)) else Fused


def require_optimizer(optimizer: Any, caller: str) -> None:
    """Raise `TypeError` for what is not an optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{caller}() was given a {type(optimizer).__name__}, which has no param_groups; it takes an optimizer; "
            "pass the torch.optim.Optimizer of these parameters"
        )


@functools.lru_cache(maxsize=64)
def _takes_scaler(step: Any) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def _zero_unwritten_momentum(new_states: list[Any], found_inf: Tensor) -> None:
    """Zero the momentum that a parameter's first step, if skipped, has left uninitialised; does not wait for the flag.

    torch's fused SGD allocates its momentum before its kernel decides to skip, and would then use it uninitialised.
    """
    for state in new_states:
        momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
        if momentum is not None:
            momentum.copy_(torch.where(moved(found_inf, momentum.device) == 0.0, momentum, 0.0))

"""Saving and restoring a scaler's state, and comparing it between ranks."""

import math
import sys
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from lossscale_core import (
    BaseScaling,
    DynamicScaling,
    PolicyLike,
    ScalingPolicy,
    as_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE, shown, shown_number
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)

_TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_NEVER = 2**31 - 1
_FACTORS = ("scale", "growth_factor", "backoff_factor")
LIBRARY_KINDS = ("none", "fixed", "dynamic")
"""The kinds of policies that torch's scaler can continue from the factors and the interval alone."""
_TORCHS_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def plain_state(saved: Any) -> dict[str, Any]:
    """Return a saved state with plain numbers under torch's keys.

    Raises `CheckpointError` for what is not a dict or not a number, and torch's `RuntimeError` for an empty dict.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{shown(saved)} is not a saved state; pass a dict that state_dict() made")
    if len(saved) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    plain = {name: _item(saved[name]) for name in _TORCHS_KEYS if name in saved}
    for name, value in plain.items():
        # An array is not compared, since that may take any time.
        if not _is_number(value) or (isinstance(value, int) and not _is_finite(value)):
            rule = "a positive finite number" if name in _FACTORS else "a number"
            raise CheckpointError(
                f"{name}={shown(value)} of the saved state must be {rule}; restore an earlier checkpoint"
            )
    return {**saved, **plain}


def _item(value: Any) -> Any:
    """Return the number in an array of shape `()`, or any other value unchanged."""
    try:
        return value.item() if getattr(value, "shape", None) == () else value
    except RuntimeError:  # a tensor of the meta device has none
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return _is_number(value) and abs(value) <= sys.float_info.max


def saved_policy(saved: Mapping[str, Any], policy: ScalingPolicy) -> ScalingPolicy:
    """Return the policy of a checkpoint: the saved policy if it has one, else torch's rule with its settings."""
    if "policy" not in saved and "version" in saved:
        return policy
    try:
        if "policy" in saved:
            return policy_from_dict(saved["policy"])
        growth = _factor(saved, "growth_factor", 1.0 + 2.0**-23, 2.0**126)
        backoff = _factor(saved, "backoff_factor", 2.0**-126, 1.0 - 2.0**-24)
        return _torch_policy(2.0**16, growth, backoff, saved["growth_interval"], enabled=True)
    except PolicyError as error:
        raise CheckpointError(f"the saved policy is refused: {error}") from error


def _factor(saved: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """Return a saved factor, moved within bounds with a warning; no warning for 1, which torch's setters accept."""
    value = saved[name]
    if value == 1.0 and value is not True:
        return min(max(1.0, low), high)
    return _within(name, value, low, high, stacklevel=5)


def _within(name: str, value: Any, low: float, high: float, stacklevel: int = 4) -> float:
    """Return a saved number, moved within bounds with a warning; raise an error unless it is positive and finite."""
    if not (_is_number(value) and 0.0 < value < math.inf):
        raise CheckpointError(
            f"{name}={shown(value)} of the saved state must be a positive finite number; restore an earlier checkpoint"
        )
    within = float(min(max(value, low), high))
    if within != value:
        note = f"{name} of the saved state was {shown_number(value)} and becomes {shown_number(within)}"
        warnings.warn(note, CheckpointWarning, stacklevel=stacklevel)  # at the call of `load_state_dict`
    return within


def saved_state(saved: Mapping[str, Any], policy: ScalingPolicy) -> Any:
    """Return the state in a checkpoint, of ours, of torch's scaler or of another framework, as host scalars."""
    if "version" in saved:
        return state_from_dict(saved, policy)
    scale = _within("scale", saved["scale"], SMALLEST_SCALE, LARGEST_SCALE)
    fields = {"loss_scale": scale, "growth_tracker": saved["_growth_tracker"]}
    return state_from_dict({**state_to_dict(policy.init_state()), **fields}, policy)


def warn_if_resumed(optimizer: Any, state: Any, stacklevel: int = 3) -> None:
    """Warn if an optimizer continues and its scaler does not; called before the first step of a new scaler."""
    start = state.peek()
    scales = BaseScaling.of(state.policy).scales_losses  # otherwise nothing is lost
    if scales and start is not None and start.steps == 0 and _has_stepped(optimizer):
        scale = shown_number(float(start.loss_scale))
        warnings.warn(
            f"the optimizer has taken steps before, but its scaler starts over with a loss scale of {scale}; to "
            "continue from a checkpoint, save scaler.state_dict() in it and pass it to scaler.load_state_dict()",
            CheckpointWarning,
            stacklevel=stacklevel,  # past this function and `GradScaler.step`
        )


def _has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer's state shows a step; do not wait for a count on a device.

    The states differ: most optimizers have a count "step" for each parameter, MADGRAD has one count with another name
    for all parameters, and SGD with momentum has none.
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return False
    of_parameters = [each for each in state.values() if isinstance(each, Mapping)]
    counts = [each["step"] for each in of_parameters if each.get("step") is not None]
    counts += [value for name, value in state.items() if isinstance(name, str) and not isinstance(value, Mapping)]
    return any(map(_is_positive, counts)) if counts else any(of_parameters)


def _is_positive(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return not count.is_cpu or bool((count > 0).any())
    return isinstance(count, int | float) and count > 0


def policy_of(policy: PolicyLike | None, torchs: tuple[float, float, float, int], enabled: bool) -> ScalingPolicy:
    """Return the policy of a scaler from its `policy` argument, or from the four arguments of torch's scaler."""
    if policy is None:
        return _torch_policy(*torchs, enabled)
    if torchs != tuple(_TORCH_DEFAULTS.values()):
        given = zip(_TORCH_DEFAULTS.items(), torchs, strict=True)
        settings = ", ".join(f"{name}={shown(value)}" for (name, default), value in given if value != default)
        raise PolicyError(
            f"policy={shown(policy)} and {settings} are both given; pass either policy= or init_scale, "
            f"growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling({settings})"
        )
    return as_policy(policy)


def _torch_policy(
    init_scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any, enabled: bool
) -> ScalingPolicy:
    """Return torch's dynamic rule, with torch's assertions and messages; every positive scale is accepted."""
    if enabled and _is_real(growth_factor) and growth_factor <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if enabled and _is_real(backoff_factor) and backoff_factor >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    if not enabled:
        return DynamicScaling()
    if not (_is_real(init_scale) or isinstance(init_scale, str)):
        raise PolicyError(f"init_scale={shown(init_scale)} must be a number; pass 2.0**16, or a policy as policy=")
    if _is_real(init_scale) and init_scale > 0:
        init_scale = min(max(init_scale, SMALLEST_SCALE), LARGEST_SCALE)
    return DynamicScaling(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=reachable_interval(growth_interval),
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
    )


def _is_real(value: Any) -> bool:
    """Return whether a value is a number, including NumPy's; for other values the policy raises an error."""
    return isinstance(value, Real)


def reachable_interval(interval: float) -> int:
    """Return a growth interval for a policy: the largest int32 for an interval that torch's kernel never reaches.

    The kernel counts steps from 1 and compares with ==, so that it never reaches 0, a fraction or a huge number:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/AmpKernels.cu
    """
    if not _is_number(interval) or math.isnan(interval):
        return interval  # type: ignore[return-value]  # the policy raises the error
    return int(interval) if 1 <= interval < _NEVER and interval == int(interval) else _NEVER


def given_interval(interval: float, policy: ScalingPolicy) -> float | None:
    """Return the given growth interval if the policy cannot hold it, else None."""
    return None if BaseScaling.of(policy).growth_interval == interval else interval


def require_scale(new_scale: Any, device_type: Any) -> None:
    """Raise torch's error unless `new_scale` is a loss scale; the given value and the rule follow torch's sentence."""
    if isinstance(new_scale, torch.Tensor):
        is_of_device = new_scale.device.type == torch.device(device_type).type
        if is_of_device and new_scale.numel() == 1 and not new_scale.requires_grad:
            return
        needs = "with" if new_scale.requires_grad else "without"
        given = f"a tensor of shape {tuple(new_scale.shape)} on {new_scale.device} {needs} requires_grad"
    elif not isinstance(new_scale, bool) and isinstance(new_scale, int | float) and new_scale > 0:
        return
    else:
        given = repr(new_scale)
    raise AssertionError(
        f"{_NEW_SCALE} It is {given}; pass a positive number, or a tensor of one element on {device_type}."
    )

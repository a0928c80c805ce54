"""The policy that the constructor or a checkpoint asks for, and saved states: torch's five keys beside the core's."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from lossscale_core import (
    BaseScaling,
    DynamicScaling,
    ScalingPolicy,
    as_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE, shown, shown_names, shown_number
from lossscale_core.errors import CheckpointError, PolicyError
from lossscale_torch._state import is_being_recorded
from lossscale_torch._versions import warn

_TORCHS_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_NEVER = 2**31 - 1
_KINDS = ("none", "fixed", "dynamic")
"""The kinds of policies that torch's scaler can continue from the factors and the interval alone."""


def policy_of(policy: Any, torchs: dict[str, Any]) -> ScalingPolicy:
    """Return the policy of a scaler from its `policy` argument, or from the four arguments of torch's scaler."""
    if policy is None:
        return _torchs_rule(**torchs)
    if torchs != _DEFAULTS:
        settings = ", ".join(f"{name}={shown(value)}" for name, value in torchs.items() if value != _DEFAULTS[name])
        raise PolicyError(
            f"policy={shown(policy)} and {settings} are both given; pass either policy= or init_scale, "
            f"growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling({settings})"
        )
    return as_policy(policy)


def _torchs_rule(init_scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any) -> ScalingPolicy:
    """Return torch's dynamic rule; every positive finite scale is accepted."""
    if not isinstance(init_scale, (Real, str)):
        raise PolicyError(f"init_scale={shown(init_scale)} must be a number; pass 2.0**16, or a policy as policy=")
    given: Any = init_scale
    if not isinstance(given, str) and 0 < given < math.inf and not SMALLEST_SCALE <= given <= LARGEST_SCALE:
        given = SMALLEST_SCALE if given < 1 else LARGEST_SCALE
        note = f"init_scale={shown(init_scale)} is beyond the range of policies, and becomes {shown_number(given)}"
        warn(note)
    return DynamicScaling(
        init_scale=given,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=reachable_interval(growth_interval),
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
    )


def reachable_interval(interval: Any) -> Any:
    """Return a growth interval for a policy: the largest int32 for 0 and huge numbers, which torch never reaches.

    Its kernel counts steps from 1 and compares with ==:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/AmpKernels.cu
    """
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        return interval  # the policy raises the error
    if interval == 0 or interval >= _NEVER:
        return _NEVER
    return int(interval) if interval == interval // 1 else interval


def saved(policy: ScalingPolicy, state: Any) -> dict[str, Any]:
    """Return a state of host scalars as plain values: torch's five keys, and those of `state_to_dict`."""
    members, ours = BaseScaling.of(policy), state_to_dict(state, policy)
    if ours.get("policy", {}).get("kind") not in _KINDS:
        return ours  # torch's scaler would continue by another rule
    return {
        "scale": float(state.loss_scale),
        "growth_factor": members.growth_factor,
        "backoff_factor": members.backoff_factor,
        "growth_interval": members.growth_interval,
        "_growth_tracker": int(state.growth_tracker),
        **ours,
    }


def restored(given: Any, policy: ScalingPolicy, follows: bool) -> tuple[ScalingPolicy, Any]:
    """Return the policy and the state, host scalars, in a checkpoint of ours, of torch's or of another framework.

    Without a policy in the checkpoint, or unless the scaler `follows` it, the policy is the scaler's.
    """
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{shown(given)} is not a saved state; pass a dict that state_dict() made")
    if len(given) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    if "version" not in given:
        fields, rule = _from_torchs(given)
        given = {**state_to_dict(policy.init_state()), **fields, **({"policy": rule} if follows else {})}
    if follows and "policy" in given:
        try:
            policy = policy_from_dict(given["policy"])
        except PolicyError as error:
            raise CheckpointError(f"the saved policy is refused: {error}") from error
    return policy, state_from_dict(given, policy)


def _from_torchs(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a state, and of a policy, from a checkpoint of torch's scaler."""
    if missing := [name for name in _TORCHS_KEYS if name not in given]:
        raise _MissingKeyError(_not_torchs(given, missing))
    numbers = {name: _number(name, given[name]) for name in _TORCHS_KEYS}
    growth, backoff = numbers["growth_factor"], numbers["backoff_factor"]
    rule = {
        "kind": "dynamic",
        # torch's setters accept a factor of 1, by which a scale does not move.
        "growth_factor": growth if growth != 1.0 else 1.0 + 2.0**-23,
        "backoff_factor": backoff if backoff != 1.0 else 1.0 - 2.0**-24,
        "growth_interval": reachable_interval(numbers["growth_interval"]),
        "min_scale": SMALLEST_SCALE,
        "max_scale": LARGEST_SCALE,
    }
    return {"loss_scale": numbers["scale"], "growth_tracker": numbers["_growth_tracker"]}, rule


class _MissingKeyError(CheckpointError, KeyError):
    """The `KeyError` of torch's scaler for another dict, in a sentence."""

    __str__ = Exception.__str__  # that of `KeyError` is a repr


def _not_torchs(given: Mapping[Any, Any], missing: list[str]) -> str:
    """Return the sentence about a dict that no scaler has saved."""
    parts = [
        key for key, part in given.items() if isinstance(part, Mapping) and ("scale" in part or "loss_scale" in part)
    ]
    hint = "pass what scaler.state_dict() returned"
    if "cur_scale" in given or any(str(key).startswith("loss_scaler") for key in given):
        tool = "deepspeed" if "cur_scale" in given else "apex"
        hint = f"for one of {tool} pass state_to_dict(lossscale.state_from_tool({tool!r}, saved))"
    elif parts:
        hint = f"pass its part {shown(parts[0])}"
    elif "param_groups" in given:
        hint = f"this is the dict of an optimizer; {hint}"
    return (
        f"load_state_dict() was given a dict of {shown_names(given)}, which is not the saved state of a scaler; it "
        f"lacks {shown_names(missing)}; {hint}"
    )


def _number(name: str, value: Any) -> Any:
    """Return a saved number, also from an array of shape `()`; of the scale and the factors a positive finite one."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    is_positive = name in _TORCHS_KEYS[:3]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value > 0 if is_positive else value == value) and (value < math.inf or name == "growth_interval"):
        return value
    rule = "a positive finite number" if is_positive else "a number"
    raise CheckpointError(f"{name}={shown(value)} of the saved state must be {rule}; restore an earlier checkpoint")


def checked_scale(new_scale: Any, device_type: Any, policy: ScalingPolicy) -> float | torch.Tensor:
    """Return a loss scale to set: a number within the policy's bounds, or a tensor on a device.

    Raises torch's error for what is not one; the given value and the rule follow torch's sentence.
    """
    value = new_scale
    if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad:
        if not new_scale.is_cpu or is_being_recorded():
            if new_scale.device.type == torch.device(device_type).type:
                return new_scale
        elif torch.device(device_type).type == "cpu":
            value = new_scale.item()
    if not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
        members = BaseScaling.of(policy)
        within = min(max(float(value), members.min_scale), members.max_scale)
        if within != value:
            note = f"new_scale={shown(value)} is beyond the bounds of the policy, and becomes {shown_number(within)}"
            warn(note)
        return within
    given = repr(new_scale)
    if isinstance(new_scale, torch.Tensor) and value is new_scale:
        needs = "with" if new_scale.requires_grad else "without"
        given = f"a tensor of shape {tuple(new_scale.shape)} on {new_scale.device} {needs} requires_grad"
    raise AssertionError(
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
        f"requires_grad=False. It is {given}; pass a positive number, or a tensor of one element on {device_type}."
    )

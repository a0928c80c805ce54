"""The policy of a scaler from its arguments or a checkpoint; checkpoints with torch's five keys and the core's keys."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

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
from lossscale_core.adapters import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    TORCH_KEYS,
    describe,
    format_number,
    join_names,
    read_torch_keys,
    warn_caller,
)
from lossscale_core.errors import CheckpointError, PolicyError
from lossscale_torch._state import is_capturing

if TYPE_CHECKING:
    from lossscale_torch._scaler import GradScaler

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_NEVER = 2**31 - 1
_NEXT_TO_ONE = {"growth_factor": 1.0 + 2.0**-23, "backoff_factor": 1.0 - 2.0**-24}


def choose_policy(policy: PolicyLike | None, torch_args: dict[str, Any]) -> ScalingPolicy:
    """Return the policy of a scaler from its `policy` argument, or from the four arguments of torch's scaler."""
    if policy is not None and torch_args != DEFAULTS:
        changed = {name: value for name, value in torch_args.items() if value != DEFAULTS[name]}
        settings = ", ".join(f"{name}={describe(value)}" for name, value in changed.items())
        raise PolicyError(
            f"policy={describe(policy)} and {settings} are both given; pass either policy= or init_scale, "
            f"growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling({settings})"
        )
    if policy is not None:
        return as_policy(policy)
    scale: Any = torch_args["init_scale"]
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if is_number and 0 < scale < math.inf:  # torch's scaler accepts every positive scale
        scale = _clamp("init_scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
    elif not isinstance(scale, Real):  # a policy, or "dynamic", that was passed as the second argument
        raise PolicyError(
            f"init_scale={describe(scale)} must be a number such as 2.0**16; for a policy, pass policy=..."
        )
    return DynamicScaling(init_scale=scale, **_rule_settings(torch_args))


def _rule_settings(torch_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `DynamicScaling` that changes the scale as torch's scaler with these arguments does."""
    settings = {name: to_setting(name, torch_args[name]) for name in _SETTINGS}
    return {**settings, "min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}


def to_setting(name: str, value: Any) -> Any:
    """Return the setting of a policy for a setting of torch's scaler. Values that are not numbers come back unchanged.

    torch accepts a factor of 1, which keeps the scale constant; a policy does not, so the result is the float32 number
    next to 1. An interval of 0 becomes the largest interval: torch's kernel counts from 1 and compares with ==, so it
    never reaches 0. https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/AmpKernels.cu
    """
    value = value.item() if getattr(value, "shape", None) == () else value
    if name not in _SETTINGS or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name != "growth_interval":
        return _NEXT_TO_ONE[name] if value == 1.0 else value
    if value == 0 or value >= _NEVER:
        return _NEVER
    return int(value) if value == value // 1 else value


def policy_setting(name: str) -> property:
    """Return a property that reads and writes a setting of the scaler's policy under torch's name."""

    def read(scaler: "GradScaler") -> float:
        value: float = getattr(BaseScaling.of(scaler.policy), name)
        return value

    def write(scaler: "GradScaler", value: float) -> None:
        if "_policy" not in vars(scaler):  # torch's constructor sets it; the policy comes later and has the setting
            return
        if name not in BaseScaling.of(scaler.policy).settings():
            raise PolicyError(f"{scaler.policy!r} has no {name}; make the scaler with another policy")
        scaler.policy = dataclasses.replace(scaler.policy, **{name: to_setting(name, value)})  # type: ignore[type-var]  # it has settings

    return property(read, write)


def checkpoint_entries(policy: ScalingPolicy, state: Any) -> dict[str, Any]:
    """Return the entries of a checkpoint as plain values: torch's five keys and the keys of `state_to_dict`."""
    ours = state_to_dict(state, policy)
    if ours.get("policy", {}).get("kind") not in ("none", "fixed", "dynamic"):
        return ours  # torch's scaler has no such rule
    settings = {name: getattr(BaseScaling.of(policy), name) for name in _SETTINGS}
    return {"scale": float(state.loss_scale), **settings, "_growth_tracker": int(state.growth_tracker), **ours}


def read_checkpoint(entries: Any, policy: ScalingPolicy, follows: bool) -> tuple[ScalingPolicy, Any]:
    """Return the policy, and the state as host scalars, from a checkpoint of ours, of torch or of another framework.

    The result has `policy`, the scaler's own, unless the checkpoint has a policy and the scaler `follows` it.
    """
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"load_state_dict() was given {describe(entries)}; pass a dict that state_dict() made")
    if len(entries) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    if "version" not in entries:
        if missing := [name for name in TORCH_KEYS if name not in entries]:
            try:
                state_from_dict(entries)
            except CheckpointError as error:
                lacks = f"load_state_dict() was given a dict without {join_names(missing)}"
                raise _MissingKeyError(f"{lacks}: {error}") from None
        ours, rule = state_to_dict(policy.init_state(), policy), _rule_settings(entries)
        if follows:
            ours["policy"] = {"kind": "dynamic", **rule}
        elif ours.get("policy", {}).get("kind") == "dynamic":  # `state_from_dict` compares the settings that torch has
            ours["policy"] |= {name: rule[name] for name in _SETTINGS}
        entries = {**ours, "loss_scale": entries["scale"], "growth_tracker": entries["_growth_tracker"]}
    entries = read_torch_keys(entries)
    if isinstance(rule := entries.get("policy"), Mapping):
        entries = {**entries, "policy": {name: to_setting(name, value) for name, value in rule.items()}}
    if follows and "policy" in entries:
        try:
            policy = policy_from_dict(entries["policy"])
        except PolicyError as error:
            raise CheckpointError(f"the policy in the checkpoint is not valid: {error}") from error
    return policy, state_from_dict(entries, policy)


class _MissingKeyError(CheckpointError, KeyError):
    """The `KeyError` that torch's scaler raises for a missing key, with a message in sentences."""

    __str__ = Exception.__str__  # `KeyError.__str__` would quote the message


def check_new_scale(new_scale: Any, device_type: Any, policy: ScalingPolicy) -> float | torch.Tensor:
    """Return the loss scale for `update(new_scale)`: a number within the policy's bounds, or a tensor on a device.

    Raises the `AssertionError` of torch's scaler for other values; the message adds the value and the remedy.
    """
    value = new_scale
    is_scalar = isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad
    if is_scalar and new_scale.device.type == torch.device(device_type).type:
        if not new_scale.is_cpu or is_capturing():
            return new_scale
        value = new_scale.item()
    if not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
        members = BaseScaling.of(policy)
        return _clamp("new_scale", value, members.min_scale, members.max_scale)
    raise AssertionError(
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
        f"requires_grad=False. It is {describe(value)}; pass a positive number, or a tensor of one element on "
        f"{device_type}."
    )


def _clamp(name: str, value: Any, low: float, high: float) -> float:
    """Return the number within the bounds that is nearest to `value`; warn if it differs from `value`."""
    within = min(max(float(value), low), high)
    if within != value:
        warn_caller(f"{name}={describe(value)} is beyond the bounds of the policy, and becomes {format_number(within)}")
    return within

"""The policy that the constructor or a checkpoint asks for, and saved states: torch's five keys beside the core's."""

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


def policy_of(policy: PolicyLike | None, torchs: dict[str, Any]) -> ScalingPolicy:
    """Return the policy of a scaler from its `policy` argument, or from the four arguments of torch's scaler."""
    if policy is not None and torchs != DEFAULTS:
        settings = ", ".join(f"{name}={describe(value)}" for name, value in torchs.items() if value != DEFAULTS[name])
        raise PolicyError(
            f"policy={describe(policy)} and {settings} are both given; pass either policy= or init_scale, "
            f"growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling({settings})"
        )
    if policy is not None:
        return as_policy(policy)
    scale: Any = torchs["init_scale"]
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if is_number and 0 < scale < math.inf:  # torch's scaler takes every such scale
        scale = _bounded("init_scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
    elif not isinstance(scale, Real):  # "dynamic" or a policy is often passed in the place of the scale
        raise PolicyError(
            f"init_scale={describe(scale)} must be a number such as 2.0**16; for a policy, pass policy=..."
        )
    return DynamicScaling(init_scale=scale, **_torchs_rule(torchs))


def _torchs_rule(torchs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy that moves a scale as torch's scaler with these does."""
    settings = {name: as_setting(name, torchs[name]) for name in _SETTINGS}
    return {**settings, "min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}


def as_setting(name: str, value: Any) -> Any:
    """Return a setting of torch's scaler as that of a policy, which raises the error for what is not a number.

    torch's setters take a factor of 1, by which programs keep the scale where it is. Its kernel counts steps from 1 and
    compares with ==, so that it never reaches an interval of 0 or a huge one:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/AmpKernels.cu
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
    """Return torch's attribute of a setting, which the policy of the scaler owns."""

    def read(scaler: "GradScaler") -> float:
        value: float = getattr(BaseScaling.of(scaler.policy), name)
        return value

    def write(scaler: "GradScaler", value: float) -> None:
        if "_policy" not in vars(scaler):  # torch's constructor writes what the policy says
            return
        if name not in BaseScaling.of(scaler.policy).settings():
            raise PolicyError(f"{scaler.policy!r} has no {name}; make the scaler with another policy")
        scaler.policy = dataclasses.replace(scaler.policy, **{name: as_setting(name, value)})  # type: ignore[type-var]  # it has settings

    return property(read, write)


def saved(policy: ScalingPolicy, state: Any) -> dict[str, Any]:
    """Return a state of host scalars as plain values: torch's five keys, and those of `state_to_dict`."""
    ours = state_to_dict(state, policy)
    if ours.get("policy", {}).get("kind") not in ("none", "fixed", "dynamic"):
        return ours  # torch's scaler would continue by another rule
    settings = {name: getattr(BaseScaling.of(policy), name) for name in _SETTINGS}
    return {"scale": float(state.loss_scale), **settings, "_growth_tracker": int(state.growth_tracker), **ours}


def restored(given: Any, policy: ScalingPolicy, follows: bool) -> tuple[ScalingPolicy, Any]:
    """Return the policy and the state, host scalars, in a checkpoint of ours, of torch's or of another framework.

    Without a policy in the checkpoint, or unless the scaler `follows` it, the policy is the scaler's.
    """
    if not isinstance(given, Mapping):
        raise CheckpointError(f"load_state_dict() was given {describe(given)}; pass a dict that state_dict() made")
    if len(given) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    if "version" not in given:
        if missing := [name for name in TORCH_KEYS if name not in given]:
            try:
                state_from_dict(given)
            except CheckpointError as error:
                lacks = f"load_state_dict() was given a dict without {join_names(missing)}"
                raise _MissingKeyError(f"{lacks}: {error}") from None
        ours, rule = state_to_dict(policy.init_state(), policy), _torchs_rule(given)
        if follows:
            ours["policy"] = {"kind": "dynamic", **rule}
        elif ours.get("policy", {}).get("kind") == "dynamic":  # is compared as far as torch's scaler has the settings
            ours["policy"] |= {name: rule[name] for name in _SETTINGS}
        given = {**ours, "loss_scale": given["scale"], "growth_tracker": given["_growth_tracker"]}
    given = read_torch_keys(given)
    if isinstance(rule := given.get("policy"), Mapping):
        given = {**given, "policy": {name: as_setting(name, value) for name, value in rule.items()}}
    if follows and "policy" in given:
        try:
            policy = policy_from_dict(given["policy"])
        except PolicyError as error:
            raise CheckpointError(f"the saved policy is refused: {error}") from error
    return policy, state_from_dict(given, policy)


class _MissingKeyError(CheckpointError, KeyError):
    """The `KeyError` of torch's scaler for another dict, in a sentence."""

    __str__ = Exception.__str__  # that of `KeyError` is a repr


def checked_scale(new_scale: Any, device_type: Any, policy: ScalingPolicy) -> float | torch.Tensor:
    """Return a loss scale to set: a number within the policy's bounds, or a tensor on a device.

    Raises torch's error for what is not one; the given value and the rule follow torch's sentence.
    """
    value = new_scale
    is_one = isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad
    if is_one and new_scale.device.type == torch.device(device_type).type:
        if not new_scale.is_cpu or is_capturing():
            return new_scale
        value = new_scale.item()
    if not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
        members = BaseScaling.of(policy)
        return _bounded("new_scale", value, members.min_scale, members.max_scale)
    raise AssertionError(
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
        f"requires_grad=False. It is {describe(value)}; pass a positive number, or a tensor of one element on "
        f"{device_type}."
    )


def _bounded(name: str, value: Any, low: float, high: float) -> float:
    """Return a loss scale within bounds; warn if it was beyond them."""
    within = min(max(float(value), low), high)
    if within != value:
        warn_caller(f"{name}={describe(value)} is beyond the bounds of the policy, and becomes {format_number(within)}")
    return within

"""Saving and restoring a scaler's state, and comparing it between ranks."""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from lossscale_core import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    BaseScaling,
    DynamicScaling,
    PolicyLike,
    ScalingPolicy,
    as_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError
from lossscale_core.messages import shown, shown_number

_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)

_TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_NEVER = 2**31 - 1
_FACTORS = ("scale", "growth_factor", "backoff_factor")
LIBRARY_KINDS = ("none", "fixed", "dynamic", "tolerant")
"""The kinds of policies whose factors and interval say enough of their rule for torch's scaler to continue by it."""
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
        # An array may take any time to compare.
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


def torchs_part(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `saved`, or torch's five keys alone where they disagree with ours beside them, with a warning.

    Then they were loaded over a dict of ours, and the rest of it is what the scaler had before:
    `torch.distributed.checkpoint` does so with a checkpoint of torch's scaler, where its planner allows missing keys.
    """
    differing = [
        f"{name}={shown(theirs)} and {shown(ours)}"
        for name, theirs, ours in _values_given_twice(saved)
        if _is_finite(ours) and not (_is_finite(theirs) and math.isclose(theirs, ours, rel_tol=1e-6))
    ]
    if not differing:
        return saved
    warnings.warn(
        f"the saved state contradicts itself ({'; '.join(differing)}); "
        f"torch's keys ({', '.join(_TORCHS_KEYS)}) are taken, and the counters start over",
        CheckpointWarning,
        stacklevel=3,
    )
    return {key: saved[key] for key in _TORCHS_KEYS}


def _values_given_twice(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and the two values of what torch's keys and ours both say."""
    if "scale" not in saved:
        return
    config = saved["policy"] if isinstance(saved.get("policy"), Mapping) else {}
    said = [
        ("scale", saved["scale"], saved.get("loss_scale")),
        ("_growth_tracker", saved.get("_growth_tracker"), saved.get("growth_tracker")),
        *((name, saved.get(name), config.get(name)) for name in ("growth_factor", "backoff_factor")),
    ]
    if "growth_interval" in saved:
        said.append(("growth_interval", reachable_interval(saved["growth_interval"]), config.get("growth_interval")))
    yield from ((name, theirs, ours) for name, theirs, ours in said if theirs is not None and ours is not None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return _is_number(value) and abs(value) <= sys.float_info.max


def saved_policy(saved: Mapping[str, Any], policy: ScalingPolicy) -> ScalingPolicy:
    """Return the policy a checkpoint was saved with: ours where it names one, else torch's under its three settings."""
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
    """Return a saved factor, brought within bounds with a warning; without one for 1, which torch's setters take."""
    value = saved[name]
    if value == 1.0 and value is not True:
        return min(max(1.0, low), high)
    return _within(name, value, low, high, stacklevel=5)


def _within(name: str, value: Any, low: float, high: float, stacklevel: int = 4) -> float:
    """Return a saved number, brought within bounds with a warning; refuse what is not positive and finite."""
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
    """Warn where an optimizer continues and its scaler does not; called before the first step of a fresh scaler."""
    start = state.peek()
    scales = BaseScaling.of(state.policy).scales_losses  # else nothing is lost
    if scales and start is not None and start.steps == 0 and _has_stepped(optimizer):
        scale = shown_number(float(start.loss_scale))
        warnings.warn(
            f"the optimizer has taken steps before, but its scaler starts over with a loss scale of {scale}; to go on "
            "from a checkpoint, save scaler.state_dict() in it and pass it to scaler.load_state_dict()",
            CheckpointWarning,
            stacklevel=stacklevel,  # past this function and `GradScaler.step`
        )


def _has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer remembers a step; a count that lives on a device is not waited for.

    Optimizers differ in what they keep: most count under "step" for each parameter, MADGRAD under a name of its own for
    all of them, SGD with momentum counts nothing.
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return False
    memories = [memory for memory in state.values() if isinstance(memory, Mapping)]
    counts = [memory["step"] for memory in memories if memory.get("step") is not None]
    counts += [value for name, value in state.items() if isinstance(name, str) and not isinstance(value, Mapping)]
    return any(map(_is_positive, counts)) if counts else any(memories)


def _is_positive(count: Any) -> bool:
    if isinstance(count, torch.Tensor):
        return not count.is_cpu or bool((count > 0).any())
    return isinstance(count, int | float) and count > 0


def policy_of(policy: PolicyLike | None, torchs: tuple[float, float, float, int], enabled: bool) -> ScalingPolicy:
    """Return the policy of a scaler from its `policy` argument, or from the four arguments that are torch's."""
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
    """Return torch's dynamic rule; what torch asserts is asserted in its words, and every positive scale is taken."""
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
    """Return whether a value is a number, NumPy's included; the policy says what any other value must be."""
    return isinstance(value, Real)


def reachable_interval(interval: float) -> int:
    """Return a growth interval that a policy takes: what torch's kernel never reaches is the largest int32.

    The kernel counts steps from 1 and compares with ==, so that it never reaches 0, a fraction or a huge number:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/AmpKernels.cu
    """
    if not _is_number(interval) or math.isnan(interval):
        return interval  # type: ignore[return-value]  # the policy says what it must be
    return int(interval) if 1 <= interval < _NEVER and interval == int(interval) else _NEVER


def given_interval(interval: float, policy: ScalingPolicy) -> float | None:
    """Return a growth interval that the policy cannot hold as it was given, or None where it can."""
    return None if BaseScaling.of(policy).growth_interval == interval else interval


def require_scale(new_scale: Any, device_type: Any) -> None:
    """Raise torch's error for what is not a loss scale, with what was given and the rule after torch's sentence."""
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

"""Saving and restoring a scaler's state, and comparing it between ranks."""

import math
import warnings
from collections.abc import Iterator, Mapping
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
from lossscale_core.dialects import from_peer, number_within
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError, SyncError
from lossscale_torch._state import ScalerState

_TORCH_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)
_TORCHS_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def require_saved_state(saved: Any) -> None:
    """Raise `CheckpointError` for what is not a dict, and torch's `RuntimeError` for an empty one."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{saved!r} is not a saved state; pass a dict that state_dict() made")
    if len(saved) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )


def torchs_part(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `saved`, or torch's five keys alone where they disagree with ours beside them, with a warning.

    Then they were loaded over a dict of ours, and the rest of it is what the scaler had before:
    `torch.distributed.checkpoint` does so with a checkpoint of torch's scaler, where its planner allows missing keys.
    """
    differing = [
        f"{name}={theirs!r} and {ours!r}"
        for name, theirs, ours in _values_given_twice(saved)
        if theirs != ours and _is_number(ours) and not (_is_number(theirs) and math.isclose(theirs, ours, rel_tol=1e-6))
    ]
    if not differing:
        return saved
    warnings.warn(
        f"the saved state contradicts itself ({'; '.join(differing)}); "
        f"torch's keys ({', '.join(_TORCHS_KEYS)}) are taken, and the counters begin anew",
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
    yield from (each for each in said if None not in each)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def saved_policy(saved: Mapping[str, Any], policy: ScalingPolicy) -> ScalingPolicy:
    """Return the policy a checkpoint was saved with: ours where it names one, else torch's under its three settings."""
    if "policy" in saved:
        return policy_from_dict(saved["policy"])
    if "version" in saved:
        return policy
    growth = _factor(saved, "growth_factor", 1.0 + 2.0**-23, 2.0**126)
    backoff = _factor(saved, "backoff_factor", 2.0**-126, 1.0 - 2.0**-24)
    return _torch_policy(2.0**16, growth, backoff, saved["growth_interval"], enabled=True)


def _factor(saved: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """Return a saved factor, brought within bounds with a warning; without one for 1, which torch's setters take."""
    value = saved[name]
    return min(max(1.0, low), high) if value == 1.0 and value is not True else number_within(name, value, low, high)


def saved_state(saved: Mapping[str, Any], policy: ScalingPolicy) -> Any:
    """Return the state in a checkpoint, of ours, of torch's scaler or of another framework, as host scalars."""
    if "version" in saved:
        return state_from_dict(saved, policy)
    scale = number_within("scale", saved["scale"], SMALLEST_SCALE, LARGEST_SCALE)
    fields = {"loss_scale": scale, "growth_tracker": saved["_growth_tracker"]}
    return state_from_dict({**state_to_dict(policy.init_state()), **fields}, policy)


def require_same_on_ranks(mine: dict[str, Any], process_group: Any) -> None:
    """Raise `SyncError` naming the ranks whose state differs from rank 0's; every rank of the group must call."""
    distributed = torch.distributed
    theirs: list[Any] = [None] * distributed.get_world_size(process_group)
    distributed.all_gather_object(theirs, mine, group=process_group)
    different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
    if different:
        scales = ", ".join(f"rank {rank}: {theirs[rank]['loss_scale']:g}" for rank in [0, *different])
        raise SyncError(
            f"the scalers of ranks {different} differ from rank 0's (loss scales: {scales}); "
            "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
        )


def warn_if_resumed(optimizer: Any, state: ScalerState) -> None:
    """Warn where an optimizer goes on and its scaler does not; called before the first step of a fresh scaler."""
    if state.is_on_host and state.read().steps == 0 and _has_stepped(optimizer):
        warnings.warn(
            "the optimizer has taken steps before, but its scaler begins anew with a loss scale of "
            f"{state.read_loss_scale():g}; to go on from a checkpoint, save scaler.state_dict() in it and pass it to "
            "scaler.load_state_dict()",
            CheckpointWarning,
            stacklevel=5,  # past this function, `Steps.note_first_step` and both of `step`
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
    if torchs != _TORCH_DEFAULTS:
        raise PolicyError(
            "pass either policy= or init_scale, growth_factor, backoff_factor and growth_interval, not both"
        )
    return as_policy(policy)


def _torch_policy(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool
) -> ScalingPolicy:
    """Return torch's dynamic rule; what torch asserts is asserted in its words, and every positive scale is taken."""
    if enabled and growth_factor <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if enabled and backoff_factor >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    if not enabled:
        return DynamicScaling()
    config = {
        "init_scale": min(max(init_scale, SMALLEST_SCALE), LARGEST_SCALE) if init_scale > 0 else init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    return from_peer("torch", config, warn=False)


def reachable_interval(interval: float) -> int:
    """Return a growth interval that a policy takes: what torch's scaler never reaches is the largest int32."""
    return BaseScaling.of(from_peer("torch", {"growth_interval": interval}, warn=False)).growth_interval


def given_interval(interval: float, policy: ScalingPolicy) -> float | None:
    """Return a growth interval that the policy cannot hold as it was given, or None where it can."""
    return None if BaseScaling.of(policy).growth_interval == interval else interval

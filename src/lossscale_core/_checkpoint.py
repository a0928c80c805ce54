"""States as dicts of plain numbers, with the same keys in every framework, from which a run resumes exactly."""

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from lossscale_core._base import KINDS, BaseScaling, ScalingPolicy
from lossscale_core._config import PolicyLike, as_policy, policy_from_dict, policy_to_dict
from lossscale_core._guard import LARGEST_NORM, GuardState, SpikeGuard
from lossscale_core._messages import not_a_state, shown, shown_names, shown_number
from lossscale_core._policy import NoScaling
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import HostScalar, ScaleState
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

VERSION = 1
_HINT = "pass a dict that state_to_dict returned, or start a new state with init_state"
_TRACKERS = ("growth_tracker", "hysteresis_tracker")


def state_to_dict(
    state: ScaleState,
    policy: PolicyLike | None = None,
    *,
    guard: GuardState | None = None,
) -> dict[str, Any]:
    """Return `state` as a dict of plain numbers, which `json.dumps` takes.

    Synchronises with the host.

    Args:
        state: A state of any framework.
        policy: Anything that `as_policy` accepts. Its config is saved too, and compared when the state is restored; a
            policy without a `kind` has no config and is left out.
        guard: The state of a spike guard, of any framework.

    Returns:
        The format's `"version"`, a number for each field of the state, the config under `"policy"`, and a dict of the
        guard's fields under `"guard"`.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    saved: dict[str, Any] = {"version": VERSION}
    try:
        saved.update(_plain_numbers(state))
    except AttributeError as error:
        raise not_a_state(state, "state_to_dict(state, policy)") from error
    if policy is not None:
        policy = as_policy(policy)
        if (config := _config_of(policy)) is not None:
            saved["policy"] = config
    if guard is not None:
        saved["guard"] = _plain_numbers(guard)
    return saved


def state_from_dict(saved: Mapping[str, Any], policy: PolicyLike | None = None) -> ScaleState[HostScalar]:
    """Return the saved state as host scalars, which every framework's `asarray` accepts.

    Under the policy with which the state was saved, every field is restored unchanged. Under another policy a
    `CheckpointWarning` lists the differences, and the trackers start over if the kind of policy differs. A scale
    outside the bounds is moved to the nearest bound with a warning.

    Args:
        saved: A dict that `state_to_dict` returned; other keys are ignored.
        policy: The policy that continues the run, as anything that `as_policy` accepts. If it is left out, the keys of
            `saved` decide the type of the state.

    Returns:
        The policy's state: a `ScaleState`, or the type of state that the policy has in its place.

    Raises:
        CheckpointError: The version is newer than this release, a key is missing, the scale is not a positive finite
            number, or a count does not fit its field.
        PolicyError: `policy` is not a policy.
    """
    _require_version(saved)
    policy = None if policy is None else as_policy(policy)
    start: Any = _start_for(saved, policy)
    missing = [name for name in ScaleState._fields if name not in saved]
    if missing:
        raise CheckpointError(f"the saved state has no {', '.join(missing)}; {_HINT}")
    fields = {name: _restored(name, saved[name], first) for name, first in start._asdict().items() if name in saved}
    _require_consistent(fields, ("skipped_steps", "steps"), ("overflow_streak", "skipped_steps"))
    notes = [] if policy is None else _policy_differences(saved.get("policy"), policy)
    notes += _bring_within_bounds(fields, policy)
    notes += [] if policy is None else _adapt(fields, start, policy, saved.get("policy"))
    if notes:
        how = "the saved state is changed" if policy is None else "the state continues under another policy"
        # The warning points at the line that called this function.
        warnings.warn(f"{how}: {'; '.join(notes)}", CheckpointWarning, stacklevel=2)
    state: ScaleState[HostScalar] = start._replace(**fields)
    return state


def guard_state_from_dict(saved: Mapping[str, Any]) -> GuardState[HostScalar]:
    """Return the saved state of a spike guard as host scalars, which every framework's `asarray` accepts.

    Args:
        saved: A dict that `state_to_dict` returned. If it was saved without a guard, a `CheckpointWarning` says that
            the guard starts over.

    Returns:
        The guard's state, with every field unchanged.

    Raises:
        CheckpointError: A field is missing, or it is not a number from 0 that fits it.
    """
    _require_version(saved)
    start = SpikeGuard().init_state()
    numbers = saved.get("guard")
    if numbers is None:
        note = "the checkpoint has no state of a spike guard, so that the guard starts over with its warm-up"
        warnings.warn(note, CheckpointWarning, stacklevel=2)
        return start
    missing = [name for name in start._fields if not isinstance(numbers, Mapping) or name not in numbers]
    if missing:
        raise CheckpointError(f"the saved guard has no {', '.join(missing)}; {_HINT}")
    fields = {name: _restored(name, numbers[name], initial, LARGEST_NORM) for name, initial in start._asdict().items()}
    state: GuardState[HostScalar] = GuardState(**fields)
    if state.streak > state.spikes:
        raise CheckpointError(
            f"streak={state.streak:g} of the saved guard exceeds spikes={state.spikes}; restore an earlier checkpoint"
        )
    return state


def _bring_within_bounds(fields: dict[str, Any], policy: ScalingPolicy | None) -> list[str]:
    """Move the restored scale to the nearest bound of the policy, in place as a float32; return a note of a change."""
    saved = fields["loss_scale"]
    scale = np.float32(min(max(saved, SMALLEST_SCALE), LARGEST_SCALE))
    # The bounds are rounded as the scale of a state is, so that a scale at a bound is within it.
    low, high = (SMALLEST_SCALE, LARGEST_SCALE) if policy is None else BaseScaling.of(policy).bounds()
    fields["loss_scale"] = bounded = min(max(scale, np.float32(low)), np.float32(high))
    is_unchanged = bounded == scale and SMALLEST_SCALE <= saved <= LARGEST_SCALE
    return [] if is_unchanged else [f"loss_scale was {shown_number(saved)} and becomes {shown_number(float(bounded))}"]


def _adapt(fields: dict[str, Any], start: Any, policy: ScalingPolicy, saved_policy: Any) -> list[str]:
    """Adapt the restored fields to `policy`, in place; return a note for each change."""
    notes = []
    kind = (_config_of(policy) or {}).get("kind")
    saved_kind = saved_policy.get("kind") if isinstance(saved_policy, Mapping) else kind
    # An array from a file is not compared, since it may have any number of elements.
    is_other_kind = saved_kind != kind if isinstance(saved_kind, str | None) else True
    for name in start._fields:
        is_foreign = name in _TRACKERS and is_other_kind
        if name not in fields or (is_foreign and fields[name] != getattr(start, name)):
            fields.pop(name, None)
            notes.append(f"{name} starts at {getattr(start, name)}")
    return notes


def _config_of(policy: ScalingPolicy) -> dict[str, Any] | None:
    try:
        return policy_to_dict(policy)
    except PolicyError:
        return None


def _plain_numbers(state: Any) -> dict[str, int | float]:
    return {name: _plain_number(value) for name, value in state._asdict().items()}


def _plain_number(value: Any) -> int | float:
    # The dtypes of the frameworks have no common interface, but the name of each one says what it is.
    return int(value) if "int" in str(getattr(value, "dtype", type(value))) else float(value)


def _require_version(saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{shown(saved)} is not a saved state; {_HINT}")
    if not saved:
        raise CheckpointError(f"the saved state is empty; {_HINT}")
    if "version" not in saved:
        raise CheckpointError(
            f"the saved state has no version, but {shown_names(saved)}; pass a dict that state_to_dict returned, or, "
            "if another tool such as torch saved it, lossscale.state_from_tool('torch', saved)"
        )
    version = _item(saved.get("version"))
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"version={shown(version)} of the saved state must be a whole number from 1; {_HINT}")
    if version > VERSION:
        raise CheckpointError(
            f"version={shown(version)} of the saved state is newer than {VERSION}, the newest this release reads; "
            "run: pip install --upgrade lossscale"
        )


def _start_for(saved: Mapping[str, Any], policy: ScalingPolicy | None) -> Any:
    """Return the first state under `policy`; without a policy, of the state type with the most of the saved keys."""
    if policy is not None:
        start: Any = policy.init_state()
        return start
    # Without its policy, only the keys of a saved state show its type; a type with fewer fields would drop some keys.
    longest: type[BaseScaling] = NoScaling
    for policy_type in KINDS.values():
        fields = policy_type.state_type._fields
        if len(fields) > len(longest.state_type._fields) and all(name in saved for name in fields):
            longest = policy_type
    return longest().init_state()


def _item(value: Any) -> Any:
    """Return the number in an array of shape `()` of any framework, or any other value unchanged."""
    if getattr(value, "shape", None) != ():
        return value
    try:
        return value.item() if hasattr(value, "item") else np.asarray(value).item()
    except Exception:  # for example a tensor on torch's meta device, or one that was lost with its device
        return value


def _restored(name: str, value: Any, initial: Any, largest: float = LARGEST_SCALE) -> Any:
    """Return a saved value in the type of `initial`, or the scale as a float. Raises `CheckpointError`."""
    value, least = _item(value), 0.0
    if is_count := isinstance(initial, np.integer):
        # This tracker counts up from below zero while a cooldown lasts.
        least, largest = -(2.0**31) if name == "growth_tracker" else 0.0, LARGEST_COUNT
        rule = f"a whole number from {least:.0f} that fits int32"
    elif name == "loss_scale":
        least, largest, rule = math.ulp(0.0), sys.float_info.max, "a positive finite number"
    else:
        rule = "a number from 0 that fits float32"
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    # The range comes first, since int() raises for NaN and infinity.
    if not (is_number and least <= value <= largest and (not is_count or value == int(value))):
        raise CheckpointError(f"{name}={shown(value)} of the saved state must be {rule}; restore an earlier checkpoint")
    return float(value) if name == "loss_scale" else type(initial)(value)


def _require_consistent(fields: dict[str, Any], *pairs: tuple[str, str]) -> None:
    """Require counters of one run: the first of each pair does not exceed the second."""
    for less, more in pairs:
        if fields[less] > fields[more]:
            raise CheckpointError(
                f"{less}={fields[less]} of the saved state exceeds {more}={fields[more]}; restore an earlier checkpoint"
            )


def _policy_differences(saved: Any, policy: ScalingPolicy) -> list[str]:
    if saved is None:
        return []
    try:
        before, now = policy_to_dict(policy_from_dict(saved)), policy_to_dict(policy)
    except PolicyError as error:
        return [f"the saved policy and the given one cannot be compared ({error})"]
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]

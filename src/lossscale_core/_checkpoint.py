"""A state as a dict of plain numbers: the same keys for every framework, and all that is needed to go on exactly."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from lossscale_core._config import as_policy, policy_from_dict, policy_to_dict
from lossscale_core._policy import KINDS, BaseScaling, NoScaling, ScalingPolicy
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import AnyScaleState, ScaleState
from lossscale_core._words import shown
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

VERSION = 1
_MEND = "pass a dict that state_to_dict made, or begin the loss scale anew with init_state"
_TRACKERS = ("growth_tracker", "hysteresis_tracker")


def state_to_dict(state: AnyScaleState, policy: Any = None) -> dict[str, Any]:
    """Return `state`, of any framework, as plain numbers under `"version"` and the names of its fields.

    With `policy` (anything `as_policy` takes) its config is saved too, under `"policy"`, and compared when the state is
    restored; a policy without a `kind` has no config and is left out. Synchronises with the host.
    """
    saved: dict[str, Any] = {"version": VERSION}
    saved.update({name: _plain_number(value) for name, value in state._asdict().items()})
    config = None if policy is None else _config_of(as_policy(policy))
    return saved if config is None else {**saved, "policy": config}


def state_from_dict(saved: Mapping[str, Any], policy: Any = None) -> Any:
    """Return the state in `saved` as host scalars, which `np.asarray` and every framework's `asarray` accept.

    Give the `policy` (anything `as_policy` takes) that will go on with it. Under the saved policy every field is
    restored as it was. Under another one a `CheckpointWarning` lists what differs, and the trackers of another kind of
    policy start fresh. A scale outside the policy's bounds, or those of every policy, is brought within them with a
    warning. Without `policy` the state's own keys decide. Other keys in `saved` are left alone. Raises
    `CheckpointError` for a newer version, a missing key, a scale that is not a positive finite number, or a count that
    no state can hold.
    """
    _require_version(saved)
    policy = None if policy is None else as_policy(policy)
    start = _start_for(saved, policy)
    missing = [name for name in ScaleState._fields if name not in saved]
    if missing:
        raise CheckpointError(f"the saved state has no {', '.join(missing)}; {_MEND}")
    fields = {name: _restored(name, saved[name], first) for name, first in start._asdict().items() if name in saved}
    _require_consistent(fields)
    notes = [] if policy is None else _policy_differences(saved.get("policy"), policy)
    notes += _bring_within_bounds(fields, policy)
    notes += [] if policy is None else _adapt(fields, start, policy, saved.get("policy"))
    if notes:
        how = "the saved state is changed" if policy is None else "the state goes on under another policy"
        warnings.warn(f"{how}: {'; '.join(notes)}", CheckpointWarning, stacklevel=2)
    return start._replace(**fields)


def number_within(name: str, value: Any, low: float, high: float, *, stacklevel: int = 2) -> float:
    """Return a saved number that is a factor or a scale, brought between `low` and `high`.

    For an adapter that reads another tool's checkpoint by itself. Where the number had to be changed, a
    `CheckpointWarning` says so under `name`. Raises `CheckpointError` for what is not a positive finite number: a bool
    or text is none, and an array of shape `()` is the number that it holds.
    """
    number = _positive(name, value)
    within = min(max(number, low), high)
    if within != number:
        notes = f"{name} of the saved state was {number:g} and becomes {within:g}"
        warnings.warn(notes, CheckpointWarning, stacklevel=stacklevel + 1)
    return within


def _bring_within_bounds(fields: dict[str, Any], policy: ScalingPolicy | None) -> list[str]:
    """Make the restored scale one that the policy has, in place, as a float32 number, and say so where it changed."""
    saved = fields["loss_scale"]
    scale = np.float32(min(max(saved, SMALLEST_SCALE), LARGEST_SCALE))
    low, high = (SMALLEST_SCALE, LARGEST_SCALE) if policy is None else BaseScaling.of(policy).bounds()
    fields["loss_scale"] = fitting = min(max(scale, np.float32(low)), np.float32(high))
    is_kept = fitting == scale and SMALLEST_SCALE <= saved <= LARGEST_SCALE
    return [] if is_kept else [f"loss_scale was {saved:g} and becomes {fitting:g}"]


def _adapt(fields: dict[str, Any], start: Any, policy: ScalingPolicy, saved_policy: Any) -> list[str]:
    """Make restored `fields` fit `policy`, in place, and say what was changed."""
    notes = []
    kind = (_config_of(policy) or {}).get("kind")
    is_other_kind = isinstance(saved_policy, Mapping) and saved_policy.get("kind") != kind
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


def _plain_number(value: Any) -> int | float:
    return int(value) if "int" in str(getattr(value, "dtype", type(value))) else float(value)


def _require_version(saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{shown(saved)} is no saved state; {_MEND}")
    version = _item(saved.get("version"))
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"version={shown(version)} is not that of a saved state; {_MEND}")
    if version > VERSION:
        raise CheckpointError(
            f"version={shown(version)} of the saved state is newer than {VERSION}, the newest this release reads; "
            "run: pip install --upgrade lossscale"
        )


def _start_for(saved: Mapping[str, Any], policy: ScalingPolicy | None) -> Any:
    if policy is not None:
        return policy.init_state()
    longest: type[BaseScaling] = NoScaling
    for policy_type in KINDS.values():
        fields = policy_type.state_type._fields
        if len(fields) > len(longest.state_type._fields) and all(name in saved for name in fields):
            longest = policy_type
    return longest().init_state()


def _item(value: Any) -> Any:
    """Return the number in an array of shape `()` of any framework, and anything else as it is."""
    if getattr(value, "shape", None) != ():
        return value
    return value.item() if hasattr(value, "item") else np.asarray(value).item()


def _positive(name: str, value: Any) -> float:
    """Return a saved scale or factor as a float, having checked that a run can go on with it."""
    number = _item(value)
    try:
        good = _is_number(number) and 0.0 < float(number) < math.inf
    except OverflowError:
        good = False
    if not good:
        raise CheckpointError(
            f"{name}={shown(number)} of the saved state must be a positive finite number, which is brought within the "
            "bounds of the policy and of every policy, 2**-126 and 2**126; restore an earlier checkpoint"
        )
    return float(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _restored(name: str, value: Any, initial: Any) -> Any:
    """Return `value` in the type of `initial`, having checked that a state can hold it; the scale as a float."""
    if name == "loss_scale":
        return _positive(name, value)
    value = _item(value)
    is_number = _is_number(value)
    least = -(2**31) if name == "growth_tracker" else 0
    if isinstance(initial, np.integer):
        good = is_number and least <= value < 2**31 and value == int(value)
        rule = f"a whole number from {least} that fits int32"
    else:
        good, rule = is_number and 0 <= value <= LARGEST_SCALE, "a number from 0"
    if not good:
        raise CheckpointError(f"{name}={shown(value)} of the saved state must be {rule}; restore an earlier checkpoint")
    return type(initial)(value)


def _require_consistent(fields: dict[str, Any]) -> None:
    """Require that counters can have come from one run: a streak is among the skips, and those are among the steps."""
    for less, more in (("skipped_steps", "steps"), ("overflow_streak", "skipped_steps")):
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

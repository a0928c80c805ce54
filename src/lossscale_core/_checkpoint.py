"""States as dicts of plain numbers with the same keys in every framework; a run resumes from them exactly."""

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lossscale_core._base import KINDS, BaseScaling, ScalingPolicy
from lossscale_core._config import PolicyLike, as_policy, policy_from_dict, policy_to_dict
from lossscale_core._guard import LARGEST_NORM, GuardState, SpikeGuard
from lossscale_core._messages import describe, format_number, join_names, warn_caller
from lossscale_core._policy import NoScaling
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE, Rule
from lossscale_core._state import HostScalar, ScaleState, read, require_one_state
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

VERSION = 1
_HINT = "pass a dict that state_to_dict returned, or start a new state with init_state"
_RESTORE_HINT = "restore an earlier checkpoint"
_TRACKERS = ("growth_tracker", "hysteresis_tracker")
_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = {"scale": "loss_scale", **{name: name for name in _SETTINGS}, "_growth_tracker": "growth_tracker"}
"""The keys of torch's scaler, in its order, and this library's names of the same numbers."""


def state_to_dict(
    state: ScaleState, policy: PolicyLike | None = None, *, guard: GuardState | None = None
) -> dict[str, Any]:
    """Return `state` as a dict of plain numbers, which `json.dumps` accepts.

    Synchronises with the host.

    Args:
        state: A state of any framework.
        policy: Anything that `as_policy` accepts. Its config is saved, too, and `state_from_dict` compares it. A policy
            without a `kind` has no config and is left out.
        guard: The state of a spike guard, of any framework.

    Returns:
        The format's `"version"`, a number for each field of the state, the config under `"policy"`, and a dict of the
        guard's fields under `"guard"`.

    Raises:
        PolicyError: `policy` is not a policy.
        TypeError: `state` is not a state, or holds several states along a leading axis.
    """
    require_one_state(state, "state_to_dict(state, policy)")
    entries: dict[str, Any] = {"version": VERSION, **_plain_numbers(state)}
    if policy is not None:
        policy = as_policy(policy)
        with contextlib.suppress(PolicyError):  # a policy without a kind has no config
            entries["policy"] = policy_to_dict(policy)
    if guard is not None:
        entries["guard"] = _plain_numbers(guard)
    return entries


def state_from_dict(saved: Mapping[str, Any], policy: PolicyLike | None = None) -> ScaleState[HostScalar]:
    """Return the saved state as host scalars, which every framework's `asarray` accepts.

    Under the policy with which the state was saved, all fields are restored unchanged. Under another policy a
    `CheckpointWarning` lists the differences, and the trackers start over if the kind of the policy differs. A scale
    outside the bounds becomes the nearest bound, with a warning.

    Args:
        saved: A dict that `state_to_dict` returned. If it also has the keys of torch's scaler, torch's numbers are
            used, and a `CheckpointWarning` shows the numbers that differ. Other keys are ignored.
        policy: The policy that continues the run: anything that `as_policy` accepts. If it is left out, the keys of
            `saved` decide the type of the state.

    Returns:
        The policy's state: a `ScaleState`, or the policy's own type of state.

    Raises:
        CheckpointError: The version is newer than this release, a key is missing, the scale is not a positive finite
            number, or a count does not fit its field.
        PolicyError: `policy` is not a policy.
    """
    _require_version(saved)
    saved = read_torch_keys(saved)
    policy = None if policy is None else as_policy(policy)
    start: Any = _start_for(saved) if policy is None else policy.init_state()
    fields = _read_fields(saved, start, ScaleState._fields, "state")
    notes: list[str] = []
    low, high = SMALLEST_SCALE, LARGEST_SCALE
    if policy is not None:
        low, high = BaseScaling.of(policy).bounds()
        notes, is_other_kind = _compare_policies(saved.get("policy"), policy)
        for name, first in start._asdict().items():
            if name not in fields or (is_other_kind and name in _TRACKERS and fields[name] != first):
                fields[name] = first
                notes.append(f"{name} starts at {first}")
    before = fields["loss_scale"]
    fields["loss_scale"] = scale = np.float32(min(max(before, low), high))
    with np.errstate(over="ignore"):
        is_changed = scale != np.float32(before)  # a bound may be between two numbers of float32
    if is_changed:
        notes.append(f"loss_scale was {format_number(before)} and becomes {format_number(float(scale))}")
    if notes:
        event = "the saved state is changed" if policy is None else "the state continues under another policy"
        warn_caller(f"{event}: {'; '.join(notes)}", CheckpointWarning)
    state: ScaleState[HostScalar] = start._replace(**fields)
    return state


def read_torch_keys(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with torch's numbers under this library's names, and without torch's keys.

    Programs for torch's scaler edit its keys. A `CheckpointWarning` shows the numbers that differ.

    Args:
        saved: A dict that `state_to_dict` or a scaler of torch returned. A dict without torch's keys is returned
            unchanged.

    Returns:
        A dict. If a number differs, the saved policy becomes a dynamic policy with torch's settings.
    """
    if not saved.keys() >= {"version", *TORCH_KEYS}:
        return saved
    policy = saved.get("policy")
    rule: Mapping[str, Any] = policy if isinstance(policy, Mapping) else saved  # without a policy, no setting differs
    own_numbers = {**saved, **{name: rule.get(name, getattr(BaseScaling, name)) for name in _SETTINGS}}
    numbers = {own: _item(saved[name]) for name, own in TORCH_KEYS.items()}
    notes = [
        f"{own}={describe(own_numbers.get(own))}, and torch's {name}={describe(numbers[own])}, which is used"
        for name, own in TORCH_KEYS.items()
        for pair in [(_item(own_numbers.get(own)), numbers[own])]
        if not all(isinstance(number, int | float) for number in pair) or pair[0] != pair[1]
    ]
    after = {name: value for name, value in saved.items() if name not in TORCH_KEYS}
    if notes:
        warn_caller(f"the saved state has {'; '.join(notes)}", CheckpointWarning)
        after |= {own: numbers[own] for own in ("loss_scale", "growth_tracker")}
        if isinstance(policy, Mapping):
            torch_rule = {"kind": "dynamic", "min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}
            settings = {name: numbers[name] for name in _SETTINGS}
            after["policy"] = {**(policy if policy.get("kind") == "dynamic" else torch_rule), **settings}
    return after


def guard_state_from_dict(saved: Mapping[str, Any]) -> GuardState[HostScalar]:
    """Return the saved state of a spike guard as host scalars, which every framework's `asarray` accepts.

    Args:
        saved: A dict that `state_to_dict` returned. If it has no state of a guard, a `CheckpointWarning` says that the
            guard starts over.

    Returns:
        The guard's state, with all fields unchanged.

    Raises:
        CheckpointError: A field is missing, or is not a number from 0 that fits its dtype.
    """
    _require_version(saved)
    start = SpikeGuard().init_state()
    if saved.get("guard") is not None:
        return start._replace(**_read_fields(saved["guard"], start, start._fields, "guard"))
    note = "the checkpoint has no state of a spike guard, so that the guard starts over with its warm-up"
    warn_caller(note, CheckpointWarning)
    return start


def _plain_numbers(state: Any) -> dict[str, int | float]:
    # The dtypes of the frameworks have no common interface, but every name of an integer dtype contains "int".
    counts = {name for name, value in state._asdict().items() if "int" in str(getattr(value, "dtype", type(value)))}
    return {name: int(read(value)) if name in counts else read(value) for name, value in state._asdict().items()}


def _require_version(saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{describe(saved)} is not a saved state; {_HINT}")
    if "version" not in saved:
        parts = [key for key, part in saved.items() if isinstance(part, Mapping) and "loss_scale" in part]
        part = f"its part {describe(parts[0])}" if parts else "a dict that state_to_dict returned"
        raise CheckpointError(
            f"the saved state has no version, but {join_names(saved) or 'nothing'}; pass {part}, or, if another tool "
            "such as torch saved it, lossscale.state_from_tool('torch', saved)"
        )
    version = _item(saved["version"])
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"version={describe(version)} of the saved state must be {VERSION}; {_HINT}; if a newer release saved it, "
            "upgrade lossscale"
        )


def _start_for(saved: Mapping[str, Any]) -> Any:
    """Return the first state of the kind of policy with the most fields, among the kinds with all fields saved."""
    kinds: list[Any] = [kind for kind in KINDS.values() if set(kind.state_type._fields) <= set(saved)]
    return max([NoScaling, *kinds], key=lambda kind: len(kind.state_type._fields))().init_state()


def _read_fields(saved: Any, start: Any, required: Sequence[str], what: str) -> dict[str, Any]:
    """Return the saved fields in the types of `start`, and the scale as a float. Raises `CheckpointError`."""
    missing = [name for name in required if not isinstance(saved, Mapping) or name not in saved]
    if missing:
        raise CheckpointError(f"the saved {what} has no {', '.join(missing)}; {_HINT}")
    fields: dict[str, Any] = {}
    for name, first in start._asdict().items():
        if name not in saved:
            continue
        # A growth tracker is negative during a cooldown. A field of a user's policy may be negative, too.
        value, is_from_0 = _item(saved[name]), name in required and name != "growth_tracker"
        least: float = 0 if is_from_0 else -(2**31) if isinstance(first, np.integer) else -LARGEST_NORM
        if name == "loss_scale":
            rule = Rule(float, "a positive finite number", _RESTORE_HINT, math.ulp(0.0), sys.float_info.max)
        elif isinstance(first, np.integer):
            rule = Rule(int, f"a whole number from {least} that fits int32", _RESTORE_HINT, least, LARGEST_COUNT)
        else:
            rule = Rule(float, f"a number{' from 0' * is_from_0} that fits float32", _RESTORE_HINT, least, LARGEST_NORM)
        if not rule.accepts(value):
            raise CheckpointError(f"{name}={describe(value)} of the saved {what} must be {rule.text}; {rule.hint}")
        fields[name] = float(value) if name == "loss_scale" else type(first)(value)
    return fields


def _item(value: Any) -> Any:
    """Return the number in an array of shape `()` of any framework, or any other value unchanged."""
    if getattr(value, "shape", None) != ():
        return value
    return value.item() if hasattr(value, "item") else np.asarray(value).item()


def _compare_policies(config: Any, policy: ScalingPolicy) -> tuple[list[str], bool]:
    """Return the differences between a saved config and a policy, and whether the kinds differ."""
    if config is None:
        return [], False
    now: dict[str, Any] = {}
    try:
        now = policy_to_dict(policy)
        before = policy_to_dict(policy_from_dict(config))
    except PolicyError as error:
        kind = config.get("kind") if isinstance(config, Mapping) else None  # a file may have any value there
        is_other_kind = not isinstance(kind, str) or kind != now.get("kind")
        return [f"the saved policy and the given one cannot be compared ({error})"], is_other_kind
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names], "kind" in names

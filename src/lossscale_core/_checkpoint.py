"""States as dicts of plain numbers, with the same keys in every framework, from which a run resumes exactly."""

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
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import HostScalar, ScaleState, read, require_one_state
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

VERSION = 1
_HINT = "pass a dict that state_to_dict returned, or start a new state with init_state"
_TRACKERS = ("growth_tracker", "hysteresis_tracker")
_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = {"scale": "loss_scale", **{name: name for name in _SETTINGS}, "_growth_tracker": "growth_tracker"}
"""The keys of torch's scaler, in its order, and our names of the same numbers."""


def state_to_dict(
    state: ScaleState, policy: PolicyLike | None = None, *, guard: GuardState | None = None
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
        TypeError: `state` is not a state, or several along a leading axis.
    """
    saved: dict[str, Any] = {"version": VERSION}
    require_one_state(state, "state_to_dict(state, policy)")
    saved.update(_plain_numbers(state))
    if policy is not None:
        policy = as_policy(policy)
        with contextlib.suppress(PolicyError):  # without a kind it has no config
            saved["policy"] = policy_to_dict(policy)
    if guard is not None:
        saved["guard"] = _plain_numbers(guard)
    return saved


def state_from_dict(saved: Mapping[str, Any], policy: PolicyLike | None = None) -> ScaleState[HostScalar]:
    """Return the saved state as host scalars, which every framework's `asarray` accepts.

    Under the policy with which the state was saved, every field is restored unchanged. Under another policy a
    `CheckpointWarning` lists the differences, and the trackers start over if the kind of policy differs. A scale
    outside the bounds is moved to the nearest bound with a warning.

    Args:
        saved: A dict that `state_to_dict` returned. If it also has torch's keys, as a scaler of torch saves them, these
            own the numbers that it has twice: where the two differ, a `CheckpointWarning` shows both. Other keys are
            ignored.
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
    saved = read_torch_keys(saved)
    policy = None if policy is None else as_policy(policy)
    start: Any = _start_for(saved) if policy is None else policy.init_state()
    fields = _restored(saved, start, ScaleState._fields, "state")
    notes: list[str] = []
    low, high = SMALLEST_SCALE, LARGEST_SCALE
    if policy is not None:
        low, high = BaseScaling.of(policy).bounds()
        notes, is_other_kind = _differences(saved.get("policy"), policy)
        for name, first in start._asdict().items():
            if name not in fields or (is_other_kind and name in _TRACKERS and fields[name] != first):
                fields[name] = first
                notes.append(f"{name} starts at {first}")
    before = fields["loss_scale"]  # compared after rounding, as a bound need not be a number of float32
    with np.errstate(over="ignore"):
        rounded = np.float32(before)
    fields["loss_scale"] = scale = np.float32(min(max(before, low), high))
    if scale != rounded:
        notes.append(f"loss_scale was {format_number(before)} and becomes {format_number(float(scale))}")
    if notes:
        how = "the saved state is changed" if policy is None else "the state continues under another policy"
        warn_caller(f"{how}: {'; '.join(notes)}", CheckpointWarning)
    state: ScaleState[HostScalar] = start._replace(**fields)
    return state


def read_torch_keys(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state without torch's keys, whose numbers replace those under our names.

    Programs for torch's scaler edit its keys. A `CheckpointWarning` shows both numbers where they differ.

    Args:
        saved: A dict that `state_to_dict` or a scaler of torch returned; without torch's keys it is returned itself.

    Returns:
        A dict. If a number differs, a policy that is not dynamic is replaced by torch's rule.
    """
    if not saved.keys() >= {"version", *TORCH_KEYS}:
        return saved
    policy = saved.get("policy")
    rule: Mapping[str, Any] = policy if isinstance(policy, Mapping) else saved  # without a policy nothing differs
    ours = {**saved, **{name: rule.get(name, getattr(BaseScaling, name)) for name in _SETTINGS}}
    used = {own: _item(saved[name]) for name, own in TORCH_KEYS.items()}
    notes = [
        f"{own}={describe(ours.get(own))}, and torch's {name}={describe(used[own])}, which is used"
        for name, own in TORCH_KEYS.items()
        for pair in [(_item(ours.get(own)), used[own])]
        if not all(isinstance(number, int | float) for number in pair) or pair[0] != pair[1]
    ]
    after = {name: value for name, value in saved.items() if name not in TORCH_KEYS}
    if notes:
        warn_caller(f"the saved state has {'; '.join(notes)}", CheckpointWarning)
        after |= {own: used[own] for own in ("loss_scale", "growth_tracker")}
        if isinstance(policy, Mapping):
            start = {"kind": "dynamic", "min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}
            settings = {name: used[name] for name in _SETTINGS}
            after["policy"] = {**(policy if policy.get("kind") == "dynamic" else start), **settings}
    return after


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
    if saved.get("guard") is not None:
        return start._replace(**_restored(saved["guard"], start, start._fields, "guard"))
    note = "the checkpoint has no state of a spike guard, so that the guard starts over with its warm-up"
    warn_caller(note, CheckpointWarning)
    return start


def _plain_numbers(state: Any) -> dict[str, int | float]:
    # The dtypes of the frameworks have no common interface, but the name of each one says what it is.
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
            "run: pip install --upgrade lossscale"
        )


def _start_for(saved: Mapping[str, Any]) -> Any:
    """Return the first state of the type that has the most of the saved keys; without a policy only these show it."""
    kinds: list[Any] = [kind for kind in KINDS.values() if set(kind.state_type._fields) <= set(saved)]
    return max([NoScaling, *kinds], key=lambda kind: len(kind.state_type._fields))().init_state()


def _restored(saved: Any, start: Any, required: Sequence[str], what: str) -> dict[str, Any]:
    """Return the saved fields in the types of those of `start`, and the scale as a float; raise `CheckpointError`."""
    missing = [name for name in required if not isinstance(saved, Mapping) or name not in saved]
    if missing:
        raise CheckpointError(f"the saved {what} has no {', '.join(missing)}; {_HINT}")
    fields: dict[str, Any] = {}
    for name, first in start._asdict().items():
        if name not in saved:
            continue
        value, is_count = _item(saved[name]), isinstance(first, np.integer)
        # A growth tracker counts up from below zero while a cooldown lasts, and a field of a user may be negative.
        is_from_0 = name in required and name != "growth_tracker"
        least, largest = 0.0 if is_from_0 else -LARGEST_NORM, LARGEST_NORM
        rule = f"a number{' from 0' * is_from_0} that fits float32"
        if is_count:
            least, largest = 0.0 if is_from_0 else -(2.0**31), LARGEST_COUNT
            rule = f"a whole number from {least:.0f} that fits int32"
        elif name == "loss_scale":
            least, largest, rule = math.ulp(0.0), sys.float_info.max, "a positive finite number"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # The range comes first, since int() raises for NaN and infinity.
        if not (is_number and least <= value <= largest and (not is_count or value == int(value))):
            hint = "restore an earlier checkpoint"
            raise CheckpointError(f"{name}={describe(value)} of the saved {what} must be {rule}; {hint}")
        fields[name] = float(value) if name == "loss_scale" else type(first)(value)
    return fields


def _item(value: Any) -> Any:
    """Return the number in an array of shape `()` of any framework, or any other value unchanged."""
    if getattr(value, "shape", None) != ():
        return value
    return value.item() if hasattr(value, "item") else np.asarray(value).item()


def _differences(saved: Any, policy: ScalingPolicy) -> tuple[list[str], bool]:
    """Return what differs between the saved policy and this one, and whether their kinds do."""
    if saved is None:
        return [], False
    now: dict[str, Any] = {}
    try:
        now = policy_to_dict(policy)
        before = policy_to_dict(policy_from_dict(saved))
    except PolicyError as error:
        kind = saved.get("kind") if isinstance(saved, Mapping) else None  # any value, of a file
        is_other_kind = not isinstance(kind, str) or kind != now.get("kind")
        return [f"the saved policy and the given one cannot be compared ({error})"], is_other_kind
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names], "kind" in names

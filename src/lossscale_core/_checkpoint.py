"""A state as a dict of plain numbers: the same keys for every framework, and all that is needed to go on exactly."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from lossscale_core._config import policy_from_dict, policy_to_dict
from lossscale_core._policy import NoScaling, ScalingPolicy, TolerantScaling
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import AnyScaleState, ScaleState
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

VERSION = 1


def state_to_dict(state: AnyScaleState, policy: ScalingPolicy | None = None) -> dict[str, Any]:
    """Return `state`, of any framework, as plain numbers under `"version"` and the names of its fields.

    With `policy` its config is saved too, under `"policy"`, and compared when the state is restored. Synchronises with
    the host.
    """
    saved: dict[str, Any] = {"version": VERSION}
    saved.update({name: _plain_number(value) for name, value in state._asdict().items()})
    if policy is not None:
        saved["policy"] = policy_to_dict(policy)
    return saved


def state_from_dict(saved: Mapping[str, Any], policy: ScalingPolicy | None = None) -> Any:
    """Return the state in `saved` as host scalars, which `np.asarray` and every framework's `asarray` accept.

    Give the `policy` that will go on with it: its own trackers are restored too, and a `CheckpointWarning` lists field
    by field where it differs from the policy saved with the state. A tracker that the saved state lacks because
    another kind of policy wrote it starts fresh, with a warning. Without `policy` the state's own keys decide.
    Other keys in `saved` are left alone. Raises `CheckpointError` for a newer version, a missing key, or a value
    that no state can hold.
    """
    _require_version(saved)
    start = _start_for(saved, policy)
    missing = [name for name in start._fields if name not in saved]
    lost = [name for name in missing if name in ScaleState._fields]
    if lost:
        raise CheckpointError(
            f"the saved state has no {', '.join(lost)}; pass a dict that state_to_dict made, or begin with init_state"
        )
    differences = _policy_differences(saved.get("policy"), policy)
    differences += [f"{name} was not saved and starts at {getattr(start, name)}" for name in missing]
    if differences:
        warnings.warn(
            "the state goes on under another policy: " + "; ".join(differences), CheckpointWarning, stacklevel=2
        )
    return start._make(
        _restored(name, saved[name], initial) if name in saved else initial for name, initial in start._asdict().items()
    )


def _plain_number(value: Any) -> int | float:
    return int(value) if "int" in str(getattr(value, "dtype", type(value))) else float(value)


def _require_version(saved: Mapping[str, Any]) -> None:
    version = saved.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"version={version!r} is not that of a saved state; pass a dict that state_to_dict made")
    if version > VERSION:
        raise CheckpointError(
            f"version={version} of the saved state is newer than {VERSION}, the newest this release reads; "
            "run: pip install --upgrade lossscale"
        )


def _start_for(saved: Mapping[str, Any], policy: ScalingPolicy | None) -> Any:
    if policy is not None:
        return policy.init_state()
    tolerant = TolerantScaling().init_state()
    return tolerant if all(name in saved for name in tolerant._fields) else NoScaling().init_state()


def _restored(name: str, value: Any, initial: Any) -> Any:
    """Return `value` in the type of `initial`, having checked that a state can hold it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2.0**127
    if name == "loss_scale":
        good, rule = is_number and SMALLEST_SCALE <= value <= LARGEST_SCALE, "a number from 2**-126 to 2**126"
    elif isinstance(initial, np.integer):
        good, rule = is_number and value == int(value) and abs(value) < 2**31, "a whole number that fits int32"
    else:
        good, rule = is_number, "a finite number"
    if not good:
        raise CheckpointError(f"{name}={value!r} of the saved state must be {rule}; restore an earlier checkpoint")
    return type(initial)(value)


def _policy_differences(saved: Any, policy: ScalingPolicy | None) -> list[str]:
    if saved is None or policy is None:
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

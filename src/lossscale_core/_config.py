"""Policies as plain dicts, TOML and JSON; reading a written policy returns an equal policy."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from lossscale_core._base import KINDS, BaseScaling, ScalingPolicy
from lossscale_core._messages import describe, join_names, nearest_name, unknown_name
from lossscale_core._policy import DynamicScaling, FixedScaling, NoScaling
from lossscale_core._settings import rules_of
from lossscale_core._state import Namespace, ScaleState
from lossscale_core.errors import PolicyError
from lossscale_core.files import read_data, suffix_of, write_whole

PolicyLike: TypeAlias = ScalingPolicy | str | os.PathLike[str] | float | Mapping[str, Any]
"""The types that `as_policy` accepts."""
PolicyT = TypeVar("PolicyT", bound=ScalingPolicy)

_SUFFIXES = (".toml", ".json")
_FROM_TOOL = "for the config of another tool run: lossscale policy convert FILE, or call lossscale.from_tool"
# All callers may share these objects, because policies are frozen.
_WITHOUT_SETTINGS: dict[str, ScalingPolicy] = {"none": NoScaling(), "dynamic": DynamicScaling()}


@overload
def as_policy(source: PolicyT) -> PolicyT: ...
@overload
def as_policy(source: Literal["dynamic"]) -> DynamicScaling: ...
@overload
def as_policy(source: Literal["none"]) -> NoScaling: ...
@overload
def as_policy(source: float) -> FixedScaling: ...
@overload
def as_policy(source: PolicyLike) -> ScalingPolicy: ...
def as_policy(source: Any) -> ScalingPolicy:
    """Return the policy that `source` describes.

    Args:
        source: A policy, `"dynamic"`, `"none"`, a number (a fixed scale), a dict that `policy_to_dict` returned, or the
            path of a `.toml` or `.json` file.

    Returns:
        `source` itself if it is a policy, otherwise a new policy.

    Raises:
        PolicyError: `source` is another value, or describes a policy that breaks a rule.
        OSError: The file cannot be read.
    """
    # The base class is checked first, because instance checks against a protocol are slow before Python 3.12.
    if isinstance(source, BaseScaling) or (isinstance(source, ScalingPolicy) and not isinstance(source, type)):
        return source
    if isinstance(source, Mapping):
        return policy_from_dict(source)
    if isinstance(source, int | float | np.integer | np.floating) and not isinstance(source, bool):
        return FixedScaling(source)  # type: ignore[arg-type]  # NumPy's numbers become Python's
    if isinstance(source, str) and source in _WITHOUT_SETTINGS:
        return _WITHOUT_SETTINGS[source]
    is_name = isinstance(source, str) and (suffix_of(source) in _SUFFIXES or os.path.exists(source))
    if is_name or isinstance(source, os.PathLike):
        return load_policy(source)
    if hasattr(source, "loss_scale"):
        raise PolicyError(
            f"{describe(source)} is a state and not a policy; pass its policy in this place, such as DynamicScaling(); "
            "diagnose, check_limits and ScaleWatch.log take the policy first"
        )
    raise PolicyError(
        f"{describe(source)} is not a loss-scaling policy; {nearest_name(source, _WITHOUT_SETTINGS)}pass a policy such "
        "as DynamicScaling(), 'dynamic', 'none', a number for a fixed scale, a dict with a 'kind', or the path of a "
        ".toml or .json file"
    )


def init_state(policy: PolicyLike, *, xp: Namespace | None = None, device: Any = None) -> ScaleState:
    """Return the state before the first step under `policy`.

    Does not synchronise with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        xp: The array namespace of the state's fields; host scalars if left out.
        device: The device of the arrays, as `xp.asarray` takes it.

    Returns:
        The policy's state, a NamedTuple of float32 and int32 scalars, or of arrays of shape `()`: a `ScaleState`, or
        the policy's own type of state.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    host: Any = as_policy(policy).init_state()
    state: ScaleState = host
    if xp is not None:
        # The dtype comes from the namespace, because torch.asarray, for example, rejects the dtypes of NumPy.
        state = host._make(xp.asarray(value, dtype=getattr(xp, value.dtype.name), device=device) for value in host)
    return state


def policy_to_dict(policy: ScalingPolicy) -> dict[str, Any]:
    """Return `policy` as a dict of plain values.

    Args:
        policy: A policy that has a `kind`.

    Returns:
        `"kind"`, then every field that is not None.

    Raises:
        PolicyError: The policy has no `kind` of its own.
    """
    members = BaseScaling.of(policy)
    if isinstance(members.kind, str) and KINDS.get(members.kind) is type(policy):
        settings = {name: value for name, value in members.settings().items() if value is not None}
        return {"kind": members.kind, **settings}
    raise PolicyError(
        f"{describe(policy)} has no config; only {', '.join(t.__name__ for t in KINDS.values())} can be written; "
        "derive the policy from BaseScaling and give it a kind"
    )


def policy_from_dict(config: Mapping[str, Any]) -> ScalingPolicy:
    """Return the policy that `config` describes.

    Args:
        config: A dict, which is not changed. `"kind"` is `"none"`, `"fixed"`, `"dynamic"`, or the kind of your own
            class. The other keys are the fields of this class. Fields that are left out have their defaults.

    Returns:
        A new policy.

    Raises:
        PolicyError: A key or the kind is unknown, a field is missing, or a value breaks its rule.
    """
    if not isinstance(config, Mapping):
        raise PolicyError(
            f"a policy's config must be a table of keys and values, not {describe(config)}; write kind = 'dynamic'"
        )
    if "kind" not in config:
        hint = f"add kind = 'dynamic' (known: {', '.join(KINDS)}), outside of any table; {_FROM_TOOL}"
        raise PolicyError(f"the policy's config has no 'kind', but {join_names(config) or 'nothing'}; {hint}")
    kind = config["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        fault = unknown_name(kind, "a kind of policy", KINDS)
        raise PolicyError(f"kind={fault}; a kind of your own is known once its module is imported")
    fields = {field.name: field for field, _ in rules_of(KINDS[kind])}
    values = {name: value for name, value in config.items() if name != "kind"}
    for name in values:
        if name not in fields:
            raise PolicyError(f"{unknown_name(name, f'a key of a {kind!r} policy', fields)}; {_FROM_TOOL}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise PolicyError(f"a {kind!r} policy needs {name}; add it, as in {name} = 1024.0")
    return KINDS[kind](**values)


def load_policy(path: str | os.PathLike[str]) -> ScalingPolicy:
    """Return the policy in a `.toml` or `.json` file.

    Args:
        path: The path of the file.

    Returns:
        A new policy.

    Raises:
        PolicyError: The content of the file is not the config of a policy; the message names the file.
        OSError: The file cannot be read.
    """
    _policy_suffix(path)
    config = read_data(path, "policy", PolicyError)
    try:
        return policy_from_dict(config)
    except PolicyError as error:
        raise PolicyError(f"{os.fspath(path)}: {error}") from error


def dump_policy(policy: ScalingPolicy, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
    """Write `policy` to a `.toml` or `.json` file, from which `load_policy` returns an equal policy.

    An existing file is replaced atomically. A symbolic link is replaced, and its target is not changed.

    Args:
        policy: A policy that has a `kind`.
        path: The path of the file, which ends in `.toml` or `.json`.
        overwrite: Whether to replace a file that exists.

    Raises:
        PolicyError: The path has another suffix, or the policy has no `kind` of its own.
        FileExistsError: The file exists, and `overwrite` is False.
        OSError: The file cannot be written.
    """
    write_whole(path, policy_text(policy, _policy_suffix(path)), overwrite=overwrite)


def policy_text(policy: ScalingPolicy, suffix: str) -> str:
    """Return `policy` as the text of a file.

    Args:
        policy: A policy that has a `kind`.
        suffix: The format, ".toml" or ".json".

    Returns:
        The text, which ends in a line break.

    Raises:
        PolicyError: The policy has no `kind` of its own.
    """
    import json

    config = policy_to_dict(policy)
    if suffix == ".json":
        return json.dumps(config, indent=2) + "\n"
    # JSON and TOML write strings, numbers and bools alike: https://toml.io/en/v1.0.0
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items())


def _policy_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a policy's file. Raises `PolicyError` if it is another suffix, or `path` is not a path."""
    if isinstance(path, str | os.PathLike) and (suffix := suffix_of(path)) in _SUFFIXES:
        return suffix
    raise PolicyError(
        f"{describe(path)} is not the path of a .toml or .json file; call load_policy('policy.toml') or "
        "dump_policy(policy, 'policy.toml')"
    )

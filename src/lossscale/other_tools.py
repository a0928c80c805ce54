"""Policies and states from the configs and checkpoints of other tools; `other_tools.toml` has each tool's names."""

import contextlib
import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib.resources import files
from numbers import Number
from typing import Any

import lossscale_core as core
from lossscale_core.adapters import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_setting,
    describe,
    join_names,
    read_torch_keys,
    unknown_name,
    warn_caller,
)
from lossscale_core.errors import CheckpointError, LossScaleError, PolicyError

__all__ = ["from_tool", "state_from_tool", "tools"]

NEVER = 2**31 - 1
"""A count that a run does not reach."""
_UNBOUNDED = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}
_SETTINGS_OF = {"dynamic": tuple(core.DynamicScaling().settings()), "fixed": ("init_scale",), "none": ()}
_TENSORFLOW = "/.ATTRIBUTES/VARIABLE_VALUE"  # ends a key in a checkpoint: https://www.tensorflow.org/guide/checkpoint
_AROUND_NAME = re.compile(r"^.*/|:\d+$")  # the path before a name, and the suffix `:0` of TensorFlow 1


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Return the content of `other_tools.toml`."""
    return tomllib.loads(files("lossscale").joinpath("other_tools.toml").read_text("utf-8"))


def tools() -> dict[str, str]:
    """Return the names that `from_tool` and `state_from_tool` accept, with the titles of the tools."""
    return {name: f"{tool['title'].replace('`', '')} ({tool['version']})" for name, tool in table().items()}


def _require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise PolicyError(rule)


def _real(value: Any) -> float:
    number = math.nan if isinstance(value, bool) else float(value)
    _require(not math.isnan(number), "it must be a number")
    return number


def _whole(value: Any) -> int:
    number = _real(value)
    _require(number == int(number), "it must be a whole number")
    return int(min(number, NEVER))


def _exact_count(value: Any, more: int = 0) -> int:
    """Return a count that the tool compares with `==`; `NEVER` for a fraction or a count below 1, which never match."""
    number = _real(value) + more
    return _whole(number) if 1 <= number < NEVER and number == int(number) else NEVER


def _flag(value: Any) -> bool:
    _require(str(value).lower() in ("true", "false", "1", "0"), "it must be true or false")
    return str(value).lower() in ("true", "1")


def _min_scale(number: float) -> dict[str, Any]:
    return {"min_scale": max(number, SMALLEST_SCALE)}


def _fixed_unless(dynamic: Any, value: Any) -> dict[str, Any]:
    is_dynamic = value == dynamic and not isinstance(value, bool)
    return {} if is_dynamic or _real(value) == dynamic else {"kind": "fixed", "init_scale": _real(value)}


def _up_and_down(value: Any) -> dict[str, Any]:
    return {"growth_factor": _real(value), "backoff_factor": 1.0 / _real(value)}


READ: dict[str, Callable[[Any], dict[str, Any]]] = {
    "init_scale": lambda v: {"init_scale": _real(v)},
    "init_scale = 2**value": lambda v: {"init_scale": math.ldexp(1.0, min(_whole(v), 1023))},
    "growth_factor": lambda v: {"growth_factor": _real(v)},
    "backoff_factor": lambda v: {"backoff_factor": _real(v)},
    "growth_factor, and backoff_factor = 1 / value": _up_and_down,
    "growth_interval": lambda v: {"growth_interval": _whole(v)},
    "growth_interval; never grows if below 1": lambda v: {"growth_interval": _exact_count(v)},
    "growth_interval = value + 1; never grows if below 0": lambda v: {"growth_interval": _exact_count(v, 1)},
    "growth_interval; at least 1, rounded down": lambda v: {"growth_interval": int(min(max(_real(v), 1.0), NEVER))},
    "hysteresis": lambda v: {"hysteresis": _whole(v)},
    "hysteresis; never backs off if below 1": lambda v: {"hysteresis": _exact_count(v)},
    "refill_on_finite": lambda v: {"refill_on_finite": _flag(v)},
    "min_scale": lambda v: _min_scale(_real(v)),
    # The documentation of flax writes its default as text.
    "min_scale; none: 2**-126": lambda v: _min_scale(0.0 if v in (None, "float32 tiny") else _real(v)),
    "max_scale; none: 2**126": lambda v: {"max_scale": min(_real(v or math.inf), LARGEST_SCALE)},
    "FixedScaling unless dynamic": lambda v: _fixed_unless("dynamic", v),
    "FixedScaling unless 0": lambda v: _fixed_unless(0, v),
    "FixedScaling if false": lambda v: {} if _flag(v) else {"kind": "fixed"},
    "NoScaling if false": lambda v: {} if _flag(v) else {"kind": "none"},
    "nothing": lambda _: {},
}
"""Functions from the value of a key to settings, by their text in `other_tools.toml` and on the migration page."""


def from_tool(name: str, config: Mapping[str, Any]) -> core.ScalingPolicy:
    """Return the policy that acts like `config` in another tool.

    The scales and the skipped steps of a run are the same while the scale is between 2**-126 and 2**126, bit for bit if
    all factors are powers of two. `docs/migrating.md` lists the differences.

    Args:
        name: The name of the tool, such as `"torch"`; `tools` returns all names.
        config: The settings of the tool under its own names, with underscores or hyphens. Numbers may be text. Keys
            that are left out, and values of `"auto"`, get the tool's defaults; `"auto"` causes a warning. For DeepSpeed
            the config may be the whole JSON. If this JSON has no stage of ZeRO, every overflow lowers the scale.

    Returns:
        A `DynamicScaling`, `FixedScaling` or `NoScaling`.

    Raises:
        PolicyError: The tool or a key is unknown, or neither the tool nor a policy can use a value.
    """
    tool = _find(name, PolicyError)
    if not isinstance(config, Mapping):
        raise PolicyError(
            f"the config of {name} must be a dict, not {describe(config)}; pass from_tool json.load(file)"
        )
    values = _rename_keys(name, tool, config)
    if keys := [key for key, value in _block(tool, config).items() if isinstance(value, str) and value == "auto"]:
        warn_caller(
            f'{name}: {join_names(keys)} of "auto" is taken for the default of {name}; a trainer may fill in another '
            "value, so write the number"
        )
    explicit = {key: value for key, value in values.items() if value is not None}
    for key, defaults in tool.get("defaults_by", {}).items():
        values = {**values, **defaults.get(str(values.get(key)), {}), **explicit}
    settings = _settings(name, tool, values)
    if tool.get("caps_init_scale") and settings["kind"] == "dynamic":
        settings["init_scale"] = min(settings["init_scale"], settings["max_scale"])
    for key, changes in tool.get("without_stage", {}).items() if _block(tool, config) is not config else ():
        part = config.get(key, False)
        settings |= {} if (part.get("stage") if isinstance(part, Mapping) else part) else changes
    return _policy(name, settings)


def _block(tool: dict[str, Any], config: Any) -> Any:
    """Return the block of a config that has the tool's keys, or the config itself if it has no such block."""
    block = config.get(tool.get("block", ""))
    return block if isinstance(block, Mapping) else config


def _find(name: Any, error: type[LossScaleError]) -> dict[str, Any]:
    """Return the table of a tool."""
    if isinstance(name, str) and name in table():
        return table()[name]
    raise error(unknown_name(name, "a tool that from_tool and state_from_tool read", table()))


def _rename_keys(name: str, tool: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return a config under the names in the table, with plain values."""
    values: dict[str, Any] = {}
    for key, value in _block(tool, config).items():
        own = str(key).lstrip("-").replace("-", "_")
        own, value = tool.get("names", {}).get(own, own), plain(value)
        if not isinstance(value, Number | str | None) and own in {**tool["keys"], **tool.get("more_keys", {})}:
            raise PolicyError(f"{name}: {key}={describe(value)} must be one number, text or bool; change the config")
        if own in values and values[own] != value:
            raise PolicyError(f"{name}: {key} and {own} are names of one setting but differ; leave one out")
        if not (isinstance(value, str) and value == "auto"):
            values[own] = value
    return values


def _keys(name: str, tool: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool's list of keys that fits a config best. Raises `PolicyError` for an unknown key."""
    lists = [tool["keys"], tool.get("more_keys", {})]
    keys: dict[str, Any] = max(lists, key=lambda names: len(names.keys() & values.keys()))
    for key in values:
        if key not in keys and not any(fnmatchcase(key, pattern) for pattern in tool["ignored"]):
            if any(key in names for names in lists):
                raise PolicyError(f"{describe(key)} is in another list of keys of {name}; pass keys of one list")
            raise PolicyError(unknown_name(key, f"a key of {name}", [*keys, *tool.get("names", ())]))
    return keys


def _settings(name: str, tool: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind of the policy and its settings. Raises `PolicyError` with the tool's own name of a key."""
    settings: dict[str, Any] = {"kind": "dynamic", **tool["rule"]}
    for bound in settings.keys() & {"min_scale", "max_scale"}:
        settings[bound] = min(max(settings[bound], SMALLEST_SCALE), LARGEST_SCALE)
    for key, (meaning, default) in _keys(name, tool, values).items():
        value = values.get(key, default)
        if key not in values and default == "required":
            raise PolicyError(f"{name} has no default for {key}; add it to the config")
        settings.update(_read(name, key, meaning, default if value is None and key in tool.get("unset", ()) else value))
    return settings


def _read(name: str, key: str, meaning: str, value: Any) -> dict[str, Any]:
    """Return the settings for a value. Raises `PolicyError` with the tool's own name of the key."""
    try:
        settings = READ[meaning](value)
        for setting in settings.keys() - {"kind"}:
            check_setting(setting, settings[setting])
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = error if isinstance(error, PolicyError) else "it must be a number"
        raise PolicyError(f"{name}: {key}={describe(value)} has no counterpart here: {reason}") from None
    return settings


def _policy(name: str, settings: dict[str, Any]) -> core.ScalingPolicy:
    """Return the policy with the settings that its kind has. Raises `PolicyError` with the name of the tool."""
    kind = settings["kind"]
    try:
        return core.policy_from_dict({key: settings[key] for key in ("kind", *_SETTINGS_OF[kind]) if key in settings})
    except PolicyError as error:  # two settings that contradict each other
        raise PolicyError(f"{name}: {error}") from None


def plain(value: Any) -> Any:
    """Return the number in a list, array or variable of one element, or any other value unchanged."""
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, TypeError, RuntimeError):  # an array of several elements
            return value
    return plain(value.numpy()) if hasattr(value, "numpy") else value


def tools_of_config(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that know every key of a config, including keys that do not concern the scale.

    If the config has the block of a tool, other tools are excluded: `fp16` is a block in DeepSpeed and a flag in
    Megatron.
    """
    if blocks := [name for name, tool in table().items() if _block(tool, config) is not config]:
        return blocks
    names = []
    for name, tool in table().items():
        with contextlib.suppress(PolicyError):
            names += [name] if _keys(name, tool, _rename_keys(name, tool, config)) else []
    return names


def tools_of_checkpoint(checkpoint: Any) -> list[str]:
    """Return the tools that find their required names in a checkpoint, and know the most of its other names."""
    counts: dict[str, int] = {}
    is_small = isinstance(checkpoint, Mapping) and len(checkpoint) < 1000  # a file may have a dict of all parameters
    for name, tool in table().items() if is_small else ():
        with contextlib.suppress(CheckpointError):
            entries = _scaler_part(name, tool, checkpoint)
            counts[name] = len({*entries} & {*re.findall(r"\w+", str(tool["saved"])), *tool["keys"]})
    return [name for name, count in counts.items() if count == max(counts.values())]


def state_from_tool(name: str, checkpoint: Mapping[str, Any], policy: core.PolicyLike | None = None) -> core.ScaleState:
    """Return the state with which a run continues where another tool's run stopped.

    The tools do not save the number of steps, so `steps` starts at 0.

    Args:
        name: The name of the tool, such as `"torch"`; `tools` returns all names.
        checkpoint: The dict that the tool saved, or the attributes of its scaler (`vars(scaler)`). Numbers may be
            arrays of one element, and names may be paths of variables.
        policy: The policy that continues the run: anything that `as_policy` accepts, for example the result of
            `from_tool`. It may be left out if the checkpoint alone determines every counter.

    Returns:
        The policy's state as host scalars.

    Raises:
        CheckpointError: The tool is unknown, a name is missing from the checkpoint, or a value does not fit the state.
        PolicyError: `policy` is not a policy.
    """
    tool = _find(name, CheckpointError)
    entries, layout = _scaler_part(name, tool, checkpoint), tool["saved"]
    keys = {**tool.get("more_keys", {}), **tool["keys"]}
    config = {tool.get("names", {}).get(key, key): value for key, value in entries.items()}
    config = {key: value for key, value in config.items() if key in keys and not keys[key][0].startswith("Fixed")}
    config |= {key: 1.0 for key in config if keys[key][0].startswith("init_scale")}  # may be the current scale
    try:
        own = _policy(name, {**_settings(name, tool, config), "init_scale": 1.0, "kind": "dynamic", **_UNBOUNDED})
    except PolicyError as error:
        raise CheckpointError(f"a setting in the checkpoint of {name} is invalid: {error}") from None
    scaling = core.BaseScaling.of(own if policy is None else core.as_policy(policy))
    fields: dict[str, Any] = {"loss_scale": _number(name, entries, layout["loss_scale"])}
    for key, names in {} if scaling.is_constant() else layout.items():
        if key == "growth_tracker":
            fields[key] = _number(name, entries, names, least=0)
        elif key == "since_overflow":
            if policy is None and "growth_interval" not in str([keys[setting] for setting in config]):
                raise CheckpointError(
                    f"the growth tracker of {name} depends on growth_interval, which the checkpoint does not hold; "
                    f"pass policy=from_tool({name!r}, config), or --policy FILE to the command"
                )
            now, last = (_number(name, entries, counter, least=-NEVER) for counter in names)
            if last >= now:
                raise CheckpointError(f"{names[0]}={now} must be after {names[1]}={last}; pass what {name} saved")
            counted = now - last - 1 - getattr(scaling, "cooldown", 0)
            fields["growth_tracker"] = counted if counted < 0 else counted % scaling.growth_interval
        elif key.startswith("hysteresis") and names in entries:
            count = _number(name, entries, names, least=0 if key == "hysteresis_used" else -NEVER)
            fields["hysteresis_tracker"] = {
                "hysteresis_left": max(count, 0),
                "hysteresis_down_to_1": count if count >= 1 else NEVER,  # below 1, the tool never backs off
                "hysteresis_used": max(getattr(scaling, "hysteresis", 1) - count, 0),
            }[key]
    start = core.state_to_dict(scaling.init_state())
    return core.state_from_dict({**start, **{key: value for key, value in fields.items() if key in start}}, scaling)


def _scaler_part(name: str, tool: dict[str, Any], checkpoint: Any) -> dict[str, Any]:
    """Return the entries of the scaler in a checkpoint; their names have no paths and no underscores at the start."""
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"state_from_tool takes a dict, not {describe(checkpoint)}; pass what {name} saved")
    layout = tool["saved"]
    inner = [key for key in checkpoint if fnmatchcase(str(key), layout.get("within", ""))]
    parts = [key for key in inner if isinstance(checkpoint[key], Mapping)]
    if len(parts) > 1:
        raise CheckpointError(f"this checkpoint of {name} holds {len(parts)} scalers; pass one: {join_names(parts)}")
    part, entries = checkpoint[parts[0]] if parts else {**checkpoint, **read_torch_keys(checkpoint)}, dict[str, Any]()
    for key in sorted(filter(lambda key: isinstance(key, str), part), key=lambda key: key.startswith("_")):
        entries.setdefault(_AROUND_NAME.sub("", key.removesuffix(_TENSORFLOW)).lstrip("_"), part[key])
    required = [layout["loss_scale"], *layout.get("since_overflow", [layout.get("growth_tracker")])]
    if missing := [names for names in required if not any(key in entries for key in names.split(" or "))]:
        raise CheckpointError(
            f"this is not a checkpoint of {name}'s scaler: it has no {', '.join(missing)}"
            f"{'' if entries else ', and is empty, like the checkpoint of a disabled scaler'}; "
            "pass state_from_tool the scaler's own part"
        )
    return {key: plain(value) for key, value in entries.items()}


def _number(name: str, entries: Mapping[str, Any], names: str, least: int | None = None) -> Any:
    """Return the number under one of the names. If `least` is set, require a whole number of at least `least`."""
    key = next(key for key in names.split(" or ") if key in entries)
    value = entries[key]
    rule = "a number" if least is None else "a whole number" if least < 0 else "a whole number from 0"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (least is not None and not (value == value // 1 and value >= least)):
        raise CheckpointError(f"{key}={describe(value)} in the checkpoint of {name} must be {rule}; pass what it saved")
    return value if least is None else int(value)

"""Conversion of other tools' checkpoints to states from which the original's run continues."""

import contextlib
import re
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lossscale.dialects._kinds import settings_of
from lossscale.dialects._policies import ONE_VALUE, plain
from lossscale.dialects._readings import NEVER, UNBOUNDED
from lossscale.dialects._record import Counter, NoCounterpartError, Saved, Settings, Tool
from lossscale.dialects._tools import TOOLS, find_tool
from lossscale_core import (
    BaseScaling,
    PolicyLike,
    ScaleState,
    as_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import shown, shown_names
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError

_OUTPUT = re.compile(r":\d+$")  # TensorFlow 1 numbers the outputs of a variable: `good_steps:0`
# tf.train.Checkpoint ends the key of every variable with this: https://www.tensorflow.org/guide/checkpoint
_TENSORFLOW_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def state_from_tool(name: str, checkpoint: Mapping[str, Any], policy: PolicyLike | None = None) -> ScaleState:
    """Return the state with which a run continues where another tool's run stopped.

    No tool saves the number of steps, so that `steps` starts at 0. A `CheckpointWarning` lists the settings in the
    checkpoint that differ from the policy's, and the counts that exceed the policy's limits.

    Args:
        name: The name of the tool, such as `"torch"`; `docs/migrating.md` lists all.
        checkpoint: The dict that the tool saved, or the attributes of its scaler (`vars(scaler)`). Numbers may be
            arrays of one element, and names may be paths of variables.
        policy: The policy that continues the run, as anything that `as_policy` accepts, such as `from_tool` returns.
            It may be left out if the checkpoint alone determines every counter.

    Returns:
        The policy's state as host scalars.

    Raises:
        CheckpointError: The tool is unknown, a name is missing from the checkpoint, or a value does not fit the state.
        PolicyError: `policy` is not a policy.
    """
    tool = find_tool(name, CheckpointError)
    values = _plain_values(tool, checkpoint)
    saved = _layout(tool, values)
    known = _known_settings(tool, values)
    given = policy is not None
    scaling = BaseScaling.of(_default_policy(tool, known) if policy is None else as_policy(policy))
    fields: dict[str, Any] = {"loss_scale": _number(tool, values, saved.scale)}
    for field, counter in saved.counters.items():
        if field in scaling.state_type._fields and not scaling.is_constant():
            converted = _converted(tool, values, counter, scaling, None if given else known)
            fields.update({} if converted is None else {field: converted})
    notes = _differences(known, scaling) if given else []
    notes += _limit_overflows_left(fields, scaling) if given else []
    notes += _note_beyond_interval(saved, fields, scaling) if given or "growth_interval" in known else []
    if notes:
        warnings.warn(f"{tool.name}: " + "; ".join(notes), CheckpointWarning, stacklevel=2)
    # A streak needs as many skipped steps, or else state_from_dict refuses the state as inconsistent.
    streak = fields.get("overflow_streak", 0)
    start = state_to_dict(scaling.init_state())
    return state_from_dict({**start, "steps": streak, "skipped_steps": streak, **fields}, scaling)


def guess_tool(checkpoint: Any) -> str:
    """Return the name of the tool that saved a scaler.

    Args:
        checkpoint: The dict that a tool saved.

    Returns:
        The name of the tool; if several tools save the same names with the same meaning, one of them.

    Raises:
        CheckpointError: No tool saves these names, or several do with different meanings.
    """
    best = possible_tools(checkpoint)
    if not best:
        raise CheckpointError(
            "no known tool saves its scaler under these names; name the tool, or pass the scaler's own part"
        )
    if len({_read_alone(name, checkpoint) for name in best}) > 1:
        raise CheckpointError(f"{', '.join(best)} save these names with different meanings; name the tool")
    return best[0]


def possible_tools(checkpoint: Any) -> tuple[str, ...]:
    """Return the names of the tools that may have saved a scaler.

    Args:
        checkpoint: Any value; only a dict can be a saved scaler.

    Returns:
        The names of all tools that save these names, possibly none.
    """
    found: dict[str, int] = {}
    for tool in TOOLS.values() if _may_hold_scaler(checkpoint) else ():
        with contextlib.suppress(CheckpointError):
            found[tool.name] = _recognised(tool, checkpoint)
    # One name alone, such as `scale`, occurs in dicts that have nothing to do with loss scaling.
    return tuple(name for name, count in found.items() if count == max(found.values()) and count >= 2)


_SCALES = {name for tool in TOOLS.values() for saved in tool.saved for name in saved.scale}
_WITHIN = sorted({tool.within for tool in TOOLS.values()} - {""})


def _may_hold_scaler(checkpoint: Any) -> bool:
    """Return whether a name is some tool's name of a scale: a fast test, since most dicts in a file are not scalers."""
    if not isinstance(checkpoint, Mapping):
        return False
    return any(
        isinstance(name, str)
        and (_last_part(name) in _SCALES or (isinstance(value, Mapping) and _matches(name, _WITHIN)))
        for name, value in checkpoint.items()
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _recognised(tool: Tool, checkpoint: Any) -> int:
    """Return how many names in a checkpoint this tool saves. Raises `CheckpointError` if no layout fits."""
    values = _scaler_part(tool, checkpoint)
    layout = _layout(tool, values)
    known = {name for counter in layout.counters.values() for names in counter.names for name in names}
    known |= {*layout.scale, *(name for key in tool.forms[tool.saved_form].keys for name in key.names)}
    return len(known & values.keys())


def _read_alone(name: str, checkpoint: Mapping[str, Any]) -> tuple[Any, ...] | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return tuple(state_from_tool(name, checkpoint))
    except CheckpointError:
        return None


def _scaler_part(tool: Tool, checkpoint: Any) -> dict[str, Any]:
    """Return the scaler's own dict in a checkpoint, with the last part of each name as the key."""
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"a checkpoint of {tool.name} must be a dict, not {type(checkpoint).__name__}")
    parts = [
        name
        for name, value in checkpoint.items()
        if tool.within and isinstance(name, str) and isinstance(value, Mapping) and fnmatchcase(name, tool.within)
    ]
    if len(parts) > 1:
        raise CheckpointError(
            f"this checkpoint of {tool.name} holds {len(parts)} scalers; pass one: {shown_names(parts)}"
        )
    values: dict[str, Any] = {}
    for name, value in (checkpoint[parts[0]] if parts else checkpoint).items():
        if isinstance(name, str):
            values.setdefault(_last_part(name), value)
    return values


def _plain_values(tool: Tool, checkpoint: Any) -> dict[str, Any]:
    """Return the scaler's own dict, with plain numbers instead of arrays and lists of one element."""
    values = _without_underscores(tool, _scaler_part(tool, checkpoint))
    return {name: plain(value) for name, value in values.items()}


def _without_underscores(tool: Tool, values: dict[str, Any]) -> dict[str, Any]:
    """Return the underscored attributes of a scaler under the names with which its tool saves them."""
    if any(not _missing(saved, values) for saved in tool.saved):
        return values
    return {**{name.lstrip("_"): value for name, value in values.items()}, **values}


def _last_part(name: str) -> str:
    """Return the name of a variable without its path and the suffix of the framework."""
    return _OUTPUT.sub("", name.removesuffix(_TENSORFLOW_SUFFIX).rpartition("/")[2])


def _layout(tool: Tool, values: Mapping[str, Any]) -> Saved:
    """Return the first layout with all its names in the checkpoint. Raises `CheckpointError` if none is."""
    for saved in tool.saved:
        if not _missing(saved, values):
            return saved
    raise CheckpointError(
        f"this is not a checkpoint of {tool.name}'s scaler: it has no {', '.join(_missing(tool.saved[0], values))}"
        f"{'' if values else ', and is empty, like that of a disabled scaler'}; pass the scaler's own part"
    )


def _missing(saved: Saved, values: Mapping[str, Any]) -> list[str]:
    """Return the names of a layout that the checkpoint lacks."""
    wanted = [saved.scale, *(names for c in saved.counters.values() if not c.optional for names in c.names)]
    return [" or ".join(names) for names in wanted if _find(values, names) is None]


def _find(values: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in values), None)


def _number(tool: Tool, values: Mapping[str, Any], names: tuple[str, ...]) -> float:
    name = _find(values, names) or names[0]
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{name}={shown(value)} in the checkpoint of {tool.name} must be a number")
    return value


def _known_settings(tool: Tool, values: Mapping[str, Any]) -> Settings:
    """Return the settings in the checkpoint; the tool itself would continue with them."""
    settings: Settings = {}
    for key in tool.forms[tool.saved_form].keys:
        name = _find(values, key.names)
        if name is not None:
            if not isinstance(values[name], ONE_VALUE):
                raise CheckpointError(
                    f"{name}={shown(values[name])} in the checkpoint of {tool.name} must be one number, text or bool"
                )
            try:
                settings.update(key.reading.read(values[name]).settings)
            except NoCounterpartError as reason:
                raise CheckpointError(
                    f"{name}={shown(values[name])} in the checkpoint of {tool.name}: {reason}"
                ) from None
    return {name: value for name, value in settings.items() if name not in ("init_scale", "kind")}


def _default_policy(tool: Tool, known: Settings) -> Any:
    """Return a policy for the conversion of counters if none was given: the tool's rule, without bounds."""
    rule = {**tool.forms[tool.saved_form].settings, **known, **UNBOUNDED}
    kind = rule.get("kind", "dynamic")
    try:
        return policy_from_dict({"kind": kind, **{name: rule[name] for name in settings_of(kind) if name in rule}})
    except PolicyError as reason:
        raise CheckpointError(f"a setting in the checkpoint of {tool.name} is invalid: {reason}") from None


def _converted(
    tool: Tool, values: Mapping[str, Any], counter: Counter, policy: Any, known: Settings | None
) -> int | None:
    """Return a counter converted for `policy`, or None if the checkpoint lacks it.

    `known` holds the settings in the checkpoint if no policy was given, else it is None.
    """
    names = [_find(values, each) for each in counter.names]
    if None in names:
        return None
    if known is not None and counter.needs and counter.needs not in known:
        raise CheckpointError(
            f"the checkpoint of {tool.name} alone does not place {' and '.join(map(str, names))}, which depends on "
            f"{counter.needs}; pass policy=from_tool({tool.name!r}, config), or --policy FILE to the command"
        )
    if counter.needs and counter.needs not in policy.settings():
        raise CheckpointError(f"{shown(policy)} has no {counter.needs}, which places {' and '.join(map(str, names))}")
    counts = {str(name): _count(tool, values, str(name)) for name in names}
    try:
        return counter.place(policy, *counts.values())
    except NoCounterpartError as reason:
        given = ", ".join(f"{name}={shown(value)}" for name, value in counts.items())
        raise CheckpointError(f"{given} in the checkpoint of {tool.name}: {reason}; pass what the tool saved") from None


def _count(tool: Tool, values: Mapping[str, Any], name: str) -> int:
    value = _number(tool, values, (name,))
    if isinstance(value, float) and not value.is_integer():
        raise CheckpointError(f"{name}={shown(value)} in the checkpoint of {tool.name} must be a whole number")
    return int(value)


def _differences(known: Settings, policy: Any) -> list[str]:
    """Return a note for each setting in the checkpoint that differs from the policy's."""
    settings = policy.settings()
    return [
        f"{name} was {shown(value)} in the checkpoint and is {settings[name]!r} in the policy"
        for name, value in known.items()
        if name in settings and settings[name] != value  # a factor may be NaN, which differs from itself
    ]


def _limit_overflows_left(fields: dict[str, Any], policy: Any) -> list[str]:
    """Lower the count of overflows left to the policy's hysteresis, in place; return a note of a change."""
    left, hysteresis = fields.get("hysteresis_tracker", 0), policy.settings().get("hysteresis", NEVER)
    if left <= hysteresis or left == NEVER:  # NEVER means that the tool no longer backs off
        return []
    fields["hysteresis_tracker"] = hysteresis
    return [f"{left} overflows were left in the checkpoint, and hysteresis={hysteresis} leaves {hysteresis}"]


def _note_beyond_interval(saved: Saved, fields: Mapping[str, Any], policy: Any) -> list[str]:
    """Return a note if a count exceeds its limit, since a tool that compares with `==` then waits for an overflow."""
    counter, tracker = saved.counters.get("growth_tracker"), fields.get("growth_tracker", 0)
    if counter is None or not counter.equal or tracker < policy.growth_interval:
        return []
    return [
        f"its count {tracker} is past growth_interval={policy.growth_interval}: there the scale would not grow before "
        "the next overflow, here it grows on the next finite step"
    ]

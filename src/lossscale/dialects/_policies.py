"""Conversion of other tools' configs to policies."""

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from numbers import Number
from types import NoneType
from typing import Any, NamedTuple

from lossscale.dialects._kinds import SETTINGS, adapts, settings_of
from lossscale.dialects._record import REQUIRED, Form, Key, Meaning, NoCounterpartError, Settings, Tool
from lossscale.dialects._tools import find_tool
from lossscale_core import ScalingPolicy, policy_from_dict
from lossscale_core.adapters import check_setting, nearest_name, shown
from lossscale_core.errors import DialectWarning, PolicyError

_COMMENT_KEYS = ("note", "comment", "_comment")  # JSON has no comments, so people write them under these keys
_MOST_WRAPPED = 8
ONE_VALUE = (Number, str, NoneType)
_ORDER = (("min_scale", "init_scale"), ("init_scale", "max_scale"), ("min_scale", "max_scale"))


def from_tool(name: str, config: Mapping[str, Any], *, warn: bool = True) -> ScalingPolicy:
    """Return the policy that behaves like the tool `name` under `config`.

    The policy reproduces the scales and the skipped steps of every run, exactly if all factors are powers of two, as
    long as the original's scale stays between 2**-126 and 2**126 and above its own floor. `docs/migrating.md` lists the
    differences.

    Args:
        name: The name of the tool, such as `"torch"`; `docs/migrating.md` lists all.
        config: The tool's own names: the keywords of its constructor, or the block of its config file. Keys left out
            take the tool's defaults. The dict is not changed.
        warn: Whether to warn (`DialectWarning`) if the original does something wrong under this config. A replacement
            for a tool passes False if users of the tool know it.

    Returns:
        A new policy.

    Raises:
        PolicyError: The tool or a key is unknown, or no policy can express a value; the message names the tool's key.
    """
    policy, bugs = translate(find_tool(name, PolicyError), config)
    for bug in bugs if warn else ():
        warnings.warn(bug, DialectWarning, stacklevel=2)
    return policy


def translate(tool: Tool, config: Mapping[str, Any]) -> tuple[ScalingPolicy, list[str]]:
    """Return the policy, and a sentence for each bug of the original that concerns this config."""
    if not isinstance(config, Mapping):
        raise PolicyError(f"the config of {tool.name} must be a dict of its keys, not {shown(config)}; pass a dict")
    try:
        config = {name: plain(value) for name, value in tool.unwrap(config).items() if name not in _COMMENT_KEYS}
        form = form_of(tool, config)
        entries = list(_entries(tool, form, config))
        settings, bugs, origins = _settings_of(tool, form, entries)
        settings, bug = form.adjust(settings, config)
    except NoCounterpartError as refusal:
        raise PolicyError(f"{tool.name}: {refusal}") from None
    bugs += [bug] if bug else []
    bugs = [f"{tool.name}: {bug}" for bug in [*bugs, *_kind_bugs(tool, settings["kind"])]]
    return _policy(tool, settings, origins), bugs


def form_of(tool: Tool, config: Mapping[str, Any]) -> Form:
    """Return the form with the fewest unknown keys. Raises `PolicyError` if a key is unknown even there."""
    unknown = {form: [name for name in config if not _knows(form, name)] for form in tool.forms}
    # min takes the first of several forms that fit equally well, so that their order in a record counts.
    form = min(tool.forms, key=lambda form: len(unknown[form]))
    for name in unknown[form]:
        names = list(dict.fromkeys(name for each in tool.forms for key in each.keys for name in key.names))
        if name in names:
            raise PolicyError(
                f"{tool.name}: {name} belongs to another form of config than the other keys; pass one form"
            )
        raise PolicyError(
            f"{shown(name)} is not a key of {tool.name}; {nearest_name(name, names)}known: {', '.join(names)}"
        )
    return form


def plain(value: Any) -> Any:
    """Return the number in a list, array or variable of one element, or any other value unchanged."""
    for _ in range(_MOST_WRAPPED):  # bounded, because a pickled list may contain itself
        if not isinstance(value, list | tuple) or len(value) != 1:
            break
        value = value[0]
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, TypeError, RuntimeError):  # the array has more than one element
            return value
    return plain(value.numpy()) if hasattr(value, "numpy") else value


def _knows(form: Form, name: str) -> bool:
    # Not fnmatch, which ignores the case of names on Windows.
    is_ignored = any(fnmatchcase(str(name), pattern) for pattern in form.ignored)
    return is_ignored or any(name in key.names for key in form.keys)


class _Entry(NamedTuple):
    """A key of the form, the name that the config uses for it, and its value or the tool's default."""

    key: Key
    name: str
    value: Any


def _entries(tool: Tool, form: Form, config: Mapping[str, Any]) -> Iterator[_Entry]:
    """Yield an entry for each key of the form."""
    for key in form.keys:
        names = [name for name in key.names if name in config]
        for name in names:
            if not isinstance(config[name], ONE_VALUE):
                raise PolicyError(f"{tool.name}: {name}={shown(config[name])} must be one number, text or bool")
        if any(config[name] != config[names[0]] for name in names[1:]):
            raise PolicyError(f"{tool.name}: {' and '.join(names)} are names of one setting but differ; leave one out")
        if not names and key.default is REQUIRED:
            raise PolicyError(f"{tool.name} has no default for {key.name}; add it to the config")
        is_default = not names or (config[names[0]] is None and key.none_is_default)
        yield _Entry(key, (names or [key.name])[0], key.default if is_default else config[names[0]])


def _settings_of(tool: Tool, form: Form, entries: list[_Entry]) -> tuple[Settings, list[str], dict[str, str]]:
    """Return the settings, the bugs of the original that matter, and for each setting the key and value it comes from.

    Errors and bugs of other keys are ignored for a fixed scale, which needs its scale only.
    """
    settings: Settings = {"kind": "dynamic", **form.settings}
    origins: dict[str, str] = {}
    bugs, errors = [], []
    for entry in entries:
        try:
            meaning = _meaning(tool, entry)
        except PolicyError as error:
            errors.append(error)
            continue
        settings.update(meaning.settings)
        origins.update(dict.fromkeys(meaning.settings, f"{entry.name}={shown(entry.value)}"))
        bugs += [f"{entry.name}={shown(entry.value)} {meaning.bug}"] if meaning.bug else []
    if errors and (adapts(settings["kind"]) or (settings["kind"] == "fixed" and "init_scale" not in settings)):
        raise errors[0]
    return settings, bugs if adapts(settings["kind"]) else [], origins


def _meaning(tool: Tool, entry: _Entry) -> Meaning:
    """Return the meaning of one entry. Raises `PolicyError` if a setting breaks its rule, under the tool's name."""
    try:
        meaning = entry.key.reading.read(entry.value)
        for name in meaning.settings.keys() & SETTINGS:
            check_setting(name, meaning.settings[name])
    except (NoCounterpartError, PolicyError) as reason:
        raise PolicyError(f"{tool.name}: {entry.name}={shown(entry.value)} has no counterpart here: {reason}") from None
    return meaning


def _policy(tool: Tool, settings: Settings, origins: Mapping[str, str]) -> ScalingPolicy:
    kind = settings["kind"]
    values = {name: settings[name] for name in settings_of(kind) if name in settings}
    for low, high in _ORDER:
        if low in values and high in values and values[low] > values[high]:
            above, below = (origins.get(name, f"its {name} of {values[name]:g}") for name in (low, high))
            raise PolicyError(
                f"{tool.name}: {above} is above {below}; "
                "there an overflow or growth jumps to the bound, which this library never does; pass them in order"
            )
    return policy_from_dict({"kind": kind, **values})


def _kind_bugs(tool: Tool, kind: str) -> list[str]:
    if kind == "none":
        return ["if it is turned off it applies infinite gradients; NoScaling skips the steps that overflow"]
    return [tool.fixed_bug] if kind == "fixed" and tool.fixed_bug else []

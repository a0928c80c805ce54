"""The types of the records that describe another tool's keys and checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Settings: TypeAlias = dict[str, Any]
"""Fields of a policy by name, and its `"kind"`."""


class NoCounterpartError(ValueError):
    """A value has no counterpart; the message gives the reason, and the caller adds the name of the field."""


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REQUIRED = _Sentinel("required")
"""The default of a key for which the original has no default."""


class Meaning(NamedTuple):
    """The settings for a value, and the bug of the original tool that affects it, or an empty text."""

    settings: Settings
    bug: str = ""


# Records hold functions and dicts, which have no useful equality. By identity they can be compared and be keys.
@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """The translation of one key, and its description for the table.

    `read` raises `NoCounterpartError` for a value without a counterpart.
    """

    text: str
    read: Callable[[Any], Meaning]


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """One key of a tool's config: its names, its reading and the tool's default."""

    names: tuple[str, ...]
    reading: Reading
    default: Any
    none_is_default: bool = False

    @property
    def name(self) -> str:
        """The name that the tool's documentation uses."""
        return self.names[0]


def key(names: str, reading: Reading, default: Any = REQUIRED, *, none_is_default: bool = False) -> Key:
    """Return a key; `names` are separated by spaces."""
    return Key(tuple(names.split()), reading, default, none_is_default)


def _unchanged(settings: Settings, _: Mapping[str, Any]) -> Meaning:
    """Return the settings unchanged."""
    return Meaning(settings)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """One way to configure a tool: a constructor, a JSON block or a command line."""

    title: str
    keys: tuple[Key, ...]
    settings: Settings
    """The settings that the tool hard-codes, so that no key sets them."""
    ignored: tuple[str, ...] = ()
    """Patterns of keys that do not concern the loss scale, as in `fnmatch`."""
    adjust: Callable[[Settings, Mapping[str, Any]], Meaning] = _unchanged
    """Returns the final settings if several keys interact, from the settings so far and the config."""


@dataclasses.dataclass(frozen=True, eq=False)
class Counter:
    """One counter of a saved scaler: its names in the checkpoint, and its conversion to a field of the state.

    `needs` names the setting that the conversion needs, or is empty. With `equal`, the original acts only if the count
    equals its limit, so that a count beyond the limit has no effect there.
    """

    text: str
    names: tuple[tuple[str, ...], ...]
    place: Callable[..., int]
    needs: str = ""
    optional: bool = False
    equal: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """One layout of a tool's saved scaler: the names of its scale, and its counters by the field of the state."""

    scale: tuple[str, ...]
    counters: Mapping[str, Counter] = dataclasses.field(default_factory=dict)
    title: str = "in a checkpoint"


@dataclasses.dataclass(frozen=True, eq=False)
class Tool:
    """One tool's configs and checkpoints as data; `docs/migrating.md` describes the differences."""

    name: str
    title: str
    version: str
    """The release that the record describes."""
    forms: tuple[Form, ...]
    saved: tuple[Saved, ...]
    fixed_bug: str = ""
    """The bug of the tool under a fixed scale, or an empty text."""
    within: str = ""
    """The key of the scaler's dict in a checkpoint, or a pattern of keys."""
    saved_form: int = 0
    """The index in `forms` of the form with the keys of a checkpoint."""
    unwrap: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Returns the part of a larger config that concerns the scale."""

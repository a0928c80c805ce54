"""Records about another tool: its keys and its checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Settings: TypeAlias = dict[str, Any]
"""Fields of a policy by name, and its `"kind"`."""


class NoCounterpartError(ValueError):
    """The reason why a value has no counterpart; whoever catches it names the field."""


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REQUIRED = _Sentinel("required")
"""The default of a key that the original gives none."""
OMIT = _Sentinel("omit")
"""What `Reading.write` returns where there is nothing to say."""


class Meaning(NamedTuple):
    """What a value says in our words, and what the original does wrong with it, if anything."""

    settings: Settings
    bug: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """How one key is translated: in words for the table, and in both directions.

    `read` raises `NoCounterpartError` for a value without a counterpart, `write` for settings the key cannot say.
    """

    text: str
    read: Callable[[Any], Meaning]
    write: Callable[[Settings], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """One key of a tool's config: its name (and other names it goes by), its reading and the tool's default."""

    names: tuple[str, ...]
    reading: Reading
    default: Any
    none_is_default: bool = False

    @property
    def name(self) -> str:
        """The name that `to_peer` writes."""
        return self.names[0]


def key(names: str, reading: Reading, default: Any = REQUIRED, *, none_is_default: bool = False) -> Key:
    """Return a key; `names` may list several, the one to write first."""
    return Key(tuple(names.split()), reading, default, none_is_default)


def _nothing(settings: Settings, _: Mapping[str, Any]) -> Meaning:
    """Return the settings as they are."""
    return Meaning(settings)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """One way to configure a tool: a constructor, a JSON block or a command line."""

    title: str
    keys: tuple[Key, ...]
    settings: Settings
    """Settings of ours that no key sets: what the tool has hard-coded."""
    ignored: tuple[str, ...] = ()
    """Keys that do not concern the loss scale; `*` stands for anything."""
    adjust: Callable[[Settings, Mapping[str, Any]], Meaning] = _nothing
    """What follows from several keys together, given the settings and the config."""
    only_read: bool = False
    """Whether `to_peer` leaves this form alone."""


@dataclasses.dataclass(frozen=True, eq=False)
class Counter:
    """One counter of a saved scaler: the keys it is made of, and where it is placed under a policy.

    `needs` is the setting without which it cannot be placed, or nothing. `equal` says that the original acts only where
    the count equals its limit, so that a count past the limit stays without effect there.
    """

    text: str
    names: tuple[tuple[str, ...], ...]
    place: Callable[..., int]
    needs: str = ""
    optional: bool = False
    equal: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """One layout of a tool's saved scaler: where its scale is, and the counters by the name of our field."""

    scale: tuple[str, ...]
    counters: Mapping[str, Counter] = dataclasses.field(default_factory=dict)
    title: str = "in a checkpoint"


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """One tool's configs and checkpoints, as data; `docs/migrating.md` tells in words what differs here."""

    name: str
    title: str
    version: str
    """The release whose behaviour this is."""
    forms: tuple[Form, ...]
    saved: tuple[Saved, ...]
    fixed_bug: str = ""
    """What the tool does wrong under a fixed scale."""
    within: str = ""
    """The key, or pattern of keys, under which checkpoints keep the scaler's part."""
    saved_form: int = 0
    """Which of `forms` names the settings that a checkpoint holds."""
    unwrap: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Takes the part that concerns the scale out of a larger config."""

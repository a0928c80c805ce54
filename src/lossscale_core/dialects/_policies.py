"""Policies from other tools' configs, and back where the other tool can say the same."""

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from numbers import Number
from types import NoneType
from typing import Any, NamedTuple

from lossscale_core._config import PolicyLike, as_policy, policy_from_dict, policy_to_dict
from lossscale_core._policy import KINDS, ScalingPolicy
from lossscale_core._settings import RULES, rules_of
from lossscale_core._words import shown
from lossscale_core.dialects._peers import find_peer, nearest
from lossscale_core.dialects._record import OMIT, REQUIRED, Form, Key, Meaning, NoCounterpartError, Peer, Settings
from lossscale_core.errors import DialectWarning, PolicyError

_REMARKS = ("note", "comment", "_comment")  # what people write where a format has no comments
_MOST_WRAPPED = 8
ONE_VALUE = (Number, str, NoneType)
_ORDER = (("min_scale", "init_scale"), ("init_scale", "max_scale"), ("min_scale", "max_scale"))


def from_peer(name: str, config: Mapping[str, Any], *, warn: bool = True) -> ScalingPolicy:
    """Return the policy that behaves like the tool `name` under `config`.

    The policy reproduces the scales and the skipped steps of every run in which the original's scale stays between
    2**-126 and 2**126 and above its own floor, exactly if all factors are powers of two. `docs/migrating.md` lists the
    differences.

    Args:
        name: The name of the tool, one of `peers()`.
        config: The tool's own names: the keywords of its constructor, or the block of its config file. Keys left out
            take the tool's defaults. The dict is not changed.
        warn: Whether to warn (`DialectWarning`) if the original does something wrong under this config. Replacements
            for a tool whose users know it pass False.

    Returns:
        A new policy.

    Raises:
        PolicyError: The tool or a key is unknown, or no policy can express a value; the message names the tool's key.
    """
    policy, bugs = translate(find_peer(name, PolicyError), config)
    for bug in bugs if warn else ():
        warnings.warn(bug, DialectWarning, stacklevel=2)
    return policy


def to_peer(name: str, policy: PolicyLike) -> dict[str, Any]:
    """Return the config under which the tool `name` behaves like `policy`.

    Args:
        name: The name of the tool, one of `peers()`.
        policy: Anything that `as_policy` accepts.

    Returns:
        A plain dict of the tool's own names.

    Raises:
        PolicyError: The tool is unknown, or cannot express the policy; the message names the field.
    """
    peer, scaling = find_peer(name, PolicyError), as_policy(policy)
    refusals = []
    for form in (form for form in peer.forms if not form.only_read):
        try:
            return _written(peer, form, scaling)
        except NoCounterpartError as refusal:
            refusals.append(str(refusal))
    raise PolicyError(f"{name} cannot express this policy: {refusals[0]}; change the field, or stay with this library")


def translate(peer: Peer, config: Mapping[str, Any]) -> tuple[ScalingPolicy, list[str]]:
    """Return the policy, and a sentence for each thing the original does wrong under this config."""
    if not isinstance(config, Mapping):
        raise PolicyError(f"the config of {peer.name} must be a dict of its keys, not {shown(config)}")
    try:
        config = {name: plain(value) for name, value in peer.unwrap(config).items() if name not in _REMARKS}
        form = form_of(peer, config)
        said = list(_said(peer, form, config))
        settings, bugs, origins = _settings_of(peer, form, said)
        settings, bug = form.adjust(settings, config)
    except NoCounterpartError as refusal:
        raise PolicyError(f"{peer.name}: {refusal}") from None
    bugs += [bug] if bug else []
    bugs = [f"{peer.name}: {bug}" for bug in [*bugs, *_kind_bugs(peer, settings["kind"])]]
    return _policy(peer, settings, origins), bugs


def form_of(peer: Peer, config: Mapping[str, Any]) -> Form:
    """Return the form of config that knows most of these keys; raise `PolicyError` for one that it does not know."""
    unknown = {form: [name for name in config if not _knows(form, name)] for form in peer.forms}
    form = min(peer.forms, key=lambda form: len(unknown[form]))
    for name in unknown[form]:
        names = list(dict.fromkeys(name for each in peer.forms for one in each.keys for name in one.names))
        if name in names:
            raise PolicyError(
                f"{peer.name}: {name} belongs to another form of config than the other keys; pass one form"
            )
        raise PolicyError(f"{shown(name)} is not a key of {peer.name}; {nearest(name, names)}known: {', '.join(names)}")
    return form


def plain(value: Any) -> Any:
    """Return a list, array or variable of one element as the number it holds, and everything else as it is."""
    for _ in range(_MOST_WRAPPED):  # a bound, since a pickled list may hold itself
        if not isinstance(value, list | tuple) or len(value) != 1:
            break
        value = value[0]
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, TypeError, RuntimeError):  # more elements than one
            return value
    return plain(value.numpy()) if hasattr(value, "numpy") else value


def _knows(form: Form, name: str) -> bool:
    is_ignored = any(fnmatchcase(str(name), pattern) for pattern in form.ignored)
    return is_ignored or any(name in one.names for one in form.keys)


class _Said(NamedTuple):
    """A key of the form, the name it was given under, and its value or the tool's default."""

    key: Key
    name: str
    value: Any


def _said(peer: Peer, form: Form, config: Mapping[str, Any]) -> Iterator[_Said]:
    """Yield what the config says of each key of the form."""
    for one in form.keys:
        names = [name for name in one.names if name in config]
        for name in names:
            if not isinstance(config[name], ONE_VALUE):
                raise PolicyError(f"{peer.name}: {name}={shown(config[name])} must be one number, word or flag")
        if any(config[name] != config[names[0]] for name in names[1:]):
            raise PolicyError(f"{peer.name}: {' and '.join(names)} are one setting, but differ; leave one out")
        if not names and one.default is REQUIRED:
            raise PolicyError(f"{peer.name} has no default for {one.name}; add it to the config")
        is_default = not names or (config[names[0]] is None and one.none_is_default)
        yield _Said(one, (names or [one.name])[0], one.default if is_default else config[names[0]])


def _settings_of(peer: Peer, form: Form, said: list[_Said]) -> tuple[Settings, list[str], dict[str, str]]:
    """Return all settings together, what the original does wrong, and by setting the key of theirs that says it.

    A fixed scale needs no more than its scale.
    """
    settings: Settings = {"kind": "dynamic", **form.settings}
    origins: dict[str, str] = {}
    bugs, errors = [], []
    for one in said:
        try:
            meaning = _meaning(peer, one)
        except PolicyError as error:
            errors.append(error)
            continue
        settings.update(meaning.settings)
        origins.update(dict.fromkeys(meaning.settings, f"{one.name}={shown(one.value)}"))
        bugs += [f"{one.name}={shown(one.value)} {meaning.bug}"] if meaning.bug else []
    adapts = KINDS[settings["kind"]].adapts
    if errors and (adapts or (settings["kind"] == "fixed" and "init_scale" not in settings)):
        raise errors[0]
    return settings, bugs if adapts else [], origins


def _meaning(peer: Peer, said: _Said) -> Meaning:
    """Return what one key says, each setting checked by its own rule under the name of theirs."""
    try:
        meaning = said.key.reading.read(said.value)
        for name in meaning.settings.keys() & RULES.keys():
            RULES[name].validate(name, meaning.settings[name])
    except (NoCounterpartError, PolicyError) as reason:
        raise PolicyError(f"{peer.name}: {said.name}={shown(said.value)} has no counterpart here: {reason}") from None
    return meaning


def _policy(peer: Peer, settings: Settings, origins: Mapping[str, str]) -> ScalingPolicy:
    kind = settings["kind"]
    values = {field.name: settings[field.name] for field, _ in rules_of(KINDS[kind]) if field.name in settings}
    for low, high in _ORDER:
        if low in values and high in values and values[low] > values[high]:
            above, below = (origins.get(name, f"its {name} of {values[name]:g}") for name in (low, high))
            raise PolicyError(
                f"{peer.name}: {above} is above {below}; "
                "there an overflow or growth would jump to the bound, here it never does: pass them in order"
            )
    return policy_from_dict({"kind": kind, **values})


def _kind_bugs(peer: Peer, kind: str) -> list[str]:
    if kind == "none":
        return ["turned off, it applies infinite gradients; NoScaling skips the steps that overflow"]
    return [peer.fixed_bug] if kind == "fixed" and peer.fixed_bug else []


def _written(peer: Peer, form: Form, policy: ScalingPolicy) -> dict[str, Any]:
    """Return the policy in this form, having read it back; raise `NoCounterpartError` where it is not the same."""
    wanted = _essence(policy)
    config = {one.name: one.reading.write(policy_to_dict(policy)) for one in form.keys}
    unsaid = [one.name for one in form.keys if one.default is REQUIRED and config[one.name] is OMIT]
    if unsaid:
        raise NoCounterpartError(f"kind={wanted['kind']!r} says nothing of {unsaid[0]}, which must be given there")
    config = {name: value for name, value in config.items() if value is not OMIT}
    try:
        back, bugs = translate(peer, config)
    except PolicyError as error:
        raise NoCounterpartError(f"written for kind={wanted['kind']!r} it is refused, since {error}") from None
    got = _essence(back)
    for name in dict.fromkeys([*wanted, *got]):
        if wanted.get(name) != got.get(name):
            raise NoCounterpartError(f"{name} is {wanted.get(name)!r} here and would be {got.get(name)!r} there")
    if bugs:
        raise NoCounterpartError(f"kind={wanted['kind']!r} differs, since {bugs[0]}")
    return config


def _essence(policy: ScalingPolicy) -> Settings:
    """Return the settings that a policy acts upon: one that backs off at once has no tolerance to restore."""
    settings = policy_to_dict(policy)
    if settings["kind"] == "tolerant" and settings["tolerance"] == 0.0:
        del settings["tolerance"]
        settings.update(kind="dynamic", hysteresis=1, cooldown=0)
    if settings.get("hysteresis") == 1:
        settings.pop("refill_on_finite", None)
        settings.pop("refill_on_backoff", None)
    return settings

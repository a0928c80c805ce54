"""Error messages for likely mistakes: a misspelt or unnamed setting, and swapped policy and state."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lossscale_core._messages import not_a_state, shown, unknown_name
from lossscale_core._settings import Rule

T = TypeVar("T")


def loss_scale_of(state: Any, call: str) -> Any:
    """Return the loss scale of a state.

    Args:
        state: A state, or any other value.
        call: The right call, for the error, such as `unscale(grads, state)`.

    Returns:
        The loss scale, on the device of the state.

    Raises:
        TypeError: `state` is not a state.
    """
    try:
        return state.loss_scale
    except AttributeError as error:
        raise not_a_state(state, call) from error


def explain_settings(rules: Mapping[str, Rule]) -> Callable[[type[T]], type[T]]:
    """Return a decorator of dataclasses: their `TypeError` for a wrong argument then says which setting was meant."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__

        # `wraps` keeps the signature for `inspect`; a type checker reads it from the fields.
        @functools.wraps(init)
        def explained_init(self: Any, *args: Any, **settings: Any) -> None:
            try:
                init(self, *args, **settings)
            except TypeError:
                if sentence := _wrong_argument(cls, rules, args, settings):
                    raise TypeError(sentence) from None
                raise

        cls.__init__ = explained_init  # type: ignore[method-assign]
        return cls

    return decorate


def _wrong_argument(
    cls: Any, rules: Mapping[str, Rule], values: tuple[Any, ...], settings: Mapping[str, Any]
) -> str | None:
    """Return the error text for a wrong number of arguments or a wrong name, or None."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    positional = [name for name, field in fields.items() if not field.kw_only]
    surplus = values[len(positional) :]
    for name in settings:
        if name not in fields:
            return unknown_name(name, f"a setting of {cls.__name__}", fields)
    if surplus and fields and not positional:
        named = _named(surplus, rules, (name for name in fields if name not in settings))
        meant = named or "{0.name}={0.default}".format(*fields.values())
        verb = "has" if len(surplus) == 1 else "have"
        given = f"{cls.__name__} takes settings by name, and {_listed(surplus)} {verb} none"
        return f"{given}; write {cls.__name__}({meant})"
    if surplus:
        takes = f"{', '.join(positional) or 'no settings'}, but got {_listed(values)}"
        return f"{cls.__name__} takes {takes}; leave out {_listed(surplus)}"
    for name in positional[len(values) :]:
        if name not in settings and fields[name].default is dataclasses.MISSING:
            return f"{cls.__name__} needs {name}; pass it, as in {cls.__name__}({name}=1024.0)"
    return None


def _named(values: Iterable[Any], rules: Mapping[str, Rule], names: Iterable[str]) -> str:
    """Return each value with the next name that accepts it by its rule; an empty text if no rule does."""
    left, parts = iter(names), []
    for value in values:
        name = next((name for name in left if rules[name].accepts(value)), None)
        if name is None:
            return ""
        parts.append(f"{name}={shown(value)}")
    return ", ".join(parts)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(shown, values))

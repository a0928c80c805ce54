"""Values and names in messages: on one line, escaped, and short even for a large value."""

import reprlib
from collections.abc import Iterable
from typing import Any

__all__ = ["shown", "shown_names"]

_LONGEST = 500
_MOST_NAMES = 12
_ABBREVIATED = (dict, list, tuple, set, frozenset, str, int)


class _Short(reprlib.Repr):
    """`reprlib.Repr` that goes by `isinstance` instead of type names, and that abbreviates integers of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 100, _LONGEST, _LONGEST

    def repr1(self, x: Any, level: int) -> str:
        for kind in _ABBREVIATED:
            if isinstance(x, kind) and not hasattr(x, "_fields"):
                return str(getattr(self, f"repr_{kind.__name__}")(x, level))
        return self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            # https://docs.python.org/3/library/stdtypes.html#integer-string-conversion-length-limitation
            return f"<an integer of {x.bit_length()} bits>"


_SHORT = _Short()


def shown(value: Any) -> str:
    """Return the `repr` of a value on one line, cut to a few hundred characters.

    Args:
        value: Any value, of a user or from a file, whatever its size is and whatever its `repr` raises.

    Returns:
        The text.
    """
    # The time is bounded as well: a nested tuple that holds the same tuple twice at 50 levels has 2**50 leaves.
    try:
        text = _SHORT.repr(value)
    except Exception:  # a `__repr__` of the user's may raise anything, and a message must not fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown_names(names: Iterable[Any]) -> str:
    """Return at most twelve names, separated by commas.

    Args:
        names: The names; one that is long, or not plain text, is shown as `shown` does.

    Returns:
        The text, which ends in the number of the names that are left out.
    """
    listed = list(names)
    words = [_name(name) for name in listed[:_MOST_NAMES]]
    more = len(listed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def _name(name: Any) -> str:
    is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= 60
    return name if is_plain else shown(name)

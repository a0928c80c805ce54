"""Values and names as messages show them: on one line, escaped, and short however large the value is."""

import reprlib
from collections.abc import Iterable
from typing import Any

_LONGEST = 500
_MOST_NAMES = 12
_ABBREVIATED = (dict, list, tuple, set, frozenset, str, int)


class _Short(reprlib.Repr):
    """Python's own abbreviations, by what a value is and not by what its type is called, and of numbers of any size."""

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
        except ValueError:  # Python writes no more than 4,300 digits
            return f"<an integer of {x.bit_length()} bits>"


_SHORT = _Short()


def shown(value: Any) -> str:
    """Return a value as Python writes it, cut to a few hundred characters.

    The work is bounded as well: a tuple of a tuple twice, fifty deep, has 2**50 leaves in a few hundred bytes.
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # whatever a stranger's own `__repr__` or keys raise: a message must not fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown_names(names: Iterable[Any]) -> str:
    """Return names apart by commas: plain ones as they are, others as Python writes them, and not too many."""
    listed = list(names)
    words = [_name(name) for name in listed[:_MOST_NAMES]]
    more = len(listed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def _name(name: Any) -> str:
    is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= 60
    return name if is_plain else shown(name)

"""Values, names and numbers in messages: on one line, escaped, and short even for a large value."""

import math
import reprlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

_LONGEST = 500
_LONGEST_NAME = 100
_MOST_NAMES = 12
_LIBRARIES = (
    *("lossscale", *(f"lossscale_{each}" for each in ("core", "jax", "keras", "tf", "torch"))),
    *("jax", "keras", "tensorflow", "tf_keras", "torch"),
)
"""What may lie between a line of a user's program and the function that warns of it."""


class _Short(reprlib.Repr):
    """`reprlib.Repr` that names an array of several elements by its shape, and its storage by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 100, _LONGEST, _LONGEST

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        # An array in a small file may have more elements than fit in memory: they may all be the same number.
        if isinstance(shape, tuple) and math.prod(shape) > 1:
            return f"{type(x).__name__} of shape {tuple(shape)}"
        if shape is None and hasattr(x, "nbytes"):  # an array's storage: its text has a line for each element
            return f"<{type(x).__name__}>"
        return super().repr1(x, level)


_SHORT = _Short()


def describe(value: Any) -> str:
    """Return the `repr` of a value on one line, cut to a few hundred characters.

    Args:
        value: Any value, of a user or from a file, of any size, also if its `repr` raises an error.

    Returns:
        The text.
    """
    # The time is bounded as well: a nested tuple that holds the same tuple twice at 50 levels has 2**50 leaves.
    try:
        text = _SHORT.repr(value)
    except Exception:  # a `__repr__` of the user's may raise anything, and a message must not fail
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    # The name of a class may come from a file, too: line ends and control characters are written as in Python's source.
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def join_names(names: Iterable[Any]) -> str:
    """Return at most twelve names, separated by commas.

    Args:
        names: The names; one that is long, or not plain text, is described as `describe` does.

    Returns:
        The text, which ends in the number of the names that are left out.
    """
    listed = list(names)
    words = [
        name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME else describe(name)
        for name in listed[:_MOST_NAMES]
    ]
    more = len(listed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def format_number(number: float) -> str:
    """Return a number as text, a power of two from 2**10 up or from 2**-10 down as `2**n`.

    Args:
        number: A loss scale or another number, possibly not finite.

    Returns:
        The text, in six digits if it is not such a power.
    """
    mantissa, exponent = math.frexp(number)
    return f"2**{exponent - 1}" if mantissa == 0.5 and abs(exponent - 1) >= 10 else f"{number:g}"


def nearest_name(name: Any, known: Iterable[str]) -> str:
    """Return the question whether the nearest known name was meant.

    Args:
        name: The unknown name, or any other value.
        known: The known names.

    Returns:
        The question, which ends in a space, or an empty text if no known name is near.
    """
    # Imported late: most processes need no such question, and pay for every import.
    import difflib

    # The time of a match grows with the product of the lengths, and the name may come from any file.
    found = difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {found[0]!r}? " if found else ""


def unknown_name(name: Any, what: str, known: Iterable[str]) -> str:
    """Return the sentence for an unknown name.

    Args:
        name: The unknown name, or any other value.
        what: What the name is not, such as `a setting of DynamicScaling`.
        known: The known names.

    Returns:
        The sentence, with the nearest known name and all known names.
    """
    names = list(known)
    return f"{describe(name)} is not {what}; {nearest_name(name, names)}known: {', '.join(names) or 'none'}"


def require_flag(grads_finite: Any, call: str) -> None:
    """Raise `TypeError` unless a value is a bool of shape `()` of any framework; by its type, also if it is traced.

    Args:
        grads_finite: The value, for example of swapped arguments, or a norm.
        call: The right call, such as `select(grads_finite, new, old)`.
    """
    # The dtypes of the frameworks have no common interface, but the name of each one says what it is.
    is_bool = isinstance(grads_finite, bool) or "bool" in str(getattr(grads_finite, "dtype", ""))
    if not is_bool or not getattr(grads_finite, "shape", ()) == ():  # shapes of TensorFlow have no != if unknown
        raise TypeError(
            f"grads_finite={describe(grads_finite)} must be a bool of shape (); call {call}, with what all_finite "
            "returned"
        )


def require_pairs(grads_and_vars: Any, caller: str) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs in a list; raise `TypeError` for what does not hold them."""
    pairs: list[Any] = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [None]
    if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return pairs
    raise TypeError(
        f"{caller} was given {describe(grads_and_vars)}; it takes (gradient, variable) pairs; pass "
        "zip(grads, variables)"
    )


def warn_caller(message: str, category: type[Warning] = UserWarning, *, packages: Iterable[str] = ()) -> None:
    """Warn at the line of the user's program, however many functions of libraries are between it and this one.

    Args:
        message: The text.
        category: The type of the warning.
        packages: The top-level packages to look past in addition to lossscale's and the frameworks', such as your own.
    """
    # `warnings.warn` has `skip_file_prefixes` for this from Python 3.12 on.
    frame, level, passed = sys._getframe(1), 2, {*_LIBRARIES, *packages}
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in passed:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

"""Texts for messages: values, names and numbers on one line, escaped and shortened."""

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
    *("lossscale", "lossscale_core", "lossscale_jax", "lossscale_keras", "lossscale_tf", "lossscale_torch"),
    *("jax", "keras", "tensorflow", "tf_keras", "torch"),
)
"""The packages that `warn_caller` skips when it looks for the line of the user's program."""


class _Short(reprlib.Repr):
    """`reprlib.Repr` that describes an array of several elements by its shape, and an array's storage by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 100, _LONGEST, _LONGEST

    def repr1(self, x: Any, level: int) -> str:
        """Return the text of a value at a level of nesting."""
        shape = getattr(x, "shape", None)
        # An array in a small file may have more elements than fit in memory, if all of them are the same number.
        if isinstance(shape, tuple) and math.prod(shape) > 1:
            return f"{type(x).__name__} of shape {tuple(shape)}"
        if shape is None and hasattr(x, "nbytes"):  # the storage of an array: its `repr` has a line for each element
            return f"<{type(x).__name__}>"
        return super().repr1(x, level)


_SHORT = _Short()


def describe(value: Any) -> str:
    """Return the `repr` of a value on one line, cut to a few hundred characters.

    Args:
        value: Any value of any size, from a user or a file. Its `repr` may raise an error.

    Returns:
        The text.
    """
    # `reprlib` also bounds the time: a tuple that holds the same tuple twice at 50 levels has 2**50 leaves.
    try:
        text = _SHORT.repr(value)
    except Exception:  # a `__repr__` may raise any error, and a message must not fail
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    # The name of a class may come from a file, too: line ends and control characters are escaped as in Python's source.
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def join_names(names: Iterable[Any]) -> str:
    """Return at most twelve names, separated by commas.

    Args:
        names: The names. `describe` shortens a name that is long or is not plain text.

    Returns:
        The text, which ends in the number of names that are left out.
    """
    listed = list(names)
    words = [
        name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME else describe(name)
        for name in listed[:_MOST_NAMES]
    ]
    more = len(listed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def format_number(number: float) -> str:
    """Return a number as text: `2**n` for a power of two with n ≥ 10 or n ≤ -10, else up to six digits.

    Args:
        number: A loss scale or another number, also NaN or infinity.

    Returns:
        The text.
    """
    mantissa, exponent = math.frexp(number)
    return f"2**{exponent - 1}" if mantissa == 0.5 and abs(exponent - 1) >= 10 else f"{number:g}"


def nearest_name(name: Any, known: Iterable[str]) -> str:
    """Return a question with the known name that is most similar to a name.

    Args:
        name: The unknown name, or any other value.
        known: The known names.

    Returns:
        The question with a space at its end, or an empty text if no known name is similar.
    """
    import difflib  # imported late, because few processes need it

    # The time of a match grows with the product of the lengths, and the name may come from any file.
    matches = difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {matches[0]!r}? " if matches else ""


def unknown_name(name: Any, what: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name.

    Args:
        name: The unknown name, or any other value.
        what: The kind of the known names, such as `a setting of DynamicScaling`.
        known: The known names.

    Returns:
        The message, with the most similar known name and all known names.
    """
    names = list(known)
    return f"{describe(name)} is not {what}; {nearest_name(name, names)}known: {', '.join(names) or 'none'}"


def require_flag(grads_finite: Any, call: str) -> None:
    """Raise `TypeError` unless a value is a bool of shape `()` of any framework. Does not synchronise with the host.

    Args:
        grads_finite: The value; it may be traced.
        call: The right call, such as `select(grads_finite, new, old)`.
    """
    # The dtypes of the frameworks have no common interface, but every name of a bool dtype contains "bool".
    is_bool = isinstance(grads_finite, bool) or "bool" in str(getattr(grads_finite, "dtype", ""))
    if not is_bool or not getattr(grads_finite, "shape", ()) == ():  # shapes of TensorFlow have no != if unknown
        raise TypeError(
            f"grads_finite={describe(grads_finite)} must be a bool of shape (); call {call}, with what all_finite "
            "returned"
        )


def require_pairs(grads_and_vars: Any, caller: str) -> list[tuple[Any, Any]]:
    """Return a list of (gradient, variable) pairs. Raise `TypeError` for other values.

    Args:
        grads_and_vars: The argument of `caller`.
        caller: The name of the function that takes the pairs, for the error.
    """
    pairs: list[Any] = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [None]
    if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return pairs
    raise TypeError(
        f"{caller} was given {describe(grads_and_vars)}; it takes (gradient, variable) pairs; pass "
        "zip(grads, variables)"
    )


def warn_caller(message: str, category: type[Warning] = UserWarning, *, packages: Iterable[str] = ()) -> None:
    """Warn with the line of the user's program that called a library.

    Args:
        message: The text.
        category: The type of the warning.
        packages: Other top-level packages that count as libraries, besides lossscale's and the frameworks'.
    """
    # `warnings.warn` has `skip_file_prefixes` for this from Python 3.12 on.
    frame, level, libraries = sys._getframe(1), 2, {*_LIBRARIES, *packages}
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in libraries:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

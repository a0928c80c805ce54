"""Functions for checks of training loops in all adapters: planned overflows, comparisons and messages."""

from collections.abc import Sequence
from typing import Any

from lossscale_core._messages import join_names

BAD_STEPS = frozenset((0, 3, 4))
"""The steps that overflow: the first step, when every value is still at its start, and two steps in a row."""
SCALES = (1.0, 2.0**10)
"""The loss scales that must give the same results: powers of two, so that scaling and unscaling are exact."""
CLOSE = 0.02
"""The largest accepted relative difference between the results of two loss scales."""


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN. Synchronises with the host.

    Args:
        a: An array of any framework, or any other value.
        b: Another value. Equal arrays have the same shape and dtype.

    Returns:
        True if the values are equal.
    """
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return a is b or (type(a) is type(b) and bool(a == b or (a != a and b != b)))


def change(name: str, before: Any, after: Any) -> str:
    """Return a clause about the change of a value. Synchronises with the host.

    Args:
        name: The name of the value.
        before: The value before the step: a plain value, or an array of any framework.
        after: The value after the step.

    Returns:
        The clause. It has the two values unless they are arrays of several elements.
    """
    shapes = {tuple(value.shape) for value in (before, after) if hasattr(value, "shape")}
    return f"{name} went from {before} to {after}" if shapes <= {()} else f"{name} changed"


def not_skipped(number: int, changes: Sequence[str], hint: str) -> str:
    """Return the message for a step that had to be skipped but changed values.

    Args:
        number: The number of the step.
        changes: The clause of `change` for each value.
        hint: What to do.

    Returns:
        The message.
    """
    return (
        f"step {number} was to be skipped, but {join_names(changes)}; a skipped step must leave all as it was; {hint}"
    )


def not_from_the_loss(number: int, names: Sequence[str], hint: str) -> str:
    """Return the message for gradients that are not zero although the loss was multiplied by zero.

    Args:
        number: The number of the step.
        names: The names of the parameters.
        hint: What to do.

    Returns:
        The message.
    """
    have = "has a gradient" if len(names) == 1 else "have gradients"
    return (
        f"at step {number} the loss was multiplied by zero, and {join_names(names)} {have} other than zero, "
        f"added without the loss scale; {hint}"
    )


def scales_differ(number: int, results: str, hint: str) -> str:
    """Return the message for a step that depends on the loss scale.

    Args:
        number: The number of the step.
        results: A noun phrase about the results of the two scales.
        hint: What to do.

    Returns:
        The message.
    """
    small, large = SCALES
    return (
        f"at step {number} a loss scale of {small:g} and one of {large:g} gave {results}; the loss scale must make no "
        f"difference; {hint}"
    )

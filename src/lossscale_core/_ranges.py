"""Functions that the range reports of all adapters need: names of values, the check of the loss, a line of progress."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lossscale_core._range_records import CHUNK, GRADIENT, NonfiniteInput
from lossscale_core._range_unscaled import unscaled_gradients

__all__ = [
    "CHUNK",
    "GRADIENT",
    "OUTSIDE",
    "Progress",
    "check_loss_shape",
    "name_of",
    "named_leaves",
    "named_values",
    "unscaled_gradients",
]

OUTSIDE = "loss_fn"
"""The place of operations that belong to no module."""
_LONGEST = 1000


class Progress:
    """A line on stderr that counts operations, for models that have more than a thousand."""

    def __init__(self) -> None:
        self._count = 0

    def step(self) -> None:
        """Count an operation, and show the count once in a thousand."""
        self._count += 1
        if self._count % 1000 == 0:
            print(f"\rrange_report: {self._count} operations", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line, if one was begun, and start to count from zero."""
        if self._count >= 1000:
            print(file=sys.stderr)
        self._count = 0


def check_loss_shape(shape: Sequence[int]) -> None:
    """Require that a loss has one element.

    Args:
        shape: The shape of the loss, all of it known.

    Raises:
        ValueError: The loss has no element, or several.
    """
    if any(length != 1 for length in shape):
        raise ValueError(f"loss_fn returned shape {tuple(shape)}; a loss has one element: return its mean or sum")


def named_values(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function refers to, with their names in the function.

    Args:
        function: A function, a method, a `functools.partial`, or an object with a `python_function`.

    Yields:
        Names and values: defaults and bound arguments, variables of enclosing functions, and those of the module.
        Dicts, lists and tuples are opened: `batch['labels']`.
    """
    inner = getattr(function, "python_function", function)
    found: dict[str, Any] = {}
    if isinstance(inner, functools.partial):
        with contextlib.suppress(TypeError, ValueError):
            found |= inspect.signature(inner.func).bind_partial(*inner.args, **inner.keywords).arguments
        inner = inner.func
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(inner).parameters.values()
        found = {each.name: each.default for each in parameters if each.default is not each.empty} | found
    with contextlib.suppress(TypeError, ValueError):
        variables = inspect.getclosurevars(inspect.unwrap(inner))
        found |= {**variables.nonlocals, **variables.globals, **found}
    for name, value in found.items():
        yield from named_leaves(name, value)


def named_leaves(name: str, value: Any, *, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested structure with their names.

    Args:
        name: The name of the structure.
        value: A leaf, or a mapping, list or tuple of nested structures; those with more than a thousand elements are
            left out.
        depth: The number of levels to open, since a structure may hold itself.

    Yields:
        Names, such as `batch['labels']` or `batch[0]`, and leaves.
    """
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items if depth and len(value) <= _LONGEST else ():
            yield from named_leaves(f"{name}[{key!r}]", each, depth=depth - 1)
    else:
        yield name, value


def name_of(array: Any, function: Callable[..., Any]) -> str | None:
    """Return the name that an array has in a function, for an array that is not finite.

    Args:
        array: An array, perhaps one that the framework has made of a value that the function refers to.
        function: A function as for `named_values`.

    Returns:
        The name of the array itself, or else of the first value of its shape that is not finite either; or None.
    """
    values = [(name, value) for name, value in named_values(function) if hasattr(value, "shape")]
    for name, value in values:
        if value is array:
            return name
    for name, value in values:
        with contextlib.suppress(Exception):  # from any library, if NumPy cannot hold the value
            if tuple(value.shape) == tuple(array.shape) and NonfiniteInput.of(value, name):
                return name
    return None

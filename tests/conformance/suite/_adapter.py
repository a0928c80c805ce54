"""The description of an adapter for the checks: its verbs, its arrays, and its ways of running."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_NAMES = re.compile(r"bfloat16|float16|float32|float64|complex64|complex128|int8|int16|int32|int64|bool")
_BY_TYPE = {bool: "bool", int: "int32", float: "float64", complex: "complex128"}


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype as NumPy spells it, found in `str(array.dtype)`.

    Does not synchronise with the host.

    Args:
        array: An array of any framework, or a Python bool, int, float or complex.

    Returns:
        The name of the dtype, such as "float32".
    """
    if type(array) in _BY_TYPE:
        return _BY_TYPE[type(array)]
    found = _NAMES.search(str(array.dtype))
    return found[0] if found else str(array.dtype)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged."""
    return function


def _step_by_step(step: Callable[..., Any], state: Any, flags: Sequence[Any]) -> Iterator[Any]:
    """Yield the state after each step."""
    for flag in flags:
        state = step(state, flag)
        yield state


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of running functions of arrays: eagerly, compiled, in a graph, in the body of a loop."""

    name: str
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged
    """Converts a pure function of nested arrays to one that runs this way, such as `jax.jit`."""
    has_values: bool = True
    """False if arrays have a dtype and a shape but no values, as on torch's `meta` device or in `jax.eval_shape`.

    Code that reads a value, and therefore would wait for a device, must raise there. Results are checked for dtype and
    shape only.
    """
    iterate: Callable[[Callable[..., Any], Any, Sequence[Any]], Iterator[Any]] = _step_by_step
    """Yields the state after each `step(state, flag)`; replace it for a way that takes many steps at once, as a scan.

    `step` is already transformed by `transform`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter, with the functions that make and read its arrays.

    `dtypes` lists the float and complex dtypes of the adapter, out of float16, bfloat16, float32, float64, complex64
    and complex128. A check that may depend on the dtype runs with each of them in the first way. If there are more than
    three, it runs with half of them in each other way.
    """

    name: str
    """The name of the adapter in messages."""
    verbs: Any
    """The module, or any object, with `init_state`, `scale`, `all_finite`, `unscale` and `select`."""
    asarray: Callable[[Any, str], Any]
    """Converts a NumPy array (float64, complex128, int32 or bool) to the adapter's array of the named dtype.

    The values are exact in that dtype. The checks also use the result, as a bool of shape `()`, as the flag of
    `update`.
    """
    to_numpy: Callable[[Any], Any] = np.asarray
    """Converts an array to a NumPy array of a dtype that holds the values exactly; waits for the device."""
    dtype_of: Callable[[Any], str] = dtype_name
    """Returns the name of an array's dtype as in `dtypes`, also for an array without values."""
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    xp: Any = None
    """The argument `xp` of `policy.update`; None if the namespace is inferred."""
    placement: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The keyword arguments of `init_state`."""
    ways: Sequence[Way] = (Way("eager"),)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Returns a context manager that is entered for each check, such as one for a device or a precision."""

    def __str__(self) -> str:
        return self.name

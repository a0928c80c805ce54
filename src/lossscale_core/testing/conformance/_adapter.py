"""What the checks must be told about an adapter: its verbs, its arrays, and the ways it runs."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_NAMES = re.compile(r"bfloat16|float16|float32|float64|complex64|complex128|int8|int16|int32|int64|bool")
_BY_TYPE = {bool: "bool", int: "int32", float: "float64", complex: "complex128"}


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype as NumPy spells it, such as "float32", found in `str(array.dtype)`.

    A Python bool, int, float or complex is named by its type. Does not synchronise with the host.
    """
    if type(array) in _BY_TYPE:
        return _BY_TYPE[type(array)]
    found = _NAMES.search(str(array.dtype))
    return found[0] if found else str(array.dtype)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function."""
    return function


def _step_by_step(step: Callable[..., Any], state: Any, flags: Sequence[Any]) -> Iterator[Any]:
    """Yield the states of one step after another."""
    for flag in flags:
        state = step(state, flag)
        yield state


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of running functions of arrays: eagerly, compiled, in a graph, in the body of a loop."""

    name: str
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    """Returns a pure function of nested arrays so that it runs this way, such as `jax.jit`."""
    has_values: bool = True
    """False where arrays have a dtype and a shape but no values, as on torch's `meta` device or in `jax.eval_shape`.

    Whatever reads a value, and so would wait for a device, must raise there. Results are checked for dtype and shape.
    """
    iterate: Callable[[Callable[..., Any], Any, Sequence[Any]], Iterator[Any]] = _step_by_step
    """Yields the states of `step(state, flag)` over flags, for what takes many steps at once, such as a scan.

    `step` has been through `transform`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter, and what the checks need to make and read its arrays.

    `dtypes` lists the float and complex dtypes it has, out of float16, bfloat16, float32, float64, complex64 and
    complex128; each check that a dtype may matter to is made with each.
    """

    name: str
    """How failures call it."""
    verbs: Any
    """The module, or any object, that has `init_state`, `scale`, `all_finite`, `unscale` and `select`."""
    asarray: Callable[[Any, str], Any]
    """Returns the array of a NumPy array's values (float64, complex128, int32 or bool) in the dtype of this name.

    float64 values are numbers that the dtype has. Of shape `()` it is what `update` takes as a flag.
    """
    to_numpy: Callable[[Any], Any] = np.asarray
    """Returns an array's values as a NumPy array of any dtype that holds them exactly; waits for the device."""
    dtype_of: Callable[[Any], str] = dtype_name
    """Returns the name of an array's dtype, as `dtypes` spells it; also where it has no values."""
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    xp: Any = None
    """The namespace that `policy.update` is given as `xp=`; None where it is inferred."""
    placement: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What `init_state` is given besides the policy."""
    ways: Sequence[Way] = (Way("eager"),)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around each check, such as a device or a precision."""

    def __str__(self) -> str:
        return self.name

"""The places where a step is decided: in a trace, on the device, or on the host."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from keras import ops

from lossscale_keras._backend import BACKEND, is_traced, native, xp
from lossscale_keras._stored import Stored

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Traced:
    """Numbers have no values yet, and a condition is a part of the graph."""

    xp: Any = xp
    """The array namespace of the numbers; None for scalars on the host."""
    cond: Any = staticmethod(ops.cond)
    where: Any = staticmethod(xp.where)
    is_finite: Any = staticmethod(xp.math.is_finite if BACKEND == "tensorflow" else xp.isfinite)
    read: Any = staticmethod(Stored.read)
    assign: Any = staticmethod(Stored.assign)
    lock: Any = staticmethod(lambda owner: nullcontext())
    """Return the context in which the state of an optimizer is read, updated and set."""
    number: Any = staticmethod(lambda array: array)
    """Return an array of shape `()` as a number of this place."""

    def norm(self, total: Any, scale: Any) -> Any:
        """Return the norm of unscaled gradients, whose scaled squares have this sum."""
        return ops.sqrt(total) / ops.cast(scale, total.dtype)

    def zero(self, dtype: str) -> Any:
        """Return the norm of a step that needs none."""
        return ops.zeros((), dtype)

    def decision(self, finite: Any, norm: Any, known: Any) -> tuple[Any, Any]:
        """Return the flag and the norm of a check, as a policy and a guard take them."""
        return finite, ops.cast(norm, "float32") if "float64" in str(getattr(norm, "dtype", "")) else norm


class Eager(Traced):
    """Numbers are on the device, and the flag is read.

    `ops.cond` would make JAX compile both functions at every step, and `torch.compile` start over.
    """

    @staticmethod
    def cond(flag: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Call one of two functions, which may assign variables."""
        return yes() if bool(flag) else no()


class Host(Eager):
    """Numbers are read: an eager operation of TensorFlow takes longer than the whole update on the host."""

    xp = None
    is_finite = staticmethod(math.isfinite)
    read = staticmethod(Stored.read_on_host)
    assign = staticmethod(Stored.assign_changed)
    lock = staticmethod(native.lock_of)

    @staticmethod
    def where(flag: bool, yes: Any, no: Any) -> Any:
        """Return one of two numbers."""
        return yes if flag else no

    def number(self, array: Any) -> Any:
        """Return the value of an array, or a number as it is."""
        return array.numpy()

    def norm(self, total: Any, scale: Any) -> Any:
        """Return the norm as a host scalar."""
        return np.sqrt(total) / scale

    def zero(self, dtype: str) -> Any:
        """Return a host scalar."""
        return 0.0

    def decision(self, finite: Any, norm: Any, known: Any) -> tuple[Any, Any]:
        """Return host scalars."""
        norm = float(norm)
        return bool(known), norm if norm < _LARGEST_FLOAT32 else math.inf


TRACED, EAGER, HOST = Traced(), Eager(), Host()


def place_of(arrays: list[Any]) -> Traced:
    """Return the place where a step with these arrays is decided."""
    return TRACED if is_traced(arrays) else HOST if BACKEND == "tensorflow" else EAGER

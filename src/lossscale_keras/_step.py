"""The parts of a step: the places where it is decided, the check of gradients, and their division."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_core.adapters import norm_by_unit
from lossscale_keras._backend import BACKEND, IndexedSlices, is_traced, native, xp
from lossscale_keras._stored import Stored
from lossscale_keras._verbs import all_finite, at_least_float32, dense, is_overwritten, parts

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


class States(NamedTuple):
    """The states of a policy and of a spike guard; on the host or as arrays."""

    scale: Any
    guard: Any


class Checked(NamedTuple):
    """The result of a check of gradients."""

    finite: Any
    """bool: whether all of them are finite, unscaled and in the dtypes of their variables."""
    norm: Any
    """float32, or float64 with such gradients: the norm of the unscaled ones; 0 if it is not needed."""
    known: Any
    """The same as `finite`; a Python bool where Python knows it, so that it is not read again."""


def check(grads: list[Any], variables: list[Any], loss_scale: Any, with_norm: bool, place: Traced) -> Checked:
    """Return whether gradients are finite, and their norm; `loss_scale` is None for gradients that are unscaled.

    A finite sum of squares proves that every element is finite, and is the norm, in one read. All elements are unscaled
    and tested if the sum is not finite, as for 1e20, if the scale is below 1, or if a cast to the dtype of a variable
    narrows. On the host the sum is read at once, and the result is on the host, too, if it is a proof.
    """
    pairs = [(grad, each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
    new_values = [dense(grad) for grad, each in pairs if is_overwritten(each)]
    pairs = [(grad, each) for grad, each in pairs if not is_overwritten(each)] if new_values else pairs
    scaled = [(at_least_float32(part), each.dtype) for grad, each in pairs for part in parts(grad)]
    narrows = any(_narrows(grad, each) for grad, each in pairs)
    total = native.sum_of_squares([grad for grad, _ in scaled])
    wide = keras.backend.standardize_dtype(total.dtype)
    total, scale = place.number(total), 1.0 if loss_scale is None else place.number(loss_scale)
    proof = place.is_finite(total) if loss_scale is None else place.is_finite(total) & (scale >= 1.0)
    if new_values:
        proof = all_finite(new_values) & proof

    def quick() -> Checked:
        return Checked(proof, place.norm(total, scale) if with_norm else place.zero(wide), True)

    def exact() -> Checked:
        divide = _division_by(loss_scale)
        flags = [all_finite(ops.cast(divide(grad), _real(dtype))) for grad, dtype in scaled]  # one copy at a time
        finite = ops.all(ops.stack([all_finite(new_values), *flags]))
        grads = [grad for grad, _ in scaled if 0 not in grad.shape]
        if not with_norm or not grads:
            return Checked(finite, ops.zeros((), wide), finite)
        largest = ops.max(ops.stack([ops.cast(ops.max(ops.abs(grad)), wide) for grad in grads]))
        squares = lambda unit: ops.cast(native.sum_of_squares([ops.divide(each, unit) for each in grads]), wide)  # noqa: E731
        factor, largest_number = ops.cast(1.0 / scale, wide), float(np.finfo(wide).max)
        return Checked(finite, norm_by_unit(largest, factor, squares, largest_number, xp=xp), finite)

    return exact() if narrows else Checked(*place.cond(proof, quick, exact))


def _real(dtype: Any) -> Any:
    """Return the dtype of the parts of complex arrays, and any other dtype as it is."""
    return {"complex64": "float32", "complex128": "float64"}.get(keras.backend.standardize_dtype(dtype), dtype)


def unscaled(grads: list[Any], variables: list[Any], divisor: Any) -> list[Any]:
    """Return gradients divided by `divisor`, if it is not None, in float32 or wider, in their variables' dtypes."""
    divide = _division_by(divisor)
    return [
        grad if grad is None or is_overwritten(each) else _cast(divide(at_least_float32(grad)), each.dtype)
        for grad, each in zip(grads, variables, strict=True)
    ]


def _division_by(divisor: Any) -> Callable[[Any], Any]:
    """Return a function that divides a gradient; one that changes nothing if `divisor` is None."""
    if divisor is None:
        return lambda grad: grad
    # TensorFlow's division takes longer, and does not fuse with other products.
    factor = 1.0 / divisor if BACKEND == "tensorflow" else None

    def divide(grad: Any) -> Any:
        if grad.dtype != divisor.dtype or isinstance(grad, IndexedSlices):  # these have no operators
            return ops.divide(grad, divisor)
        return grad / divisor if factor is None else grad * factor

    return divide


def _cast(grad: Any, dtype: Any) -> Any:
    standardize = keras.backend.standardize_dtype
    return grad if standardize(grad.dtype) == standardize(dtype) else ops.cast(grad, dtype)


def _narrows(grad: Any, variable: Any) -> bool:
    """Return whether a gradient is cast to a dtype in which it may be infinite: from 64-bit parts, or to a half one."""
    given, dtype = (keras.backend.standardize_dtype(each.dtype) for each in (grad, variable))
    return given != dtype and (given in ("float64", "complex128") or dtype in ("float16", "bfloat16"))

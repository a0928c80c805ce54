"""The parts of a step: the places where it is decided, the check of the gradients, and their division."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_core.adapters import norm_by_unit
from lossscale_keras._backend import BACKEND, IndexedSlices, is_traced, native, xp
from lossscale_keras._stored import StateVariables
from lossscale_keras._verbs import all_finite, at_least_float32, dense, is_overwritten, parts

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Traced:
    """The place of a traced step: numbers have no values yet, and a condition becomes a part of the graph."""

    xp: Any = xp
    """The array namespace of the numbers; None for host scalars."""
    cond: Any = staticmethod(ops.cond)
    where: Any = staticmethod(xp.where)
    is_finite: Any = staticmethod(xp.math.is_finite if BACKEND == "tensorflow" else xp.isfinite)
    read: Any = staticmethod(StateVariables.read)
    assign: Any = staticmethod(StateVariables.assign)
    lock: Any = staticmethod(lambda owner: nullcontext())
    """Return the context in which the step reads, updates and sets the state of an optimizer."""
    number: Any = staticmethod(lambda array: array)
    """Return an array of shape `()` as a number of this place: the array itself, or a host scalar."""

    def norm(self, total: Any, scale: Any) -> Any:
        """Return the norm of the unscaled gradients. `total` is the sum of the squares of the scaled gradients."""
        return ops.sqrt(total) / ops.cast(scale, total.dtype)

    def zero(self, dtype: str) -> Any:
        """Return the norm of a step that does not use its norm."""
        return ops.zeros((), dtype)

    def decision(self, finite: Any, norm: Any, flag: Any) -> tuple[Any, Any]:
        """Return the flag and the norm of a check in the form that a policy and a guard accept."""
        return finite, ops.cast(norm, "float32") if "float64" in str(getattr(norm, "dtype", "")) else norm


class Eager(Traced):
    """The place of an eager step: numbers are on the device, and Python reads the flag.

    With `ops.cond`, JAX would compile both functions at every step, and torch.compile would recompile.
    """

    @staticmethod
    def cond(flag: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Call one of two functions, which may assign variables."""
        return yes() if bool(flag) else no()


class Host(Eager):
    """The place of an eager step of TensorFlow: numbers are host scalars.

    An eager operation of TensorFlow takes longer than the whole update of a policy on the host.
    """

    xp = None
    is_finite = staticmethod(math.isfinite)
    read = staticmethod(StateVariables.read_on_host)
    assign = staticmethod(StateVariables.assign_changed)
    lock = staticmethod(native.lock_of)

    @staticmethod
    def where(flag: bool, yes: Any, no: Any) -> Any:
        """Return one of two numbers."""
        return yes if flag else no

    def number(self, array: Any) -> Any:
        """Return the value of an array."""
        return array.numpy()

    def norm(self, total: Any, scale: Any) -> Any:
        """Return the norm as a host scalar."""
        return np.sqrt(total) / scale

    def zero(self, dtype: str) -> Any:
        """Return 0 as a host scalar."""
        return 0.0

    def decision(self, finite: Any, norm: Any, flag: Any) -> tuple[Any, Any]:
        """Return the flag and the norm as host scalars."""
        norm = float(norm)
        return bool(flag), norm if norm < _LARGEST_FLOAT32 else math.inf


TRACED, EAGER, HOST = Traced(), Eager(), Host()


def place_of(arrays: list[Any]) -> Traced:
    """Return the place where a step with these arrays is decided."""
    return TRACED if is_traced(arrays) else HOST if BACKEND == "tensorflow" else EAGER


class States(NamedTuple):
    """The states of a policy and of a spike guard; on the host or as arrays."""

    scale: Any
    guard: Any


class CheckResult(NamedTuple):
    """The result of a check of gradients."""

    finite: Any
    """bool: whether all gradients are finite after they are unscaled and cast to the dtypes of their variables."""
    norm: Any
    """float32, or float64 for float64 gradients: the norm of the unscaled gradients; 0 if nothing uses it."""
    flag: Any
    """The value of `finite`, as a Python bool if the host knows it. Reading it then does not synchronise."""


def check(grads: list[Any], variables: list[Any], loss_scale: Any, with_norm: bool, place: Traced) -> CheckResult:
    """Return whether gradients are finite, and their norm. If the gradients are unscaled, `loss_scale` is None.

    A finite sum of squares proves that every element is finite, and gives the norm, in one read of the gradients. The
    check unscales and tests each element only if

    - the sum is not finite, as for elements of 1e20,
    - the scale is below 1, or
    - a gradient is cast to a narrower dtype.

    In an eager step of TensorFlow the sum is read immediately. If it is a proof, the result is on the host, too.
    """
    pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
    new_values = [dense(grad) for grad, variable in pairs if is_overwritten(variable)]
    pairs = [(grad, variable) for grad, variable in pairs if not is_overwritten(variable)] if new_values else pairs
    scaled = [(at_least_float32(part), variable.dtype) for grad, variable in pairs for part in parts(grad)]
    narrows = any(_narrows(grad, variable) for grad, variable in pairs)
    total = native.sum_of_squares([grad for grad, _ in scaled])
    wide = keras.backend.standardize_dtype(total.dtype)
    total, scale = place.number(total), 1.0 if loss_scale is None else place.number(loss_scale)
    proof = place.is_finite(total) if loss_scale is None else place.is_finite(total) & (scale >= 1.0)
    if new_values:
        proof = all_finite(new_values) & proof

    def quick() -> CheckResult:
        return CheckResult(proof, place.norm(total, scale) if with_norm else place.zero(wide), True)

    def exact() -> CheckResult:
        divide = _make_divide(loss_scale)
        flags = [all_finite(ops.cast(divide(grad), _real_dtype(dtype))) for grad, dtype in scaled]  # one copy at a time
        finite = ops.all(ops.stack([all_finite(new_values), *flags]))
        grads = [grad for grad, _ in scaled if 0 not in grad.shape]
        if not with_norm or not grads:
            return CheckResult(finite, ops.zeros((), wide), finite)
        largest = ops.max(ops.stack([ops.cast(ops.max(ops.abs(grad)), wide) for grad in grads]))
        squares = lambda unit: ops.cast(native.sum_of_squares([ops.divide(grad, unit) for grad in grads]), wide)  # noqa: E731
        factor, largest_number = ops.cast(1.0 / scale, wide), float(np.finfo(wide).max)
        return CheckResult(finite, norm_by_unit(largest, factor, squares, largest_number, xp=xp), finite)

    return exact() if narrows else CheckResult(*place.cond(proof, quick, exact))


def _real_dtype(dtype: Any) -> Any:
    """Return the dtype of the parts of a complex array, and any other dtype unchanged."""
    return {"complex64": "float32", "complex128": "float64"}.get(keras.backend.standardize_dtype(dtype), dtype)


def divide_grads(grads: list[Any], variables: list[Any], divisor: Any) -> list[Any]:
    """Divide gradients in float32 or wider, and cast them to the dtypes of their variables.

    If `divisor` is None, the gradients are only cast.
    """
    divide = _make_divide(divisor)
    return [
        grad if grad is None or is_overwritten(variable) else _cast(divide(at_least_float32(grad)), variable.dtype)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _make_divide(divisor: Any) -> Callable[[Any], Any]:
    """Return a function that divides a gradient by `divisor`, or returns it unchanged if `divisor` is None."""
    if divisor is None:
        return lambda grad: grad
    # On TensorFlow a division takes longer than a product, and XLA does not fuse it with other products.
    factor = 1.0 / divisor if BACKEND == "tensorflow" else None

    def divide(grad: Any) -> Any:
        if grad.dtype != divisor.dtype or isinstance(grad, IndexedSlices):  # `IndexedSlices` have no operators
            return ops.divide(grad, divisor)
        return grad / divisor if factor is None else grad * factor

    return divide


def _cast(grad: Any, dtype: Any) -> Any:
    standardize = keras.backend.standardize_dtype
    return grad if standardize(grad.dtype) == standardize(dtype) else ops.cast(grad, dtype)


def _narrows(grad: Any, variable: Any) -> bool:
    """Return whether a gradient may become infinite in the dtype of its variable: from 64-bit parts, or to a half."""
    source, target = keras.backend.standardize_dtype(grad.dtype), keras.backend.standardize_dtype(variable.dtype)
    return source != target and (source in ("float64", "complex128") or target in ("float16", "bfloat16"))

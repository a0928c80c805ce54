"""The parts of a step: the states in Keras variables, the check of gradients, and their division."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_keras._backend import number_in, squares, xp
from lossscale_keras._verbs import all_finite, dense, lifted


class Stored:
    """A NamedTuple of numbers in Keras variables of shape `()`, with the names of its fields behind a prefix."""

    def __init__(self, start: Any, prefix: str = "") -> None:
        self._start = start
        # Not autocast: within a layer's call Keras would read the loss scale in float16, in which it may be infinite.
        # All replicas compute the same numbers. Without an aggregation none of them may set a mirrored variable:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/values_util.py#L329
        settings = {"trainable": False, "autocast": False, "aggregation": "only_first_replica"}
        self.variables = [
            keras.Variable(value, dtype=value.dtype.name, name=f"{prefix}{name}", **settings)
            for name, value in start._asdict().items()
        ]

    def read(self) -> Any:
        """Return the numbers as arrays of the backend; torch's are the variables themselves, which change."""
        return self._start._make(map(ops.convert_to_tensor, self.variables))

    def copy(self) -> Any:
        """Return the numbers as new arrays of the backend."""
        return self._start._make(map(ops.copy, self.variables))

    def read_on_host(self) -> Any:
        """Return the numbers as host scalars. Synchronises with the host."""
        values = zip(self._start, map(number_in, self.variables), strict=True)
        return self._start._make(type(first)(value) for first, value in values)

    def assign(self, numbers: Any, before: Any = None) -> None:
        """Set the variables to new numbers; only those that differ from `before`, numbers on the host."""
        before = [None] * len(self.variables) if before is None else before
        for variable, old, new in zip(self.variables, before, numbers, strict=True):
            if old is None or old != new:  # an eager assignment takes longer than the whole update on the host
                variable.assign(new)


class States(NamedTuple):
    """The states of a policy and of a spike guard, which is None without one; on the host or as arrays."""

    scale: Any
    guard: Any


class LastStep(NamedTuple):
    """The record of the last step, which no checkpoint keeps."""

    outcome: Any = np.int32(0)
    """int32: 0 before the first step, 1 for an applied step, 2 for an overflow, 3 for a spike."""
    loss_scale: Any = np.float32(0)
    """float32: the scale of its loss."""
    norm: Any = np.float32(0)
    """float32: the norm of its unscaled gradients before clipping; 0 where it was not computed."""


class Checked(NamedTuple):
    """The result of a check of gradients."""

    finite: Any
    """bool: whether all of them are finite, unscaled and in the dtypes of their variables."""
    norm: Any
    """float32, or float64 with such gradients: the norm of the unscaled ones; 0 if it is not needed."""
    known: Any
    """The same as `finite`; a Python bool where Python knows it, so that it is not read again."""


def check(
    grads: list[Any], variables: list[Any], loss_scale: Any, with_norm: bool, cond: Callable[..., Any]
) -> Checked:
    """Return whether gradients are finite, and their norm; `loss_scale` is None for gradients that are unscaled.

    A finite sum of squares proves that every element is finite, and is the norm, in one read. All elements are unscaled
    and tested if the sum is not finite, as for 1e20, if the scale is below 1, or if a cast to the dtype of a variable
    narrows.
    """
    pairs = [(grad, each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
    new_values = [dense(grad) for grad, each in pairs if is_overwritten(each)]
    scaled = [(lifted(dense(grad)), each.dtype) for grad, each in pairs if not is_overwritten(each)]
    narrows = any(_narrows(grad, each) for grad, each in pairs if not is_overwritten(each))
    sums = [squares(grad) for grad, _ in scaled]
    wide = "float64" if any("float64" in str(each.dtype) for each in sums) else "float32"
    total = sum((ops.cast(each, wide) for each in sums[1:]), ops.cast(sums[0], wide) if sums else ops.zeros((), wide))
    divisor = 1.0 if loss_scale is None else ops.cast(loss_scale, wide)

    proof = all_finite([total, *new_values])
    proof = proof if loss_scale is None else proof & (loss_scale >= 1.0)
    no_norm = ops.zeros((), wide)

    def quick() -> Checked:
        return Checked(proof, ops.sqrt(total) / divisor if with_norm else no_norm, True)

    def exact() -> Checked:
        finite, sizes = all_finite(new_values), []
        for grad, dtype in scaled:
            each = ops.cast(_divided(grad, loss_scale), dtype)
            finite = finite & all_finite(each)
            sizes += [ops.cast(ops.max(ops.abs(lifted(each))), wide)] if 0 not in grad.shape else []
        if not with_norm or not sizes:
            return Checked(finite, no_norm, finite)
        norm = _norm([grad for grad, _ in scaled], ops.max(ops.stack(sizes)), divisor, wide)
        return Checked(finite, norm, finite)

    return exact() if narrows else Checked(*cond(proof, quick, exact))


def _norm(grads: list[Any], largest: Any, loss_scale: Any, wide: str) -> Any:
    """Return a norm whose square may overflow, from the largest magnitude of an unscaled element."""
    largest = at_most_largest(largest, wide)
    divisor = xp.where(largest > 0.0, largest, largest + 1.0) * loss_scale  # no square of a quotient overflows
    parts = [ops.cast(squares(ops.divide(each, divisor)), wide) for each in grads]
    return at_most_largest(largest * ops.sqrt(sum(parts[1:], parts[0])), wide)


def unscaled(grads: list[Any], variables: list[Any], divisor: Any) -> list[Any]:
    """Return gradients divided by `divisor`, if it is not None, in float32 or wider, in their variables' dtypes."""
    return [
        grad if grad is None or is_overwritten(each) else ops.cast(_divided(lifted(grad), divisor), each.dtype)
        for grad, each in zip(grads, variables, strict=True)
    ]


def _divided(grad: Any, divisor: Any) -> Any:
    return grad if divisor is None else ops.divide(grad, divisor)


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's gradients are its new values, as for float8 scales; these are never scaled.

    Keras marks such variables: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _narrows(grad: Any, variable: Any) -> bool:
    """Return whether a gradient is cast to a half dtype that is not its own, in which it may become infinite."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return dtype in ("float16", "bfloat16") and keras.backend.standardize_dtype(grad.dtype) != dtype


def at_most_largest(number: Any, dtype: str) -> Any:
    """Return a number that is at most the largest of the dtype; NaN stays."""
    held_in = keras.backend.standardize_dtype(number.dtype)
    largest = ops.convert_to_tensor(np.asarray(np.finfo(dtype).max, held_in), dtype=held_in)
    return xp.where(number > largest, largest, number)

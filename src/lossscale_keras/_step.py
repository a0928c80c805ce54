"""The parts of a step: the states in Keras variables, the check of gradients, and their division."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_keras._backend import squares, xp
from lossscale_keras._verbs import all_finite, dense, lifted

_LARGEST = float(np.finfo(np.float32).max)


class Stored:
    """A NamedTuple of numbers in Keras variables of shape `()`, with the names of its fields behind a prefix."""

    def __init__(self, start: Any, prefix: str = "") -> None:
        self._start = start
        # Not autocast: within a layer's call Keras would read the loss scale in float16, in which it may be infinite.
        self.variables = [
            keras.Variable(value, dtype=value.dtype.name, trainable=False, autocast=False, name=f"{prefix}{name}")
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
        values = zip(self._start, self.read(), strict=True)
        return self._start._make(type(first)(float(value)) for first, value in values)  # exact, also for int32

    def assign(self, numbers: Any) -> None:
        """Set every variable to a new number."""
        for variable, value in zip(self.variables, numbers, strict=True):
            variable.assign(value)


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
    """float32: the norm of the unscaled gradients; infinite or NaN if they are not finite."""
    known: Any
    """The same as `finite`; a Python bool where Python knows it, so that it is not read again."""


def check(
    grads: list[Any], variables: list[Any], loss_scale: Any, with_norm: bool, cond: Callable[..., Any]
) -> Checked:
    """Return whether gradients are finite, and their norm.

    A finite sum of squares proves that every element is finite, and is the norm, in one read. All elements are unscaled
    and tested if the sum is not finite, as for 1e20, if the scale is below 1, or if a cast to the dtype of a variable
    narrows.
    """
    pairs = [(grad, each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
    new_values = [dense(grad) for grad, each in pairs if is_overwritten(each)]
    scaled = [(lifted(dense(grad)), each.dtype) for grad, each in pairs if not is_overwritten(each)]
    narrows = any(_narrows(grad, each) for grad, each in pairs if not is_overwritten(each))
    total = sum((ops.cast(squares(grad), "float32") for grad, _ in scaled), ops.zeros((), "float32"))
    proof = all_finite([total, *new_values]) & (loss_scale >= 1.0)

    def quick() -> Checked:
        return Checked(proof, ops.sqrt(total) / loss_scale, True)

    def exact() -> Checked:
        unscaled = [ops.cast(ops.divide(grad, loss_scale), dtype) for grad, dtype in scaled]
        finite = all_finite([*unscaled, *new_values])
        sizes = [lifted(ops.abs(grad)) for grad in unscaled if 0 not in grad.shape]
        if not with_norm or not sizes:
            return Checked(finite, total, finite)
        largest = _within_float32(ops.max(ops.stack([ops.cast(ops.max(each), "float32") for each in sizes])))
        divisor = xp.where(largest > 0.0, largest, largest + 1.0)  # no square of a quotient overflows
        parts = [ops.cast(squares(ops.divide(each, divisor)), "float32") for each in sizes]
        return Checked(finite, _within_float32(largest * ops.sqrt(sum(parts))), finite)

    return exact() if narrows else Checked(*cond(proof, quick, exact))


def unscaled(grads: list[Any], variables: list[Any], divisor: Any) -> list[Any]:
    """Return gradients divided by `divisor` in float32 or wider, in their variables' dtypes."""
    return [
        grad if grad is None or is_overwritten(each) else ops.cast(ops.divide(lifted(grad), divisor), each.dtype)
        for grad, each in zip(grads, variables, strict=True)
    ]


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's gradients are its new values, as for float8 scales; these are never scaled.

    Keras marks such variables: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _narrows(grad: Any, variable: Any) -> bool:
    """Return whether a gradient is cast to a half dtype that is not its own, in which it may become infinite."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return dtype in ("float16", "bfloat16") and keras.backend.standardize_dtype(grad.dtype) != dtype


def _within_float32(number: Any) -> Any:
    """Return a number that is at most the largest of float32; NaN stays."""
    return xp.where(number > _LARGEST, _LARGEST, number)

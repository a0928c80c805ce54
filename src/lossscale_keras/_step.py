"""The parts of a step: the states in Keras variables, the check of gradients, and their division."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from lossscale_core.adapters import norm_by_unit
from lossscale_keras._backend import BACKEND, half_squares, is_finite, xp
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

    def read(self, count: int | None = None) -> Any:
        """Return the numbers as arrays of the backend; torch's are the variables themselves, which change.

        With a `count`, only so many are read, and the others are those before the first step.
        """
        if BACKEND == "tensorflow":  # `ops.convert_to_tensor` returns the variable, which each use would read
            numbers = map(xp.convert_to_tensor, self._tf_variables[:count])
        else:
            numbers = map(ops.convert_to_tensor, self.variables[:count])
        return self._start._make([*numbers, *(() if count is None else self._start[count:])])

    def copy(self) -> Any:
        """Return the numbers as new arrays of the backend."""
        return self._start._make(map(ops.copy, self.variables))

    def read_on_host(self) -> Any:
        """Return the numbers as host scalars. Synchronises with the host."""
        if BACKEND == "tensorflow":
            values = [each.value().numpy() for each in self._tf_variables]
        else:
            values = list(map(ops.convert_to_numpy, self.variables))
        return self._start._make([type(first)(value) for first, value in zip(self._start, values, strict=True)])

    @functools.cached_property
    def _tf_variables(self) -> list[Any]:
        # TensorFlow's variables take half the time of Keras's wrappers around them.
        return [each.value for each in self.variables]

    def assign(self, numbers: Any, before: Any = None) -> None:
        """Set the variables to new numbers; those that differ from `before` if this is given, numbers on the host."""
        if before is None:
            for variable, new in zip(self.variables, numbers, strict=True):
                variable.assign(new)
            return
        for variable, old, new in zip(self._tf_variables, before, numbers, strict=True):
            if old != new:  # an assignment takes longer than the whole update on the host
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
    grads: list[Any],
    variables: list[Any],
    loss_scale: Any,
    with_norm: bool,
    cond: Callable[..., Any],
    on_host: bool = False,
) -> Checked:
    """Return whether gradients are finite, and their norm; `loss_scale` is None for gradients that are unscaled.

    A finite sum of squares proves that every element is finite, and is the norm, in one read. All elements are unscaled
    and tested if the sum is not finite, as for 1e20, if the scale is below 1, or if a cast to the dtype of a variable
    narrows. With `on_host` the sum is read at once, and the result is on the host, too, if it is a proof.
    """
    pairs = [(grad, each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
    new_values = [dense(grad) for grad, each in pairs if is_overwritten(each)]
    pairs = [(grad, each) for grad, each in pairs if not is_overwritten(each)] if new_values else pairs
    scaled = [(lifted(dense(grad)), each.dtype) for grad, each in pairs]
    narrows = any(_narrows(grad, each) for grad, each in pairs)
    total = _sum_of_squares([grad for grad, _ in scaled])
    wide = keras.backend.standardize_dtype(total.dtype)
    scale = 1.0 if loss_scale is None else loss_scale
    if on_host:
        total, scale = total.numpy(), 1.0 if loss_scale is None else loss_scale.numpy()
    proof = is_finite(total) if loss_scale is None else is_finite(total) & (scale >= 1.0)
    if new_values:
        proof = all_finite(new_values) & proof

    def quick() -> Checked:
        if not with_norm:
            return Checked(proof, ops.zeros((), wide) if not on_host else 0.0, True)
        return Checked(proof, np.sqrt(total) / scale if on_host else ops.sqrt(total) / ops.cast(scale, wide), True)

    def exact() -> Checked:
        divide = _division_by(loss_scale)
        flags = [all_finite(ops.cast(divide(grad), dtype)) for grad, dtype in scaled]  # one copy at a time
        finite = ops.all(ops.stack([all_finite(new_values), *flags]))
        grads = [grad for grad, _ in scaled if 0 not in grad.shape]
        if not with_norm or not grads:
            return Checked(finite, ops.zeros((), wide), finite)
        largest = ops.max(ops.stack([ops.cast(ops.max(ops.abs(grad)), wide) for grad in grads]))
        squares = lambda unit: ops.cast(_sum_of_squares([ops.divide(each, unit) for each in grads]), wide)  # noqa: E731
        factor, largest_number = ops.cast(1.0 / scale, wide), float(np.finfo(wide).max)
        return Checked(finite, norm_by_unit(largest, factor, squares, largest_number, xp=xp), finite)

    return exact() if narrows else Checked(*cond(proof, quick, exact))


def _sum_of_squares(grads: list[Any]) -> Any:
    """Return the sum in float32, or in float64 if a gradient is in it."""
    halves = [half_squares(grad) for grad in grads]
    wide = "float64" if any("float64" in str(each.dtype) for each in halves) else "float32"
    halves = [each if wide in str(each.dtype) else ops.cast(each, wide) for each in halves]
    if BACKEND == "tensorflow" and halves:
        return 2.0 * xp.add_n(halves)
    return 2.0 * functools.reduce(operator.add, halves, ops.zeros((), wide))


def unscaled(grads: list[Any], variables: list[Any], divisor: Any) -> list[Any]:
    """Return gradients divided by `divisor`, if it is not None, in float32 or wider, in their variables' dtypes."""
    divide = _division_by(divisor)
    return [
        grad if grad is None or is_overwritten(each) else _cast(divide(lifted(grad)), each.dtype)
        for grad, each in zip(grads, variables, strict=True)
    ]


def _division_by(divisor: Any) -> Callable[[Any], Any]:
    """Return a function that divides a gradient; one that changes nothing if `divisor` is None."""
    if divisor is None:
        return lambda grad: grad
    # TensorFlow's division takes longer, and does not fuse with other products.
    factor = 1.0 / divisor if BACKEND == "tensorflow" else None

    def divide(grad: Any) -> Any:
        if grad.dtype != divisor.dtype or hasattr(grad, "indices"):  # `IndexedSlices` have no operators
            return ops.divide(grad, divisor)
        return grad / divisor if factor is None else grad * factor

    return divide


def _cast(grad: Any, dtype: Any) -> Any:
    standardize = keras.backend.standardize_dtype
    return grad if standardize(grad.dtype) == standardize(dtype) else ops.cast(grad, dtype)


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's gradients are its new values, as for float8 scales; these are never scaled.

    Keras marks such variables: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _narrows(grad: Any, variable: Any) -> bool:
    """Return whether a gradient is cast to a dtype in which it may become infinite: from float64, or to a half one."""
    given, dtype = (keras.backend.standardize_dtype(each.dtype) for each in (grad, variable))
    return given != dtype and (given == "float64" or dtype in ("float16", "bfloat16"))

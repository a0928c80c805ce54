"""The range of gradients: which loss scale fits, what flushes to zero without it, and what does not follow it."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._messages import describe, format_number, join_names

_LOWEST, _HIGHEST = -24, 40
"""The exponents of the loss scales to try."""
_RATIO = (1.8, 2.2)
"""The norms at a scale and at half of it, one by the other: 2, but for rounding in half precision."""


class GradientRange(NamedTuple):
    """What `gradient_range` found; as text, a line for each finding."""

    overflows_above: float
    """The largest power of two, up to 2**40, at which every gradient is finite; 0.0 if there is none from 2**-24 on."""
    first_overflow: str | None
    """The parameter with the first gradient that is not finite at twice that scale; None if all are finite there."""
    flushed: dict[str, float]
    """The share of each gradient's elements that are zero at a scale of 1, but not at `overflows_above`; if any are."""
    unscaled: list[str]
    """The parameters with a gradient that does not follow the loss scale, such as one of a loss that was not scaled."""

    def __str__(self) -> str:
        """Return the findings as sentences."""
        if self.overflows_above == 0.0:
            return f"{self.first_overflow} is not finite at any loss scale: look at the inputs and the forward pass"
        limit = format_number(self.overflows_above)
        lines = [f"finite up to a loss scale of {limit}"]
        if self.first_overflow is not None:
            lines[0] += f"; above it {self.first_overflow} overflows first"
        for name, share in sorted(self.flushed.items(), key=lambda item: -item[1]):
            lines.append(f"{name}: {share:.2g} of its elements are zero at a loss scale of 1, but not at {limit}")
        if self.unscaled:
            lines.append(f"not multiplied by the loss scale: {join_names(self.unscaled)}")
        return "\n".join(lines)


def gradient_range(grads_at: Callable[[float], Mapping[str, Any]]) -> GradientRange:
    """Find the largest loss scale at which all gradients are finite, and what they lose without it.

    Runs the backward pass at about ten powers of two from 2**-24 to 2**40, and once at zero, where only gradients that
    do not come from the scaled loss differ from zero. Waits for each result on the host.

    Args:
        grads_at: Takes a loss scale, a float; returns the gradients of the loss times this scale, not unscaled, by the
            names of their parameters: arrays that NumPy can read, of any shape and float or complex dtype. The same
            batch and random numbers give the same gradients at each call.

    Returns:
        A `GradientRange`.

    Raises:
        TypeError: `grads_at` is not a function, or returns something else than a mapping, or a mapping without arrays.
    """

    @functools.cache
    def at(scale: float) -> dict[str, np.ndarray]:
        """Return the magnitudes of the gradients in float64."""
        grads = grads_at(scale) if callable(grads_at) else None
        if not isinstance(grads, Mapping) or not grads:
            raise TypeError(
                f"grads_at={describe(grads_at)} must be a function of a loss scale that returns gradients by name, but "
                f"returned {describe(grads)}; call gradient_range(grads_at), with a function that returns a dict"
            )
        return {name: np.abs(np.asarray(grad)).astype(np.float64) for name, grad in grads.items()}

    def overflowing(power: int) -> list[str]:
        return [name for name, values in at(2.0**power).items() if not np.isfinite(values).all()]

    if stuck := overflowing(_LOWEST):
        return GradientRange(0.0, stuck[0], {}, [])
    low, high = _LOWEST, _HIGHEST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overflowing(middle) else (middle, high)
    limit, half, one, none = (at(scale) for scale in (2.0**low, 2.0 ** (low - 1), 1.0, 0.0))
    flushed = {name: float(((one[name] == 0.0) & (limit[name] > 0.0)).mean()) for name in limit if limit[name].size}
    unscaled = [name for name in limit if (none[name] > 0.0).any() or not _doubles(half[name], limit[name])]
    first = [*overflowing(high), None][0] if high <= _HIGHEST else None
    return GradientRange(2.0**low, first, {name: share for name, share in flushed.items() if share}, unscaled)


def _doubles(half: np.ndarray, full: np.ndarray) -> bool:
    """Return whether gradients double with the scale; those that flush to zero at half of it do not count."""
    norms = [math.sqrt(float(np.square(each[half > 0.0]).sum())) for each in (half, full)]
    return norms[0] == 0.0 or _RATIO[0] < norms[1] / norms[0] < _RATIO[1]

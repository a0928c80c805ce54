"""The range of gradients: the largest loss scale, the elements that need it, and gradients that miss it."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._messages import describe, format_number, join_names

_LOWEST, _HIGHEST = -24, 40
"""The smallest and the largest exponent of the loss scales to try."""
_RATIO = (1.8, 2.2)
"""The accepted ratios of the norms at a scale and at half of this scale: about 2, with rounding in half precision."""


class GradientRange(NamedTuple):
    """The result of `gradient_range`; as text, it has a line for each finding."""

    overflows_above: float
    """The largest power of two from 2**-24 to 2**40 at which every gradient is finite, or 0.0."""
    first_overflow: str | None
    """The parameter with the first non-finite gradient at twice `overflows_above`; None if all gradients are finite."""
    flushed: dict[str, float]
    """The share of elements that are zero at a scale of 1 but not at `overflows_above`, by parameter, if not 0."""
    unscaled: list[str]
    """The parameters with gradients that do not follow the loss scale, for example of a loss that was not scaled."""

    def __str__(self) -> str:
        """Return a line for each finding."""
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
    """Find the largest loss scale at which all gradients are finite, and the elements that are zero without it.

    Runs the backward pass at about ten powers of two from 2**-24 to 2**40, and once at a scale of zero. At zero, only
    gradients that miss the loss scale differ from zero. Synchronises with the host after each pass.

    Args:
        grads_at: A function of a loss scale (a float). It returns the gradients of the scaled loss, not unscaled, by
            the names of the parameters: arrays that NumPy can read, of any shape and any float or complex dtype. With
            the same batch and random numbers, it returns the same gradients at each call.

    Returns:
        A `GradientRange`.

    Raises:
        TypeError: `grads_at` is not a function, or does not return a mapping with arrays.
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
    limit, half, plain, zero = (at(scale) for scale in (2.0**low, 2.0 ** (low - 1), 1.0, 0.0))
    flushed = {name: float(((plain[name] == 0.0) & (limit[name] > 0.0)).mean()) for name in limit if limit[name].size}
    unscaled = [name for name in limit if (zero[name] > 0.0).any() or not _doubles(half[name], limit[name])]
    first = [*overflowing(high), None][0] if high <= _HIGHEST else None
    return GradientRange(2.0**low, first, {name: share for name, share in flushed.items() if share}, unscaled)


def _doubles(half: np.ndarray, full: np.ndarray) -> bool:
    """Return whether the gradients double with the scale, except elements that flush to zero at half of the scale."""
    norms = [math.sqrt(float(np.square(values[half > 0.0]).sum())) for values in (half, full)]
    return norms[0] == 0.0 or _RATIO[0] < norms[1] / norms[0] < _RATIO[1]

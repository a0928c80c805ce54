"""The gradients that do not follow the loss scale, from the norms of a few backward passes."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

_ROUNDING = 1.1
"""The ratio of two norms up to which their difference may come from rounding."""
_REPEATED = 1e-3
"""The relative difference of two passes at one scale above which the gradients are random."""
_FAR_SMALLER = 2.0**-5


class UnscaledGradient(NamedTuple):
    """A parameter's gradient that does not follow the loss scale, so that unscaling makes it wrong."""

    name: str
    """The name of the parameter."""
    cause: Literal["inside", "nonlinear", "early"]
    """`"inside"`: it is not zero for a loss times zero, so that something within the graph adds to it.

    `"nonlinear"`: it does not grow with the loss scale, as with a hook that clamps or normalises it. `"early"`: it was
    there when the forward pass ended, since the function calls the backward pass itself.
    """


UnscaledGradient.__module__ = "lossscale_core"  # a pickle stores it, and the private module may change


def unscaled_gradients(norms_at: Callable[[float], Mapping[str, float]], loss_scale: float) -> list[UnscaledGradient]:
    """Return the gradients that do not follow the loss scale, by three backward passes and, if need be, two more.

    The gradient of the loss times zero is zero, exactly, if all of it comes from the loss.

    Args:
        norms_at: Runs the backward pass of the loss times its argument; returns the 2-norm of each gradient by name.
        loss_scale: A scale at which all gradients are finite.

    Returns:
        The gradients with their causes, in the order of `norms_at`.
    """

    def unscaled_at(scale: float) -> dict[str, float]:
        return {name: norm / scale for name, norm in norms_at(scale).items()}

    norms, at_half, at_zero = unscaled_at(loss_scale), unscaled_at(loss_scale / 2.0), norms_at(0.0)
    # NaN is 0 / 0, from a hook that divides by the gradient. A clamp makes the second norm up to twice the first.
    nonlinear = {name for name, norm in norms.items() if math.isnan(at_zero[name]) or at_half[name] > _ROUNDING * norm}
    if nonlinear:
        # Near the smallest number of a dtype, rounding may double a gradient at half the scale. Such a gradient
        # flushes to zero at a far smaller scale; one that is clamped or normalised becomes larger. A pass that draws
        # other random numbers each time cannot be compared.
        far_below, again = unscaled_at(loss_scale * _FAR_SMALLER), unscaled_at(loss_scale)
        nonlinear = {
            name
            for name in nonlinear
            if math.isnan(at_zero[name])
            or (far_below[name] > at_half[name] / 2.0 and math.isclose(again[name], norms[name], rel_tol=_REPEATED))
        }
    found = []
    for name in norms:
        if at_zero[name] > 0.0:
            found.append(UnscaledGradient(name, "inside"))
        elif name in nonlinear:
            found.append(UnscaledGradient(name, "nonlinear"))
    return found

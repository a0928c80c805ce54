"""Functions that the steps of all adapters use: the norm, the clip, and the decision of guard and policy.

Like a policy, they use only `xp` and operators, so that they run on host scalars and on the arrays of any framework.
"""

import math
from collections.abc import Callable
from typing import Any

from lossscale_core._arrays import HOST
from lossscale_core._base import ScalingPolicy
from lossscale_core._guard import LARGEST_NORM, GuardState, SpikeGuard
from lossscale_core._state import Array, Namespace


def decide(
    policy: ScalingPolicy,
    guard: SpikeGuard | None,
    state: Any,
    guard_state: GuardState | None,
    finite: Array,
    norm: Array,
    *,
    proposed: Array | None = None,
    xp: Namespace | None = None,
) -> tuple[Any, Any, Any]:
    """Decide whether a step is applied: an overflow goes to the policy, and a spike leaves its state unchanged.

    The function is pure and does not synchronise with the host.

    Args:
        policy: The policy.
        guard: The guard, or None.
        state: The policy's state before the step.
        guard_state: The guard's state before the step, or None.
        finite: Whether the gradients are finite: a bool of shape `()`.
        norm: The norm of the unscaled gradients before clipping: float32, shape `()`. Infinity with finite gradients is
            a spike. It is ignored without a guard.
        proposed: Whether the adapter has a step to apply; if left out, `finite` decides.
        xp: The array namespace of the states; None for states on the host.

    Returns:
        Whether the step is applied, the policy's state after the step, and the guard's state or None.
    """
    proposed = finite if proposed is None else proposed
    after = policy.update(state, finite, xp=xp)
    if guard is None or guard_state is None:
        return proposed, after, guard_state
    where = HOST.where if xp is None else xp.where
    norm = where(norm < LARGEST_NORM, norm, LARGEST_NORM)  # a norm above float32's range is a spike, too
    is_applied, guard_state = guard.check(guard_state, where(proposed, norm, math.inf), xp=xp)
    is_spike = (proposed ^ is_applied) & finite  # a step that is not proposed is not applied
    return is_applied, state._make(where(is_spike, *pair) for pair in zip(state, after, strict=True)), guard_state


def clip_divisor(norm: Array, max_norm: float, *, xp: Namespace) -> Array:
    """Return the divisor, at least 1, that clips gradients of this norm to `max_norm`; infinite if the norm is."""
    max_norm = max_norm if max_norm <= LARGEST_NORM else math.inf  # NumPy warns of a cast that overflows
    return xp.where(norm > max_norm, norm / max_norm, 1.0)


def norm_by_unit(
    largest: Array, factor: Array, squares: Callable[[Array], Array], largest_number: float, *, xp: Namespace
) -> Array:
    """Return a norm times `factor`; the sum of squares may exceed the range of the dtype.

    Args:
        largest: The largest magnitude of an element, in the dtype of the norm, shape `()`.
        factor: A factor in the same dtype.
        squares: A function of a divisor; it returns the sum of the squares of all elements divided by it.
        largest_number: The largest number of the dtype.
        xp: The array namespace.

    Returns:
        The norm in the same dtype; infinity if the norm itself exceeds the range.
    """
    unit = xp.where((largest > 0.0) & (largest < math.inf), largest, 1.0)
    limit = largest_number * 2.0**-28  # the reciprocal of a larger unit may be subnormal, and flush to zero
    unit = xp.where(unit < limit, unit, limit)
    return unit * factor * xp.sqrt(squares(unit))

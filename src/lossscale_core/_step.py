"""What the steps of the adapters share: the norm, the clip, and the decision of guard and policy.

As in a policy, the code uses `xp` and operators only, so that it runs on host scalars and in any framework's programs.
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
            a spike. It is not read without a guard.
        proposed: Whether there is a step to take, if that is not the same as `finite`.
        xp: The array namespace of the states; None for states on the host.

    Returns:
        Whether the step is applied, the policy's state after it, and the guard's, which is None without a guard.
    """
    proposed = finite if proposed is None else proposed
    after = policy.update(state, finite, xp=xp)
    if guard is None or guard_state is None:
        return proposed, after, guard_state
    where = HOST.where if xp is None else xp.where
    known = where(norm < LARGEST_NORM, norm, LARGEST_NORM)  # a norm beyond float32 is a spike, too
    applies, guard_state = guard.check(guard_state, where(proposed, known, math.inf), xp=xp)
    keeps = (proposed ^ applies) & finite  # the guard accepts no step that is not proposed
    return applies, state._make(where(keeps, *pair) for pair in zip(state, after, strict=True)), guard_state


def clip_divisor(norm: Array, max_norm: float, *, xp: Namespace) -> Array:
    """Return the divisor, at least 1, that clips gradients of this norm to `max_norm`; an infinite norm becomes 0."""
    max_norm = max_norm if max_norm <= LARGEST_NORM else math.inf  # NumPy warns of a cast that overflows
    return xp.where(norm > max_norm, norm / max_norm, 1.0)


def norm_by_unit(
    largest: Array, factor: Array, squares: Callable[[Array], Array], largest_number: float, *, xp: Namespace
) -> Array:
    """Return a norm times `factor`, also if its sum of squares would overflow.

    Args:
        largest: The largest magnitude of an element, in the dtype of the norm, shape `()`.
        factor: A factor in the same dtype.
        squares: Returns the sum of squares of all elements divided by its argument.
        largest_number: The largest number of the dtype.
        xp: The array namespace.

    Returns:
        The norm in the same dtype; infinite if it overflows itself.
    """
    unit = xp.where((largest > 0.0) & (largest < math.inf), largest, 1.0)
    limit = largest_number * 2.0**-28  # the reciprocal of a larger one may be subnormal, and flushed to zero
    unit = xp.where(unit < limit, unit, limit)
    return unit * factor * xp.sqrt(squares(unit))

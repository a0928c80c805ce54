"""Counters of two kinds of skipped steps that are not overflows: a loss, or an update, that is NaN or infinite.

As for the spike guard, the adapter that takes the step leaves the policy's state unchanged, since no loss scale fixes
either of them.
"""

from typing import Any, Generic, Literal, NamedTuple

import numpy as np

from lossscale_core._arrays import HOST, Namespace, namespace
from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._state import Array, ArrayT_co, HostScalar, one_more
from lossscale_core.errors import NonfiniteStreakError, NonfiniteUpdateError

OnNonfiniteUpdate = Literal["ignore", "raise", "skip"]
"""The reaction to a step that makes a parameter or a state of the optimizer NaN or infinite."""
OnNonfiniteLoss = Literal["back_off", "hold"]
"""The reaction of the loss scale to a loss that is NaN or infinite before it is scaled."""

_LONGEST_STREAK = 20


class NonfiniteState(NamedTuple, Generic[ArrayT_co]):
    """The counters of losses and of updates that are NaN or infinite; each field is int32 of shape `()`."""

    updates: ArrayT_co
    """The steps that were undone, because they made a parameter or a state of the optimizer NaN or infinite."""
    update_streak: ArrayT_co
    """Such steps in a row; a step that was skipped for another reason does not end the streak."""
    losses: ArrayT_co
    """The steps that were skipped, because their loss was NaN or infinite before it was scaled."""
    loss_streak: ArrayT_co
    """Such steps in a row."""


def init_nonfinite_state() -> NonfiniteState[HostScalar]:
    """Return the counters before the first step, on the host."""
    return NonfiniteState(np.int32(0), np.int32(0), np.int32(0), np.int32(0))


def count_nonfinite(
    state: NonfiniteState[Any],
    *,
    loss_finite: Array = True,
    stepped: Array = False,
    update_finite: Array = True,
    xp: Namespace | None = None,
) -> NonfiniteState[Any]:
    """Return the counters after a step. Pure; does not synchronise with the host.

    Args:
        state: The counters before the step, on the host or in the arrays of a framework.
        loss_finite: Whether the loss, before it was scaled, was finite: a bool of shape `()`, or a Python bool.
        stepped: Whether the optimizer took the step; False if an overflow, a spike or the loss forbade it.
        update_finite: Whether the step left parameters and optimizer state finite.
        xp: The array namespace of the state, inferred when left out; TensorFlow's cannot be inferred.

    Returns:
        Counters with the same dtypes and shapes.
    """
    xp = namespace(state.updates) if xp is None else xp
    updates, update_streak, losses, loss_streak = state

    def where(condition: Array, x: Array, y: Array) -> Array:
        return HOST.where(condition, x, y) if isinstance(condition, bool | np.bool_) else xp.where(condition, x, y)

    def unless(condition: Array, counter: Array, otherwise: Array) -> Array:
        return where(condition, otherwise, one_more(counter))

    return NonfiniteState(
        where(stepped, unless(update_finite, updates, updates), updates),
        where(stepped, unless(update_finite, update_streak, update_streak * 0), update_streak),
        unless(loss_finite, losses, losses),
        unless(loss_finite, loss_streak, loss_streak * 0),
    )


def check_nonfinite_streak(policy: PolicyLike, state: NonfiniteState) -> None:
    """Raise an error if too many updates or losses in a row were NaN or infinite.

    The limit of both is the policy's `max_overflow_streak`. Without one, it is 20 for updates, which would otherwise be
    undone without end, and losses have none. Call it when the state is on the host; reading it from a device
    synchronises.

    Args:
        policy: Anything that `as_policy` accepts.
        state: The counters after a step.

    Raises:
        NonfiniteStreakError: A streak has reached its limit.
        PolicyError: `policy` is not a policy.
    """
    limit = BaseScaling.of(as_policy(policy)).max_overflow_streak
    updates, losses = int(state.update_streak), int(state.loss_streak)
    if updates >= (limit or _LONGEST_STREAK):
        raise NonfiniteStreakError(
            f"the last {updates} updates in a row made a parameter or a state of the optimizer NaN or infinite, and "
            "were undone; look for eps=0, a learning rate that is too large, or half precision in the optimizer"
        )
    if limit is not None and losses >= limit:
        raise NonfiniteStreakError(
            f"the last {losses} losses in a row were NaN or infinite before they were scaled, which reaches "
            f"max_overflow_streak={limit}; no loss scale fixes this: look at the inputs and the forward pass"
        )


def nonfinite_update(name: str) -> NonfiniteUpdateError:
    """Return the error for a parameter or state that a step has made NaN or infinite.

    Args:
        name: The name of the first such parameter or state.

    Returns:
        The error, to raise after the step.
    """
    return NonfiniteUpdateError(
        f"{name} became NaN or infinite in a step with finite gradients; load an earlier checkpoint, and look for a "
        "huge gradient, eps=0 or half precision in the optimizer; on_nonfinite_update='skip' undoes such steps"
    )

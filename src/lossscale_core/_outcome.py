"""The outcome of a step, and the numbers of a state for a log."""

from typing import Generic, NamedTuple

import numpy as np

from lossscale_core._guard import GuardState
from lossscale_core._settings import LARGEST_COUNT
from lossscale_core._state import Array, ArrayT_co, FlagT_co, ScaleState, loss_scale_of, require_one_state


class StepInfo(NamedTuple, Generic[ArrayT_co, FlagT_co]):
    """The outcome of a step; it is true if the step was applied.

    Each field has shape `()` and stays on its device until it is read. `if info:` reads `applied`.
    """

    applied: FlagT_co
    """bool: the step was applied; an overflow or a spike skips the step."""
    loss_scale_used: ArrayT_co
    """float32: the scale that multiplied this step's loss and divided its gradients."""
    loss_scale_after: ArrayT_co
    """float32: the scale of the next step."""
    overflow_streak: ArrayT_co
    """int32: overflows in a row, including this step; 0 if the step was applied."""
    overflowed: FlagT_co | bool = False
    """bool: a gradient held NaN or infinity."""
    spiked: FlagT_co | bool = False
    """bool: the gradients were finite, and a `SpikeGuard` refused their norm."""

    def __bool__(self) -> bool:
        """Return whether the step was applied; waits for the device of `applied`."""
        return bool(self.applied)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other if isinstance(other, bool) else tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def step_info(
    before: ScaleState[ArrayT_co], after: ScaleState[ArrayT_co], *, spiked: Array = False
) -> StepInfo[ArrayT_co, ArrayT_co | np.bool_]:
    """Return the outcome of the step that changed the state from `before` to `after`.

    Does not synchronise with the host.

    Args:
        before: The state before the step.
        after: The state that the policy's `update` returned; `before` itself after a spike.
        spiked: Whether the gradients were finite and a `SpikeGuard` refused their norm: a bool of shape `()` of the
            states' framework, or a Python bool.

    Returns:
        The outcome, with fields of shape `()` on the device of the states.

    Raises:
        TypeError: `before` or `after` is not a state.
        ValueError: The states are on the host, and `after` has fewer steps than `before`.
    """
    scale_used, scale_after = (loss_scale_of(state, "step_info(before, after)") for state in (before, after))
    streak: Array = after.overflow_streak
    steps: tuple[Array, Array] = after.steps, before.steps
    if isinstance(steps[0], np.generic) and steps[0] < steps[1]:  # counts on a device are not read
        order = "{} steps after {}".format(*steps)
        raise ValueError(f"step_info was given states of {order}; call step_info(before, after), in this order")
    not_spiked = spiked ^ True
    # Every overflow lengthens a streak that is not full; after other steps the streak is not full.
    overflowed = ((streak > before.overflow_streak) | (streak >= LARGEST_COUNT)) & not_spiked
    return StepInfo(overflowed ^ not_spiked, scale_used, scale_after, streak, overflowed, spiked)


def metrics(state: ScaleState[ArrayT_co], *, guard: GuardState[ArrayT_co] | None = None) -> dict[str, ArrayT_co]:
    """Return the numbers of a state for a log, under the same names in every framework and release.

    Does not synchronise with the host, but reading a value later does.

    Args:
        state: A state of any framework.
        guard: The state of a spike guard.

    Returns:
        The fields of the state by name (`loss_scale`, `growth_tracker`, `hysteresis_tracker`, `steps`, `skipped_steps`,
        `overflow_streak` and a policy's own counters) and `applied_steps`. Each value has shape `()`, or is a Python
        number if the state is on the host. A guard adds `spikes`, `spike_streak` and `norm_mean`.

    Raises:
        TypeError: `state` is not a state, or holds several states along a leading axis.
    """
    require_one_state(state, "metrics(state)")
    numbers = state._asdict()
    numbers["applied_steps"] = numbers["steps"] - numbers["skipped_steps"]
    # `json.dumps` accepts Python's numbers, but not NumPy's.
    on_host = (np.generic, np.ndarray)
    if guard is not None:
        streak = int(guard.streak) if isinstance(guard.streak, on_host) else guard.streak  # a count, in float32
        numbers |= {"spikes": guard.spikes, "spike_streak": streak, "norm_mean": guard.mean}
    return {name: value.item() if isinstance(value, on_host) else value for name, value in numbers.items()}

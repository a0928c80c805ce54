"""A spike guard with its state in variables, and its check of a norm, eagerly and in graphs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from lossscale_core import GuardState, SpikeGuard
from lossscale_core.adapters import check_spike_streak
from lossscale_tf._state import StateVariables

_LARGEST = float(tf.float32.max)


class Decision(NamedTuple):
    """The guard's decision about the norm of an eager step, and its states before and after."""

    accepted: bool
    norm: float
    before: GuardState
    after: GuardState


class Guard:
    """A `SpikeGuard` and the variables of its state."""

    def __init__(self, guard: SpikeGuard, state: StateVariables) -> None:
        self.guard = guard
        self.state = state

    @classmethod
    def of(cls, guard: SpikeGuard | None, make_variable: Callable[[str, Any], tf.Variable]) -> "Guard | None":
        """Return the guard with a state in new variables, or None without a guard."""
        return None if guard is None else cls(guard, StateVariables(guard, make_variable))

    def check_on_host(self, norm: tf.Tensor) -> Decision:
        """Return the decision about a finite norm; change no variable. Synchronises with the host."""
        # The norm of float64 gradients may be beyond float32, where it would look like an overflow.
        number, before = min(float(norm), _LARGEST), self.state.read_on_host()
        accepted, after = self.guard.check(before, number)
        return Decision(bool(accepted), number, before, after)

    def assign(self, decision: Decision) -> None:
        """Set the variables to the state after a step; raise `SpikeStreakError` if it has reached `max_streak`."""
        self.state.assign_changed(decision.before, decision.after)
        check_spike_streak(self.guard, decision.after, decision.norm)

    def check_in_graph(self, finite: tf.Tensor, norm: tf.Tensor) -> tuple[tf.Tensor, GuardState]:
        """Return whether a step is finite and its norm accepted, and the state after it; change no variable."""
        known = tf.cast(tf.minimum(norm, _LARGEST), tf.float32)
        checked = tf.where(finite, known, float("inf"))  # infinity leaves the state unchanged
        accepted, after = self.guard.check(self.state.read(), checked, xp=tf)
        return accepted, after

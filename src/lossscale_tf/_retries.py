"""Retries of overflowed steps at a lower loss scale, and protection of variables in a skipped step."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling, StepInfo, step_info
from lossscale_core.adapters import check_setting
from lossscale_core.errors import OverflowStreakError, ScaleFloorError
from lossscale_tf._protect import SavedValues, operations_so_far, trained_variables_of, variables_of
from lossscale_tf._step import Step, merges_replicas


class Tries:
    """The tries of one call of `minimize`, each of which takes a whole step: it differentiates, decides and updates.

    Args:
        step: The policy and the state of the optimizer.
        retries: The largest number of further tries; a policy that does not adapt has none.
        protect: The objects to protect: a skipped try leaves their variables unchanged.

    """

    def __init__(self, step: Step, retries: Any, protect: Any) -> None:
        retries = check_setting("retries", retries)
        self._step = step
        self._retries = retries if BaseScaling.of(step.policy).adapts else 0
        items = tf.nest.flatten(protect)
        self._variables = [each for item in items for each in variables_of(item)]
        self._trained = [each for item in items for each in trained_variables_of(item)]
        self.is_plain = not retries and not self._variables and not self._trained
        strategy = tf.distribute.get_strategy()
        is_looped = self._retries > 0 and not tf.executing_eagerly()
        if not self.is_plain and (strategy.num_replicas_in_sync > 1 or (is_looped and merges_replicas())):
            raise ValueError(
                f"{type(strategy).__name__} combines gradients across replicas, which cannot be "
                "done in the loop of the tries; leave retries= and protect= out, and run a step that was skipped again"
            )

    def run(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> Any:
        """Call `apply` with the gradients of `differentiate`; repeat while they overflow and retries are left.

        Returns None eagerly, and the operation of all tries in a graph.
        """
        if self.is_plain:
            return apply(differentiate())
        if tf.executing_eagerly():
            return self._run_eagerly(differentiate, apply)
        return self._run_in_graph(differentiate, apply)

    def _run_eagerly(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> None:
        for left in range(self._retries, -1, -1):
            try:
                info = self._take(differentiate, apply, SavedValues(self._variables, self._trained))
            except (OverflowStreakError, ScaleFloorError):  # the state was updated before the error was raised
                if not left:
                    raise
                continue
            if not info.overflowed:  # applied, or skipped for a reason that no other scale would remove
                return

    def _run_in_graph(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> tf.Operation:
        before = SavedValues(
            self._variables, self._trained
        )  # once for all tries, since each restores the variables that it has written

        def attempt(left: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return left - 1, self._take(differentiate, apply, before).overflowed

        def continues(left: tf.Tensor, overflowed: tf.Tensor) -> tf.Tensor:
            return overflowed & (left >= 0)

        start = tf.constant(self._retries), tf.constant(True)
        if self._retries:
            return tf.group(*tf.while_loop(continues, attempt, start, parallel_iterations=1))
        return tf.group(*attempt(*start))

    def _take(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any], before: SavedValues) -> StepInfo:
        """Take one step, restore what it wrote to if it is skipped, and return its outcome."""
        operations_before = len(operations_so_far())
        try:
            gradients = differentiate()
            before.release_unwritten(operations_before)
            info = self._apply(gradients, apply)
        except BaseException:
            if tf.executing_eagerly():  # a graph has not written anything yet
                before.restore()
            raise
        before.restore_unless(info.applied)
        return info

    def _apply(self, gradients: Any, apply: Callable[[Any], Any]) -> StepInfo:
        """Apply gradients, and return the outcome, from the states before and after."""
        with self._step.lock:  # another thread's step must not come between the two states
            before, counts_before = self._read()
            apply(gradients)
            after, counts = self._read()
        return step_info(before, after, **{cause: counts[cause] > counts_before[cause] for cause in counts})

    def _read(self) -> tuple[Any, dict[str, tf.Tensor]]:
        """Return the state, and the numbers of steps that were skipped for other reasons than an overflow."""
        counts, guard, nonfinite = {}, self._step.guard, self._step.nonfinite
        if guard is not None:
            counts["spiked"] = tf.identity(guard.state.spikes)
        if nonfinite is not None and nonfinite.counters is not None:
            counts["nonfinite_update"] = tf.identity(nonfinite.counters.updates)
            counts["nonfinite_loss"] = tf.identity(nonfinite.counters.losses)
        return self._step.state.read(), counts

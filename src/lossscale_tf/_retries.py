"""Steps that are taken again at a lower loss scale where they overflow, and variables that a skipped step leaves."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import BaseScaling, StepInfo, step_info
from lossscale_core.errors import OverflowStreakError, PolicyError, ScaleFloorError
from lossscale_tf._step import Step, merges_replicas


class Tries:
    """The tries of one call of `minimize`, each of which takes a whole step: it differentiates, decides and updates.

    Args:
        step: The policy and the state of the optimizer.
        retries: The largest number of further tries; a policy that does not adapt has none.
        protect: What a skipped try leaves as it was.

    """

    def __init__(self, step: Step, retries: Any, protect: Any) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise PolicyError(f"retries={retries!r} must be a whole number from 0; pass 0 not to retry")
        self._step = step
        self._retries = retries if BaseScaling.of(step.policy).adapts else 0
        self._variables = [each for item in tf.nest.flatten(protect) for each in _variables_of(item)]
        self.is_plain = not retries and not self._variables
        strategy = tf.distribute.get_strategy()
        is_looped = self._retries > 0 and not tf.executing_eagerly()
        if not self.is_plain and (strategy.num_replicas_in_sync > 1 or (is_looped and merges_replicas())):
            raise ValueError(
                f"{type(strategy).__name__} combines gradients across replicas, which cannot be "
                "done in the loop of the tries; leave retries= and protect= out, and run a step that was skipped again"
            )

    def run(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> Any:
        """Give `apply` the gradients that `differentiate` makes, again while they overflow and retries are left.

        Returns None eagerly, and the operation of all tries in a graph.
        """
        if self.is_plain:
            return apply(differentiate())
        before = [tf.identity(variable) for variable in self._variables]

        def put_back() -> tf.Tensor:
            for variable, value in zip(self._variables, before, strict=True):
                variable.assign(value)
            return tf.constant(False)

        if tf.executing_eagerly():
            return self._run_eagerly(differentiate, apply, put_back)
        return self._run_in_graph(differentiate, apply, put_back)

    def _run_eagerly(
        self, differentiate: Callable[[], Any], apply: Callable[[Any], Any], put_back: Callable[[], Any]
    ) -> None:
        for left in range(self._retries, -1, -1):
            try:
                info = self._take(differentiate, apply)
            except (OverflowStreakError, ScaleFloorError):  # the state is updated before it is raised
                put_back()
                if not left:
                    raise
                continue
            except BaseException:
                put_back()
                raise
            if info.applied:
                return
            put_back()
            if not info.overflowed:  # a spike: another scale would not make the norm smaller
                return

    def _run_in_graph(
        self, differentiate: Callable[[], Any], apply: Callable[[Any], Any], put_back: Callable[[], Any]
    ) -> tf.Operation:
        def attempt(left: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            info = self._take(differentiate, apply)
            tf.cond(info.applied, lambda: tf.constant(True), put_back)
            return left - 1, info.overflowed

        def goes_on(left: tf.Tensor, overflowed: tf.Tensor) -> tf.Tensor:
            return overflowed & (left >= 0)

        start = tf.constant(self._retries), tf.constant(True)
        if self._retries:
            return tf.group(*tf.while_loop(goes_on, attempt, start, parallel_iterations=1))
        return tf.group(*attempt(*start))

    def _take(self, differentiate: Callable[[], Any], apply: Callable[[Any], Any]) -> StepInfo:
        """Take one step, and tell from the states before and after what it did."""
        gradients = differentiate()
        with self._step.lock:  # another thread's step must not come between the two states
            before, spikes_before = self._read()
            apply(gradients)
            after, spikes = self._read()
        return step_info(before, after, spiked=spikes > spikes_before)

    def _read(self) -> tuple[Any, tf.Tensor]:
        guard = self._step.guard
        return self._step.state.read(), tf.constant(0) if guard is None else tf.identity(guard.state.spikes)


def _variables_of(item: Any) -> list[tf.Variable]:
    """Return the variables that a loss may write to: of a layer or module, of a generator of random numbers."""
    if isinstance(item, tf.Variable):
        return [item]
    if isinstance(item, keras.Variable):
        return [item.value]
    if hasattr(item, "non_trainable_variables"):
        if not getattr(item, "built", True):
            raise ValueError(f"{item.name!r} is not built, so that protect= cannot copy its variables; build it first")
        return [variable for each in item.non_trainable_variables for variable in _variables_of(each)]
    if isinstance(item, keras.metrics.Metric):  # of Keras 3, whose variables are its state
        return [variable for each in item.variables for variable in _variables_of(each)]
    if isinstance(state := getattr(item, "state", None), tf.Variable | keras.Variable):
        return _variables_of(state)
    raise TypeError(
        f"protect={item!r} holds no variables that could be put back; pass layers, modules, metrics, variables, or "
        "generators of random numbers"
    )

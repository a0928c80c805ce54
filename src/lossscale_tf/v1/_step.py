"""The step of a `tf.compat.v1` optimizer, in a graph for sessions and eagerly."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lossscale_core import ScaleState, ScaleWatch, ScalingPolicy, StepInfo, check_limits, step_info
from lossscale_keras.tensorflow import all_replicas, lock_of, merges_replicas
from lossscale_tf._verbs import Gradient, cast_for, finite_when_unscaled, inverse_of


class StateVariables(tf.Module):
    """The state of a policy in variables of shape `()`, one for each field, with the names of the fields."""

    def __init__(self, policy: ScalingPolicy) -> None:
        super().__init__(name="loss_scale_state")
        self._start = policy.init_state()
        for name, value in self._start._asdict().items():
            setattr(self, name, _variable(name, value))

    @property
    def all(self) -> list[Any]:
        """Every variable, in the order of the fields."""
        return [getattr(self, name) for name in self._start._fields]

    def read(self) -> Any:
        """Return the state as tensors."""
        return self._start._make(map(tf.convert_to_tensor, self.all))

    def read_on_host(self) -> Any:
        """Return the state as host scalars; eagerly only. Synchronises with the host."""
        values = (variable.numpy() for variable in self.all)
        return self._start._make(type(first)(value) for first, value in zip(self._start, values, strict=True))

    def assign(self, state: Any) -> list[Any]:
        """Set every variable to its field of `state`."""
        return [variable.assign(value) for variable, value in zip(self.all, state, strict=True)]


class Step:
    """The policy and the state of one optimizer, and the function that takes its steps."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.state = StateVariables(policy)
        self.watch = ScaleWatch()
        self.last_step: StepInfo | None = None

    def restart(self, state: Any) -> list[Any]:
        """Set the state, and forget the events that were logged before."""
        self.watch = ScaleWatch()
        return self.state.assign(state)

    def take(
        self,
        grads: list[Gradient],
        variables: list[Any],
        loss_scale: tf.Tensor | None,
        update: Callable[[list[Gradient]], Any],
        group: Callable[..., Any],
    ) -> Any:
        """Call `update(grads)` if all gradients are finite on every replica, else skip the step.

        Args:
            grads: The gradients.
            variables: Their variables.
            loss_scale: The scale of the gradients, or None if they are unscaled.
            update: Applies unscaled gradients to their variables, and returns the operations of a graph, if any.
            group: Groups the tensors and operations of this step into one operation. Called in a graph only.

        Returns:
            The result of `group`. Eagerly the host reads the flag, and the result is None.
        """
        inverse = None if loss_scale is None else inverse_of(loss_scale)

        def unscale_and_update(*grads: Any) -> Any:
            return update([cast_for(variable, grad, inverse) for grad, variable in zip(grads, variables, strict=True)])

        # A cast to a smaller dtype may overflow, and the sum over the replicas in that dtype may overflow, too.
        pairs = zip(grads, variables, strict=True)
        narrow = [cast_for(v, grad, inverse) for grad, v in pairs if v.dtype.size < max(grad.dtype.size, 4)]
        context = tf.distribute.get_replica_context()
        if narrow and context.num_replicas_in_sync > 1:
            # In a graph for sessions, `all_reduce` looks for the variables of a differentiable input, and cannot find
            # the variables of the second replica.
            narrow = tf.nest.map_structure(tf.stop_gradient, narrow, expand_composites=True)
            narrow = context.all_reduce(tf.distribute.ReduceOp.SUM, narrow)
        finite = all_replicas(finite_when_unscaled(grads, loss_scale) & finite_when_unscaled(narrow))
        if not merges_replicas():
            return self._apply_or_skip(finite, lambda: unscale_and_update(*grads), group)

        def in_cross_replica_context(strategy: Any, finite: Any, *grads: Any) -> Any:
            def update_replicas() -> Any:
                operations = strategy.extended.call_for_each_replica(unscale_and_update, args=grads)
                return strategy.experimental_local_results(operations)

            return self._apply_or_skip(strategy.experimental_local_results(finite)[0], update_replicas, group)

        return tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(finite, *grads))

    def _apply_or_skip(self, finite: tf.Tensor, apply: Callable[[], Any], group: Callable[..., Any]) -> Any:
        if tf.executing_eagerly():
            with lock_of(self):  # no other thread reads the state before it is set
                is_finite, before = bool(finite), self.state.read_on_host()
                if is_finite:
                    apply()
                after: ScaleState = self.policy.update(before, is_finite)
                self.state.assign(after)
            self.last_step = step_info(before, after)
            # The state is set before an error is raised, so that a caller who catches it continues at the lower scale.
            check_limits(self.policy, after)
            self.watch.log(self.policy, after)
            return None

        def apply_all() -> tf.Tensor:
            operations = [operation for operation in tf.nest.flatten(apply()) if operation is not None]
            with tf.control_dependencies(operations):
                return tf.constant(True)

        finite, updates = self._update_in_graph(finite)
        return group(tf.cond(finite, apply_all, lambda: tf.constant(False)), *updates)

    def _update_in_graph(self, finite: tf.Tensor) -> tuple[tf.Tensor, Sequence[Any]]:
        """Return the flag, and the operations that update the state."""
        if tf.compat.v1.executing_eagerly_outside_functions():
            return finite, self.state.assign(self.policy.update(self.state.read(), finite, xp=tf))
        # A session runs operations in any order, and may run several steps at a time. This step takes the lock after
        # its inputs are computed. If a step held the lock and waited for inputs, two steps could wait for each other.
        mutex = tf.raw_ops.MutexV2(shared_name=f"{self.state.steps.name}/update", container="")
        with tf.control_dependencies([finite]):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            finite = tf.identity(finite)
            updates = self.state.assign(self.policy.update(self.state.read(), finite, xp=tf))
        with tf.control_dependencies(updates):
            release = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([release]):
            return tf.identity(finite), [release]


def _variable(name: str, value: Any) -> tf.Variable:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    if tf.executing_eagerly():
        return tf.Variable(value, trainable=False, name=name, aggregation=first)
    # After `disable_v2_behavior` the default is a reference variable, and its value may change after it is read.
    return tf.compat.v1.Variable(value, trainable=False, name=name, use_resource=True, aggregation=first)

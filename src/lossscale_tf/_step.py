"""One step of an optimizer, of Keras or of `tf.compat.v1`: check the gradients, decide together, apply or skip."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from lossscale_core import BaseScaling, ScaleState, ScaleWatch, ScalingPolicy, StepInfo, step_info
from lossscale_core.adapters import check_overflow_streak, shown_number
from lossscale_core.errors import CheckpointWarning
from lossscale_tf._guard import Guard
from lossscale_tf._norm import clip_factor, global_norm
from lossscale_tf._state import StateVariables
from lossscale_tf._verbs import (
    Gradient,
    all_replicas,
    cast_for,
    finite_when_unscaled,
    inverse_of,
    mean_over_replicas,
    select,
)
from lossscale_tf._warning import warn_caller

Update: TypeAlias = Callable[[Sequence[Gradient], tf.Tensor | None, list[Any]], Any]
"""Applies gradients times a factor, if any, to variables; returns the operations of a graph, if any."""


class Step:
    """The policy and state of one optimizer, and its steps.

    `policy` can be replaced by a policy with the same type of state; a step that was traced before does not change.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        state: StateVariables,
        max_norm: float | None,
        guard: Guard | None,
        watch: ScaleWatch,
    ) -> None:
        self.policy = policy
        self.state = state
        # A norm above float32's range clips nothing, and would be infinite in float32.
        self.max_norm = None if max_norm is None or max_norm > float(tf.float32.max) else float(max_norm)
        self.guard = guard
        self.watch = watch
        self.last_step: StepInfo | None = None
        self.has_begun = False  # whether `warn_if_resumed` was called
        self.is_traced = False
        self.lock = _StepLock()

    def take(
        self,
        grads: list[Gradient],
        variables: list[Any],
        loss_scale: tf.Tensor | None,
        update: Update,
        in_graph: Callable[..., Any] = lambda *done: None,
    ) -> Any:
        """Call `update` if all gradients are finite on every replica, else change nothing.

        A guard may refuse finite gradients; the policy's state then stays unchanged. `loss_scale` is the scale of the
        gradients, or None if they are unscaled. Eagerly the flag is read, the state is updated on the host, and None is
        returned. In a graph, the result of `in_graph` for the tensors and operations of this step is returned.
        """
        finite, norm, factor = self._check(grads, variables, loss_scale)
        finite, norm = all_replicas(finite), None if self.guard is None else mean_over_replicas(norm)
        if not merges_replicas():
            apply = functools.partial(update, grads, factor, variables)
            return self._apply_or_skip(finite, norm, apply, in_graph)

        def in_cross_replica_context(strategy: Any, finite: Any, norm: Any, *grads: Any) -> Any:
            def update_each() -> Any:
                apply = lambda *grads: update(grads, factor, variables)  # noqa: E731
                return strategy.experimental_local_results(strategy.extended.call_for_each_replica(apply, args=grads))

            finite, norm = (strategy.experimental_local_results(each)[0] for each in (finite, norm))
            return self._apply_or_skip(finite, norm, update_each, in_graph)

        return tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(finite, norm, *grads))

    def restored(self) -> None:
        """Note that the state comes from a checkpoint, so that no warning is needed."""
        self.has_begun = True

    def warn_if_resumed(self, iterations: Any) -> None:
        """Warn, once, if the wrapped optimizer continues and the scale starts over; `iterations` are its steps."""
        if self.has_begun:
            return
        self.has_begun = True
        steps_before, state = int(tf.convert_to_tensor(iterations)), self.state.read()
        if steps_before > 0 and int(state.steps) == 0 and BaseScaling.of(self.policy).scales_losses:
            warn_caller(
                f"the wrapped optimizer has taken {steps_before} steps before, but the loss scale starts over at "
                f"{shown_number(float(state.loss_scale))}; to continue from a checkpoint, keep this optimizer "
                "in it, or its state_dict() for load_state_dict()",
                CheckpointWarning,
            )

    def _check(
        self, grads: list[Gradient], variables: list[Any], loss_scale: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Return whether the gradients are finite, their norm, and the factor that unscales and clips them."""
        overwrites = [is_overwritten(variable) for variable in variables]
        scaled = grads
        if any(overwrites):
            scaled = [grad for grad, overwriting in zip(grads, overwrites, strict=True) if not overwriting]
        finite, norm, factor = self._check_scaled(scaled, loss_scale)
        others = [
            grad if overwriting else cast_for(variable, grad, factor)
            for grad, variable, overwriting in zip(grads, variables, overwrites, strict=True)
            if overwriting or _narrows(grad, variable, factor)
        ]
        return (finite & finite_when_unscaled(others) if others else finite), norm, factor

    def _check_scaled(
        self, grads: list[Gradient], loss_scale: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        inverse = None if loss_scale is None else inverse_of(loss_scale)
        if self.max_norm is None and self.guard is None:
            return finite_when_unscaled(grads, loss_scale), None, inverse
        norm = global_norm(grads, 1.0 if loss_scale is None else loss_scale)
        finite = tf.math.is_finite(norm)
        if self.max_norm is None:
            return finite, norm, inverse
        clip = clip_factor(norm, self.max_norm)
        return finite, norm, clip if inverse is None else clip * tf.cast(inverse, clip.dtype)

    def _apply_or_skip(
        self,
        finite: tf.Tensor,
        norm: tf.Tensor | None,
        apply: Callable[[], Any],
        in_graph: Callable[..., Any],
    ) -> Any:
        if tf.executing_eagerly():
            is_finite = bool(finite)
            with self.lock:
                self._take_on_host(is_finite, norm, apply)
            return None

        self.is_traced = True

        def apply_all() -> tf.Tensor:
            with tf.control_dependencies([each for each in tf.nest.flatten(apply()) if each is not None]):
                return tf.constant(True)

        accepted, updates = self._decide_in_graph(finite, norm)
        applied = tf.cond(accepted, apply_all, lambda: tf.constant(False))
        return in_graph(applied, *updates)

    def _take_on_host(self, is_finite: bool, norm: tf.Tensor | None, apply: Callable[[], Any]) -> None:
        decision = None
        if is_finite and self.guard is not None and norm is not None:
            decision = self.guard.check_on_host(norm)
        spiked = decision is not None and not decision.accepted
        if is_finite and not spiked:
            apply()
        before: ScaleState = self.state.read_on_host()
        after: ScaleState = before if spiked else self.policy.update(before, is_finite)
        self.state.assign_changed(before, after)
        self.last_step = step_info(before, after, spiked=spiked)
        # The state is set before anything is raised, so that callers who catch it continue at the lower scale.
        check_overflow_streak(self.policy, after)
        self.watch.log(self.policy, after)
        if decision is not None and self.guard is not None:
            self.guard.assign(decision)

    def _decide_in_graph(self, finite: tf.Tensor, norm: tf.Tensor | None) -> tuple[tf.Tensor, list[Any]]:
        """Return whether a step is accepted, and the operations that update the states of guard and loss scale."""
        if tf.compat.v1.executing_eagerly_outside_functions():
            return self._decide(finite, norm)
        # A session keeps no order, and may run several of these at a time. The lock is taken after all inputs are
        # computed, since another step, for which this one waits, must not wait for the lock.
        mutex = tf.raw_ops.MutexV2(shared_name=f"{self.state.steps.name}/update", container="")
        with tf.control_dependencies([finite] if norm is None else [finite, norm]):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([lock]):
            accepted, updates = self._decide(finite, norm)
            updates = [tf.identity(each) for each in updates]
        with tf.control_dependencies(updates):
            release = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([release]):
            return tf.identity(accepted), [release]

    def _decide(self, finite: tf.Tensor, norm: tf.Tensor | None) -> tuple[tf.Tensor, list[Any]]:
        accepted, assignments = finite, []
        if self.guard is not None and norm is not None:
            accepted, guard_after = self.guard.check_in_graph(finite, norm)
            assignments = self.guard.state.assign(guard_after)
        before = self.state.read()
        after = self.policy.update(before, finite, xp=tf)
        if self.guard is not None:
            after = select(accepted | ~finite, after, before)
        return accepted, assignments + self.state.assign(after)


def cast_to_variables(grads: Sequence[Gradient], variables: list[Any], factor: tf.Tensor | None) -> list[Gradient]:
    """Return gradients times `factor`, if it is not None, each in its variable's dtype."""
    return [
        grad if is_overwritten(variable) else cast_for(variable, grad, factor)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's gradients are its new values, as for float8 scales; these are never scaled.

    Keras marks such variables: https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _narrows(grad: Gradient, variable: Any, factor: tf.Tensor | None) -> bool:
    """Return whether the cast of a gradient to its variable's dtype narrows it, so that it may become infinite."""
    lifted_to = 0 if factor is None else tf.float32.size
    return bool(tf.as_dtype(variable.dtype).base_dtype.size < max(grad.dtype.size, lifted_to))


def merges_replicas() -> bool:
    """Return whether operations for all replicas must run in the cross-replica context."""
    # Keras makes the same check before it puts a condition around an update:
    # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py
    return tf.distribute.has_strategy() and not tf.__internal__.distribute.strategy_supports_no_merge_call()


def outside_of_replicas(make: Callable[[], None]) -> None:
    """Call `make` once for all replicas, where variables may be created."""
    if not merges_replicas():
        make()
    else:
        tf.distribute.get_replica_context().merge_call(lambda _: make())


def summed_over_replicas(grads: list[Gradient]) -> list[Gradient]:
    """Return gradients summed over the replicas that take this step together."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return grads
    return context.all_reduce(tf.distribute.ReduceOp.SUM, grads)


class _StepLock:
    """A lock for eager steps, in which one thread at a time reads the state, updates it on the host, and sets it.

    Replicas are not locked: they are threads, too, and may wait for each other within a step. Nor is the only replica
    of a strategy that merges, since another thread then continues its step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = threading.local()

    def __enter__(self) -> None:
        is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
        self._held.by_this_thread = is_alone and not merges_replicas()
        if self._held.by_this_thread:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._held.by_this_thread:
            self._lock.release()

    # A lock cannot be copied or pickled; the copy gets its own lock.
    def __reduce__(self) -> tuple[type["_StepLock"], tuple[()]]:
        return _StepLock, ()

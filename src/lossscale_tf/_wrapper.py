"""The part that both wrappers share: reading and restoring the loss scale's state, and checks of their arguments."""

import weakref
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lossscale_core import (
    GuardState,
    ScaleState,
    ScalingPolicy,
    SpikeGuard,
    StepInfo,
    diagnose,
    metrics,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import check_overflow_streak, check_setting, guard_state_from_dict
from lossscale_tf._step import Step


class Wrapper:
    """An optimizer with a loss scale. A subclass sets `_step`, which takes the optimizer's steps."""

    _step: Step

    @property
    def policy(self) -> ScalingPolicy:
        """The scaling policy, frozen."""
        return self._step.policy

    @property
    def last_step(self) -> StepInfo | None:
        """The outcome of the last eager step; None before it, and in graphs, where `step_info` compares two states."""
        return self._step.last_step

    @property
    def scale_state(self) -> ScaleState:
        """The policy's state, as tensors of shape `()`."""
        return self._step.state.read()

    @property
    def guard(self) -> SpikeGuard | None:
        """The spike guard, frozen; None without one."""
        return None if self._step.guard is None else self._step.guard.guard

    @property
    def guard_state(self) -> GuardState | None:
        """The spike guard's state, as tensors of shape `()`; None without a guard."""
        return None if self._step.guard is None else self._step.guard.state.read()

    def metrics(self) -> dict[str, tf.Tensor]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise."""
        state = self.scale_state
        if tf.executing_eagerly() and "CPU" in state.loss_scale.device:  # the host reads its own memory
            self._step.watch.log(self.policy, state)
        return metrics(state, guard=self.guard_state)

    def diagnose(self) -> str:
        """Describe the condition of loss scaling in one or two sentences; see `lossscale_core.diagnose`. Eager only.

        Synchronises with the host.
        """
        return diagnose(self.policy, self._read_and_log(), guard=self._guard_on_host())

    def check_overflow_streak(self) -> None:
        """Log events and raise errors as every eager step does; for steps that `fit` or a `tf.function` takes.

        Synchronises with the host.

        Raises:
            OverflowStreakError: The policy's `max_overflow_streak` is reached.

        """
        if not tf.executing_eagerly():  # a graph has no values; without a limit none are needed
            check_overflow_streak(self.policy, self.scale_state)
            return
        state = self._step.state.read_on_host()
        check_overflow_streak(self.policy, state)
        self._step.watch.log(self.policy, state)

    def state_dict(self) -> dict[str, Any]:
        """Return all states and the policy as plain numbers, which other frameworks can restore.

        `tf.train.Checkpoint` and Keras save the state without this method. It works eagerly only: in a graph, run
        `scale_state` in a session and pass the result to `lossscale_core.state_to_dict`. Synchronises with the host.
        """
        return state_to_dict(self._read_and_log(), self.policy, guard=self._guard_on_host())

    def load_state_dict(self, saved: Mapping[str, Any]) -> tf.Operation | None:
        """Continue from a saved state, with the policy and the guard of this optimizer.

        A `CheckpointWarning` names each difference from the saved policy, and a missing state of the guard.

        Args:
            saved: The result of `state_dict`, or of `lossscale_core.state_to_dict` in any framework.

        Returns:
            The operation to run in a graph's session; None eagerly, since the state is set already.

        Raises:
            CheckpointError: `saved` is not a saved state, or is one of a newer version.

        """
        state = state_from_dict(saved, self.policy)
        guard_state = None if self._step.guard is None else guard_state_from_dict(saved)
        assigned = self._step.state.assign(state)
        self._step.restored()
        if self._step.guard is not None:
            assigned += self._step.guard.state.assign(guard_state)
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def _read_and_log(self) -> ScaleState:
        """Return the state as host scalars, and log its events."""
        state: ScaleState = self._step.state.read_on_host()
        self._step.watch.log(self.policy, state)
        return state

    def _guard_on_host(self) -> GuardState | None:
        return None if self._step.guard is None else self._step.guard.state.read_on_host()


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs as a list; raise `TypeError` for anything else."""
    try:
        return [(grad, variable) for grad, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(f"grads_and_vars={grads_and_vars!r} must be (gradient, variable) pairs") from error


def scales_already(optimizer: Any) -> bool:
    """Return whether an optimizer scales losses: a wrapper of TensorFlow, Keras, tf_keras or this package."""
    # By name, since tf_keras need not be installed.
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)


def share_deferred_restorations(wrapper: Any, inner: Any) -> None:
    """Let `inner` find the values in a checkpoint for variables that it creates later.

    Its variables are saved as children of the wrapper, so that TensorFlow defers them there, while the optimizer that
    creates a variable looks for them in its own dictionary:
    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/trackable/base.py#L601
    """
    wrapper._maybe_initialize_trackable()
    inner._maybe_initialize_trackable()
    vars(inner)["_self_unconditional_deferred_dependencies"] = (
        wrapper._deferred_dependencies
    )  # without automatic tracking


_wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def require_single_wrapper(wrapper: Any, inner: Any) -> None:
    """Raise `ValueError` if another wrapper has this optimizer: both would be saved under the same names."""
    other = _wrapped.get(inner, lambda: None)()
    if other is not None or getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):  # tf_keras sets it
        raise ValueError(
            '"inner_optimizer" is already wrapped by a LossScaleOptimizer. An optimizer can only be wrapped by a '
            f"single LossScaleOptimizer; make another {type(inner).__name__}, such as by its from_config(get_config())"
        )
    _wrapped[inner] = weakref.ref(wrapper)


def require_clipnorm(global_clipnorm: float | None) -> None:
    """Raise `PolicyError` for a norm that gradients cannot be clipped to."""
    if global_clipnorm is not None:
        check_setting("global_clipnorm", global_clipnorm)

"""What both wrappers are: an optimizer with a policy, a state, and a step that is applied or skipped as a whole."""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale_core import (
    StepInfo,
    check_overflow_streak,
    diagnose,
    metrics,
    state_from_dict,
    state_to_dict,
    step_info,
)
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_tf._grads import all_replicas, finite_when_unscaled
from lossscale_tf._norm import clip_factor, global_norm
from lossscale_tf._state import StateVariables


class StepLock:
    """Lets one thread at a time take an eager step, in which the state is read, updated on the host, and set.

    Replicas, which are threads as well and may wait for each other within a step, are not kept apart.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = threading.local()

    def __enter__(self) -> None:
        self._held.by_this_thread = tf.distribute.get_strategy().num_replicas_in_sync == 1
        if self._held.by_this_thread:
            self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        if self._held.by_this_thread:
            self._lock.release()

    def __deepcopy__(self, _: Any) -> "StepLock":
        return StepLock()

    def __reduce__(self) -> Any:
        return StepLock, ()


class Wrapper:
    """A policy's state beside an optimizer, and what users read of it."""

    _policy: Any
    _max_norm: float | None
    _scale_state: StateVariables
    _last_step: StepInfo | None = None
    _has_begun = False

    @property
    def policy(self) -> Any:
        """The scaling policy, frozen."""
        return self._policy

    @property
    def last_step(self) -> StepInfo | None:
        """What the last eager step did; None before it, and in graphs, where `step_info` compares two states."""
        return self._last_step

    @property
    def scale_state(self) -> Any:
        """The policy's state, as tensors."""
        return self._scale_state.read()

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`. Does not synchronise."""
        return metrics(self.scale_state)

    def diagnose(self) -> str:
        """Say, eagerly, in a sentence or two how loss scaling is doing; see `lossscale_core.diagnose`. Synchronises."""
        return diagnose(self._policy, self._scale_state.read_on_host())

    def check_overflow_streak(self) -> None:
        """Raise `OverflowStreakError` where the policy's `max_overflow_streak` is reached, as eager steps do.

        Synchronises with the host where there is such a limit.
        """
        check_overflow_streak(self._policy, self.scale_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale state and its policy as plain numbers, as `lossscale_core.state_to_dict` does.

        For checkpoints that travel to another framework; `tf.train.Checkpoint` and Keras keep the state by themselves.
        Eagerly only: in a graph, run `scale_state` in a session and give it to `state_to_dict`. Synchronises.
        """
        return state_to_dict(self._scale_state.read_on_host(), self._policy)

    def load_state_dict(self, saved: Any) -> Any:
        """Go on from what `state_dict`, or `lossscale_core.state_to_dict` in any framework, returned.

        The policy stays this optimizer's; a `CheckpointWarning` names each difference to the saved one. Raises
        `CheckpointError` for a newer version or what is no saved state. Returns the operation to run in a graph's
        session; eagerly the state is set when this returns.
        """
        assigned = self._scale_state.assign(state_from_dict(saved, self._policy))
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def _warn_of_lost_state(self, iterations: Any) -> None:
        """Warn, once, where the wrapped optimizer goes on and the scale begins anew; `iterations` are its steps."""
        if self._has_begun:
            return
        self._has_begun = True
        steps_before, state = int(tf.convert_to_tensor(iterations)), self._scale_state.read()
        if steps_before > 0 and int(state.steps) == 0:
            warnings.warn(
                f"the wrapped optimizer has taken {steps_before} steps before, but the loss scale begins anew at "
                f"{float(state.loss_scale):g}; to go on from a checkpoint, keep this optimizer in it, or its "
                "state_dict() for load_state_dict()",
                CheckpointWarning,
                stacklevel=5,
            )

    def _check(self, grads: list[Any], loss_scale: Any = None) -> tuple[tf.Tensor, Any]:
        """Return whether all gradients are finite, unscaled; and what unscales and clips them, if anything does."""
        inverse = None if loss_scale is None else 1.0 / loss_scale
        if self._max_norm is None:
            return finite_when_unscaled(grads, loss_scale), inverse
        norm = global_norm(grads, 1.0 if loss_scale is None else loss_scale)
        clip = clip_factor(norm, self._max_norm)
        return tf.math.is_finite(norm), clip if inverse is None else clip * tf.cast(inverse, clip.dtype)

    def _update_on_host(self, is_finite: bool) -> None:
        before = self._scale_state.read_on_host()
        after = self._policy.update(before, is_finite)
        self._scale_state.assign_changed(before, after)
        self._last_step = step_info(before, after)
        check_overflow_streak(self._policy, after)


def decide_together(
    finite: tf.Tensor, grads: list[Any], apply: Callable[..., Any], apply_or_skip: Callable[..., Any]
) -> Any:
    """Call `apply_or_skip(flag, apply to grads)` once for all replicas, the flag combined over them."""
    finite = all_replicas(finite)
    if not merges_replicas():
        return apply_or_skip(finite, lambda: apply(*grads))

    def in_cross_replica_context(strategy: Any, finite: Any, *grads: Any) -> Any:
        flag = strategy.experimental_local_results(finite)[0]
        results = lambda: strategy.extended.call_for_each_replica(apply, args=grads)  # noqa: E731
        return apply_or_skip(flag, lambda: strategy.experimental_local_results(results()))

    return tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(finite, *grads))


def merges_replicas() -> bool:
    """Return whether what concerns all replicas must be done in the context across them."""
    return tf.distribute.has_strategy() and not tf.__internal__.distribute.strategy_supports_no_merge_call()


def outside_of_replicas(make: Callable[[], None]) -> None:
    """Call `make` once for all replicas, where variables may be created."""
    if not merges_replicas():
        make()
    else:
        tf.distribute.get_replica_context().merge_call(lambda _: make())


def summed_over_replicas(grads: list[Any]) -> list[Any]:
    """Return gradients summed over the replicas that take this step together."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return grads
    return context.all_reduce(tf.distribute.ReduceOp.SUM, grads)


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs as a list; raise `TypeError` for what is none."""
    try:
        return [(grad, variable) for grad, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(f"grads_and_vars={grads_and_vars!r} must be (gradient, variable) pairs") from error


def scales_already(optimizer: Any) -> bool:
    """Return whether an optimizer of any kind is a wrapper like these: TensorFlow's, Keras's, tf_keras's or ours."""
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)


def share_deferred_restorations(wrapper: Any, inner: Any) -> None:
    """Let `inner` find what a checkpoint holds for variables that it creates later.

    Its variables are saved as children of the wrapper, so that TensorFlow defers them there, while the optimizer that
    creates a variable looks for them in its own dictionary:
    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/trackable/base.py#L601
    """
    wrapper._maybe_initialize_trackable()
    inner._maybe_initialize_trackable()
    vars(inner)["_self_unconditional_deferred_dependencies"] = wrapper._deferred_dependencies  # past automatic tracking


_wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def require_single_wrapper(wrapper: Any, inner: Any) -> None:
    """Raise `ValueError` where another wrapper, which would be saved under the same names, has this optimizer."""
    other = _wrapped.get(inner, lambda: None)()
    if other is not None or getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):  # tf_keras sets it
        raise ValueError(
            '"inner_optimizer" is already wrapped by a LossScaleOptimizer. An optimizer can only be wrapped by a '
            f"single LossScaleOptimizer; make another {type(inner).__name__}, such as by its from_config(get_config())"
        )
    _wrapped[inner] = weakref.ref(wrapper)


def require_clipnorm(global_clipnorm: float | None) -> None:
    """Raise `PolicyError` for a norm that nothing can be clipped to."""
    if global_clipnorm is None:
        return
    if not isinstance(global_clipnorm, int | float) or not 0.0 < global_clipnorm < float("inf"):
        raise PolicyError(f"global_clipnorm={global_clipnorm!r} must be positive and finite; leave it out not to clip")

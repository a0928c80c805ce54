"""What both wrappers are: an optimizer with a policy, a state, and a step that is applied or skipped as a whole."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale_core import StepInfo, check_overflow_streak, diagnose, metrics, step_info
from lossscale_core.errors import PolicyError
from lossscale_tf._grads import all_replicas, finite_when_unscaled
from lossscale_tf._norm import clip_factor, global_norm
from lossscale_tf._state import StateVariables


class Wrapper:
    """A policy's state beside an optimizer, and what users read of it."""

    _policy: Any
    _max_norm: float | None
    _scale_state: StateVariables
    _last_step: StepInfo | None = None

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

    def _check(self, grads: list[Any], loss_scale: Any = None) -> tuple[tf.Tensor, Any]:
        """Return whether all gradients are finite, unscaled; and what unscales and clips them, if anything does."""
        inverse = None if loss_scale is None else 1.0 / loss_scale
        if self._max_norm is None:
            return finite_when_unscaled(grads, loss_scale), inverse
        norm = global_norm(grads, 1.0 if loss_scale is None else loss_scale)
        clip = clip_factor(norm, self._max_norm)
        return tf.math.is_finite(norm), clip if inverse is None else clip * inverse

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


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs as a list; raise `TypeError` for what is none."""
    try:
        return [(grad, variable) for grad, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(f"grads_and_vars={grads_and_vars!r} must be (gradient, variable) pairs") from error


def scales_already(optimizer: Any) -> bool:
    """Return whether an optimizer of any kind is a wrapper like these: TensorFlow's, Keras's, tf_keras's or ours."""
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)


def require_clipnorm(global_clipnorm: float | None) -> None:
    """Raise `PolicyError` for a norm that nothing can be clipped to."""
    if global_clipnorm is None:
        return
    if not isinstance(global_clipnorm, int | float) or not 0.0 < global_clipnorm < float("inf"):
        raise PolicyError(f"global_clipnorm={global_clipnorm!r} must be positive and finite; leave it out not to clip")

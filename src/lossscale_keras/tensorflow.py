"""The parts of a step that TensorFlow does in its own way. They also work if Keras runs on another backend.

Under a strategy of `tf.distribute` gradients are summed first, and all replicas decide alike. Keras's own wrapper
decides by the first replica, before the sum:
https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

__all__ = ["all_replicas", "call_once", "is_distributed", "lock_of", "merges_replicas", "sum_of_squares", "unconverted"]

unconverted = tf.autograph.experimental.do_not_convert
"""A decorator that keeps AutoGraph from converting a function: the conversion takes seconds and is not needed."""


def sum_of_squares(arrays: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the squares of real tensors: float32, or float64 if one of them is; shape `()`."""
    # One kernel squares and sums; `reduce_sum(square(x))` would write all squares to memory and read them again.
    halves = list(map(tf.nn.l2_loss, arrays))
    if len({half.dtype for half in halves}) > 1:
        halves = [tf.cast(half, tf.float64) for half in halves]
    return 2.0 * tf.add_n(halves) if halves else tf.zeros(())


def all_replicas(flag: tf.Tensor) -> tf.Tensor:
    """Return whether a flag is true on every replica.

    Raises:
        RuntimeError: The call is made outside of a replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("flags are combined in a replica context; call this inside strategy.run")
    if context.num_replicas_in_sync == 1:
        return flag
    # The only reductions are SUM and MEAN, which are not defined for bools.
    overflows = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~flag, tf.float32))
    return tf.equal(overflows, 0.0)


def lock_of(owner: Any) -> threading.Lock:
    """Return the lock of an optimizer, which is held while an eager step reads the state, updates it and sets it."""
    return _locks.setdefault(owner, threading.Lock())


_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
"""Not attributes of the optimizers, which can be copied."""


def is_distributed() -> bool:
    """Return whether this code runs on one of several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def require_replica() -> None:
    """Raise `ValueError` within a strategy, but outside of its replicas."""
    if tf.distribute.in_cross_replica_context():
        raise ValueError("gradients are applied in a replica context; call this inside strategy.run")


def merges_replicas() -> bool:
    """Return whether operations for all replicas must run in the cross-replica context."""
    return tf.distribute.has_strategy() and not tf.__internal__.distribute.strategy_supports_no_merge_call()


def sum_over_replicas(grads: list[Any]) -> list[Any]:
    """Return gradients summed over the replicas that take this step together; None stays."""
    if not is_distributed():
        return grads
    present = [grad for grad in grads if grad is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if grad is None else next(sums) for grad in grads]


def agree(checked: Any) -> Any:
    """Return whether checked gradients are finite on every replica, and the mean of their norms."""
    if not is_distributed():
        return checked
    norm = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, checked.norm)
    finite = all_replicas(checked.finite)
    return checked._replace(finite=finite, norm=norm, known=finite)


def merge(step: Callable[..., None], checked: Any, update: Callable[..., None], grads: list[Any]) -> None:
    """Call `step(checked, apply)` once for all replicas; `apply()` calls `update(*grads)` on each of them."""

    def in_cross_replica_context(strategy: Any, checked: Any, *grads: Any) -> None:
        first = checked._make(strategy.experimental_local_results(each)[0] for each in checked)
        step(first, lambda: strategy.extended.call_for_each_replica(update, args=grads) and None)

    tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(checked, *grads))


def call_once(function: Callable[[], None]) -> None:
    """Call a function once for all replicas, where variables may be created."""
    if merges_replicas():
        tf.distribute.get_replica_context().merge_call(lambda _: function())
    else:
        function()


def outside_traces(variables: list[Any]) -> Any:
    """Return a context that leaves a trace, if the variables have values outside of it.

    They have none if the model is being built in it. Then only the trace can read them, as `ScheduleFreeAdamW` does.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    with tf.init_scope():
        exist = tf.distribute.has_strategy() or all(
            bool((each.value if isinstance(each, keras.Variable) else each).is_initialized()) for each in variables
        )
    return tf.init_scope() if exist else contextlib.nullcontext()


class StoredNumber:
    """A float32 with a value for each replica, which eager code and graphs set and read in the order of their calls."""

    def __init__(self, name: str, start: float) -> None:
        self._is_set = False
        with tf.init_scope():
            # A mirrored variable needs a merge call, which a user's loop must not contain:
            # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/mirrored_run.py#L503
            self.variable = tf.Variable(
                start,
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def set(self, number: tf.Tensor | float) -> None:
        """Set the number."""
        self._is_set = True
        self.variable.assign(number)

    def get(self) -> tf.Tensor | None:
        """Return the number, or None before any code set it, or was traced that sets it."""
        return tf.convert_to_tensor(self.variable) if self._is_set else None

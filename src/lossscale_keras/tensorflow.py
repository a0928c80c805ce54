"""The parts of a step that are different on TensorFlow. They also work if Keras runs on another backend.

Under a strategy of `tf.distribute`, a step first sums the gradients over the replicas. All replicas then decide
together whether to apply it. Keras's own wrapper lets the first replica decide, before the sum:
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
"""A decorator that keeps AutoGraph from converting a function. The conversion takes seconds and has no use here."""


def sum_of_squares(arrays: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the squares of real tensors: float32, or float64 if one tensor is float64; shape `()`."""
    # One kernel squares and sums; `reduce_sum(square(x))` would write all squares to memory and read them again.
    halves = list(map(tf.nn.l2_loss, arrays))
    if len({half.dtype for half in halves}) > 1:
        halves = [tf.cast(half, tf.float64) for half in halves]
    return 2.0 * tf.add_n(halves) if halves else tf.zeros(())


def all_replicas(flag: tf.Tensor) -> tf.Tensor:
    """Return whether a flag is true on every replica.

    Raises:
        RuntimeError: The caller is not in a replica context.
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
    """Return the lock of an optimizer. An eager step holds it while it reads, updates and sets the state."""
    return _locks.setdefault(owner, threading.Lock())


_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
"""The locks of the optimizers. A lock in an attribute would make an optimizer impossible to copy."""


def is_distributed() -> bool:
    """Return whether this code runs on one of several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def require_replica() -> None:
    """Raise `ValueError` if the caller is in a strategy, but not in one of its replicas."""
    if tf.distribute.in_cross_replica_context():
        raise ValueError("gradients are applied in a replica context; call this inside strategy.run")


def merges_replicas() -> bool:
    """Return whether operations for all replicas must run in the cross-replica context, by a `merge_call`."""
    return tf.distribute.has_strategy() and not tf.__internal__.distribute.strategy_supports_no_merge_call()


def sum_over_replicas(grads: list[Any]) -> list[Any]:
    """Return gradients summed over the replicas that take this step together. None stays None."""
    if not is_distributed():
        return grads
    present = [grad for grad in grads if grad is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if grad is None else next(sums) for grad in grads]


def agree(result: Any) -> Any:
    """Combine the check results of all replicas: whether all are finite, and the mean of their norms."""
    if not is_distributed():
        return result
    norm = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, result.norm)
    finite = all_replicas(result.finite)
    return result._replace(finite=finite, norm=norm, flag=finite)


def merge(step: Callable[..., None], result: Any, update: Callable[..., None], grads: list[Any]) -> None:
    """Call `step(result, apply)` once for all replicas; `apply()` calls `update(*grads)` on each replica."""

    def in_cross_replica_context(strategy: Any, result: Any, *grads: Any) -> None:
        local_result = result._make(strategy.experimental_local_results(value)[0] for value in result)
        step(local_result, lambda: strategy.extended.call_for_each_replica(update, args=grads) and None)

    tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(result, *grads))


def call_once(function: Callable[[], None]) -> None:
    """Call a function once for all replicas, in a context in which it may create variables."""
    if merges_replicas():
        tf.distribute.get_replica_context().merge_call(lambda _: function())
    else:
        function()


def outside_traces(variables: list[Any]) -> Any:
    """Return a context that leaves a trace if the variables have values outside of the trace.

    If the model is being built in the trace, only the trace can read the variables, and some optimizers read them when
    they are built, such as `ScheduleFreeAdamW`. The context then changes nothing.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    with tf.init_scope():
        exist = tf.distribute.has_strategy() or all(
            bool((v.value if isinstance(v, keras.Variable) else v).is_initialized()) for v in variables
        )
    return tf.init_scope() if exist else contextlib.nullcontext()


class StoredNumber:
    """A float32 number of each replica. Eager code and graphs set and read it in the order of their calls."""

    def __init__(self, name: str, start: float) -> None:
        self._is_set = False
        with tf.init_scope():
            # A mirrored variable needs a merge call. TensorFlow forbids it in a nested tf.function and in control flow:
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
        """Return the number, or None if no call of `set` has run or been traced."""
        return tf.convert_to_tensor(self.variable) if self._is_set else None

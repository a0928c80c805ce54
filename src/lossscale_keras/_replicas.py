"""Steps under a strategy of `tf.distribute`: gradients are summed first, and all replicas decide alike.

Keras's own wrapper decides by the first replica, before the sum:
https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py
"""

from collections.abc import Callable
from typing import Any

from lossscale_keras._backend import BACKEND
from lossscale_keras._step import Checked

if BACKEND == "tensorflow":
    import tensorflow as tf


def is_distributed() -> bool:
    """Return whether this code runs on one of several replicas."""
    return BACKEND == "tensorflow" and tf.distribute.get_strategy().num_replicas_in_sync > 1


def require_replica() -> None:
    """Raise `ValueError` within a strategy, but outside of its replicas."""
    if BACKEND == "tensorflow" and tf.distribute.in_cross_replica_context():
        raise ValueError("gradients are applied in a replica context; call this inside strategy.run")


def merges() -> bool:
    """Return whether operations for all replicas must run in the cross-replica context."""
    return (
        BACKEND == "tensorflow"
        and tf.distribute.has_strategy()
        and not tf.__internal__.distribute.strategy_supports_no_merge_call()
    )


def summed(grads: list[Any]) -> list[Any]:
    """Return gradients summed over the replicas that take this step together; None stays."""
    if not is_distributed():
        return grads
    present = [grad for grad in grads if grad is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if grad is None else next(sums) for grad in grads]


def agreed(checked: Checked) -> Checked:
    """Return whether the gradients are finite on every replica, and the mean of their norms."""
    if not is_distributed():
        return checked
    context, reduce = tf.distribute.get_replica_context(), tf.distribute.ReduceOp
    # The only reductions are SUM and MEAN, which are not defined for bools.
    overflows = context.all_reduce(reduce.SUM, tf.cast(~checked.finite, tf.float32))
    finite = tf.equal(overflows, 0.0)
    return Checked(finite, context.all_reduce(reduce.MEAN, checked.norm), finite)


def once(function: Callable[[], None]) -> None:
    """Call a function once for all replicas, where variables may be created."""
    if merges():
        tf.distribute.get_replica_context().merge_call(lambda _: function())
    else:
        function()


def together(step: Callable[..., None], checked: Checked, update: Callable[..., None], grads: list[Any]) -> None:
    """Call `step(checked, apply)` once for all replicas; `apply()` calls `update(*grads)` on each of them."""
    if not merges():
        step(checked, lambda: update(*grads))
        return

    def in_cross_replica_context(strategy: Any, checked: Checked, *grads: Any) -> None:
        first = Checked(*(strategy.experimental_local_results(each)[0] for each in checked))
        step(first, lambda: strategy.extended.call_for_each_replica(update, args=grads) and None)

    tf.distribute.get_replica_context().merge_call(in_cross_replica_context, args=(checked, *grads))


def apply_summed(inner: Any, grads: list[Any], variables: list[Any]) -> None:
    """Let a Keras 3 optimizer apply gradients that are summed over the replicas already."""
    if BACKEND != "tensorflow":
        inner.apply(grads, variables)
        return
    # `apply` has no argument for this. The attribute replaces the method, without automatic tracking. Eagerly the sum
    # takes a tenth of a step, also on one replica:
    # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/tensorflow/optimizer.py
    vars(inner)["_all_reduce_sum_gradients"] = list
    try:
        inner.apply(grads, variables)
    finally:
        vars(inner).pop("_all_reduce_sum_gradients", None)  # another replica may have been faster

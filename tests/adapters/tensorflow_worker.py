"""One of two workers on loopback: trains with overflows, and spikes, on one of them at a time.

It prints the bits it ends with.
"""

import keras
import numpy as np
import tensorflow as tf

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
GUARD = SpikeGuard(warmup=4)


def _optimizer(kind: str, guard: SpikeGuard | None):
    if kind == "v1":
        return v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(0.01), POLICY)
    return LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY, guard=guard)


def _take_step(optimizer, variable, victim, sums: bool) -> None:
    """Take a step on this replica; with `sums`, the gradient is summed over replicas before it is applied."""
    context = tf.distribute.get_replica_context()
    bad = float("inf") if getattr(optimizer, "guard", None) is None else 1e4
    factor = tf.where(context.replica_id_in_sync_group == victim, bad, 1.0)
    loss = lambda: tf.reduce_sum(variable**2) * factor  # noqa: E731
    if not sums:
        optimizer.minimize(loss, var_list=[variable])
        return
    grads = context.all_reduce("sum", optimizer.get_gradients(loss, [variable]))
    optimizer.apply_gradients(zip(grads, [variable], strict=True), experimental_aggregate_gradients=False)


def _train(strategy, kind: str, steps: int, graph: bool, sums: bool, guard: SpikeGuard | None = None) -> list:
    """Return the bits of the variable and of the slots after so many steps, each of which was checked."""
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0]), _optimizer(kind, guard)

    def step(victim):
        strategy.run(_take_step, args=(optimizer, variable, victim, sums))

    step = tf.function(step, autograph=False) if graph else step
    victims = np.random.default_rng(0).integers(0, 5, steps)
    if guard is None:
        expected = simulate(POLICY, list(victims >= 2))
    else:
        victims[: guard.warmup] = 2
        expected = simulate(POLICY, [True] * steps, norms=np.where(victims < 2, 1e4, 1.0), guard=guard)
    for n, victim in enumerate(victims):
        before = variable.numpy()
        step(tf.constant(int(victim)))
        assert np.array_equal(before, variable.numpy()) == (victim < 2), n
        assert optimizer.loss_scale.numpy() == expected.loss_scale_after[n], n
    inner = optimizer.variables() if kind == "v1" else optimizer.inner_optimizer.variables
    return [np.asarray(each.numpy()).tobytes().hex() for each in (variable, *inner)]


def main() -> None:
    """Train in a graph and eagerly, and with the Keras wrapper after a sum by the caller, too."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for kind, sums in (("keras", False), ("keras", True), ("v1", False)):
        print(_train(strategy, kind, 16, True, sums), _train(strategy, kind, 4, False, sums))
        if kind == "keras":
            print(_train(strategy, kind, 10, True, sums, GUARD), _train(strategy, kind, 6, False, sums, GUARD))


if __name__ == "__main__":
    main()

"""One of two workers on the loopback interface. Steps overflow or spike on one worker at a time.

The program prints the bits of its variables at the end.
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


def _take_step(optimizer, variable, victim) -> None:
    """Take a step on this replica."""
    bad = float("inf") if getattr(optimizer, "guard", None) is None else 1e4
    factor = tf.where(tf.distribute.get_replica_context().replica_id_in_sync_group == victim, bad, 1.0)
    optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, var_list=[variable])


def _train(strategy, kind: str, steps: int, graph: bool, guard: SpikeGuard | None = None) -> list:
    """Take steps, check each step, and return the bits of the variable and of the slots."""
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0]), _optimizer(kind, guard)

    def step(victim):
        strategy.run(_take_step, args=(optimizer, variable, victim))

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
    return [np.asarray(v.numpy()).tobytes().hex() for v in (variable, *inner)]


def main() -> None:
    """Train in a graph and eagerly."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for kind, guard in (("keras", None), ("keras", GUARD), ("v1", None)):
        print(_train(strategy, kind, 16, True, guard), _train(strategy, kind, 6, False, guard))


if __name__ == "__main__":
    main()

"""One of two workers on the loopback interface. Steps overflow on one worker at a time.

The program prints the bits of its variables at the end.
"""

import keras
import numpy as np
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)


OPTIMIZERS = {
    "keras": lambda: LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY),
    "v1": lambda: v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(0.01), POLICY),
}


def _take_step(optimizer, variable, victim) -> None:
    """Take a step on this replica."""
    here = tf.distribute.get_replica_context().replica_id_in_sync_group
    factor = tf.where(here == victim, float("inf"), 1.0)
    optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, var_list=[variable])


def _train(strategy, kind: str, steps: int, graph: bool) -> list:
    """Take steps, check each step, and return the bits of the variable and of the slots."""
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0]), OPTIMIZERS[kind]()

    def step(victim):
        strategy.run(_take_step, args=(optimizer, variable, victim))

    step = tf.function(step, autograph=False) if graph else step
    victims = np.random.default_rng(0).integers(0, 5, steps)
    expected = simulate(POLICY, list(victims >= 2))
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
    for kind in OPTIMIZERS:
        print(_train(strategy, kind, 16, True), _train(strategy, kind, 6, False))


if __name__ == "__main__":
    main()

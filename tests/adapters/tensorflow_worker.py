"""One of two workers on loopback: trains with overflows on one of them at a time, and prints the bits it ends with."""

import sys

import keras
import numpy as np
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer, v1

STEPS = 200
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)


def main(kind: str) -> None:
    """Train with the wrapper of that kind."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        if kind == "v1":
            optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(0.01), POLICY)
        else:
            optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY)

    def on_replica(victim):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        factor = tf.where(replica == victim, float("inf"), 1.0)
        optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, var_list=[variable])

    @tf.function(autograph=False)
    def step(victim):
        strategy.run(on_replica, args=(victim,))

    victims = np.random.default_rng(0).integers(0, 5, STEPS)
    expected = simulate(POLICY, list(victims >= 2))
    for n, victim in enumerate(victims):
        before = variable.numpy()
        step(tf.constant(int(victim)))
        assert np.array_equal(before, variable.numpy()) == (victim < 2), n
        assert optimizer.loss_scale.numpy() == expected.loss_scale_after[n], n
    inner = optimizer.variables() if kind == "v1" else optimizer.inner_optimizer.variables
    print([np.asarray(each.numpy()).tobytes().hex() for each in (variable, *inner)])


if __name__ == "__main__":
    main(sys.argv[1])

"""Steps that AutoGraph converts, as `tf.function` does by default: it can convert what it meets, or is told not to."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: F401, I001  # where AutoGraph's warnings are errors
import keras
import pytest
import tensorflow as tf

from lossscale_tf import LossScaleOptimizer, v1


class Model(keras.Sequential):
    """A model with the loss and the ways to train that a user traces."""

    def __init__(self):
        super().__init__([keras.Input((4,)), keras.layers.Dense(3)])
        self.x, self.y = tf.ones((2, 4)), tf.ones((2, 3))

    def mean_square(self):
        """Return the loss."""
        return tf.reduce_mean((self(self.x) - self.y) ** 2)


def _loop(model):
    optimizer, weights = LossScaleOptimizer(keras.optimizers.Adam(1e-3)), model.trainable_variables

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(model.mean_square())
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, weights))
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    return step


def _minimize(model):
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), global_clipnorm=1.0)
    return tf.function(lambda: optimizer.minimize(model.mean_square, model.trainable_variables))


def _fit(model):
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    return lambda: model.fit(model.x, model.y, verbose=0)


def _v1(model):
    optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "dynamic")
    weights = [each.value for each in model.trainable_variables]

    @tf.function
    def step():
        optimizer.minimize(model.mean_square, var_list=weights)

    return step


@pytest.mark.parametrize("make", [_loop, _minimize, _fit, _v1])
def test_a_step_that_autograph_converts(make):
    """It trains, and prints nothing."""
    step = make(model := Model())
    before = float(model.mean_square())
    step()
    step()
    assert float(model.mean_square()) < before

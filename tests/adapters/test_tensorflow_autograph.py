"""Steps that AutoGraph converts, which is the default of `tf.function`."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: F401, I001  # where AutoGraph's warnings are errors
import keras
import pytest
import tensorflow as tf

from lossscale_tf import LossScaleOptimizer, v1


def _loss(weight):
    return tf.reduce_mean((weight - 1.0) ** 2)


def _loop(weight):
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(_loss(weight))
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(grads, [weight], strict=True))

    return step


def _minimize(weight):
    loss, optimizer = lambda: _loss(weight), LossScaleOptimizer(keras.optimizers.Adam(1e-3), global_clipnorm=1.0)
    return tf.function(lambda: optimizer.minimize(loss, [weight]))


def _v1(weight):
    optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "dynamic")

    @tf.function
    def step():
        optimizer.minimize(lambda: _loss(weight), var_list=[weight])

    return step


@pytest.mark.parametrize("make", [_loop, _minimize, _v1])
def test_a_step_that_autograph_converts(make):
    """The step trains and prints nothing."""
    weight = tf.Variable([3.0, 4.0])
    step, before = make(weight), float(_loss(weight))
    step()
    step()
    assert float(_loss(weight)) < before

"""Steps that AutoGraph converts, which is the default of `tf.function`."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: F401, I001  # where AutoGraph's warnings are errors
import keras
import pytest
import tensorflow as tf

from lossscale_tf import LossScaleOptimizer, v1


INPUTS, TARGETS = tf.ones((2, 4)), tf.ones((2, 3))


def _loss(model):
    return tf.reduce_mean((model(INPUTS) - TARGETS) ** 2)


def _loop(model):
    optimizer, weights = LossScaleOptimizer(keras.optimizers.Adam(1e-3)), model.trainable_variables

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(_loss(model))
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, weights))
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    return step


def _minimize(model):
    optimizer, loss = LossScaleOptimizer(keras.optimizers.Adam(1e-3), global_clipnorm=1.0), lambda: _loss(model)
    return tf.function(lambda: optimizer.minimize(loss, model.trainable_variables))


def _v1(model):
    optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "dynamic")
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step():
        optimizer.minimize(lambda: _loss(model), var_list=weights)

    return step


@pytest.mark.parametrize("make", [_loop, _minimize, _v1])
def test_a_step_that_autograph_converts(make):
    """The step trains and prints nothing."""
    step = make(model := keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    before = float(_loss(model))
    step()
    step()
    assert float(_loss(model)) < before

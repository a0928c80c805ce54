"""Likely mistakes with the TensorFlow wrappers: the error of each says what to do in one sentence."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: F401, I001  # the devices of all tests, before any is used
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core.errors import CheckpointWarning
from lossscale_tf import LossScaleOptimizer, v1

_sgd = keras.optimizers.SGD
_sgd_of_v1 = tf.compat.v1.train.GradientDescentOptimizer


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(_sgd()), "wrap the optimizer once"),
        (lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()), "wrap the optimizer once"),
        (lambda: v1.LossScaleOptimizer(_sgd_of_v1(1.0), 4.0), "wrap the optimizer once"),
        (lambda: _sgd_of_v1(1.0), r"wrap it by lossscale_tf\.v1"),
        (lambda: _sgd, "is not a Keras optimizer"),
    ],
)
def test_objects_that_cannot_be_wrapped(inner, words):
    """The message names the reason on one line."""
    with pytest.raises(TypeError, match=words):
        LossScaleOptimizer(inner())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "none", "initial_scale": 4.0}, "^policy='none' and initial_scale=4.0 are both given; pass either "),
        ({"policy": "none", "dynamic": False, "dynamic_growth_steps": 7}, "dynamic=False, dynamic_growth_steps=7 are"),
        ({"policy": "none", "loss_scale": 8.0}, "loss_scale=8.0 are both given; pass either policy= or the settings"),
        ({"loss_scale": 8.0, "dynamic": True}, "pass either loss_scale= or dynamic="),
        ({"loss_scale": 8.0, "initial_scale": 4.0}, "go with dynamic scaling; set them in the policy"),
        ({"clipnorm": 1.0}, r"does not support `clipnorm`\. Instead, set `clipnorm` on the `inner_opt"),
        ({"dynamic": "no"}, r"\"dynamic\" argument .* must be a bool, but got: 'no'"),
        ({"init_scale": 8.0}, "does not support arguments: `init_scale`"),
    ],
)
def test_arguments_that_cannot_be_passed(arguments, words):
    """The message contains the values, and what to pass instead."""
    with pytest.raises((ValueError, TypeError), match=words):
        LossScaleOptimizer(**{"inner_optimizer": _sgd(), **arguments})


def test_one_optimizer_in_two_wrappers():
    """It is an error, because files would have the same names for both wrappers."""
    inner = tf_keras.optimizers.SGD()
    tf_keras.mixed_precision.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="already wrapped by a LossScaleOptimizer"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("loss_scale", 4.0, r"loss_scale=4\.0 cannot be set, .*load_state_dict"),
        ("initial_scale", 4.0, r"initial_scale=4\.0 cannot be set; .* another policy"),
        ("dynamic_growth_steps", 5, "dynamic_growth_steps belongs to dynamic scaling"),
    ],
)
def test_attributes_that_cannot_be_set(name, value, words):
    """Only the policy changes the scale."""
    optimizer, variable = LossScaleOptimizer(_sgd(0.5), 8.0), tf.Variable(1.0)
    with pytest.raises(AttributeError, match=words):
        setattr(optimizer, name, value)
    optimizer.minimize(lambda: variable**2, [variable])
    assert (float(variable), float(optimizer.loss_scale)) == (0.0, 8.0)


def test_a_graph_for_sessions():
    """The error names `v1`, because a Keras optimizer has no operation for a session."""
    with tf.Graph().as_default():
        variable, optimizer = tf.Variable(1.0), LossScaleOptimizer(_sgd(0.1), 8.0)
        for call in (
            lambda: optimizer.minimize(lambda: variable * 1.0, [variable]),
            lambda: optimizer.get_scaled_loss(variable * 1.0),
            lambda: optimizer.scale_loss(variable * 1.0),
            lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]),
            lambda: optimizer.get_gradients(variable * 1.0, [variable]),
        ):
            with pytest.raises(RuntimeError, match=r"lossscale_tf\.v1\.LossScaleOptimizer"):
                call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_optimizer_that_has_taken_steps(is_loaded):
    """The scale starts over, with a warning. After loading a state there is no warning, even without steps."""
    inner, variable = _sgd(0.5), tf.Variable(1.0)
    inner.build([variable])
    inner.apply([tf.constant(0.0)], [variable])
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    if is_loaded:
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scale": 4096.0})
    words = "has taken 1 steps before, but the loss scale starts over at 8"
    with nullcontext() if is_loaded else pytest.warns(CheckpointWarning, match=words):
        optimizer.minimize(lambda: variable**2, [variable])
    assert float(optimizer.loss_scale) == (4096.0 if is_loaded else 8.0)

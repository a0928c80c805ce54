"""Likely mistakes with the TensorFlow wrappers: the error of each says what to do in one sentence."""

import warnings

import keras
import pytest
import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf import LossScaleLogger, LossScaleOptimizer, v1


class Foreign:
    """An optimizer of another framework with a text of several lines."""

    def __repr__(self):
        return "SGD (\nParameter Group 0\n    lr: 0.1\n)"


@pytest.fixture
def optimizer():
    """Return an optimizer that is built."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([tf.Variable([1.0])])
    return optimizer


def test_the_loss_scale_is_not_set(optimizer):
    """The policy changes it; what to do instead is said, and does it."""
    with pytest.raises(AttributeError, match=r"loss_scale=4\.0 cannot be set, .*load_state_dict"):
        optimizer.loss_scale = 4.0
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scale": 4.0})
    assert float(optimizer.loss_scale) == 4.0


def test_no_gradients_at_all(optimizer):
    """An empty list is not taken for a list of gradients that are None."""
    with pytest.raises(ValueError, match=r"grads_and_vars is empty, .*; pass"):
        optimizer.apply_gradients([])


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"initial_scale": 4.0}, "initial_scale=4.0"),
        ({"dynamic": False, "dynamic_growth_steps": 7}, "dynamic=False, dynamic_growth_steps=7"),
        ({"loss_scale": 8.0}, "loss_scale=8.0"),
    ],
)
def test_a_policy_and_settings_are_both_shown(settings, given):
    """Both values are in the message, and what to pass instead."""
    with pytest.raises(ValueError, match=f"^policy='none' and {given} are both given; pass either policy= or the sett"):
        LossScaleOptimizer(keras.optimizers.SGD(0.1), policy="none", **settings)


def test_clipping_twice_is_refused():
    """By the wrapper and by the optimizer inside."""
    with pytest.raises(
        ValueError, match=r"global_clipnorm=1\.0, and the inner optimizer's is 2\.0, .* set one of the two"
    ):
        LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=2.0), global_clipnorm=1.0)
    assert LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=2.0)).global_clipnorm == 2.0


def test_a_logger_without_a_loss_scale_says_so():
    """It names the optimizer and what to compile with; `fit` continues."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    with pytest.warns(UserWarning, match="logs nothing: the optimizer is SGD; compile with the LossScaleOptimizer of"):
        history = model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0, callbacks=[LossScaleLogger()]).history
    assert list(history) == ["loss"]


@pytest.mark.parametrize("wrap", [LossScaleOptimizer, lambda inner: v1.LossScaleOptimizer(inner, "dynamic")])
def test_an_optimizer_of_another_framework_is_shown_on_one_line(wrap):
    """And what to pass is said."""
    with pytest.raises(TypeError) as caught:
        wrap(Foreign())
    assert "SGD ( Parameter Group 0 lr: 0.1 )" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_keras_optimizer_in_v1s_wrapper():
    """The wrapper for it is named."""
    with pytest.raises(TypeError, match=r"wrap a Keras optimizer by lossscale_tf\.LossScaleOptimizer"):
        v1.LossScaleOptimizer(keras.optimizers.SGD(0.1), "dynamic")


def test_another_inner_optimizer():
    """It is refused, since the variables that are built belong to the first."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), tf.Variable(1.0)
    with pytest.raises(AttributeError, match="make another LossScaleOptimizer around it"):
        optimizer.inner_optimizer = keras.optimizers.SGD(0.25)
    optimizer.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.0


def test_an_unknown_argument():
    """The message names the nearest argument."""
    with pytest.raises(ValueError, match=r"init_scale.*did you mean 'initial_scale'"):
        LossScaleOptimizer(keras.optimizers.SGD(), init_scale=8.0)


def test_errors_keep_their_type_in_a_function_that_autograph_converts():
    """So that they can be caught; AutoGraph adds the lines that led to them."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), tf.Variable(1.0)

    @tf.function
    def scaled_twice():
        return optimizer.get_scaled_loss(optimizer.get_scaled_loss(variable * 1.0))

    with pytest.raises(CallOrderError, match="this loss is scaled already"):
        scaled_twice()


def test_a_loaded_state_is_no_reason_to_warn():
    """Though it has counted no steps, as one that comes from another tool."""
    inner, variable = keras.optimizers.SGD(0.5), tf.Variable(1.0)
    inner.build([variable])
    inner.apply([tf.constant(0.0)], [variable])
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scale": 4096.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.minimize(lambda: variable**2, [variable])

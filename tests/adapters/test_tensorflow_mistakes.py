"""Likely mistakes with the TensorFlow wrappers: the error of each says what to do in one sentence."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core.errors import CallOrderError, CheckpointWarning, PolicyError
from lossscale_tf import LossScaleOptimizer, v1

SGD = keras.optimizers.SGD
tf1 = tf.compat.v1


class Manager:
    """A user's loss scale manager, as the documents of `tf.contrib` describe it."""

    def update_loss_scale(self, finite_grads):
        """Change variables."""


def _with(**arguments):
    return LossScaleOptimizer(SGD(), **arguments)


def _set(name):
    setattr(_with(loss_scale=8.0), name, 4.0)


def _in_a_graph(call):
    with tf.Graph().as_default():
        call(_with(), tf.Variable(1.0))


def _scaled_by_hand():
    optimizer, variable = _with(), tf.Variable(1.0)
    optimizer.minimize(lambda: optimizer.get_scaled_loss(variable * 1.0), [variable])


def _wrapped_in_two():
    inner = tf_keras.optimizers.SGD()
    tf_keras.mixed_precision.LossScaleOptimizer(inner)
    LossScaleOptimizer(inner)


def _of_v1(*args, **kwargs):
    return v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), *args, **kwargs)


def _in_cross_replica_context():
    with STRATEGY.scope():
        _of_v1(8.0).apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])


MISTAKES = [
    (TypeError, "wrap the optimizer once", lambda: LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(SGD()))),
    (ValueError, "already wrapped by a LossScaleOptimizer", _wrapped_in_two),
    (TypeError, r"by lossscale_tf\.v1", lambda: LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0))),
    (TypeError, "is not a Keras optimizer", lambda: LossScaleOptimizer(SGD)),
    # arguments and attributes
    (ValueError, "dynamic=False, initial_scale=4.0, dynamic_growth_steps=7, loss_scale=8.0 are both given",
     lambda: _with(policy="none", dynamic=False, initial_scale=4.0, dynamic_growth_steps=7, loss_scale=8.0)),
    (ValueError, "pass either loss_scale= or dynamic=", lambda: _with(loss_scale=8.0, dynamic=True)),
    (ValueError, "set them in the policy", lambda: _with(loss_scale=8.0, initial_scale=4.0)),
    (ValueError, "set `clipnorm` on the `inner_opt", lambda: _with(clipnorm=1.0)),
    (ValueError, "does not support arguments: `init_scale`", lambda: _with(init_scale=8.0)),
    (PolicyError, "^initial_scale=", lambda: _with(initial_scale="abc")),
    (PolicyError, "^dynamic_growth_steps=", lambda: _with(dynamic_growth_steps="abc")),
    (TypeError, "must be a bool, but got: 'no'", lambda: _with(dynamic="no")),
    (ValueError, "initial_scale", lambda: _with(dynamic=False)),
    (ValueError, "growth_steps", lambda: _with(dynamic=False, initial_scale=4.0, dynamic_growth_steps=3)),
    (AttributeError, r"loss_scale=4\.0 cannot be set, .*load_state_dict", lambda: _set("loss_scale")),
    (AttributeError, r"initial_scale=4\.0 cannot be set; .* another policy", lambda: _set("initial_scale")),
    (AttributeError, "belongs to dynamic scaling", lambda: _set("dynamic_growth_steps")),
    (AttributeError, "'SGD' object has no attribute 'beta_1'", lambda: _set("beta_1")),
    # losses and gradients
    (ValueError, "1 gradients came for 0 variables", lambda: _with().apply([tf.constant(1.0)], [])),
    *((RuntimeError, r"lossscale_tf\.v1\.LossScaleOptimizer", lambda call=call: _in_a_graph(call)) for call in (
        lambda optimizer, variable: optimizer.minimize(lambda: variable * 1.0, [variable]),
        lambda optimizer, variable: optimizer.get_gradients(lambda: variable * 1.0, [variable]),
        lambda optimizer, variable: optimizer.get_scaled_loss(variable * 1.0),
        lambda optimizer, variable: optimizer.apply_gradients([(tf.constant(1.0), variable)]),
        lambda optimizer, variable: optimizer.get_gradients(variable * 1.0, [variable]),
    )),
    (CallOrderError, "this loss is scaled already", _scaled_by_hand),
    (TypeError, r"\(gradient, variable\) pairs", lambda: _with().apply_gradients([3])),
    (TypeError, r"is not a variable; .* pairs", lambda: _with().apply_gradients([(tf.ones(()), tf.ones(()))])),
    (ValueError, "has a gradient", lambda: _with().apply_gradients([])),
    (ValueError, "has a gradient", lambda: _with().apply_gradients([(None, tf.Variable(1.0))])),
    (ValueError, "no gradient with respect to", lambda: _with().get_gradients(lambda: tf.ones(()), tf.Variable(1.0))),
    (ValueError, "has no graph to differentiate", lambda: _with().get_gradients(tf.ones(()), tf.Variable(1.0))),
    (ValueError, "needs the tape it was computed under", lambda: _with().minimize(tf.constant(1.0), [])),
    # v1
    (ValueError, "must be given", _of_v1),
    (PolicyError, "must be at least 1", lambda: v1.FixedLossScale(0.5)),
    (PolicyError, "a loss scale manager.* a policy of your own", lambda: _of_v1(Manager())),
    (TypeError, "wrap the optimizer once", lambda: v1.LossScaleOptimizer(_of_v1(8.0), 8.0)),
    (TypeError, r"by lossscale_tf\.LossScaleOptimizer", lambda: v1.LossScaleOptimizer(SGD(), 8.0)),
    *((ValueError, "name", lambda name=name: _of_v1(8.0, name=name)) for name in (3, "a b", "_a")),
    (RuntimeError, r"strategy\.run", _in_cross_replica_context),
    (RuntimeError, "should be a function", lambda: _of_v1(8.0).compute_gradients(tf.Variable(1.0) * 1.0)),
    (ValueError, "No gradients provided", lambda: _of_v1(8.0).apply_gradients([(None, tf.Variable(1.0))])),
    (ValueError, r"is not a tf\.Variable", lambda: _of_v1(8.0).apply_gradients([(tf.ones(()), tf.ones(()))])),
    (ValueError, r"is not a tf\.Variable", lambda: _of_v1(8.0).minimize(lambda: 1.0, var_list=[tf.ones(())])),
]  # fmt: skip


@pytest.mark.promise(21, 28, 29, 32, 43, 65, 66, 70, 81, 86)
@pytest.mark.parametrize(("error", "words", "call"), MISTAKES)
def test_mistakes(error, words, call):
    """The message says what was passed, and what to do instead."""
    with pytest.raises(error, match=words):
        call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_optimizer_that_has_taken_steps(is_loaded):
    """A wrapper of an optimizer that has taken steps warns that the scale starts over, unless a state was loaded."""
    inner, variable = SGD(0.5), tf.Variable(1.0)
    inner.apply([tf.constant(0.0)], [variable])
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    if is_loaded:
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scale": 4096.0})
    words = "has taken 1 steps before, but the loss scale starts over at 8"
    with nullcontext() if is_loaded else pytest.warns(CheckpointWarning, match=words):
        optimizer.minimize(lambda: variable**2, [variable])
    assert float(optimizer.loss_scale) == (4096.0 if is_loaded else 8.0)


@pytest.mark.filterwarnings("error")
def test_a_global_step_that_has_counted():
    """A wrapper of TensorFlow 1 warns at its first step if the global step has counted steps before."""
    variable, global_step = tf.Variable(1.0), tf.Variable(3, dtype=tf.int64)
    optimizer = v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), 8.0)
    for way in (pytest.warns(CheckpointWarning, match="has taken 3 steps before"), nullcontext()):
        with way:
            optimizer.minimize(lambda: variable**2, var_list=[variable], global_step=global_step)

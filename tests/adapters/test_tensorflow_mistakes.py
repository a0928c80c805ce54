"""Likely mistakes with the TensorFlow wrappers: the error of each says what to do in one sentence."""

from tests.adapters.tensorflow_devices import STRATEGY, traced  # noqa: I001
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core.errors import CallOrderError, CheckpointWarning, PolicyError
from lossscale_tf import LossScaleOptimizer, v1

_sgd = keras.optimizers.SGD
tf1 = tf.compat.v1


class Manager:
    """A user's loss scale manager, as the documents of `tf.contrib` describe it."""

    def get_loss_scale(self):
        """Return the loss scale."""

    def update_loss_scale(self, finite_grads):
        """Change variables."""


def _wrapped(**arguments):
    return LossScaleOptimizer(**{"inner_optimizer": _sgd(), **arguments})


def _wrapped_in_two():
    inner = tf_keras.optimizers.SGD()
    tf_keras.mixed_precision.LossScaleOptimizer(inner)
    LossScaleOptimizer(inner)


def _of_v1(*args, **kwargs):
    return v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), *args, **kwargs)


def _apply(pairs, optimizer=lambda: LossScaleOptimizer(_sgd(0.25))):
    return lambda: optimizer().apply_gradients(pairs())


def _get_gradients(loss, params, mode=lambda call: call):
    variables = {"a": tf.Variable(3.0), "b": tf.Variable(1.0)}
    optimizer = _wrapped(loss_scale=8.0)
    return mode(lambda: optimizer.get_gradients(loss(variables["a"] ** 2), [variables[name] for name in params]))()


def _twice(call, mode=lambda call: call):
    optimizer, variable = _wrapped(loss_scale=8.0), tf.Variable(1.0)
    mode(lambda: call(optimizer, variable))()


def _in_a_graph(call):
    with tf.Graph().as_default():
        call(_wrapped(), tf.Variable(1.0))


def _in_cross_replica_context():
    with STRATEGY.scope():
        _of_v1(8.0).apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])


WRAPPED = [
    (TypeError, "wrap the optimizer once", lambda: keras.optimizers.LossScaleOptimizer(_sgd())),
    (TypeError, "wrap the optimizer once",
     lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD())),
    (TypeError, "wrap the optimizer once", lambda: _of_v1(4.0)),
    (TypeError, r"wrap it by lossscale_tf\.v1", lambda: tf1.train.GradientDescentOptimizer(1.0)),
    (TypeError, "is not a Keras optimizer", lambda: _sgd),
]  # fmt: skip
ARGUMENTS = [
    (ValueError, "^policy='none' and initial_scale=4.0 are both given; pass either ",
     {"policy": "none", "initial_scale": 4.0}),
    (ValueError, "dynamic=False, dynamic_growth_steps=7 are",
     {"policy": "none", "dynamic": False, "dynamic_growth_steps": 7}),
    (ValueError, "loss_scale=8.0 are both given; pass either policy= or the settings",
     {"policy": "none", "loss_scale": 8.0}),
    (ValueError, "pass either loss_scale= or dynamic=", {"loss_scale": 8.0, "dynamic": True}),
    (ValueError, "go with dynamic scaling; set them in the policy", {"loss_scale": 8.0, "initial_scale": 4.0}),
    (ValueError, r"does not support `clipnorm`\. Instead, set `clipnorm` on the `inner_opt", {"clipnorm": 1.0}),
    (TypeError, r"\"dynamic\" argument .* must be a bool, but got: 'no'", {"dynamic": "no"}),
    (ValueError, "does not support arguments: `init_scale`", {"init_scale": 8.0}),
    (ValueError, "initial_scale", {"dynamic": False}),
    (ValueError, "growth_steps", {"dynamic": False, "initial_scale": 4.0, "dynamic_growth_steps": 3}),
]  # fmt: skip
ATTRIBUTES = [
    (AttributeError, r"loss_scale=4\.0 cannot be set, .*load_state_dict", "loss_scale"),
    (AttributeError, r"initial_scale=4\.0 cannot be set; .* another policy", "initial_scale"),
    (AttributeError, "dynamic_growth_steps belongs to dynamic scaling", "dynamic_growth_steps"),
    (AttributeError, "'SGD' object has no attribute 'beta_1'", "beta_1"),
]
IN_A_GRAPH = [
    lambda optimizer, variable: optimizer.minimize(lambda: variable * 1.0, [variable]),
    lambda optimizer, variable: optimizer.get_scaled_loss(variable * 1.0),
    lambda optimizer, variable: optimizer.scale_loss(variable * 1.0),
    lambda optimizer, variable: optimizer.apply_gradients([(tf.constant(1.0), variable)]),
    lambda optimizer, variable: optimizer.get_gradients(variable * 1.0, [variable]),
]
SCALED_TWICE = [
    lambda optimizer, variable: optimizer.scale_loss(optimizer.scale_loss(variable * 1.0)),
    lambda optimizer, variable: optimizer.minimize(lambda: optimizer.get_scaled_loss(variable * 1.0), [variable]),
    lambda optimizer, variable: optimizer.get_scaled_loss(optimizer.get_scaled_loss(variable * 1.0)),
]
OTHERS = [
    (ValueError, "already wrapped by a LossScaleOptimizer", _wrapped_in_two),
    *((TypeError, r"\(gradient, variable\) pairs", _apply(lambda pairs=pairs: pairs)) for pairs in (3, None, [3])),
    (TypeError, r"\(gradient, variable\) pairs", _apply(lambda: [(tf.constant(1.0), tf.constant(1.0))])),
    (ValueError, "has a gradient", _apply(list)),
    (ValueError, "has a gradient", _apply(lambda: [(None, tf.Variable(1.0))])),
    (ValueError, "no gradient with respect to", lambda: _get_gradients(lambda loss: lambda: loss, "ab")),
    (ValueError, "no gradient with respect to", lambda: _get_gradients(lambda loss: lambda: loss, "ab", traced)),
    (ValueError, "no gradient with respect to", lambda: _get_gradients(lambda loss: loss, "b", traced)),
    (ValueError, "has no graph to differentiate", lambda: _get_gradients(lambda loss: loss, "a")),
    (ValueError, "needs the tape it was computed under", lambda: _wrapped().minimize(tf.constant(1.0), [])),
]
OF_V1 = [
    (ValueError, "must be given", _of_v1),
    (PolicyError, "'static'", lambda: _of_v1("static")),
    (PolicyError, "a loss scale manager.* a policy of your own", lambda: _of_v1(Manager())),
    (TypeError, r"must be a tf\.compat\.v1\.train\.Optimizer", lambda: v1.LossScaleOptimizer(3, 8.0)),
    (TypeError, "wrap the optimizer once", lambda: v1.LossScaleOptimizer(_of_v1(8.0), 8.0)),
    (TypeError, r"wrap a Keras optimizer by lossscale_tf\.LossScaleOptimizer",
     lambda: v1.LossScaleOptimizer(_sgd(), 8.0)),
    *((ValueError, "name", lambda name=name: _of_v1(8.0, name=name)) for name in ("", 3, "a b", "_a")),
    (RuntimeError, r"strategy\.run", _in_cross_replica_context),
    (RuntimeError, "should be a function", lambda: _of_v1(8.0).compute_gradients(tf.Variable(1.0) * 1.0)),
]  # fmt: skip


@pytest.mark.promise(21, 28, 29, 32, 65, 66, 70, 81, 86)
@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        *((error, words, lambda make=make: LossScaleOptimizer(make())) for error, words, make in WRAPPED),
        *((error, words, lambda row=row: _wrapped(**row)) for error, words, row in ARGUMENTS),
        *(
            (error, words, lambda name=name: setattr(_wrapped(loss_scale=8.0), name, 4.0))
            for error, words, name in ATTRIBUTES
        ),
        *(
            (RuntimeError, r"lossscale_tf\.v1\.LossScaleOptimizer", lambda call=call: _in_a_graph(call))
            for call in IN_A_GRAPH
        ),
        *((CallOrderError, "this loss is scaled already", lambda call=call: _twice(call)) for call in SCALED_TWICE),
        (CallOrderError, "this loss is scaled already", lambda: _twice(SCALED_TWICE[-1], tf.function)),
        *OTHERS,
        *OF_V1,
    ],
)
def test_mistakes(error, words, call):
    """The message says what was passed, and what to do instead."""
    with pytest.raises(error, match=words):
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

"""Gradients that do not follow the loss scale: a range report finds each, and names none of a right model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras import layers

from lossscale_tf import LossScaleOptimizer, range_report

RNG = np.random.default_rng(0)
X = tf.constant(RNG.normal(size=(6, 5, 8)), tf.float32)
ROWS = X[:, 0]
IMAGES = tf.constant(RNG.normal(size=(4, 6, 6, 3)), tf.float32)
TOKENS = tf.constant(RNG.integers(0, 7, size=(6, 5)))
OPTIMIZER = LossScaleOptimizer(keras.optimizers.SGD())


@pytest.fixture(autouse=True)
def _policy_kept():
    """Build models under the policy of the test alone."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    tf_keras.mixed_precision.set_global_policy("float32")


def _square(out):
    return tf.reduce_mean(tf.square(tf.cast(out, tf.float32)))


def _of(x, *parts):
    """Return a Keras model of some layers, and a loss of it."""
    model = keras.Sequential([*parts], name="model")
    model(x)
    return model, lambda: _square(model(x, training=True))


# -- right models ------------------------------------------------------------------------------------------------------


def _plain():
    return _of(X, layers.Dense(16, activation="silu"), layers.Dense(8))


def _dropout():
    return _of(X, layers.Dense(16), layers.Dropout(0.5), layers.Dense(8))


def _conv_with_batch_norm():
    return _of(IMAGES, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten())


def _embedding():
    return _of(TOKENS, layers.Embedding(7, 8), layers.Dense(3))


def _recurrent():
    return _of(X, layers.LSTM(8), layers.Dense(3))


def _frozen():
    model, loss_fn = _of(X, layers.Dense(16), layers.Dense(8))
    model.layers[0].trainable = False
    return model, loss_fn


def _spectral_norm():
    return _of(X, layers.SpectralNormalization(layers.Dense(8)))


def _attention():
    inputs = keras.Input((5, 8))
    hidden = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True))
    model = keras.Model(inputs, layers.Dense(8)(hidden), name="model")
    return model, lambda: _square(model(X, training=True))


def _tf_keras():
    tf_keras.mixed_precision.set_global_policy(keras.config.dtype_policy().name)
    model = tf_keras.Sequential([tf_keras.layers.Dense(8), tf_keras.layers.Dropout(0.5), tf_keras.layers.Dense(3)])
    return model, lambda: _square(model(X, training=True))


def _tied():
    model, _ = _of(TOKENS, layers.Embedding(7, 8))
    table = model.layers[0].embeddings
    return model, lambda: _square(tf.matmul(model(TOKENS), tf.cast(table, model.compute_dtype), transpose_b=True))


def _several_terms():
    model, loss_fn = _of(X, layers.Dense(8, kernel_regularizer="l2"))

    def terms():
        sparse = 1e-4 * tf.reduce_sum(tf.abs(tf.convert_to_tensor(model.weights[0])))
        return [loss_fn(), *(tf.cast(each, tf.float32) for each in (sparse, *model.losses))]

    return model, lambda: tf.add_n(terms())


def _attached():
    model, _ = _of(X, layers.Dense(8))

    @tf.function
    def loss_fn():
        out = model(X)
        aux_loss = 0.125 * tf.square(tf.reduce_mean(tf.cast(out, tf.float32), axis=0))
        return _square(OPTIMIZER.attach(out, aux_loss))

    return model, loss_fn


def _attached_and_recomputed():
    model, _ = _of(X, layers.Dense(8))

    def forward(x):
        out = model(x)
        return OPTIMIZER.attach(out, 0.125 * _square(out))

    return model, lambda: _square(tf.recompute_grad(forward)(X))


def _recomputed_dropout():
    model, _ = _of(X, layers.Dense(32), layers.Dropout(0.5), layers.Dense(8))
    return model, lambda: _square(tf.recompute_grad(lambda x: model(x, training=True))(X))


def _recomputed_random_numbers():
    model, _ = _of(X, layers.Dense(2))
    dropped = tf.recompute_grad(lambda x: tf.nn.dropout(model(x), 0.5))
    return model, lambda: _square(dropped(X))


def _loop():
    model, _ = _of(ROWS, layers.Dense(8, activation="tanh"))

    @tf.function
    def loss_fn():
        start = tf.cast(ROWS, model.compute_dtype)
        return _square(tf.while_loop(lambda n, _: n < 3, lambda n, x: (n + 1, model(x)), (0, start))[1])

    return model, loss_fn


def _penalty():
    model, _ = _of(ROWS, layers.Dense(8, activation="tanh"), layers.Dense(1))

    def loss_fn():
        with tf.GradientTape() as tape:
            tape.watch(ROWS)
            out = tf.reduce_sum(tf.cast(model(ROWS), tf.float32))
        return tf.reduce_mean(tf.square(tf.norm(tape.gradient(out, ROWS), axis=-1) - 1.0))

    return model, loss_fn


def _mask_of_infinity():
    model, _ = _of(X, layers.Dense(5))
    mask = np.where(np.tri(5), 0.0, -np.inf)
    return model, lambda: _square(tf.nn.softmax(model(X) + tf.cast(mask, model.compute_dtype)))


def _infinite_slope_of_an_unused_branch():
    model, _ = _of(X, layers.Dense(8, activation="relu"))
    return model, lambda: tf.reduce_mean(tf.where(X > 1e9, tf.sqrt(0.0 * tf.cast(model(X), tf.float32)), 1.0))


def _gradients_that_flush():
    model, loss_fn = _of(X, layers.Dense(8), layers.Dense(8))
    return model, lambda: 1e-9 * loss_fn() + 1e4 * tf.reduce_mean(tf.cast(model(X[:1]), tf.float32))


def _straight_through():
    model, _ = _of(X, layers.Dense(8))

    @tf.custom_gradient
    def rounded(x):
        return tf.round(x), lambda upstream: tf.where(tf.abs(x) < 1.0, upstream, 0.0)

    return model, lambda: _square(rounded(model(X)))


class _ScaleOfInputs(layers.Layer):
    """A weight with a gradient that is its new value, as the scales of float8 layers in Keras."""

    def build(self, _):
        self.amount = self.add_weight(shape=(), initializer="ones", name="amount")
        self.amount.overwrite_with_gradient = True

    def call(self, x):
        @tf.custom_gradient
        def noted(x, amount):
            return x / tf.cast(amount, x.dtype), lambda upstream: (upstream, tf.reduce_max(tf.abs(x)))

        return noted(x, tf.cast(self.amount, x.dtype))


def _weight_that_is_overwritten():
    return _of(X, layers.Dense(8), _ScaleOfInputs(), layers.Dense(8))


RIGHT = [
    *(_plain, _dropout, _conv_with_batch_norm, _embedding, _recurrent, _frozen, _spectral_norm, _attention, _tf_keras),
    *(_tied, _several_terms, _attached, _attached_and_recomputed, _recomputed_dropout, _recomputed_random_numbers),
    *(_loop, _penalty, _mask_of_infinity, _infinite_slope_of_an_unused_branch, _gradients_that_flush),
    *(_straight_through, _weight_that_is_overwritten),
]


@pytest.mark.filterwarnings("ignore:.*recompute_grad")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__.strip("_"))
def test_right_models_are_not_named(make, policy):
    """Nothing that a loss alone gives a gradient, in whatever precision, is said to miss the scale."""
    keras.config.set_dtype_policy(policy)
    report = range_report(*make())
    assert report.unscaled_gradients == ()
    assert "follow the loss scale" not in str(report)


# -- wrong models ------------------------------------------------------------------------------------------------------


def _between(forward, backward):
    """Return a model with a function between two layers, where `backward` changes the gradient; and its loss."""
    model, _ = _of(X, layers.Dense(8, name="low"), layers.Dense(8, name="high"))
    low, high = model.layers

    @tf.custom_gradient
    def changed(x):
        return forward(x), lambda upstream: backward(x, upstream)

    return model, lambda: _square(high(changed(low(X))))


def _router_loss():
    return _between(tf.identity, lambda x, upstream: upstream + 0.125 * x)


def _constant():
    return _between(tf.identity, lambda _, upstream: upstream + 1.0)


def _clamped():
    return _between(tf.identity, lambda _, upstream: tf.clip_by_value(upstream, -1e-3, 1e-3))


def _clipped_by_norm():
    return _between(tf.identity, lambda _, upstream: tf.cast(tf.clip_by_norm(upstream, 1e-3), upstream.dtype))


def _normalised():
    return _between(
        tf.identity,
        lambda _, upstream: tf.cast(tf.math.l2_normalize(tf.cast(upstream, tf.float32)), upstream.dtype),
    )


def _signs():
    return _between(tf.identity, lambda _, upstream: 0.125 * tf.sign(upstream))


def _weight_decay():
    model, _ = _of(X, layers.Dense(8, name="low"), layers.Dense(8, name="high"))
    low, high = model.layers

    @tf.custom_gradient
    def decayed(weight):
        return weight, lambda upstream: upstream + 0.125 * weight

    def loss_fn():
        kernel = tf.cast(decayed(tf.convert_to_tensor(low.kernel)), low.compute_dtype)
        return _square(high(tf.tensordot(tf.cast(X, kernel.dtype), kernel, 1)))

    return model, loss_fn


def _by_hand_with_a_fixed_scale():
    """Attach a loss as Megatron does, with a scale that was set by hand, which a report cannot replace."""
    return _between(tf.identity, lambda x, upstream: upstream + 2.0**8 * 0.125 * x)


def _stored_gradient():
    """Differentiate a second loss by a tape of its own, and add its gradient on the way back."""
    model, _ = _of(X, layers.Dense(8, name="low"), layers.Dense(8, name="high"))
    low, high = model.layers

    @tf.custom_gradient
    def predicted_twice(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            second = _square(high(x)[:, 1:])
        grad = tape.gradient(second, x)
        return tf.identity(x), lambda upstream, variables=None: (upstream + grad, [None] * len(variables or []))

    return model, lambda: _square(high(predicted_twice(low(X))))


def _clamped_above_recomputed_dropout():
    """Clamp the gradients of a layer that draws the same random numbers when it is computed again."""
    model, _ = _of(X, layers.Dense(8, name="low"))
    below = keras.Sequential([model.layers[0], layers.Dropout(0.5)])

    @tf.custom_gradient
    def clamped(x):
        return x, lambda upstream: tf.clip_by_value(upstream, -1e-3, 1e-3)

    recomputed = tf.recompute_grad(lambda x: below(x, training=True))
    return model, lambda: _square(clamped(recomputed(X)))


INSIDE = [_router_loss, _constant, _weight_decay, _by_hand_with_a_fixed_scale, _stored_gradient]
NONLINEAR = [_clamped, _clipped_by_norm, _normalised, _signs, _clamped_above_recomputed_dropout]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [*INSIDE, *NONLINEAR], ids=lambda make: make.__name__.strip("_"))
def test_wrong_models_are_named(make, policy):
    """The parameters below the fault, and only those, with the cause."""
    keras.config.set_dtype_policy(policy)
    report = range_report(*make())
    assert {each.cause for each in report.unscaled_gradients} == {"inside" if make in INSIDE else "nonlinear"}
    names = {each.name for each in report.unscaled_gradients}
    assert names == ({"model/low/kernel"} if make is _weight_decay else {"model/low/kernel", "model/low/bias"})
    what = "not zero for a loss of zero: see attach" if make in INSIDE else "which does not grow with the scale"
    assert f"not follow the loss scale, first model/low/kernel, {what}" in str(report)


def test_a_report_leaves_the_scale_of_attached_losses():
    """After it, as before, an attached loss has the optimizer's scale; and all variables are as before."""
    model, loss_fn = _attached()
    before = [each.numpy() for each in model.variables]
    for _ in range(2):
        with tf.GradientTape() as tape:
            kernel = tf.convert_to_tensor(model.layers[0].kernel)
            loss = tf.reduce_sum(0.0 * OPTIMIZER.attach(kernel, kernel))
        grad = tape.gradient(loss, model.layers[0].kernel.value)
        np.testing.assert_array_equal(grad, np.full((8, 8), OPTIMIZER.initial_scale))
        assert range_report(model, loss_fn).unscaled_gradients == ()
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_concrete_function_keeps_the_scale_of_its_attached_losses():
    """It is one operation to the report, which cannot distinguish its attached losses from unscaled ones."""
    weight = tf.Variable(2.0, name="weight")
    traced = tf.function(lambda: OPTIMIZER.attach(3.0 * weight, weight * weight))
    assert range_report(None, traced).unscaled_gradients == ()
    concrete = traced.get_concrete_function()
    found = range_report(None, concrete).unscaled_gradients
    assert [(each.name, each.cause) for each in found] == [("weight", "inside")]
    assert OPTIMIZER.get_gradients(concrete, [weight]) == [3.0 + 4.0]

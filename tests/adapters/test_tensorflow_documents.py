"""The examples of TensorFlow's documents, run as they stand there, with only the import changed.

What they print is what they promise, but for `1e-5`, which Python prints as `1e-05`.
"""

import doctest

import numpy as np
import pytest
import tensorflow as tf

import lossscale_tf

EXPERIMENTAL = """
>>> opt = tf.keras.optimizers.SGD(0.25)
>>> opt = LossScaleOptimizer(opt,
...                          "dynamic")
>>> var = tf.Variable(1.)
>>> loss_fn = lambda: var ** 2
>>> opt.minimize(loss_fn, var_list=var)
>>> var.numpy()
0.5
>>> with tf.GradientTape() as tape:
...   loss = loss_fn()
...   scaled_loss = opt.get_scaled_loss(loss)
>>> scaled_grad = tape.gradient(scaled_loss, var)
>>> (grad,) = opt.get_unscaled_gradients([scaled_grad])
>>> opt.apply_gradients([(grad, var)])  # Loss scale is updated here
>>> var.numpy()
0.25
"""

MIXED_PRECISION = """
>>> opt = tf.keras.optimizers.SGD(0.25)
>>> opt = LossScaleOptimizer(opt)
>>> var = tf.Variable(1.)
>>> loss_fn = lambda: var ** 2
>>> opt.minimize(loss_fn, var_list=var)
>>> var.numpy()
0.5
>>> with tf.GradientTape() as tape:
...   loss = loss_fn()
...   scaled_loss = opt.get_scaled_loss(loss)
>>> scaled_grad = tape.gradient(scaled_loss, var)
>>> (grad,) = opt.get_unscaled_gradients([scaled_grad])
>>> opt.apply_gradients([(grad, var)])  # Loss scale is updated here
>>> var.numpy()
0.25
>>> opt = tf.keras.optimizers.Adam(beta_1=0.8, epsilon=1e-5)
>>> opt = LossScaleOptimizer(opt)
>>> opt.beta_1  # Equivalent to `opt.inner_optimizer.beta_1`
0.8
>>> opt.beta_1 = 0.7  # Equivalent to `opt.inner_optimizer.beta_1 = 0.7`
>>> opt.beta_1
0.7
>>> opt.inner_optimizer.beta_1
0.7
>>> opt.inner_optimizer.epsilon
1e-05
>>> opt.epsilon
Traceback (most recent call last):
...
AttributeError: 'LossScaleOptimizer' object has no attribute 'epsilon'
>>> opt.epsilon = 1e-4  # This does NOT set epsilon on `opt.inner_optimizer`
>>> opt.inner_optimizer.epsilon
1e-05
"""

CONTRIB = """
>>> variable = tf.Variable([3., 4.])
>>> loss = lambda: tf.reduce_sum(variable ** 2)
>>> opt = tf.compat.v1.train.AdamOptimizer(learning_rate=0.1)
>>> loss_scale_manager = FixedLossScaleManager(5000)
>>> loss_scale_optimizer = LossScaleOptimizer(opt, loss_scale_manager)
>>> train_op = loss_scale_optimizer.minimize(loss)
>>> loss_scale_optimizer = LossScaleOptimizer(opt, loss_scale_manager)
>>> grads_and_vars = loss_scale_optimizer.compute_gradients(loss)
>>> grads = [grad for grad, _ in grads_and_vars]
>>> clipped, _ = tf.clip_by_global_norm(grads, 1.0)
>>> train_op = loss_scale_optimizer.apply_gradients(zip(clipped, [variable]))
>>> variable.numpy().round(1)
array([2.8, 3.8], dtype=float32)
"""

DOCUMENTS = {
    "tf.keras.mixed_precision.experimental": (EXPERIMENTAL, vars(lossscale_tf)),
    "tf.keras.mixed_precision": (MIXED_PRECISION, vars(lossscale_tf)),
    "tf.contrib.mixed_precision": (CONTRIB, vars(lossscale_tf.v1)),
}


@pytest.mark.filterwarnings("ignore:epsilon is set on the LossScaleOptimizer")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_examples(document):
    """Line by line."""
    text, names = DOCUMENTS[document]
    test = doctest.DocTestParser().get_doctest(text, {**names, "tf": tf}, document, None, None)
    said = []
    with np.printoptions(legacy="1.25", precision=4):
        outcome = doctest.DocTestRunner().run(test, out=said.append)
    assert outcome.failed == 0, "".join(said)
    assert outcome.attempted == text.count(">>>")

"""The wrappers where Keras runs on NumPy, which trains nothing; and TensorFlow's on another backend's Keras."""

import os
import subprocess
import sys

CODE = """
import keras, lossscale_keras, lossscale_tf, tensorflow as tf
for package in (lossscale_keras, lossscale_tf):
    try:
        package.LossScaleOptimizer(keras.optimizers.SGD())
    except RuntimeError as error:
        print(error)
weight = tf.Variable(1.0)
inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
lossscale_tf.v1.LossScaleOptimizer(inner, 8.0).minimize(lambda: weight**2, None, [weight])
print(float(weight))
"""


def _said_under(backend):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_other_backends_of_keras_are_refused():
    """When the wrapper is made, with what to do; `v1` of TensorFlow trains under each."""
    of_keras, of_tensorflow, weight = _said_under("numpy")
    assert of_keras.startswith("Keras runs on numpy")
    assert "set KERAS_BACKEND to jax, torch or tensorflow" in of_keras
    assert "Keras runs on numpy" in of_tensorflow
    assert "set KERAS_BACKEND=tensorflow" in of_tensorflow
    assert weight == "0.0"
    of_tensorflow, weight = _said_under("jax")
    assert "Keras runs on jax" in of_tensorflow
    assert "or use lossscale_keras.LossScaleOptimizer" in of_tensorflow
    assert weight == "0.0"

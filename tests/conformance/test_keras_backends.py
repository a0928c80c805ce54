"""The wrappers where Keras runs on NumPy, which trains nothing."""

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


def test_keras_on_numpy_is_refused():
    """When the wrapper is made, with what to do; `v1` of TensorFlow trains."""
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    of_keras, of_tensorflow, weight = done.stdout.splitlines()
    assert of_keras.startswith("Keras runs on numpy")
    assert "set KERAS_BACKEND to jax, torch or tensorflow" in of_keras
    assert "Keras runs on numpy" in of_tensorflow
    assert "set KERAS_BACKEND=tensorflow" in of_tensorflow
    assert weight == "0.0"

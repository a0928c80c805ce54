"""The wrappers where Keras runs on NumPy, which trains nothing."""

import os
import subprocess
import sys

CODE = """
import keras, lossscale_keras, lossscale_tf
for package in (lossscale_keras, lossscale_tf):
    try:
        package.LossScaleOptimizer(keras.optimizers.SGD())
    except RuntimeError as error:
        print(error)
"""


def test_keras_on_numpy_is_refused():
    """When the wrapper is made, with what to do."""
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    of_keras, of_tensorflow = done.stdout.splitlines()
    assert "set KERAS_BACKEND to jax, torch or tensorflow" in of_keras
    assert "set KERAS_BACKEND=tensorflow" in of_tensorflow

"""The two wrappers of Keras where it runs on a backend that they do not train on, each in a process of its own."""

import os
import subprocess
import sys

CODE = "import keras, lossscale_{}; lossscale_{}.LossScaleOptimizer(keras.optimizers.SGD())"
V1 = """
import tensorflow as tf
from lossscale_tf import v1
weight = tf.Variable(1.0)
v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), 8.0).minimize(lambda: weight**2, None, [weight])
assert float(weight) == 0.0
"""
REFUSED = {
    ("tf", "jax"): "or use lossscale_keras.LossScaleOptimizer",
    ("tf", "torch"): "or use lossscale_keras.LossScaleOptimizer",
    ("tf", "numpy"): "set KERAS_BACKEND=tensorflow",
    ("keras", "numpy"): "set KERAS_BACKEND to jax, torch or tensorflow",
}


def test_other_backends_of_keras_are_refused():
    """When the wrapper is made, with what to do; `v1` of TensorFlow trains under each."""
    processes = {
        (package, backend): subprocess.Popen(
            [sys.executable, "-c", (V1 if package == "tf" else "") + CODE.format(package, package)],
            env={**os.environ, "KERAS_BACKEND": backend},
            stderr=subprocess.PIPE,
            text=True,
        )
        for package, backend in REFUSED
    }
    for (package, backend), process in processes.items():
        _, said = process.communicate(timeout=240)
        assert f"RuntimeError: Keras runs on {backend}" in said, said
        assert REFUSED[package, backend] in said

"""`lossscale_tf.LossScaleOptimizer` where Keras runs on JAX, PyTorch or NumPy, each in a process of its own."""

import os
import subprocess
import sys

CODE = "import keras, lossscale_tf; lossscale_tf.LossScaleOptimizer(keras.optimizers.SGD())"
ADAPTERS = {
    "jax": "lossscale_jax.loss_scaled",
    "torch": "lossscale_torch.GradScaler",
    "numpy": "lossscale_tf trains on TensorFlow",
}


def test_other_backends_of_keras_are_refused():
    """When the wrapper is made, with the adapter to take."""
    processes = {
        backend: subprocess.Popen(
            [sys.executable, "-c", CODE],
            env={**os.environ, "KERAS_BACKEND": backend},
            stderr=subprocess.PIPE,
            text=True,
        )
        for backend in ADAPTERS
    }
    for backend, process in processes.items():
        _, said = process.communicate(timeout=240)
        assert f"RuntimeError: Keras runs on {backend}" in said, said
        assert ADAPTERS[backend] in said

"""A `.keras` file of `lossscale_keras`, written on one backend and continued on the others: a process for each."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

BACKENDS = ("jax", "torch", "tensorflow")
COMMON = """
import json, sys
import keras, numpy as np
from lossscale_keras import LossScaleOptimizer
from lossscale_core import DynamicScaling, SpikeGuard
data = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
def seen():
    optimizer = model.optimizer
    weights = [keras.ops.convert_to_numpy(each.value).tolist() for each in model.trainable_variables]
    return {"weights": weights, "state": optimizer.state_dict(), "clipnorm": optimizer.global_clipnorm,
            "iterations": int(optimizer.iterations), "steps": int(optimizer.metrics()["steps"])}
def fit():
    model.fit(data, data.sum(axis=1), batch_size=8, verbose=0, shuffle=False)
"""
SAVE = """
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
policy = DynamicScaling(growth_interval=3, hysteresis=2, cooldown=1)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), policy, guard=SpikeGuard(), global_clipnorm=5.0)
model.compile(optimizer, "mse", jit_compile=False)
fit()
model.fit(np.full((8, 3), np.inf, np.float32), np.ones(8), batch_size=8, verbose=0)
model.save(sys.argv[1])
saved = seen()
fit()
print(json.dumps([saved, seen()]))
"""
CONTINUE = """
model = keras.models.load_model(sys.argv[1])
loaded = seen()
fit()
print(json.dumps([loaded, seen()]))
"""


def _start(code, path, backend):
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code, str(path)],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _printed(process):
    numbers, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return json.loads(numbers.splitlines()[-1])


@pytest.mark.parametrize("writer", BACKENDS)
def test_a_saved_model_continues_on_the_other_backends(tmp_path, writer):
    """State and weights are the same numbers; after the next steps the weights agree but for rounding."""
    path = tmp_path / "model.keras"
    saved, continued = _printed(_start(SAVE, path, writer))
    processes = [_start(CONTINUE, path, backend) for backend in BACKENDS if backend != writer]
    for process in processes:
        loaded, after = _printed(process)
        assert loaded == saved
        assert after["steps"] == continued["steps"] == saved["steps"] + 8
        for one, other in zip(after["weights"], continued["weights"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)

"""The first traced step of a process prints nothing: AutoGraph can convert what it meets."""

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import keras, tensorflow as tf
from lossscale_tf import LossScaleOptimizer, v1
x, y = tf.ones((2, 4)), tf.ones((2, 3))
model = keras.Sequential([keras.layers.Dense(3)])
model.build((None, 4))
weights = model.trainable_variables
def loss():
    return tf.reduce_mean((model(x) - y) ** 2)
"""
LOOP = """
opt = LossScaleOptimizer(keras.optimizers.Adam(1e-3))
@tf.function
def step():
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(loss())
    opt.apply_gradients(zip(opt.get_unscaled_gradients(tape.gradient(scaled, weights)), weights))
for _ in range(2):
    step()
"""
MINIMIZE = """
opt = LossScaleOptimizer(keras.optimizers.Adam(1e-3))
@tf.function
def step():
    opt.minimize(loss, weights)
step()
"""
CLIPPED = """
opt = LossScaleOptimizer(keras.optimizers.Adam(1e-3), global_clipnorm=1.0)
@tf.function
def step():
    opt.minimize(loss, weights)
step()
"""
FIT = """
model.compile(LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")
model.fit(x, y, verbose=0)
"""
V1 = """
opt = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "dynamic")
weight = tf.Variable(1.0)
@tf.function
def step():
    opt.minimize(lambda: weight * weight, var_list=[weight])
step()
"""
PROGRAMS = {"loop": LOOP, "minimize": MINIMIZE, "clipped": CLIPPED, "fit": FIT, "v1": V1}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("keras_*.py"))


def _said(*arguments, cwd):
    """Return what a program prints about AutoGraph."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "AutoGraph" in line or "TensorFlow team" in line]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_traced_step_prints_nothing(tmp_path, name):
    """It runs in a separate process, since AutoGraph prints once, and from a file, since AutoGraph reads the source."""
    (tmp_path / "program.py").write_text(START + PROGRAMS[name])
    assert _said("program.py", cwd=tmp_path) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_print_nothing_of_autograph(tmp_path, example):
    """From their first step to the last."""
    assert _said(str(example), cwd=tmp_path) == []

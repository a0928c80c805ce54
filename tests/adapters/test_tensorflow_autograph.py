"""The first traced step of a process prints nothing: AutoGraph can convert what it meets."""

import subprocess
import sys

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
PROGRAMS = {"loop": LOOP, "clipped": CLIPPED, "fit": FIT, "v1": V1}
RUN_EACH = """
import os, runpy, sys
import keras, lossscale_tf, tensorflow
for path in sys.argv[1:]:
    if not os.fork():
        sys.argv[1:] = []
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, path
"""


def test_the_first_traced_step_prints_nothing(tmp_path):
    """Each runs in a process of its own, since AutoGraph prints once, and reads the source."""
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(START + program)
    command = [sys.executable, "-c", RUN_EACH, *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "AutoGraph" in line or "TensorFlow team" in line] == []

"""MLX in float16 with the core's policy: the work of an adapter in one file, because there is no adapter for MLX.

    pip install . scikit-learn 'mlx[cpu]'    # on a Mac: mlx
    python examples/mlx_loop.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. Such a step leaves the weights and the optimizer state unchanged.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import DynamicScaling, ScaleState, diagnose, metrics

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE = 128


class Result(NamedTuple):
    """The accuracy on the test images, and the scale state at the end."""

    accuracy: float
    scale_state: ScaleState


def forward(params: Any, images: mx.array) -> mx.array:
    """Return the logits, computed in float16 and then converted to float32."""
    half = tree_map(lambda param: param.astype(mx.float16), params)
    hidden = nn.relu(images.astype(mx.float16) @ half["weight"] + half["bias"])
    return (hidden @ half["weight_out"] + half["bias_out"]).astype(mx.float32)


def scaled_loss(params: Any, images: mx.array, labels: mx.array, loss_scale: mx.array) -> mx.array:
    """Return the mean loss of a batch, times the loss scale."""
    return nn.losses.cross_entropy(forward(params, images), labels, reduction="mean") * loss_scale


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    rng = np.random.default_rng(seed)
    shapes = {"weight": (64, 64), "bias": (64,), "weight_out": (64, 10), "bias_out": (10,)}
    params = {name: mx.array(rng.normal(0.0, 0.1, shape).astype(np.float32)) for name, shape in shapes.items()}
    optimizer = mlx.optimizers.Adam(3e-3)
    optimizer.init(params)
    state = ScaleState(*map(mx.array, POLICY.init_state()))

    for _ in range(steps):
        rows = rng.integers(0, len(images), BATCH_SIZE)
        batch = mx.array(images[rows].astype(np.float32)), mx.array(labels[rows])
        grads = mx.grad(scaled_loss)(params, *batch, state.loss_scale)
        grads = tree_map(lambda grad, state=state: grad.astype(mx.float32) / state.loss_scale, grads)
        finite = mx.all(mx.stack([mx.all(mx.isfinite(grad)) for _, grad in tree_flatten(grads)]))

        # The device computes both outcomes and chooses by the flag, so a step never waits for the host.
        before = tree_map(lambda value: value, (params, optimizer.state))  # a copy: the optimizer changes its state
        after = optimizer.apply_gradients(grads, params), optimizer.state
        params, optimizer.state = tree_map(lambda new, old, finite=finite: mx.where(finite, new, old), after, before)
        state = POLICY.update(state, finite, xp=mx)
        mx.eval(params, optimizer.state, state)

    guesses = forward(params, mx.array(test_images.astype(np.float32))).argmax(axis=1)
    accuracy = float(np.mean(np.array(guesses) == test_labels))
    host = ScaleState(*(np.array(field)[()] for field in state))
    print(f"accuracy {accuracy:.3f} after {metrics(host)['applied_steps']} applied steps; {diagnose(POLICY, host)}")
    return Result(accuracy, host)


if __name__ == "__main__":
    main()

"""A real network that learns digits in float16, where the gradients underflow without loss scaling."""

import functools

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from sklearn.datasets import load_digits

from lossscale_core import DynamicScaling
from lossscale_mlx import LossScaleOptimizer
from tests.adapters.mlx_training import in_half

DAMPING = 2.0**-24
"""Multiplies the last layer's output gradients, as in a deep network; without scaling float16 flushes them to zero."""
STEPS = 120


@functools.cache
def _digits():
    images, labels = load_digits(return_X_y=True)
    return mx.array((images / 16).astype("f")), mx.array(labels.astype("i"))


def _network():
    mx.random.seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _loss(model, images, labels):
    logits = model(images).astype(mx.float32)
    return DAMPING * nn.losses.cross_entropy(logits, labels, reduction="mean")


def _train(optimizer, bad_batches=(), dtype=mx.float16):
    """Return the share of digits that are read correctly after a run, and the network."""
    model = _network()
    loss_fn = in_half(_loss) if dtype == mx.float16 else _loss
    is_scaled = isinstance(optimizer, LossScaleOptimizer)
    differentiate = (optimizer.value_and_grad if is_scaled else nn.value_and_grad)(model, loss_fn)
    images, labels = _digits()
    random = np.random.default_rng(0)
    for n in range(STEPS):
        rows = mx.array(random.integers(0, len(labels), 64))
        batch = images[rows] * (float("inf") if n in bad_batches else 1.0)
        _, grads = differentiate(model, batch, labels[rows])
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
    return mx.mean(mx.argmax(model(images), axis=1) == labels).item(), model


def _sgd():
    return optim.SGD(0.2 / DAMPING)


def test_gradients_that_underflow_learn_with_loss_scaling_only():
    """Plain float16 stays where it began; with the scale it learns as float32 does."""
    plain, _ = _train(_sgd())
    scaled, _ = _train(LossScaleOptimizer(_sgd(), DynamicScaling(init_scale=2.0**24)))
    wide, _ = _train(_sgd(), dtype=mx.float32)
    assert plain < 0.3
    assert scaled > 0.85
    assert scaled == pytest.approx(wide, abs=0.03)


def test_one_bad_batch_is_survived():
    """Plain MLX ends with NaN in every weight; the wrapped optimizer skips one step and learns."""
    _, lost = _train(optim.SGD(0.2 / DAMPING), bad_batches={10}, dtype=mx.float32)
    assert all(mx.all(mx.isnan(leaf)).item() for name, leaf in tree_flatten(lost.parameters()) if "bias" in name)
    optimizer = LossScaleOptimizer(_sgd(), DynamicScaling(init_scale=2.0**24))
    right, _ = _train(optimizer, bad_batches={10})
    assert right > 0.85
    assert optimizer.scale_state.skipped_steps.item() == 1

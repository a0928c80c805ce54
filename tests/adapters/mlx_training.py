"""Small models and helpers for the tests of MLX."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map


class _Network(nn.Module):
    # Without a list of layers, which `MultiOptimizer` of MLX before 0.32.4 cannot split.
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def __call__(self, x):
        return self.last(mx.tanh(self.first(x)))


def network():
    """Return a small network with the same weights each time, in float32."""
    mx.random.seed(0)
    model = _Network()
    mx.eval(model.parameters())
    return model


def batch(seed=0):
    """Return inputs and targets."""
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((5, 3)).astype("f")), mx.array(random.standard_normal((5, 2)).astype("f"))


def squared_error(model, x, y):
    """Return the loss, in float32."""
    return mx.mean(mx.square(model(x) - y))


def bits(tree):
    """Return the dtype and the bytes of each array by its path."""
    arrays = {
        name: np.array(leaf.view(mx.uint16)) if leaf.itemsize == 2 else np.array(leaf) for name, leaf in _flat(tree)
    }
    return {name: (str(leaf.dtype), arrays[name].tobytes()) for name, leaf in _flat(tree)}


def _flat(tree):
    return [(name, leaf) for name, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def in_half(loss_fn):
    """Return a loss that runs the model in float16, from float32 weights, and returns float32."""

    def loss(model, x, *rest):
        weights = model.trainable_parameters()
        model.update(tree_map(lambda weight: weight.astype(mx.float16), weights))
        value = loss_fn(model, x.astype(mx.float16), *rest)
        model.update(weights)
        return value

    return loss

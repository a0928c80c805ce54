"""An adapter that is no part of the package: Apple's MLX, which is lazy, and has no namespace of the array API.

It is what a stranger would write, and is described as they would describe it.
"""

import sys

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from lossscale_core import as_policy
from lossscale_core.testing.conformance import Adapter, Way

_HALF = (mx.float16, mx.bfloat16)


def init_state(policy):
    """Return the state before the first step, as arrays of shape ()."""
    return type(as_policy(policy).init_state())(*map(mx.array, as_policy(policy).init_state()))


def scale(loss, state):
    """Return the loss times the loss scale, in float32 or wider."""
    return _map(lambda leaf: _lifted(leaf) * state.loss_scale, loss)


def all_finite(grads):
    """Return whether every gradient element is finite, as a bool array of shape ()."""
    leaves = [leaf for _, leaf in tree_flatten(grads) if leaf is not None and _is_gradient(leaf)]
    return mx.all(mx.stack([mx.array(True), *(mx.all(mx.isfinite(leaf)) for leaf in leaves)]))


def unscale(grads, state):
    """Return the gradients divided by the loss scale, halves in float32."""
    return _map(lambda leaf: _lifted(leaf) / state.loss_scale if _is_gradient(leaf) else leaf, grads)


def select(grads_finite, new, old):
    """Return `new` where the gradients are finite, else `old`."""
    return tree_map(lambda a, b: None if a is None else mx.where(grads_finite, a, b), new, old)


def _map(function, tree):
    return tree_map(lambda leaf: None if leaf is None else function(leaf), tree)


def _is_gradient(leaf):
    return mx.issubdtype(leaf.dtype, mx.inexact)


def _lifted(leaf):
    return leaf.astype(mx.float32) if leaf.dtype in _HALF or not _is_gradient(leaf) else leaf


def _to_numpy(array):
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _array(values, dtype):
    return mx.array(values, dtype=mx.bool_ if dtype == "bool" else getattr(mx, dtype))


MLX = Adapter(
    name="mlx",
    verbs=sys.modules[__name__],
    asarray=_array,
    to_numpy=_to_numpy,
    dtypes=("float16", "bfloat16", "float32", "float64"),
    xp=mx,
    ways=(Way("eager"), Way("trace", mx.compile, has_values=False)),  # what is not read is traced and never run
    context=lambda: mx.stream(mx.cpu),  # where MLX has float64
)

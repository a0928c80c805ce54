"""The global norm of scaled gradients, which shows whether they are finite, and the factor that clips by it."""

import functools
import operator
from typing import Any

import mlx.core as mx

from lossscale_core import tree
from lossscale_mlx._verbs import is_gradient, lift

LARGEST = 2.0**127 * (2.0 - 2.0**-23)
"""The largest number of float32."""


def check_and_measure(grads: Any, loss_scale: mx.array) -> tuple[mx.array, mx.array]:
    """Return whether all gradients are finite when they are unscaled, and their norm then; infinity if they are not.

    float16 gradients are read once: the squares of its numbers fit in float32. Others are read twice, and divided by
    their largest magnitude first, because MLX cannot decide from the first result whether a second read is needed.
    """
    leaves = [leaf for leaf in tree.leaves(grads) if leaf is not None and is_gradient(leaf) and leaf.size]
    if not leaves:
        return mx.array(True), mx.array(0.0)
    magnitudes = [mx.abs(lift(leaf)) for leaf in leaves]
    largest = mx.array(1.0)
    if any(leaf.dtype != mx.float16 for leaf in leaves):
        largest = functools.reduce(mx.maximum, map(mx.max, magnitudes))
        largest = mx.where(largest == 0.0, 1.0, largest)  # a NaN stays one
    squares = [mx.sum(mx.square(each / largest)) for each in magnitudes]  # infinity / infinity is NaN
    root, unit = mx.sqrt(functools.reduce(operator.add, squares)), largest / loss_scale
    finite = mx.isfinite(root) & mx.isfinite(unit)
    # The norm of finite numbers may exceed float32, and is not an overflow.
    return finite, mx.where(finite, mx.minimum(unit * root, LARGEST), float("inf"))


def clip_factor(norm: mx.array, max_norm: float) -> mx.array:
    """Return the factor that reduces gradients of this norm to a norm of at most `max_norm`; 1 if it is not larger."""
    most = min(max_norm, LARGEST)
    return most / mx.maximum(norm, max(most, 2.0**-126))  # 0 / 0 would be NaN

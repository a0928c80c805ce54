"""The global norm of scaled gradients, which shows whether they are finite, and the factor that clips by it."""

import functools
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from lossscale_mlx._verbs import gradients_of, is_gradient, lift


def check_and_measure(grads: Any, loss_scale: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return whether all gradients are finite when they are unscaled, and their norm then; infinity if they are not.

    Also return two factors of the norm, which do not overflow where their product does. float16 gradients are read
    once: the squares of its numbers fit in float32. Others are read twice, and divided by their largest magnitude
    first, because MLX cannot decide from the first result whether a second read is needed.
    """
    leaves = [leaf for _, leaf in gradients_of(grads) if leaf.size] or [mx.array(0.0)]
    magnitudes = [mx.abs(lift(leaf)) for leaf in leaves]
    largest = mx.array(1.0)
    if any(leaf.dtype != mx.float16 for leaf in leaves):
        largest = functools.reduce(mx.maximum, map(mx.max, magnitudes))
        largest = mx.where(largest == 0.0, 1.0, largest)  # a NaN stays one
    squares = [mx.sum(mx.square(each / largest)) for each in magnitudes]  # infinity / infinity is NaN
    root, unit = mx.sqrt(sum(squares, mx.array(0.0))), largest / loss_scale
    finite = mx.isfinite(root) & mx.isfinite(unit)
    # The norm of finite numbers may exceed float32, and is not an overflow.
    return finite, mx.where(finite, mx.minimum(unit * root, mx.finfo(mx.float32).max), float("inf")), unit, root


def clip(grads: Any, unit: mx.array, root: mx.array, max_norm: float) -> Any:
    """Reduce gradients of the norm `unit * root` to a norm of at most `max_norm`; integers are left as they are."""
    exceeds = unit * root > max_norm
    divisor, factor = mx.where(exceeds, unit, 1.0), mx.where(exceeds, max_norm / root, 1.0)
    return tree_map(lambda grad: grad / divisor * factor if is_gradient(grad) else grad, grads)

"""The global norm of gradients, whose read proves them finite, and what clipping by it multiplies with."""

from typing import Any

import tensorflow as tf

from lossscale_tf._grads import finite_when_unscaled, sum_of_squares, summed_values


def global_norm(leaves: list[Any], loss_scale: Any) -> tf.Tensor:
    """Return the 2-norm of all leaves together, unscaled; infinite exactly where an element is not finite.

    Reads the gradients once. Only where their sum of squares overflows, or the scale is below 1, are they read again.
    """
    inverse = 1.0 / tf.cast(loss_scale, tf.float32)
    values = [summed_values(leaf) for leaf in leaves]
    if not values:
        return tf.constant(0.0)
    squares = sum_of_squares(values)

    def exact() -> tf.Tensor:
        finite = finite_when_unscaled(leaves, loss_scale)
        wide = [tf.cast(tf.abs(value), tf.float64) for value in values]
        norm = tf.sqrt(sum_of_squares(wide)) * tf.cast(inverse, tf.float64)
        norm = tf.minimum(norm, tf.cast(tf.float32.max, tf.float64))
        return tf.where(finite, tf.cast(norm, tf.float32), float("inf"))

    def quick() -> tf.Tensor:
        return tf.cast(tf.sqrt(squares), tf.float32) * inverse

    return tf.cond(tf.math.is_finite(squares) & (inverse <= 1.0), quick, exact)


def clip_factor(norm: tf.Tensor, max_norm: float) -> tf.Tensor:
    """Return what to multiply gradients of this norm with so that it becomes at most `max_norm`."""
    return max_norm / tf.maximum(norm, max_norm)

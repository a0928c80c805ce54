"""The global norm of gradients, which also shows whether they are finite, and the factor that clips them."""

from typing import Any

import tensorflow as tf

from lossscale_tf._verbs import finite_when_unscaled, lifted, sum_of_squares, summed_values


def global_norm(leaves: list[Any], loss_scale: Any) -> tf.Tensor:
    """Return the 2-norm of all leaves together, unscaled; infinite if and only if an element is not finite.

    Its dtype is float64 if a leaf's is, else float32; a norm too large for the dtype becomes its largest number. Reads
    the gradients once, and a second time if their sum of squares overflows, or the scale is below 1.
    """
    inverse = 1.0 / tf.cast(loss_scale, tf.float32)
    values = [summed_values(leaf) for leaf in leaves]
    if not values:
        return tf.constant(0.0)
    squares = sum_of_squares(values)

    def exact() -> tf.Tensor:
        finite = finite_when_unscaled(leaves, loss_scale)
        wide = [tf.cast(tf.abs(lifted(value)), tf.float64) for value in values]
        # With a zero, since the maximum of an empty leaf would be minus infinity.
        largest = tf.reduce_max([tf.reduce_max(tf.concat([tf.reshape(value, [-1]), [0.0]], 0)) for value in wide])
        divisor = tf.where(largest > 0.0, largest, 1.0)  # so that no square overflows, which it may in float64, too
        norm = divisor * tf.sqrt(sum_of_squares([value / divisor for value in wide])) * tf.cast(inverse, tf.float64)
        norm = tf.minimum(norm, tf.cast(squares.dtype.max, tf.float64))
        return tf.where(finite, tf.cast(norm, squares.dtype), float("inf"))

    def quick() -> tf.Tensor:
        return tf.sqrt(squares) * tf.cast(inverse, squares.dtype)

    return tf.cond(tf.math.is_finite(squares) & (inverse <= 1.0), quick, exact)


def clip_factor(norm: tf.Tensor, max_norm: float) -> tf.Tensor:
    """Return the factor for gradients of this norm after which their norm is at most `max_norm`."""
    return max_norm / tf.maximum(norm, max_norm)

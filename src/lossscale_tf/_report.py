"""Which variables overflowed, and how."""

from typing import Any

import tensorflow as tf

from lossscale_core import GradientReport
from lossscale_tf._verbs import is_gradient, summed_values


def overflow_report(grads_and_vars: Any) -> list[GradientReport]:
    """Return a report on each variable whose gradient holds NaN or infinity, by its name.

    Call it eagerly, with the (gradient, variable) pairs of a skipped step; where nothing overflowed the list is empty.
    Duplicates of `IndexedSlices` are summed. Look at the loss beside it: with a finite loss the scale was too large,
    also where gradients hold NaN and no infinity. Reads every gradient and synchronises with the host; raises
    `RuntimeError` in a graph, which has no numbers yet.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("overflow_report reads numbers, which a graph has not; call it outside of tf.function")
    return [
        _report(getattr(variable, "path", variable.name), values)
        for grad, variable in grads_and_vars
        if is_gradient(grad)
        for values in [summed_values(grad)]
        if not bool(tf.reduce_all(tf.math.is_finite(tf.abs(values))))
    ]


def _report(name: str, values: tf.Tensor) -> GradientReport:
    parts = tf.stack([tf.math.real(values), tf.math.imag(values)]) if values.dtype.is_complex else values
    magnitudes = tf.where(tf.math.is_finite(parts), tf.abs(parts), 0)
    infinite = tf.math.is_inf(parts)
    return GradientReport(
        name,
        nan=int(tf.math.count_nonzero(tf.math.is_nan(parts))),
        positive_inf=int(tf.math.count_nonzero(infinite & (parts > 0))),
        negative_inf=int(tf.math.count_nonzero(infinite & (parts < 0))),
        # With a zero, since a gradient may have no elements.
        largest_finite=float(tf.reduce_max(tf.concat([tf.reshape(magnitudes, [-1]), [0]], 0))),
    )

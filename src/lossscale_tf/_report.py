"""A report on the variables with NaN or infinity in their gradients."""

from typing import Any

import tensorflow as tf

from lossscale_core.adapters import OverflowReport, require_pairs
from lossscale_tf._verbs import all_finite, at_least_float32, is_gradient, summed_values


def overflow_report(grads_and_vars: Any, *, loss: Any = None) -> OverflowReport:
    """Report on each variable with NaN or infinity in its gradient, and on the cause.

    Call it eagerly, after a skipped step. Reads every gradient and synchronises with the host.

    Args:
        grads_and_vars: The (gradient, variable) pairs of the step. Duplicates of `IndexedSlices` are summed.
        loss: The unscaled loss of the step: a tensor or a number. The report needs it to name the cause, because an
            overflow of the backward pass may leave only NaN in the gradients.

    Returns:
        A list of `GradientReport`, one for each such variable, with its name; empty if nothing overflowed. The
            `verdict` of the list says whether a smaller loss scale helps.

    Raises:
        RuntimeError: The caller is in a graph, which has no numbers yet.
        TypeError: `grads_and_vars` is not made of pairs.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("overflow_report reads numbers, and a graph has none yet; call it outside of tf.function")
    pairs = require_pairs(grads_and_vars, "overflow_report")
    checked = [(summed_values(grad), variable) for grad, variable in pairs if is_gradient(grad)]
    bad = [
        (getattr(variable, "path", variable.name), at_least_float32(values).numpy())
        for values, variable in checked
        if not bool(tf.reduce_all(tf.math.is_finite(tf.abs(values))))
    ]
    return OverflowReport(bad, loss_finite=None if loss is None else bool(all_finite(loss)), checked=len(checked))

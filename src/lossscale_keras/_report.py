"""A report on the variables with NaN or infinity in their gradients."""

from typing import Any

from keras import ops

from lossscale_core.adapters import OverflowReport, require_pairs
from lossscale_keras._verbs import all_finite, at_least_float32, dense, is_gradient


def overflow_report(grads_and_vars: Any, *, loss: Any = None) -> OverflowReport:
    """Report on each variable with NaN or infinity in its gradient, and on the cause.

    Call it eagerly, after a skipped step. Reads every gradient and synchronises with the host.

    Args:
        grads_and_vars: The (gradient, variable) pairs of the step; a gradient may be None.
        loss: The unscaled loss of the step: an array or a number. The report needs it to name the cause, because an
            overflow of the backward pass may leave only NaN in the gradients.

    Returns:
        A list of `GradientReport`, one for each such variable, with its path; empty if nothing overflowed. The
            `verdict` of the list says whether a smaller loss scale helps.

    Raises:
        TypeError: `grads_and_vars` is not made of pairs.
    """
    pairs = require_pairs(grads_and_vars, "overflow_report")
    checked = [(grad, variable) for grad, variable in pairs if is_gradient(grad)]
    bad = [
        (getattr(variable, "path", variable.name), ops.convert_to_numpy(at_least_float32(dense(grad))))
        for grad, variable in checked
        if not bool(all_finite(grad))
    ]
    return OverflowReport(bad, loss_finite=None if loss is None else bool(all_finite(loss)), checked=len(checked))

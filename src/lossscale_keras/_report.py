"""Which variables overflowed, and how."""

from typing import Any

import numpy as np
from keras import ops

from lossscale_core import GradientReport, OverflowReport
from lossscale_keras._verbs import dense, is_gradient, lifted


def overflow_report(grads_and_vars: Any, *, loss: Any = None) -> OverflowReport:
    """Report on each variable with NaN or infinity in its gradient, and on the cause.

    Call it eagerly, after a skipped step. Reads every gradient and synchronises with the host.

    Args:
        grads_and_vars: The (gradient, variable) pairs of the step; a gradient may be None.
        loss: The loss of the step, unscaled: an array or a number. It shows the cause. Gradients alone do not, since
            an overflow of the backward pass may leave NaN and no infinity.

    Returns:
        A list of `GradientReport`, one for each such variable, by its path; empty where nothing overflowed. Its
            `verdict` says "finite loss: a smaller loss scale fixes this" or "the loss itself is not finite".
    """
    reports = []
    for grad, variable in grads_and_vars:
        values = ops.convert_to_numpy(lifted(dense(grad))) if is_gradient(grad) else np.zeros(0)
        finite = np.isfinite(values)
        if not finite.all():
            counts = int(np.isnan(values).sum()), int((values == np.inf).sum()), int((values == -np.inf).sum())
            largest = float(np.abs(values[finite]).max(initial=0.0))
            reports.append(GradientReport(getattr(variable, "path", variable.name), *counts, largest))
    is_loss_finite = None if loss is None else bool(np.isfinite(ops.convert_to_numpy(loss)).all())
    return OverflowReport(reports, loss_finite=is_loss_finite)

"""A report on the gradients that overflowed."""

from typing import Any

import mlx.core as mx

from lossscale_core.adapters import GradientReport, OverflowReport
from lossscale_mlx._verbs import all_finite, gradients_of, real_parts


def overflow_report(grads: Any, *, loss: Any = None) -> OverflowReport:
    """Report on each leaf that holds NaN or infinity, and on the cause.

    Call it with the gradients of a skipped step, outside of `mx.compile`. Evaluates every gradient and synchronises
    with the host.

    Args:
        grads: A tree of arrays.
        loss: The loss of the step, unscaled. It shows the cause. Gradients alone do not, since an overflow of the
            backward pass may leave NaN and no infinity.

    Returns:
        A list of `GradientReport`, one for each such leaf, named by its path in the tree; empty where nothing
            overflowed. Its `verdict` says "finite loss: a smaller loss scale fixes this" or "the loss itself is not
            finite".

    Raises:
        TypeError: A leaf is not an array of MLX; the message names it.
        ValueError: The call is within a function that `mx.compile` traces, where arrays have no values.
    """
    reports = [_report(name, leaf) for name, leaf in gradients_of(grads) if not all_finite(leaf).item()]
    return OverflowReport(reports, loss_finite=None if loss is None else bool(all_finite(mx.array(loss)).item()))


def _report(name: str, leaf: mx.array) -> GradientReport:
    parts = mx.stack(real_parts(leaf))
    nan, positive, negative = (int(mx.sum(test(parts))) for test in (mx.isnan, mx.isposinf, mx.isneginf))
    magnitudes = mx.where(mx.isfinite(parts), mx.abs(parts), 0.0)
    return GradientReport(name, nan, positive, negative, float(mx.max(magnitudes)))

"""A report on the gradients that overflowed."""

import jax.numpy as jnp
from jax import Array

from lossscale_core.adapters import GradientReport, OverflowReport
from lossscale_jax._leaves import is_traced, named_gradients, real_parts
from lossscale_jax._types import PyTree
from lossscale_jax._verbs import all_finite


def overflow_report(grads: PyTree, *, loss: Array | float | None = None) -> OverflowReport:
    """Report on each leaf that holds NaN or infinity, and on the cause.

    Call it with the gradients of a skipped step, outside of `jit`. Reads every gradient and synchronises with the host.

    Args:
        grads: A pytree of arrays.
        loss: The loss of the step, unscaled. It shows the cause. Gradients alone do not, since an overflow of the
            backward pass may leave NaN and no infinity.

    Returns:
        A list of `GradientReport`, one for each such leaf, named by its path in the pytree; empty where nothing
            overflowed. Its `verdict` says "finite loss: a smaller loss scale fixes this" or "the loss itself is not
            finite".

    Raises:
        TypeError: A leaf is not an array, or is traced: the call is within a compiled function.
    """
    named = named_gradients(grads)
    if is_traced([leaf for _, leaf in named], loss):
        raise TypeError(
            "the gradients or the loss are traced, and have no values while a function is compiled; return them from "
            "the compiled function, and call overflow_report(grads, loss=loss) outside of it"
        )
    reports = [_report(name, leaf) for name, leaf in named if not bool(jnp.isfinite(leaf).all())]
    return OverflowReport(reports, loss_finite=None if loss is None else bool(all_finite(loss)))


def _report(name: str, values: Array) -> GradientReport:
    parts = jnp.stack(real_parts(values))
    magnitudes = jnp.where(jnp.isfinite(parts), jnp.abs(parts), 0.0)
    return GradientReport(
        name,
        nan=int(jnp.isnan(parts).sum()),
        positive_inf=int(jnp.isposinf(parts).sum()),
        negative_inf=int(jnp.isneginf(parts).sum()),
        largest_finite=float(magnitudes.max(initial=0.0)),
    )

"""A report on the gradients that overflowed."""

import jax.numpy as jnp
from jax import Array

from lossscale_core import GradientReport
from lossscale_jax._debug import unchecked
from lossscale_jax._leaves import is_traced, named_gradients, real_parts
from lossscale_jax._types import PyTree


@unchecked
def overflow_report(grads: PyTree) -> list[GradientReport]:
    """Report on each leaf that holds NaN or infinity.

    Call it with the gradients of a skipped step, outside of `jit`, and look at the loss, too: with a finite loss the
    scale was too large, also where gradients hold NaN and no infinity. Reads every gradient and synchronises with the
    host.

    Args:
        grads: A pytree of arrays.

    Returns:
        A report for each such leaf, named by its path in the pytree; empty where nothing overflowed.

    Raises:
        TypeError: A leaf is not an array, or is traced: the call is within a compiled function.
    """
    named = named_gradients(grads)
    if is_traced([leaf for _, leaf in named], None):
        raise TypeError(
            "the gradients are traced, and have no values while a function is compiled; return them from the compiled "
            "function, and call overflow_report(grads) outside of it"
        )
    return [_report(name, leaf) for name, leaf in named if not bool(jnp.isfinite(leaf).all())]


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

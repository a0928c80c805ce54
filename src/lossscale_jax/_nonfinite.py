"""Losses and updates that are NaN or infinite, which no loss scale fixes: a stage, and a check of a step's results."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_core import nonfinite_update
from lossscale_core.errors import PolicyError
from lossscale_jax import _axes
from lossscale_jax._arguments import number
from lossscale_jax._debug import unchecked
from lossscale_jax._decide import Skip, decide, select
from lossscale_jax._finite import finite_when_unscaled
from lossscale_jax._leaves import is_array, is_gradient, is_traced
from lossscale_jax._stages import Attempt, Settings
from lossscale_jax._types import PyTree

Step: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""Returns a result and the state after the step, given the source of the gradients and the state before it."""
Skipping: TypeAlias = Callable[[tuple[PyTree, PyTree], PyTree, PyTree], tuple[PyTree, PyTree]]
"""Returns the same of a skipped step, given first what `Step` returns, or its shapes."""
Written: TypeAlias = Callable[[PyTree], tuple[PyTree, PyTree]]
"""Returns the parameters before and after a step, given its result."""


def check_loss(attempt: Attempt, settings: Settings) -> Attempt:
    """Check the loss; where it is not finite, the call is not applied and is not a step of the policy."""
    loss = None if attempt.loss is None else number(attempt.loss)
    if loss is None or loss.shape != ():
        given = "value is missing" if loss is None else f"value has shape {loss.shape}"
        raise TypeError(
            f"{given}, and on_nonfinite_loss='hold' needs the loss, a scalar that is not scaled; pass it to update or "
            "apply_gradients, as by optimizer.update(grads, opt_state, params, value=loss)"
        )
    finite = _axes.all_true(jnp.isfinite(loss), settings.axis_name)
    _axes.require_reduced(finite, attempt.scale_state, "pass value=jax.lax.pmean(loss, {names})", "losses")
    return attempt._replace(
        grads_finite=attempt.grads_finite & finite, applies=attempt.applies & finite, counts=finite, loss_finite=finite
    )


def take_or_undo(
    attempt: Attempt, step: Step, skip: Skipping, inner_state: PyTree, written: Written, settings: Settings
) -> tuple[Attempt, tuple[PyTree, PyTree]]:
    """Decide as `decide` does, and undo a step as `skip` does if it leaves an array NaN or infinite.

    An undone step is not a step of the policy. Within a conditional, a skipped step costs no more than without it.
    """

    def checked(source: PyTree, before: PyTree) -> tuple[tuple[PyTree, PyTree], Array]:
        new = result, after = step(source, before)
        params_before, params_after = written(result)
        finite = _stays_finite((params_before, before), (params_after, after), settings.skip)
        finite = _axes.all_true(finite, settings.axis_name)
        return select(finite, new, _axes.matching(skip(new, source, before), new)), finite

    def skipped(applied: Any, source: PyTree, before: PyTree) -> tuple[tuple[PyTree, PyTree], Array]:
        return skip(applied[0], source, before), jnp.asarray(True)

    new, finite = decide(attempt.applies, checked, skipped, attempt.source, inner_state, by=settings.skip)
    _axes.require_reduced(finite, attempt.scale_state, "pass axis_name={names} to loss_scaled", "parameters")
    counts = finite | ~attempt.grads_finite  # an overflow in the same call still counts
    counts = counts if attempt.counts is None else attempt.counts & counts
    return attempt._replace(counts=counts, update_finite=finite), new


@unchecked
def require_finite(applies: Array, before: tuple[PyTree, PyTree], after: tuple[PyTree, PyTree]) -> None:
    """Raise `NonfiniteUpdateError` that names the first array that a step has made NaN or infinite; the host waits.

    Both arguments are pairs of parameters and inner state. Raises `PolicyError` in a compiled step.
    """
    if is_traced(jax.tree.leaves((before, after)), applies):
        raise PolicyError(
            "on_nonfinite_update='raise' cannot raise in a compiled step; pass 'skip', and call "
            "lossscale_core.check_nonfinite_streak(policy, opt_state.nonfinite_state) where you read the state; or run "
            "the step within jax.disable_jit() to have the name"
        )
    if not applies or _stays_finite(before, after, "select"):
        return
    for part, old, new in zip(("params", "inner_state"), before, after, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(new)
        for (path, leaf), leaf_before in zip(leaves, jax.tree.leaves(old), strict=True):
            if not _stays_finite(leaf_before, leaf, "select"):
                raise nonfinite_update(part + jax.tree_util.keystr(path))


def _stays_finite(before: PyTree, after: PyTree, by: Skip) -> Array:
    """Return whether every array is finite, or was not finite before; arrays without floats do not count."""
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    pairs = [(old, new) for old, new in leaves if is_array(new) and is_gradient(new)]
    traced = is_traced([leaf for pair in pairs for leaf in pair], None)
    return (_each_stays_finite if traced else _each_stays_finite_at_once)(pairs, by)


def _each_stays_finite(pairs: list[tuple[Array, Array]], by: Skip) -> Array:
    def exact(pairs: list[tuple[Array, Array]]) -> Array:
        if not pairs:
            return jnp.asarray(True)
        became = jnp.stack([~_is_finite(new) & _is_finite(old) for old, new in pairs]).astype(jnp.float32)
        # Not `any`: XLA for a CPU would repeat all of it within the select of each array, and compile for minutes.
        return jnp.dot(became, became) == 0.0

    if by == "select":
        return exact(pairs)
    finite = finite_when_unscaled([new for _, new in pairs], None)
    return decide(~finite, exact, lambda *_: jnp.asarray(True), pairs, by=by)


_each_stays_finite_at_once = jax.jit(_each_stays_finite, static_argnums=1)


def _is_finite(array: Any) -> Array:
    return finite_when_unscaled(array, None, by="select")

"""One step of an optax optimizer, applied or skipped as a whole."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import is_checked, unchecked
from lossscale_jax._gradients import lift_leaves, map_gradients
from lossscale_jax._types import PyTree, Tree
from lossscale_jax._verbs import select

Operands = TypeVarTuple("Operands")
Result = TypeVar("Result")

Skip = Literal["cond", "select"]
"""How a compiled step is skipped: by a conditional around it, or by choosing between its results and the old values."""


def apply_or_skip(
    applies: Array,
    apply: Callable[[*Operands], Result],
    skip: Callable[[*Operands], Result],
    *operands: *Operands,
    by: Skip = "cond",
) -> Result:
    """Return `apply(*operands)` where `applies`, else `skip(*operands)` in the same dtypes.

    Traced by `cond`, only the branch that is taken runs, and donated buffers are not copied.
    """
    applied = jax.eval_shape(apply, *operands)

    def skip_alike(*operands: *Operands) -> Result:
        return _axes.matching(skip(*operands), applied)

    is_traced = isinstance(applies, jax.core.Tracer)
    if is_traced and by == "cond":
        return lax.cond(applies, apply, skip_alike, *operands)
    if not is_traced and is_checked():  # the step that is not taken would raise, and all operations are waited for
        return apply(*operands) if applies else unchecked(skip_alike)(*operands)
    return select(applies, apply(*operands), skip_alike(*operands))


def zeros_unless(applies: Array, grads: Tree) -> Tree:
    """Return `grads` where `applies`, else zeros, so that a step whose results are dropped meets no NaN.

    An optimizer that searches a line, calls the host or checks its numbers would otherwise act on it.
    """
    return map_gradients(lambda leaf: jnp.where(applies, leaf, jnp.zeros_like(leaf)), grads)


def no_updates(grads: Tree) -> Tree:
    """Return updates that change nothing: -0.0, since adding it to 0.0 or -0.0 leaves even the sign alone."""

    def negative_zeros(leaf: Any) -> Array:
        is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
        return lax.full_like(leaf, complex(-0.0, -0.0) if is_complex else -0.0)

    return jax.tree.map(negative_zeros, grads)


def with_updates(params: Tree, updates: PyTree) -> Tree:
    """Return `params` with `updates` added in float32 or wider, in the parameters' dtypes."""
    wide = lift_leaves(params)
    # `apply_updates` alone would promote half-precision parameters by itself, which JAX's strict promotion refuses.
    return optax.tree.cast_like(optax.apply_updates(wide, optax.tree.cast_like(updates, wide)), params)


def with_extra_args(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `update` so that it ignores the extra arguments it has no name for.

    `optax.with_extra_args_support` withholds all of them from what is not a `GradientTransformationExtraArgs`, such as
    `optax.MultiSteps(...).gradient_transformation()`, whose `update` passes them on to the optimizer within.
    """
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return update

    def with_known_args(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return update(updates, state, params, **{k: v for k, v in extra_args.items() if k in parameters})

    return with_known_args

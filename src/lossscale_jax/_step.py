"""One step of an optax-shaped optimizer, applied or skipped as a whole."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._debug import is_checked, unchecked
from lossscale_jax._grads import lifted, select


def apply_or_skip(finite: Array, apply: Callable[..., Any], kept: Callable[..., Any], *operands: Any) -> Any:
    """Return `apply(*operands)` where `finite`, else `kept(*operands)` in the same dtypes.

    Traced, only the branch that is taken runs, and donated buffers are not copied.
    """
    applied = jax.eval_shape(apply, *operands)

    def skip(*operands: Any) -> Any:
        return _axes.matching(kept(*operands), applied)

    if isinstance(finite, jax.core.Tracer):
        return lax.cond(finite, apply, skip, *operands)
    if is_checked():  # the step that is not taken would raise, and every operation is waited for anyway
        return apply(*operands) if finite else unchecked(skip)(*operands)
    return select(finite, apply(*operands), skip(*operands))


def no_updates(like: Any) -> Any:
    """Return zero updates: negative, since added to a parameter they leave even the sign of its zeros alone."""
    return jax.tree.map(lambda leaf: lax.full_like(leaf, _negative_zero(leaf.dtype)), like)


def with_updates(params: Any, updates: Any) -> Any:
    """Return `params` with `updates` added, in the parameters' dtypes."""
    return jax.tree.map(lambda param, update: _moved(jnp.asarray(param), update), params, updates)


def _moved(param: Array, update: Array) -> Array:
    wide = lifted(param) if jnp.issubdtype(param.dtype, jnp.inexact) else param
    return (wide + update.astype(wide.dtype)).astype(param.dtype)


def _negative_zero(dtype: Any) -> complex:
    return complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0


def with_extra_args(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `update` so that it ignores the extra arguments it has no name for."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return update

    def known_only(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return update(updates, state, params, **{k: v for k, v in extra_args.items() if k in parameters})

    return known_only

"""One step of an optax-shaped optimizer, applied or skipped as a whole."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._grads import select


def apply_or_skip(finite: Array, update: Callable[..., Any], grads: Any, inner_state: Any) -> tuple[Any, Any]:
    """Return `update(grads, inner_state)` where `finite`, else zero updates and `inner_state` as it was.

    Traced, only the branch that is taken runs, and donated buffers are not copied. The zeros are negative: added to a
    parameter they leave even the sign of its zeros alone.
    """
    updates, new_state = jax.eval_shape(update, grads, inner_state)

    def skip(_: Any, inner_state: Any) -> tuple[Any, Any]:
        return jax.tree.map(_nothing, updates), _axes.matching(inner_state, new_state)

    if isinstance(finite, jax.core.Tracer):
        return lax.cond(finite, update, skip, grads, inner_state)
    return select(finite, update(grads, inner_state), skip(grads, inner_state))


def _nothing(like: jax.ShapeDtypeStruct) -> Array:
    zeros = lax.full(like.shape, -0.0, like.dtype, sharding=like.sharding)
    return _axes.matching(zeros, like)


def with_extra_args(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `update` so that it ignores the extra arguments it has no name for."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return update

    def known_only(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return update(updates, state, params, **{k: v for k, v in extra_args.items() if k in parameters})

    return known_only

"""Updates of an optax optimizer: computing them with extra arguments, adding them, and zero updates."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lossscale_jax._leaves import lift_leaves
from lossscale_jax._types import PyTree, Tree


def no_updates(grads: Tree) -> Tree:
    """Return updates that change nothing: -0.0, which also keeps the sign of 0.0 and -0.0."""

    def negative_zeros(leaf: Any) -> Array:
        is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
        return lax.full_like(leaf, complex(-0.0, -0.0) if is_complex else -0.0)

    return jax.tree.map(negative_zeros, grads)


def with_updates(params: Tree, updates: PyTree) -> Tree:
    """Return `params` with `updates` added in float32 or wider, in the parameters' dtypes."""
    wide = lift_leaves(params)
    # `apply_updates` promotes half-precision parameters implicitly, which JAX's strict promotion refuses.
    return optax.tree.cast_like(optax.apply_updates(wide, optax.tree.cast_like(updates, wide)), params)


def with_extra_args(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's `update` so that it ignores extra arguments that are not among its parameters.

    `optax.with_extra_args_support` passes none of them to an optimizer that is not a
    `GradientTransformationExtraArgs`. `optax.MultiSteps(...).gradient_transformation()` is not one, but its `update`
    passes them to the inner optimizer.
    """
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return update

    def with_known_args(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return update(updates, state, params, **{k: v for k, v in extra_args.items() if k in parameters})

    return with_known_args

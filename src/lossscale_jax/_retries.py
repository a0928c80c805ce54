"""Retries at a lower loss scale after an overflow."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lossscale_core import BaseScaling, OnNonfiniteLoss, PolicyLike, ScaleState, as_policy
from lossscale_core.adapters import check_setting
from lossscale_jax import _axes
from lossscale_jax._arguments import loss_scale_of, require_function
from lossscale_jax._attach import attaches
from lossscale_jax._autodiff import ScaledGradients, presented_as, value_and_grad
from lossscale_jax._types import PyTree

Value = TypeVar("Value")
Aux = TypeVar("Aux")


class RetriedGradients(NamedTuple, Generic[Value, Aux]):
    """The results of the last try, and the state that scaled its loss."""

    gradients: ScaledGradients[Value, Aux, PyTree]
    """The results of the last try; `grads_finite` is False if every try overflowed."""
    state: ScaleState
    """The state of the last try: pass it to `policy.update` together with `grads_finite`."""


def retrying_value_and_grad(
    fun: Callable[..., Any],
    policy: PolicyLike,
    *,
    retries: int,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
    on_nonfinite_loss: OnNonfiniteLoss = "back_off",
) -> Callable[..., RetriedGradients[Any, Any]]:
    """Create a function that differentiates `fun` with a scaled loss, and again at a lower scale if it overflows.

    Each overflow but the last lowers the scale by one `policy.update`, so that the counters and the hysteresis count
    it. For the last try the caller updates the policy, as with `value_and_grad`:

    ```python
    differentiate = retrying_value_and_grad(loss, policy, retries=3)
    gradients, state = differentiate(state, params, batch)
    state = policy.update(state, gradients.grads_finite)
    ```

    The tries run in one `while_loop` with the same arguments, including random keys, and `fun` is compiled once, even
    outside of `jit`. So the gradients are bit for bit those of a compiled `value_and_grad`, which may differ from those
    of an eager one. Does not synchronise with the host.

    Args:
        fun: As for `value_and_grad`.
        policy: Anything that `as_policy` accepts. A policy that does not adapt is not retried.
        retries: The largest number of further tries, 0 or more. With 32, the first step calibrates the scale.
        argnums: As for `value_and_grad`.
        has_aux: As for `value_and_grad`.
        axis_name: As for `value_and_grad`; then all devices retry together.
        on_nonfinite_loss: As for `value_and_grad`. With `"hold"` a loss that is NaN or infinite before it is scaled is
            not retried, since it would be the same at any scale.

    Returns:
        A function `(state, *args, **kwargs)` that returns `RetriedGradients`.

    Raises:
        TypeError: `fun` is not a function; or, when called, `state` is not a state, or the loss is not a scalar.
        ValueError: When called: `fun` calls `attach`, which would keep the scale of the first try.
        PolicyError: `policy` is not a policy, or `retries` is not a whole number from 0, or `on_nonfinite_loss` is
            another value.
    """
    require_function(fun, "retrying_value_and_grad(fun, policy, retries=3)(state, *args)")
    retries = check_setting("retries", retries)
    chosen = as_policy(policy)
    # Each overload is for one value of `has_aux`, which is not known here.
    differentiate: Any = value_and_grad(fun, argnums, has_aux, axis_name, on_nonfinite_loss=on_nonfinite_loss)  # type: ignore[call-overload]
    most = retries if BaseScaling.of(chosen).adapts else 0

    def retrying(state: Any, /, *args: Any, **kwargs: Any) -> RetriedGradients[Any, Any]:
        loss_scale_of(state, "retrying_value_and_grad(fun, policy, retries=3)(state, *args)")

        def attempt(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            tries, state, before = carry
            lowered = chosen.update(state, before.grads_finite, xp=jnp)
            state = state._make(jnp.where(tries > 0, new, old) for new, old in zip(lowered, state, strict=True))
            return tries + 1, state, differentiate(state, *args, **kwargs)

        def continues(carry: tuple[Any, Any, Any]) -> Any:
            tries, _, result = carry
            again = (tries <= most) & ~result.grads_finite
            return again if result.loss_finite is None else again & ((tries == 0) | result.loss_finite)

        # Placeholder gradients, so that `fun` is traced once, in the body of the loop.
        closed, like = jax.make_jaxpr(lambda: differentiate(state, *args, **kwargs), return_shape=True)()
        if most and any(map(attaches, closed.jaxpr.eqns)):
            raise ValueError(
                "fun attaches a loss, and a retry lowers the loss scale without changing the state that attach was "
                "given; return the sum of both losses instead, or use value_and_grad"
            )
        nothing = _axes.matching(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), like)
        _, state, result = lax.while_loop(continues, attempt, (jnp.int32(0), state, nothing))
        return RetriedGradients(result, state)

    return presented_as(fun, retrying)

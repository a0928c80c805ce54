"""`jax.value_and_grad` of a scaled loss."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._grads import all_finite, scale, unscale


class ScaledGradients(NamedTuple):
    """What a scaled backward pass yields, unscaled."""

    value: Any
    """The loss as `fun` returned it."""
    aux: Any
    """What else `fun` returned; None without `has_aux`."""
    grads: Any
    """The gradients, unscaled, in float32 or wider; averaged over `axis_name`."""
    grads_finite: Array
    """bool, shape `()`: every gradient element is finite, on every device along `axis_name`."""


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Any = None,
) -> Callable[..., ScaledGradients]:
    """Return a function `(state, *args, **kwargs)` that differentiates `fun(*args, **kwargs)` with its loss scaled.

    As `jax.value_and_grad`, the loss multiplied by the state's scale on the way. `argnums` counts without the state.
    Under `shard_map`, `pmap` or `vmap` with data split over `axis_name`, gradients are unscaled, averaged over it and
    checked, so that every device comes to the same `grads_finite`; `value` and `aux` stay each device's own. Forgetting
    it there lets the devices' states drift apart: `shard_map` raises, `pmap` cannot know. Does not synchronise with the
    host. Follows the interface of flax's `DynamicScale.value_and_grad`.
    """

    def scaled_value_and_grad(state: Any, /, *args: Any, **kwargs: Any) -> ScaledGradients:
        def scaled_loss(*args: Any) -> tuple[Any, tuple[Any, Any]]:
            value, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            return scale(value, state), (value, aux)

        chosen = _chosen(argnums, len(args))
        if axis_name is not None:  # else shard_map would sum the gradients of what is replicated by itself
            args = tuple(_axes.vary_over(arg, axis_name) if n in chosen else arg for n, arg in enumerate(args))
        grads, (value, aux) = jax.grad(scaled_loss, argnums, has_aux=True)(*args)
        grads = unscale(grads, state)
        if axis_name is not None:
            grads = lax.pmean(grads, axis_name)
        finite = all_finite(grads)
        _axes.require_reduced(finite, state, _ADVICE)
        if axis_name is None:
            _axes.require_reduced(value, (state, [args[n] for n in chosen]), _ADVICE)
        return ScaledGradients(value, aux, grads, finite)

    return _presented_as(scaled_value_and_grad, fun)


_ADVICE = (
    "pass every axis to average the gradients over, axis_name={names} among them; where each device owns a part of the "
    "parameters, let loss_scaled(..., axis_name={names}) decide instead"
)


def _chosen(argnums: int | Sequence[int], count: int) -> set[int]:
    """Return which of `count` arguments are differentiated; what is out of range is for JAX to refuse."""
    numbers = argnums if isinstance(argnums, Sequence) else [argnums]
    return {operator.index(n) % count for n in numbers if count}


def _presented_as(function: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under the name of `fun`, and with its parameters after the state, by which `jit` goes."""
    functools.update_wrapper(function, fun)
    del function.__wrapped__  # type: ignore[attr-defined]
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin, say
        return function
    name = "state" if all(parameter.name != "state" for parameter in parameters) else "scale_state"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([state, *parameters])  # type: ignore[attr-defined]
    return function

"""`jax.value_and_grad` of a scaled loss."""

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
from jax import Array, lax

from lossscale_jax import _axes
from lossscale_jax._arguments import loss_and_aux, loss_scale_of, require_function
from lossscale_jax._types import HasLossScale, PyTree
from lossscale_jax._verbs import all_finite, scale, unscale

P = ParamSpec("P")
Params = TypeVar("Params", bound=Any)  # the bound lets pyright accept arithmetic on it in a lambda
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Grads = TypeVar("Grads")


class ScaledGradients(NamedTuple, Generic[Value, Aux, Grads]):
    """The results of a scaled backward pass, unscaled."""

    value: Value
    """The loss as `fun` returned it."""
    aux: Aux
    """The auxiliary output of `fun`; None without `has_aux`."""
    grads: Grads
    """The gradients, unscaled, in float32 or wider; averaged over `axis_name`."""
    grads_finite: Array
    """bool, shape `()`: every gradient element is finite, on every device along `axis_name`."""


@overload
def value_and_grad(
    fun: Callable[Concatenate[Params, P], tuple[Value, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, Params, P], ScaledGradients[Value, Aux, Params]]: ...
@overload
def value_and_grad(  # type: ignore[overload-overlap]  # the overloads differ only in the name of a parameter
    fun: Callable[Concatenate[Params, P], Value],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, Params, P], ScaledGradients[Value, None, Params]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Value, Aux]],
    argnums: int | Sequence[int],
    has_aux: Literal[True],
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, P], ScaledGradients[Value, Aux, PyTree]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Value],
    argnums: int | Sequence[int],  # no default: a lambda that fits two overloads is inferred as Any by mypy
    has_aux: Literal[False] = False,
    axis_name: Hashable = None,
) -> Callable[Concatenate[HasLossScale, P], ScaledGradients[Value, None, PyTree]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., ScaledGradients[Any, Any, PyTree]]:
    """Create a function that differentiates `fun` with a scaled loss; the counterpart of `jax.value_and_grad`.

    The interface follows flax's `DynamicScale.value_and_grad`. Does not synchronise with the host.

    Args:
        fun: Returns the loss, a scalar; with `has_aux`, a pair of the loss and anything else.
        argnums: Which arguments of `fun` to differentiate, counted without the state.
        has_aux: Whether `fun` returns such a pair.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of them, over which the data are split.
            Gradients are then unscaled, averaged over this axis and checked, so that `grads_finite` is the same on
            every device; `value` and `aux` remain those of each device. If `axis_name` is missing, the states of the
            devices diverge: `shard_map` raises an error, `pmap` does not notice.

    Returns:
        A function `(state, *args, **kwargs)` that returns the `ScaledGradients` of `fun(*args, **kwargs)`.

    Raises:
        TypeError: `fun` is not a function; or, when called, `state` is not a state, or the loss is not a scalar.
        ValueError: When called under `shard_map`: devices share a state, but their gradients or losses differ.
    """
    require_function(fun, "value_and_grad(fun)(state, *args)")

    def scaled_value_and_grad(state: HasLossScale, /, *args: Any, **kwargs: Any) -> ScaledGradients[Any, Any, PyTree]:
        loss_scale_of(state, "value_and_grad(fun)(state, *args)")

        def scaled_loss(*args: Any) -> tuple[Any, tuple[Any, Any]]:
            value, aux = loss_and_aux(fun(*args, **kwargs), has_aux)
            return scale(value, state), (value, aux)

        chosen = _chosen(argnums, len(args))
        if axis_name is not None:  # otherwise shard_map would sum the gradients of replicated arguments
            args = tuple(_axes.vary_over(arg, axis_name) if n in chosen else arg for n, arg in enumerate(args))
        grads, (value, aux) = jax.grad(scaled_loss, argnums, has_aux=True)(*args)
        # Unscale first, since a sum of scaled float16 gradients over the devices may overflow.
        grads = unscale(grads, state)
        if axis_name is not None:
            grads = lax.pmean(grads, axis_name)
        finite = all_finite(grads)
        _axes.require_reduced(finite, state, _ADVICE)
        if axis_name is None:
            _axes.require_reduced(value, (state, [args[n] for n in chosen]), _ADVICE)
        return ScaledGradients(value, aux, grads, finite)

    return _presented_as(fun, scaled_value_and_grad)


_ADVICE = (
    "pass every axis to average the gradients over, axis_name={names} among them; where each device owns a part of the "
    "parameters, let loss_scaled(..., axis_name={names}) decide instead"
)


def _chosen(argnums: int | Sequence[int], count: int) -> set[int]:
    """Return which of `count` arguments are differentiated; JAX itself refuses numbers out of range."""
    numbers = argnums if isinstance(argnums, Sequence) else [argnums]
    return {operator.index(n) % count for n in numbers if count}


def _presented_as(fun: Callable[..., Any], function: Callable[..., Value]) -> Callable[..., Value]:
    """Return `function` with the name and signature of `fun`, the state first, so that `static_argnames` work."""
    functools.update_wrapper(function, fun)
    # `jax.jit` calls `inspect.signature`, which would follow `__wrapped__` to `fun`: its signature lacks the state.
    del function.__wrapped__  # type: ignore[attr-defined]
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # for example a builtin
        return function
    name = "state" if all(parameter.name != "state" for parameter in parameters) else "scale_state"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([state, *parameters])  # type: ignore[attr-defined]
    return function

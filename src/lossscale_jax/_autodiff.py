"""`jax.value_and_grad` of a scaled loss."""

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

from lossscale_jax._gradients import PyTree, is_array, manual_axes, require_reduced, vary_over
from lossscale_jax._verbs import HasLossScale, all_finite, loss_scale_of, scale, unscale

P = ParamSpec("P")
Params = TypeVar("Params", bound=Any)  # the bound lets pyright accept arithmetic on it in a lambda
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Grads = TypeVar("Grads")

_ADVICE = (
    "pass every axis to average the gradients over, axis_name={names} among them; where each device owns a part of the "
    "parameters, let loss_scaled(..., axis_name={names}) decide instead"
)


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
        A function `(state, *args, **kwargs)` that returns a NamedTuple for `fun(*args, **kwargs)`: `value`, the loss
            as `fun` returned it; `aux`, or None; `grads`, unscaled, in float32 or wider; and `grads_finite`, a bool
            array of shape `()`.

    Raises:
        TypeError: `fun` is not a function; or, when called, `state` is not a state, or the loss is not a float scalar.
        ValueError: When called under `shard_map`: devices share a state, but their gradients or losses differ.
    """
    call = "value_and_grad(fun)(state, *args)"
    if not callable(fun):
        raise TypeError(f"fun is a {type(fun).__name__} and must be a function that returns the loss; call {call}")

    def scaled_value_and_grad(state: HasLossScale, /, *args: Any, **kwargs: Any) -> ScaledGradients[Any, Any, PyTree]:
        loss_scale_of(state, call)

        def scaled_loss(*args: Any) -> tuple[Any, tuple[Any, Any]]:
            value, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
            return scale(value, state), (value, aux)

        numbers = argnums if isinstance(argnums, Sequence) else [argnums]
        chosen = {operator.index(n) % len(args) for n in numbers if args}  # JAX itself refuses numbers out of range
        if axis_name is not None:  # otherwise shard_map would sum the gradients of replicated arguments
            axes = manual_axes(axis_name)
            vary = functools.partial(jax.tree.map, lambda leaf: vary_over(leaf, axes))
            args = tuple(vary(arg) if n in chosen else arg for n, arg in enumerate(args))
        grads, (value, aux) = jax.grad(scaled_loss, argnums, has_aux=True)(*args)
        # Unscale first, since a sum of scaled float16 gradients over the devices may overflow.
        grads = unscale(grads, state)
        grads = grads if axis_name is None else lax.pmean(grads, axis_name)
        finite = all_finite(grads)
        require_reduced(finite, state, _ADVICE)
        if axis_name is None:
            require_reduced(value, (state, [args[n] for n in chosen]), _ADVICE)
        return ScaledGradients(value, aux, grads, finite)

    # Copy `fun`'s signature with the state first, so that `jit`'s `static_argnames` work.
    functools.update_wrapper(scaled_value_and_grad, fun)
    del scaled_value_and_grad.__wrapped__  # type: ignore[attr-defined]  # its signature lacks the state
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # for example a builtin
        return scaled_value_and_grad
    name = "scale_state" if any(parameter.name == "state" for parameter in parameters) else "state"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    scaled_value_and_grad.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return scaled_value_and_grad


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and the auxiliary output of `fun`; raise `TypeError` if the loss is not a scalar."""
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            f"fun returned {_described(result)}, and has_aux=True needs a pair of the loss and anything else; return "
            "such a pair, or leave has_aux out"
        )
    loss, aux = result if has_aux else (result, None)
    if is_array(loss) and jnp.shape(loss) == ():
        return loss, aux
    hint = "return its mean, as by jnp.mean(loss)" if is_array(loss) else "return the loss alone"
    if isinstance(loss, tuple) and not has_aux:
        hint = "pass has_aux=True if it returns a pair of the loss and anything else"
    raise TypeError(f"fun returned {_described(loss)}, and the loss must be a scalar; {hint}")


def _described(value: Any) -> str:
    return f"a loss of shape {jnp.shape(value)}" if is_array(value) else f"a {type(value).__name__}"

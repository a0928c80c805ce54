"""Checks of arguments and results; each error is one sentence that says what to pass instead."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_jax._leaves import is_array
from lossscale_jax._types import HasLossScale, PyTree

P = ParamSpec("P")
T = TypeVar("T")


def loss_scale_of(state: HasLossScale, call: str) -> Any:
    """Return the loss scale of `state`; raise `TypeError` that shows the `call` if `state` is not a state."""
    # The optimizer state of `loss_scaled` has no `loss_scale`; reading it raises an error that names `get_scale_state`.
    if hasattr(state, "loss_scale") or hasattr(state, "scale_state"):
        return state.loss_scale
    raise TypeError(
        f"{type(state).__name__} is not a scale state, since it has no loss_scale; call {call}, with a state that "
        "init_state or get_scale_state returned"
    )


def number(loss: Any) -> Array:
    """Return `loss` as an array; raise `TypeError` if it is not a number."""
    if isinstance(loss, str | bytes):  # JAX would read it as the name of a dtype
        raise TypeError(f"the loss {loss!r} is not a number; pass what the model computes")
    array = jnp.asarray(loss)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"a loss of dtype {array.dtype} is not a number; pass what the model computes, not a PRNG key")
    return array


def require_function(fun: Any, call: str) -> None:
    """Raise `TypeError` that shows the `call` if `fun` is not a function."""
    if not callable(fun):
        raise TypeError(f"fun is a {type(fun).__name__} and must be a function that returns the loss; call {call}")


def require_optimizer(inner: Any) -> None:
    """Raise `TypeError` if `inner` is not an optimizer, for example `optax.adam` without its arguments."""
    if isinstance(inner, type) or not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner={inner!r} must be an optimizer with init and update; pass one that is made, such as "
            "optax.adamw(1e-3), and the policy after it"
        )


def loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and the auxiliary output of `fun`; raise `TypeError` if the loss is not a scalar."""
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            f"fun returned {_described(result)}, and has_aux=True needs a pair of the loss and anything else; return "
            "such a pair, or leave has_aux out"
        )
    loss, aux = result if has_aux else (result, None)
    if not is_array(loss):
        hint = "pass has_aux=True if it returns a pair of the loss and anything else"
        raise TypeError(
            f"fun returned {_described(loss)}, and the loss must be a scalar; "
            f"{hint if isinstance(loss, tuple) and not has_aux else 'return the loss alone'}"
        )
    if jnp.shape(loss) != ():
        raise TypeError(
            f"fun returned a loss of shape {jnp.shape(loss)}, and the loss must be a scalar; return its mean, as by "
            "jnp.mean(loss)"
        )
    return loss, aux


def _described(value: Any) -> str:
    return f"an array of shape {jnp.shape(value)}" if is_array(value) else f"a {type(value).__name__}"


def explain_structures(method: Callable[P, T]) -> Callable[P, T]:
    """Wrap a method of `(self, grads, state, params)` so that its errors say how gradients and parameters differ.

    The two are compared only after the method has failed, since an optimizer may accept a difference.
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (TypeError, ValueError) as error:
            try:
                bound = inspect.signature(method).bind(*args, **kwargs)
            except TypeError:  # Python's own error says which argument is missing
                raise error from None
            bound.apply_defaults()
            _, grads, state, params, *_ = bound.arguments.values()
            window = getattr(state, "window", None)
            like = window.total if params is None and window is not None else params
            difference = None if like is None else _difference(grads, like)
            if difference is None:
                raise
            raise ValueError(f"{difference}; pass what jax.grad returns for these parameters") from error

    return run


def _difference(grads: PyTree, params: PyTree) -> str | None:
    """Return the first leaf in which gradients differ from parameters, or None; a part without leaves matches any."""
    if not jax.tree.leaves(grads) and jax.tree.leaves(params):
        return "the gradients hold no array"
    given, own = _shapes(grads), _shapes(params)
    left_out = [path for path, shape in given.items() if shape is None]  # such as None for what is not trained
    for path in {**own, **given}:
        name = jax.tree_util.keystr(path) or "the leaf"
        if path not in own:
            return f"the gradients have {name}, which the parameters lack"
        if path not in given and own[path] is not None and not any(path[: len(each)] == each for each in left_out):
            return f"the gradients lack {name}, which the parameters have"
        if None not in (own[path], given.get(path)) and own[path] != given[path]:
            return f"{name} of the gradients has shape {given[path]}, and the parameter has shape {own[path]}"
    return None


def _shapes(tree: PyTree) -> dict[Any, tuple[int, ...] | None]:
    """Return the shapes of the leaves by their paths, and None for a part without leaves."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not jax.tree.leaves(node))
    return {path: jnp.shape(leaf) if is_array(leaf) else None for path, leaf in named}

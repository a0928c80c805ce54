"""`attach`: a loss that is added within the graph, such as the router loss of a mixture of experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from lossscale_jax._arguments import loss_scale_of, number
from lossscale_jax._leaves import is_array, lift
from lossscale_jax._types import HasLossScale, PyTree, Tree

ATTACHED = "lossscale.attach"
"""The scope of the operation in the backward pass that reads the loss scale; `range_report` finds it by this name."""


def attach(x: Tree, aux_loss: ArrayLike, state: HasLossScale) -> Tree:
    """Return `x`, and add the gradients of `aux_loss`, times the loss scale, to the backward pass through `x`.

    A layer uses it to add a loss that it does not return, such as the router loss of a mixture of experts:

    ```python
    hidden = attach(hidden, 0.01 * router_loss, state)
    ```

    The gradients are those of `loss + sum(aux_loss)`, each call counted once, also under `jit`, `checkpoint`, `scan`,
    `vmap` and `shard_map`. `attach` does not divide by the number of tokens, examples, micro-batches or devices: divide
    `aux_loss` as you divide the loss. Under `vmap` and `shard_map` each example and each device adds its own
    `aux_loss`. If the gradients are then averaged over the devices, the attached losses are averaged, too.

    If no gradient passes through the result, the loss is lost without a warning: use the result in place of `x`. If the
    main loss is not scaled, the gradients of `aux_loss` are too large by the loss scale; a gradient that the loss
    computes itself, for a penalty, is such a case. If a function that `jax.vjp` returned is called twice, they count
    twice. `jax.jvp` and `jax.jacfwd` raise an error, and so does `retrying_value_and_grad`. Does not synchronise with
    the host.

    Args:
        x: An array of floats, or a pytree that holds one.
        aux_loss: A real array of any shape and dtype, or a Python number; a shape other than `()` means its sum, in
            float32 or wider. Compute it in float32: in a float16 one, a loss scale of 2**16 is infinite, as in `scale`.
        state: The scale state that scales the loss; with `loss_scaled`, `get_scale_state(opt_state)`.

    Returns:
        `x`, with the same values and dtypes.

    Raises:
        TypeError: `x` holds no float, `aux_loss` is not a real number, or `state` is not a state.
    """
    loss_scale = jnp.asarray(loss_scale_of(state, "attach(x, aux_loss, state)"))
    aux_loss = number(aux_loss)
    if jnp.iscomplexobj(aux_loss):
        raise TypeError(f"an attached loss of dtype {aux_loss.dtype} is not real; attach its real part or magnitude")
    if not _floats(x):
        raise TypeError("x holds no array of floats, through which a gradient could pass; attach the loss to one")
    total = jnp.sum(lift(aux_loss))
    zero = _zero_of((x, total, loss_scale)).astype(total.dtype)
    return _attached(x, lax.broadcast(total + zero, (1,)), loss_scale.astype(total.dtype), zero)


@jax.custom_vjp
def _attached(x: Tree, aux_loss: Array, loss_scale: Array, zero: Array) -> Tree:
    return x


def _forward(x: Tree, aux_loss: Array, loss_scale: Array, zero: Array) -> tuple[Tree, tuple[Array, Array]]:
    return x, (loss_scale, zero)


def _backward(residuals: tuple[Array, Array], cotangent: PyTree) -> tuple[PyTree, Array, None, None]:
    loss_scale, zero = residuals
    with jax.named_scope(ATTACHED):
        of_aux_loss = lax.broadcast(loss_scale, (1,))
    return cotangent, of_aux_loss + zero, None, None


_attached.defvjp(_forward, _backward)


def _zero_of(tree: PyTree) -> Array:
    """Return a False with the batch axes of `vmap` and the mesh axes of `shard_map` of all floats in `tree`.

    Added as a zero, it lets a loss that is the same for all examples or devices count for each of them, as a loss that
    is returned does. XLA reads nothing for it.
    """
    return functools.reduce(jnp.logical_or, (jnp.any(leaf != leaf, where=False) for leaf in _floats(tree)))


def _floats(tree: PyTree) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    return [leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]


def attaches(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or one within it, reads the loss scale for an attached loss."""
    inner = [each for param in eqn.params.values() for each in (param if isinstance(param, tuple) else (param,))]
    return reads_scale(eqn) or any(
        any(map(attaches, each.eqns)) for each in inner if isinstance(each, Jaxpr | ClosedJaxpr)
    )


def reads_scale(eqn: JaxprEqn) -> bool:
    """Return whether the result of an equation is the loss scale of an attached loss."""
    return ATTACHED in scopes(eqn)


def scopes(eqn: JaxprEqn) -> list[str]:
    """Return the names from `jax.named_scope` or flax modules, without those of transformations."""
    stack: Any = eqn.source_info.name_stack
    return [each.name for each in stack.stack if type(each).__name__ != "Transform"]

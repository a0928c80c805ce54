"""Four of the five verbs: pure functions of pytrees, correct under every transform. `select` is in `_decide`."""

from collections.abc import Hashable
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding
from jax.typing import ArrayLike

from lossscale_core import PolicyLike, ScaleState, as_policy
from lossscale_jax import _axes
from lossscale_jax._arguments import loss_scale_of, number
from lossscale_jax._finite import finite_when_unscaled
from lossscale_jax._leaves import multiply, times
from lossscale_jax._types import HasLossScale, PyTree, Tree


def init_state(policy: PolicyLike, *, device: jax.Device | Sharding | None = None) -> ScaleState:
    """Return the state before the first step under `policy`.

    The leaves are strongly typed and stay so, so that a step is compiled once. Does not synchronise with the host.

    Args:
        policy: Anything that `lossscale_core.as_policy` accepts.
        device: Where to place the state; by default, JAX's default device.

    Returns:
        The policy's state, a NamedTuple of float32 and int32 arrays of shape `()`, and so a pytree.

    Raises:
        PolicyError: `policy` is not a policy.
    """

    def place(value: Any) -> Array:
        dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else jnp.int32)
        return jnp.asarray(value, dtype, device=device)

    state: ScaleState = jax.tree.map(place, as_policy(policy).init_state())
    return state


@overload
def scale(loss: ArrayLike, state: HasLossScale) -> Array: ...
@overload
def scale(loss: Tree, state: HasLossScale) -> Tree: ...
def scale(loss: Any, state: HasLossScale) -> Any:
    """Multiply `loss` by the loss scale: differentiate the result.

    Everything below float32 is converted to it first, because a scale of 2**16 is infinite in float16. Does not
    synchronise with the host.

    Args:
        loss: An array of any shape and numeric dtype, a Python number, or a pytree of them.
        state: The scale state; with `loss_scaled`, `get_scale_state(opt_state)`.

    Returns:
        The scaled loss, in float32 or wider, in the structure of `loss`.

    Raises:
        TypeError: A leaf of `loss` is not a number, or `state` is not a state.
    """
    loss_scale = loss_scale_of(state, "scale(loss, state)")
    return jax.tree.map(lambda leaf: times(number(leaf), jnp.asarray(loss_scale)), loss)


def all_finite(grads: PyTree, *, axis_name: Hashable = None) -> Array:
    """Return whether every gradient element is finite.

    The check is exact: large finite values are never flagged. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays of any float or complex dtype. Integer leaves do not count; the duplicates of sparse
            (BCOO) leaves are summed first; a pytree without gradients is finite.
        axis_name: The axis of `shard_map`, `pmap` or `vmap`, or a tuple of them, over which to combine the flag.
            Arrays that are sharded under `jit` need none.

    Returns:
        A bool array of shape `()`.

    Raises:
        TypeError: A leaf is not an array.
    """
    return _axes.all_true(finite_when_unscaled(grads, None), axis_name)


def unscale(grads: Tree, state: HasLossScale) -> Tree:
    """Divide `grads` by the loss scale.

    Multiplies by the reciprocal of the scale, which is always a normal float32. Does not synchronise with the host.

    Args:
        grads: A pytree of arrays, such as `jax.grad` of the scaled loss returns.
        state: The state that scaled the loss, not the one after `policy.update`.

    Returns:
        The gradients: float16 and bfloat16 leaves in float32, others in their own dtype, integer leaves as they are.

    Raises:
        TypeError: A leaf is not an array, or `state` is not a state.
    """
    loss_scale = jnp.asarray(loss_scale_of(state, "unscale(grads, state)"))
    # XLA fuses a product into the operation that reads it, but would store a quotient first.
    return multiply(grads, 1.0 / loss_scale)

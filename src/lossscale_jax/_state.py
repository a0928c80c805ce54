"""The optimizer state of `loss_scaled`, and the search for it in a larger state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lossscale_core import GuardState, PolicyLike, ScaleState, state_from_dict
from lossscale_core.adapters import guard_state_from_dict
from lossscale_core.errors import ScaleStateError
from lossscale_jax._accumulation import Window
from lossscale_jax._types import PyTree, Tree


class LossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled`."""

    scale_state: ScaleState
    """The policy's state; `get_scale_state` finds it from the outside."""
    inner_state: PyTree
    """The wrapped optimizer's own state; a skipped step leaves it untouched."""
    window: Window | None
    """None without gradient accumulation."""

    @property
    def guard_state(self) -> GuardState | None:
        """The state of the spike guard, which a `GuardedLossScaledState` has as a field; None here."""
        return None


# Orbax and flax compare the names of all fields: with one field more they would refuse every state saved without it.
class GuardedLossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled` with a spike guard: a `LossScaledState` with one field more."""

    scale_state: ScaleState
    """The policy's state; `get_scale_state` finds it from the outside."""
    inner_state: PyTree
    """The wrapped optimizer's own state; a skipped step leaves it untouched."""
    window: Window | None
    """None without gradient accumulation."""
    guard_state: GuardState
    """The state of the spike guard."""


def _explain_missing(state: LossScaledState, name: str) -> NoReturn:
    if hasattr(state.scale_state, name):
        hint = f"did you mean get_scale_state(opt_state).{name}?"
    elif hasattr(state.inner_state, name):
        hint = f"did you mean opt_state.inner_state.{name}?"
    else:
        hint = "what the wrapped optimizer keeps is in opt_state.inner_state"
    raise AttributeError(f"the optimizer state of loss_scaled has no {name}; {hint}")


if not TYPE_CHECKING:  # hidden from type checkers, which would accept every name
    for _kind in (LossScaledState, GuardedLossScaledState):
        _kind.__getattr__ = _explain_missing


def get_scale_state(opt_state: PyTree) -> ScaleState:
    """Find the scale state in an optimizer state, however deep `loss_scaled` is nested in it.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that holds one.

    Returns:
        The policy's state, arrays of shape `()`: a `ScaleState`, or the type of state that the policy has in its place.

    Raises:
        ScaleStateError: `opt_state` holds no scale state, or several (the message lists their paths); or an optax
            wrapper around `loss_scaled` drops overflows before they can lower the loss scale.
    """
    _require_overflows_seen(opt_state)
    found = find_scale_states(opt_state)
    if len(found) == 1:
        (state,) = found.values()
        leaves = jax.tree.leaves(state)  # plain arrays, even if flax nnx holds them in mutable variables
        return type(state)(*leaves) if len(leaves) == len(state) else state
    if found:
        raise ScaleStateError(
            f"the optimizer state holds {len(found)} scale states, at {', '.join(found)}; pass the part that you mean"
        )
    raise ScaleStateError(
        f"the optimizer state ({type(opt_state).__name__}) holds no scale state; pass what the init of loss_scaled "
        "returned: wrap the optimizer in loss_scaled, or merge what was split"
    )


def load_scale_state(opt_state: Tree, saved: Mapping[str, Any], policy: PolicyLike) -> Tree:
    """Restore the scale state in an optimizer state, however deep `loss_scaled` is nested in it.

    If `loss_scaled` has a spike guard, the guard's state is restored, too. Like `lossscale_core.state_from_dict`, this
    function issues a `CheckpointWarning` for each difference from the policy with which the state was saved.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that holds one.
        saved: A dict that `lossscale_core.state_to_dict` returned, in any framework.
        policy: The policy of `loss_scaled`.

    Returns:
        A new optimizer state; the restored arrays are on the devices of those in `opt_state`.

    Raises:
        CheckpointError: `saved` is not a saved state, or is of a newer version.
        ScaleStateError: `opt_state` holds no scale state, several, or one of another kind of policy.
    """
    get_scale_state(opt_state)
    state = state_from_dict(saved, policy)

    def restore(node: Any) -> Any:
        if not is_own_state(node):
            return node
        leaves = jax.tree.leaves(node.scale_state)
        if len(leaves) != len(state):
            raise ScaleStateError(
                f"the optimizer state holds {len(leaves)} numbers of a scale state, and {policy!r} keeps {len(state)}; "
                "pass the policy that loss_scaled was given"
            )
        node = node._replace(scale_state=_placed_as(node.scale_state, state))
        more: dict[str, Any] = {}
        if node.guard_state is not None:
            more["guard_state"] = _placed_as(node.guard_state, guard_state_from_dict(saved))
        return cast(Any, node)._replace(**more)

    return jax.tree.map(restore, opt_state, is_leaf=is_own_state)


def _placed_as(old: Tree, values: Any) -> Tree:
    """Return host scalars as arrays in the structure of `old`, on the devices of its arrays."""
    leaves, structure = jax.tree.flatten(old)
    placed = [
        jnp.asarray(value, device=leaf.sharding if getattr(leaf, "committed", False) else None)
        for value, leaf in zip(values, leaves, strict=True)
    ]
    restored: Tree = jax.tree.unflatten(structure, placed)
    return restored


def find_scale_states(opt_state: PyTree) -> dict[str, ScaleState]:
    """Return the scale states in `opt_state` by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_own_state)
    return {jax.tree_util.keystr(path) or "the top": node.scale_state for path, node in nodes if is_own_state(node)}


def is_own_state(node: Any) -> TypeGuard[LossScaledState]:
    """Return whether `node` is a state of `loss_scaled`, of either of its types."""
    return isinstance(node, LossScaledState | GuardedLossScaledState)


def _require_overflows_seen(opt_state: PyTree) -> None:
    """Raise `ScaleStateError` if a wrapper of optax drops non-finite gradients before `loss_scaled` receives them."""
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: is_own_state(node) or _dropper(node) is not None):
        dropper = _dropper(node)
        if dropper and find_scale_states(node):
            raise ScaleStateError(
                f"{dropper} wraps loss_scaled and drops overflows before they can lower the loss scale; leave "
                "it out, since loss_scaled skips them itself, or wrap it: loss_scaled(optax.chain(...), policy)"
            )


def _dropper(node: Any) -> str | None:
    """Return the name of the optax wrapper that drops non-finite gradients; None for any other node."""
    if isinstance(node, optax.ApplyIfFiniteState):
        return "optax.apply_if_finite"
    # Both `skip_not_finite` and `skip_large_updates` write this key; without a skip function it is missing.
    if isinstance(node, optax.MultiStepsState) and "should_skip" in node.skip_state:
        return "optax.MultiSteps with a should_skip_update_fn"
    return None


def place_with(state: Tree, params: PyTree) -> Tree:
    """Replicate the one-device arrays of a new optimizer state over the mesh of `params`, if they have a mesh.

    A step under `jit` returns its state in this form. From a state in another form, the second step would recompile.
    """
    mesh = _mesh(params)
    if mesh is None:
        return state
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        on_one_device = isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding)
        return jax.device_put(leaf, replicated) if on_one_device else leaf

    return jax.tree.map(place, state)


def _mesh(params: PyTree) -> Mesh | AbstractMesh | None:
    """Return the mesh that holds all of `params`, in this process only; None without such a mesh."""
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = {sharding.mesh if isinstance(sharding, NamedSharding) else None for sharding in shardings}
    # For devices of other processes, `device_put` compares the values of all processes, and so waits for each of them.
    is_local = all(sharding is not None and sharding.is_fully_addressable for sharding in shardings)
    return meshes.pop() if len(meshes) == 1 and is_local else None

"""The optimizer state of `loss_scaled`, and the search for it in a larger state."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.export import register_namedtuple_serialization
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lossscale_core import BaseScaling, GuardState, PolicyLike, ScaleState, state_from_dict
from lossscale_core.adapters import guard_state_from_dict
from lossscale_core.errors import ScaleStateError
from lossscale_jax._gradients import PyTree, Tree


class Window(NamedTuple):
    """The state of an accumulation between two micro-batches."""

    total: PyTree
    """The sum of the finite micro-batches' unscaled gradients, each divided by the window's size."""
    seen: Array
    """int32: the number of micro-batches in the window up to now."""
    finite: Array
    """int32: the number of finite micro-batches among them."""
    stepped: Array
    """bool: whether the last call completed a window and applied its mean."""


class LossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled`."""

    scale_state: ScaleState
    """The policy's state; `get_scale_state` finds it from the outside."""
    inner_state: PyTree
    """The wrapped optimizer's own state; a skipped step leaves it untouched."""
    window: Window | None = None
    """The micro-batches of an accumulation up to now; None without accumulation."""
    guard_state: GuardState | None = None
    """The state of the spike guard; None without a guard."""


# `jax.export` writes these types under names of ours, so that a serialized step can take and return states.
_POLICIES = [each for each in BaseScaling.__subclasses__() if each.__module__ == BaseScaling.__module__]
_TYPES: set[Any] = {GuardState, LossScaledState, Window, *(policy.state_type for policy in _POLICIES)}
for _type in _TYPES:
    with contextlib.suppress(ValueError):  # JAX refuses a second registration, and the module may be imported twice
        register_namedtuple_serialization(_type, serialized_name=f"lossscale.{_type.__name__}")


def get_scale_state(opt_state: PyTree) -> ScaleState:
    """Find the scale state in an optimizer state, however deep `loss_scaled` is nested in it.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that holds one.

    Returns:
        The policy's state, arrays of shape `()`: a `ScaleState`, or the type of state that the policy has in its place.

    Raises:
        ScaleStateError: `opt_state` holds no scale state, or several (the message lists their paths); or an optax
            wrapper around `loss_scaled` drops overflows before they can lower the loss scale, or keeps them.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: _is_own(node) or _harm(node) is not None):
        if (harm := _harm(node)) and scale_states_of(node):
            raise ScaleStateError(harm)
    found = scale_states_of(opt_state)
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

    def restored(node: Any) -> Any:
        if not _is_own(node):
            return node
        guard_state = None if node.guard_state is None else placed(guard_state_from_dict(saved), node.guard_state)
        return node._replace(scale_state=placed(state, node.scale_state), guard_state=guard_state)

    def placed(values: Any, old: Any) -> Any:
        """Return host scalars as arrays in the structure of `old`, on the devices of its arrays."""
        leaves, structure = jax.tree.flatten(old)
        if len(leaves) != len(values):
            raise ScaleStateError(
                f"the optimizer state holds {len(leaves)} numbers of a scale state, and {policy!r} keeps "
                f"{len(values)}; pass the policy that loss_scaled was given"
            )
        places = [leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves]
        return jax.tree.unflatten(structure, [jnp.asarray(v, device=d) for v, d in zip(values, places, strict=True)])

    loaded: Tree = jax.tree.map(restored, opt_state, is_leaf=_is_own)
    return loaded


def scale_states_of(opt_state: PyTree) -> dict[str, ScaleState]:
    """Return the scale states in `opt_state` by their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_own)
    return {jax.tree_util.keystr(path) or "the top": node.scale_state for path, node in nodes if _is_own(node)}


def _is_own(node: Any) -> bool:
    return isinstance(node, LossScaledState)


def _harm(node: Any) -> str | None:
    """Return what an optax wrapper does to the overflows of what it wraps; None for any other node."""
    # Both `skip_not_finite` and `skip_large_updates` write `should_skip`; without a skip function it is missing.
    skips = isinstance(node, optax.MultiStepsState) and "should_skip" in node.skip_state
    if isinstance(node, optax.ApplyIfFiniteState) or skips:
        wrapper = "optax.MultiSteps with a should_skip_update_fn" if skips else "optax.apply_if_finite"
        return (
            f"{wrapper} wraps loss_scaled and drops overflows before they can lower the loss scale; leave it out, "
            "since loss_scaled skips them itself, or wrap it: loss_scaled(optax.chain(...), policy)"
        )
    return None


def place_with(state: Tree, params: PyTree) -> Tree:
    """Replicate the one-device arrays of a new optimizer state over the mesh of `params`, if they have a mesh.

    A step under `jit` returns its state in this form. From a state in another form, the second step would recompile.
    """
    leaves = jax.tree.leaves(params)
    places: Any = {None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None) for leaf in leaves}
    # For devices of other processes, `device_put` compares the values of all processes, and so waits for each of them.
    if not all(isinstance(place, NamedSharding) and place.is_fully_addressable for place in places):
        return state
    meshes = {place.mesh for place in places}
    if len(meshes) != 1:
        return state
    replicated = NamedSharding(meshes.pop(), PartitionSpec())
    on_one_device = lambda leaf: isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding)  # noqa: E731
    return jax.tree.map(lambda leaf: jax.device_put(leaf, replicated) if on_one_device(leaf) else leaf, state)

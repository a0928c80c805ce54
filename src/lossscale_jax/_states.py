"""The optimizer state of `loss_scaled`, functions that find it in a larger state, and checks of arguments."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lossscale_core import GuardState, PolicyLike, ScaleState, SpikeGuard, state_from_dict
from lossscale_core.adapters import guard_state_from_dict
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax._gradients import PyTree, Tree, is_array, is_float, name_of


class Window(NamedTuple):
    """The state of an accumulation between two micro-batches."""

    total: PyTree
    """The sum of the unscaled gradients of finite micro-batches, divided by the number of micro-batches in a window."""
    seen: Array
    """int32: the number of micro-batches in the window up to now."""
    overflowed: Array
    """bool: whether any micro-batch of the window overflowed."""


class LastStep(NamedTuple):
    """The outcome of the last call of `loss_scaled`; each field has shape `()`."""

    applied: Array
    """bool: whether the call applied a step; False in the middle of a window of micro-batches."""
    overflowed: Array
    """bool: whether the gradients of the call, or of its window up to now, contained NaN or infinity."""
    spiked: Array
    """bool: whether the gradients were finite and a `SpikeGuard` rejected their norm."""
    norm: Array | None = None
    """float32: the norm of the unscaled gradients of the last applied step, before clipping; 0 before the first applied
    step. None without `max_norm` and without a guard, because it is then not computed."""


class LossScaledState(NamedTuple):
    """The optimizer state of `loss_scaled`."""

    scale_state: ScaleState[Array]
    """The state of the policy; read it with `get_scale_state`."""
    inner_state: PyTree
    """The state of the wrapped optimizer; a skipped step leaves it unchanged."""
    window: Window | None
    """The sum over the micro-batches of the current window; None without accumulation."""
    guard_state: GuardState | None
    """The state of the spike guard; None without a guard."""
    last_step: LastStep
    """The outcome of the last call; read it with `get_last_step`."""


_FORBIDDEN_WRAPPERS = {optax.ApplyIfFiniteState: "apply_if_finite", optax.MultiStepsState: "MultiSteps"}
"""Names of the optax wrappers that must not be around `loss_scaled`, by the types of their states."""


def get_scale_state(opt_state: PyTree) -> ScaleState[Array]:
    """Find the scale state in an optimizer state, at any depth.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that contains `loss_scaled`.

    Returns:
        The policy's state, with arrays of shape `()`: a `ScaleState`, or the policy's own type of state.

    Raises:
        ScaleStateError: `opt_state` contains no scale state or several (the message lists their paths); or an optax
            wrapper around `loss_scaled` drops overflows before they can lower the loss scale, or stores them.
    """
    return _plain(_find(opt_state).scale_state)


def get_last_step(opt_state: PyTree) -> LastStep:
    """Find the outcome of the last call in an optimizer state, at any depth.

    Does not synchronise with the host, and also works within a compiled step, for example for a schedule.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that contains `loss_scaled`, after a call.

    Returns:
        The outcome of the call, with the norm of the last applied step if it was computed: arrays of shape `()`.

    Raises:
        ScaleStateError: As for `get_scale_state`.
    """
    return _plain(_find(opt_state).last_step)


def _find(opt_state: PyTree) -> LossScaledState:
    """Return the only state of `loss_scaled` in an optimizer state, or raise `ScaleStateError`."""
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: _is_state(node) or type(node) in _FORBIDDEN_WRAPPERS):
        if type(node) in _FORBIDDEN_WRAPPERS and states_of(node):
            hint = "put it inside, as in loss_scaled(optax.chain(...), policy), or pass accumulation_steps="
            effect = "drops overflows before they can lower the loss scale, or keeps a NaN permanently"
            raise ScaleStateError(f"optax.{_FORBIDDEN_WRAPPERS[type(node)]} wraps loss_scaled and {effect}; {hint}")
    states = states_of(opt_state)
    if len(states) == 1:
        return next(iter(states.values()))
    content = f"{len(states)} scale states, at {', '.join(states)}" if states else "no scale state"
    hint = "pass the part that you mean" if states else "wrap the optimizer in loss_scaled, or merge a split state"
    raise ScaleStateError(f"the optimizer state ({type(opt_state).__name__}) holds {content}; {hint}")


def _plain(state: Any) -> Any:
    """Return a NamedTuple of scalars with plain arrays, even if flax nnx stores them in mutable variables."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None)
    return type(state)(*leaves) if len(leaves) == len(state) else state


def load_scale_state(opt_state: Tree, saved: Mapping[str, Any], policy: PolicyLike) -> Tree:
    """Restore the scale state in an optimizer state, at any depth.

    If `loss_scaled` has a spike guard, the guard's state is restored, too. As in `lossscale_core.state_from_dict`, a
    `CheckpointWarning` lists the differences from the policy with which the state was saved.

    Args:
        opt_state: The state of `loss_scaled`, or of an optimizer that contains `loss_scaled`.
        saved: A dict that `lossscale_core.state_to_dict` returned, in any framework.
        policy: The policy of `loss_scaled`.

    Returns:
        A new optimizer state; the restored arrays are on the same devices as the arrays in `opt_state`.

    Raises:
        CheckpointError: `saved` is not a saved state, or is of a newer version.
        ScaleStateError: `opt_state` contains no scale state, or several, or the state of another kind of policy.
    """
    get_scale_state(opt_state)
    state = state_from_dict(saved, policy)

    def restore(node: Any) -> Any:
        if not _is_state(node):
            return node
        guard_state = None if node.guard_state is None else place_like(guard_state_from_dict(saved), node.guard_state)
        return node._replace(scale_state=place_like(state, node.scale_state), guard_state=guard_state)

    def place_like(values: Any, old: Any) -> Any:
        """Convert host scalars to arrays in the structure of `old`, on the devices of its arrays."""
        leaves, structure = jax.tree.flatten(old)
        if len(leaves) != len(values):
            counts = f"has {len(leaves)} numbers in its scale state, and a state of {policy!r} has {len(values)}"
            raise ScaleStateError(f"the optimizer state {counts}; pass the policy of loss_scaled")
        places = [leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves]
        return jax.tree.unflatten(structure, [jnp.asarray(v, device=d) for v, d in zip(values, places, strict=True)])

    return jax.tree.map(restore, opt_state, is_leaf=_is_state)


def states_of(opt_state: PyTree) -> dict[str, LossScaledState]:
    """Return the states of `loss_scaled` in `opt_state`, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_state)
    return {jax.tree_util.keystr(path) or "the top": node for path, node in nodes if _is_state(node)}


def _is_state(node: Any) -> bool:
    return isinstance(node, LossScaledState)


def place_with(state: Tree, params: PyTree) -> Tree:
    """Replicate the one-device arrays of a new optimizer state over the mesh of `params`, if they have a mesh.

    A step under `jit` returns its state in this form. If the first state had another form, the second step would
    recompile.
    """
    leaves = jax.tree.leaves(params)
    places: Any = {None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None) for leaf in leaves}
    meshes: Any = {place.mesh if isinstance(place, NamedSharding) else None for place in places}
    # With devices of other processes, `device_put` compares the values of all processes, and so waits for them.
    if None in meshes or len(meshes) != 1 or not all(place.is_fully_addressable for place in places):
        return state
    replicated = NamedSharding(meshes.pop(), PartitionSpec())
    on_one_device = lambda leaf: isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding)  # noqa: E731
    return jax.tree.map(lambda leaf: jax.device_put(leaf, replicated) if on_one_device(leaf) else leaf, state)


def require_state(state: Any, accumulation_steps: int, guard: SpikeGuard | None) -> None:
    """Raise an error if `state` is not a state of `loss_scaled`, or was made with other settings."""
    if not isinstance(state, LossScaledState):
        hint = "pass the state from its init as the second argument; to continue from an inner state alone, pass"
        example = "optimizer.init(params)._replace(inner_state=...)"
        raise ScaleStateError(f"{type(state).__name__} is not a state of loss_scaled; {hint} {example}")
    if (state.window is None, state.guard_state is None) != (accumulation_steps == 1, guard is None):
        parts = ["without" if part is None else "with" for part in (state.window, state.guard_state)]
        raise PolicyError(
            f"accumulation_steps={accumulation_steps} and guard={guard!r} do not fit a state made {parts[0]} "
            f"accumulation and {parts[1]} a guard; pass the settings of the saved run, or take the missing part from "
            "a new state: opt_state._replace(guard_state=optimizer.init(params).guard_state)"
        )


def trained_params(params: PyTree) -> PyTree:
    """Return the parameters that gradients belong to: with `optax.lookahead`, the fast parameters."""
    is_pair = lambda node: isinstance(node, optax.LookaheadParams)  # noqa: E731
    return jax.tree.map(lambda node: node.fast if is_pair(node) else node, params, is_leaf=is_pair)


def require_gradients_of(params: PyTree, grads: PyTree) -> None:
    """Raise `ValueError` for the first leaf that cannot be a gradient of the parameter in its place.

    Gradients may have a part without leaves, such as None, in place of parameters. Their shapes may begin with one more
    dimension, for samples.
    """
    is_empty = lambda node: not jax.tree.leaves(node)  # noqa: E731
    flat: Any = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=is_empty)
    param_leaves, grad_leaves = dict(flat(params)), dict(flat(grads))
    faults = ["hold no array"] if is_empty(grads) and not is_empty(params) else []
    for path, param in param_leaves.items():
        if not is_empty(param) and not any(path[:n] in grad_leaves for n in range(len(path) + 1)):
            faults.append(f"lack {name_of(path)}, which the parameters have")
    for path, grad in grad_leaves.items():
        param, name = param_leaves.get(path, ()), name_of(path)
        if is_empty(param) and not is_empty(grad):
            faults.append(f"have {name}, which the parameters lack")
        elif is_array(param) and is_array(grad):
            if jnp.shape(param) not in (jnp.shape(grad), jnp.shape(grad)[1:]):
                faults.append(f"have shape {jnp.shape(grad)} at {name}, and the parameter has shape {jnp.shape(param)}")
            elif is_float(param) > is_float(grad) or getattr(param, "dtype", None) == jax.dtypes.float0:
                faults.append(f"hold no floats at {name}, but the parameter does; the gradients are the first argument")
    if faults:
        raise ValueError(f"the gradients {faults[0]}; pass what jax.grad returns for these parameters")

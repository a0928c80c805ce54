"""Places a state where JAX's arrays live."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lossscale_core import as_policy


def init_state(policy: Any, *, device: Any = None) -> Any:
    """Return the state before the first step under `policy`: arrays of shape `()`, and so a pytree.

    `policy` is anything `as_policy` takes; `device` is a `jax.Device` or a `jax.sharding.Sharding`. The leaves are
    strongly typed float32 and int32, and stay so: one compilation serves the whole run. Does not synchronise.
    """

    def placed(value: Any) -> Array:
        dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else jnp.int32)
        return jnp.asarray(value, dtype, device=device)

    return jax.tree.map(placed, as_policy(policy).init_state())


def beside(state: Any, params: Any) -> Any:
    """Return a new optimizer state with what lies on one device replicated over the mesh of `params`, if they have one.

    A step under `jit` returns it so; given it otherwise, the second step would be compiled once more.
    """
    mesh = _mesh(params)
    if mesh is None:
        return state
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> Any:
        on_one_device = isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding)
        return jax.device_put(leaf, replicated) if on_one_device else leaf

    return jax.tree.map(placed, state)


def _mesh(params: Any) -> Any:
    """Return the mesh over which all of `params` lie, in this process alone; None where there is no such mesh."""
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = {sharding.mesh if isinstance(sharding, NamedSharding) else None for sharding in shardings}
    is_local = all(sharding is not None and sharding.is_fully_addressable for sharding in shardings)
    return meshes.pop() if len(meshes) == 1 and is_local else None

"""The devices on which an optimizer state lies."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from lossscale_jax._types import PyTree, Tree


def place_beside(state: Tree, params: PyTree) -> Tree:
    """Return a new optimizer state with what lies on one device replicated over the mesh of `params`, if they have one.

    A step under `jit` returns it so; given it otherwise, the second step would be compiled once more.
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
    """Return the mesh over which all of `params` lie, in this process alone; None where there is no such mesh."""
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = {sharding.mesh if isinstance(sharding, NamedSharding) else None for sharding in shardings}
    # Onto devices of other processes, `device_put` first compares the values of all, and so waits for every process.
    is_local = all(sharding is not None and sharding.is_fully_addressable for sharding in shardings)
    return meshes.pop() if len(meshes) == 1 and is_local else None


def fixed_place(array: Array) -> Sharding | None:
    """Return where `array` has to stay; None where JAX may move it, as to the mesh of what it meets under `jit`."""
    return array.sharding if getattr(array, "committed", False) else None

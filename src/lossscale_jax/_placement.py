"""The devices of an optimizer state."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from lossscale_jax._types import PyTree, Tree


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


def fixed_place(array: Array) -> Sharding | None:
    """Return the sharding that `array` must keep; None if JAX may move it, for example to a mesh under `jit`."""
    return array.sharding if getattr(array, "committed", False) else None

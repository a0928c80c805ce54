"""Questions to the device meshes over which parameters are sharded."""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from lossscale_torch._gradients import is_dtensor, params_of


def meshes_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the meshes of the optimizers' parameters, with gradients or without, from the smallest to the largest."""
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():
        return []  # a device mesh needs DTensor and several processes
    params: list[Any] = [param for optimizer in optimizers for param in params_of(optimizer)]
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    return sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())


def groups_over(mesh: Any) -> list[Any]:
    """Return process groups that reach every rank of a mesh, one after the other: a single one where there is one."""
    each_dim = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(each_dim) < 2:
        return each_dim
    backend = torch.distributed.get_backend_config(each_dim[0])
    for group in _flattened_groups(mesh):
        if torch.distributed.get_backend_config(group) == backend:
            return [group]
    return each_dim


def _flattened_groups(mesh: Any) -> list[Any]:
    """Return the process groups of exactly the ranks of a mesh that exist already; making one would be a collective."""
    covers_all = mesh.size() == torch.distributed.get_world_size()
    # `mesh._flatten()` has no public name, nor has what it made: https://github.com/pytorch/pytorch/pull/132632
    flattened = [each for each in mesh._get_root_mesh()._flatten_mapping.values() if each.size() == mesh.size()]
    ranks = set(mesh.mesh.flatten().tolist()) if flattened else set()
    groups = [each.get_group() for each in flattened if set(each.mesh.tolist()) == ranks]
    return [torch.distributed.group.WORLD, *groups] if covers_all else groups

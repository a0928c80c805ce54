"""The ranks that make the same decision: those of a process group, and of the device meshes of sharded parameters."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import shown_number
from lossscale_core.errors import SyncError
from lossscale_torch._gradients import is_dtensor, moved, params_of
from lossscale_torch._members import SPIKE
from lossscale_torch._versions import flattened_meshes


class Ranks:
    """The combination of an optimizer's flags over the ranks that must make the same decision."""

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group

    def combine(
        self, optimizer: Any, found: dict[Any, Tensor], device: torch.device, known_to: Iterable[Any] = ()
    ) -> dict[Any, Tensor]:
        """Return the flags of an optimizer, combined by *max* over its groups: `found` itself without a group.

        Every rank of a group must call this, also a rank without gradients. Groups in `known_to` have combined these
        flags already. Does not synchronise.
        """
        meshes = meshes_of([optimizer])
        if self.process_group is None and not meshes:
            return found
        groups = [group for group in self._groups_over(meshes) if group not in known_to]
        if not groups:
            return found
        flags = [moved(flag, device).reshape(()) for key, flag in found.items() if key is not SPIKE]
        overflow = torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=device)
        message = torch.stack([overflow, moved(found[SPIKE], device)]) if SPIKE in found else overflow.view(1)
        reduce_max(message, groups)
        return dict(zip((device, SPIKE), message.unbind(), strict=False))

    def check_member(self) -> None:
        """Raise `SyncError` in a process that is not in the process group, since collectives would not work."""
        if self.process_group is not None and torch.distributed.get_rank(self.process_group) < 0:
            raise SyncError(
                f"rank {torch.distributed.get_rank()} is not in the process_group of its scaler, so it would decide "
                "alone; make the scaler of each rank with a group that contains it, or without one"
            )

    def _groups_over(self, meshes: list[Any]) -> list[Any]:
        self.check_member()
        groups = [group for mesh in meshes for group in groups_over(mesh)]
        return list(dict.fromkeys(groups if self.process_group is None else [*groups, self.process_group]))


def reduce_max(flags: Tensor, groups: Iterable[Any]) -> None:
    """Combine flags over the ranks of each group, in place; every rank of a group must call."""
    for group in groups:
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)


def meshes_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the meshes of the optimizers' parameters, with gradients or without, from the smallest to the largest."""
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():
        return []  # a device mesh needs DTensor and several processes
    params: list[Any] = [param for optimizer in optimizers for param in params_of(optimizer)]
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    return sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())


def groups_over(mesh: Any) -> list[Any]:
    """Return process groups that reach every rank of a mesh, one after the other; a single group if one exists."""
    each_dim = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(each_dim) < 2:
        return each_dim
    backend = torch.distributed.get_backend_config(each_dim[0])
    for group in _flattened_groups(mesh):
        if torch.distributed.get_backend_config(group) == backend:
            return [group]
    return each_dim


def _flattened_groups(mesh: Any) -> list[Any]:
    """Return existing process groups of exactly the ranks of a mesh; creating one would be a collective."""
    covers_all = mesh.size() == torch.distributed.get_world_size()
    flattened = [each for each in flattened_meshes(mesh) if each.size() == mesh.size()]
    ranks = set(mesh.mesh.flatten().tolist()) if flattened else set()
    groups = [each.get_group() for each in flattened if set(each.mesh.tolist()) == ranks]
    return [torch.distributed.group.WORLD, *groups] if covers_all else groups


def require_same_on_ranks(mine: dict[str, Any], process_group: Any) -> None:
    """Raise `SyncError` with the ranks that have another state than rank 0; every rank of the group must call this."""
    distributed = torch.distributed
    theirs: list[Any] = [None] * distributed.get_world_size(process_group)
    distributed.all_gather_object(theirs, mine, group=process_group)
    different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
    if different:
        scales = ", ".join(f"rank {rank}: {shown_number(theirs[rank]['loss_scale'])}" for rank in [0, *different])
        raise SyncError(
            f"the scalers of ranks {different} differ from rank 0's (loss scales: {scales}); "
            "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
        )

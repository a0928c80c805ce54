"""The ranks that make the same decision: those of a process group, and of the device meshes of sharded parameters."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import shown, shown_number
from lossscale_core.errors import SyncError
from lossscale_torch._gradients import is_dtensor, params_of


def groups_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the process groups over the meshes of the optimizers' parameters, with gradients or without."""
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():
        return []  # a device mesh needs DTensor and several processes
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    here = sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())
    groups = [mesh.get_group(dim) for mesh in here for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return list(dict.fromkeys(groups))


def reduce_max(flags: Tensor, groups: Iterable[Any]) -> None:
    """Combine flags over the ranks of each group, in place; every rank of a group must call."""
    for group in groups:
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)


def require_group(process_group: Any, name: str = "process_group") -> None:
    """Raise `TypeError` for what is not a process group; a rank outside of one has the number of `new_group` for it."""
    if process_group is None:
        return
    if torch.distributed.is_available():
        known = torch.distributed.ProcessGroup, type(torch.distributed.GroupMember.NON_GROUP_MEMBER)
        if isinstance(process_group, known) and not isinstance(process_group, bool):
            return
    raise TypeError(
        f"{name}={shown(process_group)} is not a process group; pass torch.distributed.group.WORLD after "
        "init_process_group(), or what new_group() returned"
    )


def require_member(process_group: Any, name: str = "process_group") -> None:
    """Raise `SyncError` in a process that is not in the group, since collectives would not work."""
    if process_group is not None and torch.distributed.get_rank(process_group) < 0:
        raise SyncError(
            f"rank {torch.distributed.get_rank()} is not in the {name} of its scaler, so it would decide "
            "alone; make the scaler of each rank with a group that contains it, or without one"
        )


def require_same_on_ranks(mine: dict[str, Any], process_group: Any) -> None:
    """Raise `SyncError` with the ranks that have another state than rank 0; every rank of the group must call this."""
    theirs: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(theirs, mine, group=process_group)
    different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
    if different:
        scales = ", ".join(f"rank {rank}: {shown_number(theirs[rank]['loss_scale'])}" for rank in [0, *different])
        entries = dict.fromkeys(name for state in theirs for name in state)  # one without a guard lacks its entry
        names = [name for name in entries if any(state.get(name) != theirs[0].get(name) for state in theirs)]
        raise SyncError(
            f"the scalers of ranks {different} differ from rank 0's in {', '.join(names)} (loss scales: {scales}); "
            "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
        )

"""The norm of gradients that are sharded over device meshes, by one collective for each mesh.

Each rank sends the norm of the gradients that it holds together with its messages on the step, so that the decision of
the ranks costs no collective of its own.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_torch._gradients import Gradients, is_dtensor
from lossscale_torch._meshes import groups_over
from lossscale_torch._norm import UnscaledNorm, norm_on_device, unscaled_norm
from lossscale_torch._state import CapturedScale


class Agreed(NamedTuple):
    """What the ranks of some meshes know together."""

    norm: Tensor
    """The norm of the unscaled gradients: float64, shape `()`. Not finite where a rank has gradients that are not."""
    messages: Tensor
    """The messages of all ranks combined by *max*: float32, a row for each optimizer."""
    groups: list[Any]
    """The process groups over which they are combined last, and so are alike on every rank."""

    def read(self, scale: Tensor) -> UnscaledNorm:
        """Return the norm on the host, and the loss scale. Synchronises with the host once."""
        return UnscaledNorm(*torch.stack([self.norm, scale.to(torch.float64)]).tolist())


@torch.no_grad()
def local_norms(
    gradients: Gradients,
    params: list[Any],
    meshes: list[Any],
    captured: CapturedScale,
    norm_type: float,
    stays_on_device: bool,
) -> list[Tensor]:
    """Return for each mesh what this rank adds to the norm of the unscaled gradients there: float64, shape `()`.

    `gradients` are all those of `params`. Ranks that hold the same part of a gradient add an equal share each. A
    parameter that is not sharded counts as one that every rank of the last mesh holds. Unless `stays_on_device`, this
    synchronises with the host.
    """
    scale = captured.scale
    norms: list[list[Tensor]] = [[] for _ in meshes]
    for (place, copies), part in _parts(gradients, params, meshes).items():
        if stays_on_device:
            norm = norm_on_device(part, scale, norm_type, captured.may_be_below_one)
        else:
            value = unscaled_norm(part, scale, norm_type).value
            norm = torch.full((), value, dtype=torch.float64, device=scale.device)
        # The powers are summed over all ranks, so that each of the copies counts as its share of one.
        norms[place].append(norm * copies ** (-1.0 / norm_type))
    return [_joined(torch.stack(some), norm_type) if some else _zero_like(scale) for some in norms]


@torch.no_grad()
def agree(norms: list[Tensor], messages: Tensor, meshes: list[Any], norm_type: float) -> Agreed:
    """Return the norm of all ranks' gradients, and their messages, whose first column holds the flags.

    Every rank of a mesh must call. A norm over smaller meshes may differ between the ranks of a larger one: there the
    largest counts, so that they go on with the same. Does not synchronise.
    """
    flag = (~torch.isfinite(torch.stack(norms))).any().to(messages.dtype)
    # In float64, as the norm is, so that both go out in one tensor; it holds every number of a message exactly.
    told = torch.cat([flag.expand(len(messages), 1), messages[:, 1:]], dim=1).double().flatten()
    total = _zero_like(told)
    for norm, mesh in zip(norms, meshes, strict=True):
        for group in groups_over(mesh):
            # Gathered and not reduced: norms are summed and messages maximised, and every rank sums in one order, so
            # that all of them go on with the same bits.
            everyone = _gathered(torch.cat([norm.view(1), total.view(1), told]), group)
            norm, total, told = _joined(everyone[:, 0], norm_type), everyone[:, 1].amax(), everyone[:, 2:].amax(0)
        total = _joined(torch.stack([norm, total]), norm_type)
    told = told.view(messages.shape)
    is_raised = (told[:, 0] != 0.0).any()
    norm = torch.where(is_raised & torch.isfinite(total), torch.inf, total)
    return Agreed(norm, told.to(messages.dtype), groups_over(meshes[-1]))


def _parts(gradients: Gradients, params: Iterable[Any], meshes: list[Any]) -> dict[tuple[int, int], Gradients]:
    """Return the gradients by the place of their mesh in `meshes` and by how many ranks hold the same part."""
    by_key: dict[tuple[int, int], list[Any]] = {}
    places = {mesh: place for place, mesh in enumerate(meshes)}
    for param in params:
        if param.grad is not None:
            by_key.setdefault(_key(param, places), []).append(param)
    if len(by_key) == 1:
        return dict.fromkeys(by_key, gradients)
    return {key: Gradients.of_params(some) for key, some in by_key.items()}


def _key(param: Any, places: dict[Any, int]) -> tuple[int, int]:
    if not is_dtensor(param) or param.device_mesh not in places:
        last = next(reversed(places))
        return places[last], last.size()
    mesh, copies = param.device_mesh, 1
    for dim, placement in enumerate(param.grad.placements):
        copies *= mesh.size(dim) if placement.is_replicate() else 1
    return places[mesh], copies


def _gathered(row: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks of a group."""
    everyone = row.new_empty(torch.distributed.get_world_size(group) * len(row))
    torch.distributed.all_gather_single(everyone, row, group=group)
    return everyone.view(-1, len(row))


def _joined(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of norms; their powers do not overflow."""
    largest = norms.amax()
    is_usual = (largest > 0.0) & torch.isfinite(largest)
    return torch.where(is_usual, largest * torch.linalg.vector_norm(norms / largest, norm_type), largest)


def _zero_like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=tensor.device)

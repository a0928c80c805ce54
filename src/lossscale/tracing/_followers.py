"""Objects that follow the steps of training: schedules, averaged weights, the statistics of normalisation."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from lossscale.tracing._digests import attributes_of, params_of

_AVERAGE = re.compile(r"Averaged|EMA|Ema(?![a-z])")
_DEEPEST = 3


class Kind(NamedTuple):
    """A kind of objects that follow the steps."""

    what: str
    """The requirement that a page states for them."""
    sentence: str
    """The advice for those that moved."""


SCHEDULES = Kind(
    "learning-rate schedules do not move on skipped steps",
    "{name} moved on {moves} of {skips} skipped steps. Step it only if update().applied is true.",
)
AVERAGES = Kind(
    "averaged weights do not move on skipped steps",
    "{name} moved on {moves} of {skips} skipped steps. Update it only if update().applied is true.",
)
STATISTICS = Kind(
    "the statistics of BatchNorm do not move on skipped steps",
    "{name} was updated by {moves} of {skips} skipped steps. To undo this, pass GradScaler(protect=[model]).",
)
KINDS = (SCHEDULES, AVERAGES, STATISTICS)


# The functions below look at types, not by `isinstance`, for which a proxy would import or compute its object.
def schedules_in(objects: list[Any]) -> list[Any]:
    """Return the schedules of learning rates among some objects."""
    return [each for each in objects if issubclass(type(each), LRScheduler)]


def averages_in(objects: list[Any]) -> list[Any]:
    """Return the objects that hold averaged weights, by the names of their classes."""
    return [
        each
        for each in objects
        if _is_average(each)
        and not issubclass(type(each), LRScheduler | type)
        and any(True for _ in tensors_of(each, set()))
    ]


def normalisations_in(objects: list[Any]) -> list[Any]:
    """Return the layers with running statistics, except those in averaged weights."""
    averaged = {id(module) for each in averages_in(objects) for module in _modules_of(each)}
    names = ("running_mean", "num_batches_tracked")
    return [
        each
        for each in objects
        if issubclass(type(each), torch.nn.Module)
        and id(each) not in averaged
        and any(torch.is_tensor(attributes_of(each).get("_buffers", {}).get(name)) for name in names)
    ]


def statistics_of(layer: torch.nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of a layer."""
    return [*layer.buffers(recurse=False)]


def live_tensors(objects: list[Any]) -> set[int]:
    """Return the ids of what is trained, which an average may reference: parameters, and buffers of their models.

    An average without any of these parameters that is a layer of the model, such as a codebook, keeps its buffers.
    """
    modules = [each for each in objects if issubclass(type(each), torch.nn.Module)]
    optimizers = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    params = {id(param) for each in optimizers for param in params_of(each)}
    trained = {id(each) for each in modules if any(id(param) in params for param in each.parameters())}
    averages = [each for each in modules if _is_average(each)]
    apart = {id(inner) for each in averages if id(each) not in trained for inner in each.modules()}
    models = [each for each in modules if id(each) in trained and not _is_average(each)]
    layers = [inner for each in models for inner in each.modules() if id(inner) not in apart]
    return params.union(id(buffer) for each in layers for buffer in each.buffers(recurse=False))


def tensors_of(each: Any, live: set[int], depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds in its attributes, containers and modules, without those in `live`."""
    if isinstance(each, torch.Tensor):
        if id(each) not in live:
            yield each
        return
    if isinstance(each, torch.nn.Module):
        parts: Any = [*each.parameters(), *each.buffers()]
    elif isinstance(each, dict):
        parts = each.values()
    elif isinstance(each, list | tuple):
        parts = each
    else:
        parts = attributes_of(each).values() if depth == _DEEPEST else ()
    for part in list(parts) if depth else ():
        yield from tensors_of(part, live, depth - 1)


def _is_average(each: Any) -> bool:
    return _AVERAGE.search(type(each).__name__) is not None


def _modules_of(average: Any) -> Iterator[torch.nn.Module]:
    if isinstance(average, torch.nn.Module):
        yield from average.modules()
    for each in attributes_of(average).values():
        if isinstance(each, torch.nn.Module):
            yield from each.modules()


def position_of(schedule: Any) -> Any:
    """Return what changes when a schedule moves: its counter, or its last rates if it has none."""
    counter = getattr(schedule, "last_epoch", None)
    if counter is not None:
        return counter
    try:
        return [float(rate) for rate in schedule.get_last_lr()]
    except (AttributeError, TypeError):  # a schedule of the script's own may have neither
        return None

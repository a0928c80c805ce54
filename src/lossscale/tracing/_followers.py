"""Objects that follow the steps of training: schedules, averaged weights, the statistics of normalisation."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from lossscale.tracing._digests import attributes_of, params_of

_AVERAGE = re.compile(r"Averaged|EMA|Ema(?![a-z])")
_DEEPEST = 3

ValueOf = Callable[[Iterable[torch.Tensor]], Any]
"""A function of an object's tensors: their versions, or digests."""


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


class Follower(NamedTuple):
    """An object that follows the steps."""

    kind: Kind
    it: Any
    read: Callable[[], Any]
    """Returns a value that changes when the object moves."""
    label: str = ""
    """The name, if it is not that of the class."""

    @property
    def name(self) -> str:
        """The name of the class, or the label."""
        return self.label or type(self.it).__name__


def moved_after_loss(objects: list[Any], value_of: ValueOf) -> Iterator[Follower]:
    """Yield the objects that a script moves after the forward pass: schedules, and averages by their tensors."""
    for each in objects:
        if issubclass(type(each), LRScheduler):
            yield Follower(SCHEDULES, each, partial(_position_of, each))
    live = _live_tensors(objects)
    for each in _averages_in(objects):
        yield Follower(AVERAGES, each, partial(_value, value_of, partial(_tensors_of, each, live)))


def moved_before_update(objects: list[Any], value_of: ValueOf) -> Iterator[Follower]:
    """Yield the layers with running statistics, which a forward pass moves, except those in averaged weights."""
    averaged = {id(module) for each in _averages_in(objects) for module in _modules_of(each)}
    for each in _modules_in(objects):
        statistics = [each._buffers.get(name) for name in ("running_mean", "num_batches_tracked")]
        if id(each) not in averaged and any(map(torch.is_tensor, statistics)):
            yield Follower(STATISTICS, each, partial(_value, value_of, partial(each.buffers, recurse=False)))


def _value(value_of: ValueOf, tensors: Callable[[], Iterable[torch.Tensor]]) -> Any:
    return value_of(tensors())


# By type, not by `isinstance`, for which a proxy would import or compute its object.
def _modules_in(objects: list[Any]) -> list[torch.nn.Module]:
    return [each for each in objects if issubclass(type(each), torch.nn.Module) and "_buffers" in attributes_of(each)]


def _averages_in(objects: list[Any]) -> list[Any]:
    """Return the objects that hold averaged weights, by the names of their classes."""
    named = [each for each in objects if _is_average(each) and not issubclass(type(each), LRScheduler | type)]
    return [each for each in named if any(True for _ in _tensors_of(each, set()))]


def _live_tensors(objects: list[Any]) -> set[int]:
    """Return the ids of what is trained, which an average may reference: parameters, and buffers of their models.

    An average without any of these parameters that is a layer of the model, such as a codebook, keeps its buffers.
    """
    modules = _modules_in(objects)
    optimizers = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    params = {id(param) for each in optimizers for param in params_of(each)}
    trained = {id(each) for each in modules if any(id(param) in params for param in each.parameters())}
    averages = [each for each in modules if _is_average(each)]
    apart = {id(inner) for each in averages if id(each) not in trained for inner in each.modules()}
    models = [each for each in modules if id(each) in trained and not _is_average(each)]
    layers = [inner for each in models for inner in each.modules() if id(inner) not in apart]
    return params.union(id(buffer) for each in layers for buffer in each.buffers(recurse=False))


def _tensors_of(each: Any, live: set[int], depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
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
        yield from _tensors_of(part, live, depth - 1)


def _is_average(each: Any) -> bool:
    return _AVERAGE.search(type(each).__name__) is not None


def _modules_of(average: Any) -> Iterator[torch.nn.Module]:
    if isinstance(average, torch.nn.Module):
        yield from average.modules()
    for each in attributes_of(average).values():
        if isinstance(each, torch.nn.Module):
            yield from each.modules()


def _position_of(schedule: Any) -> Any:
    """Return what changes when a schedule moves: its counter, or its last rates if it has none."""
    counter = getattr(schedule, "last_epoch", None)
    if counter is not None:
        return counter
    try:
        return [float(rate) for rate in schedule.get_last_lr()]
    except (AttributeError, TypeError):  # a schedule of the script's own may have neither
        return None

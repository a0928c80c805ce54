"""Objects that change on skipped steps, although parameters do not: schedules, averaged weights, statistics."""

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

_AVERAGE = re.compile(r"Averaged|EMA|Ema(?![a-z])")
_MOST_WAITING = 100


class Kind(NamedTuple):
    """A kind of objects that follow the steps."""

    what: str
    """The requirement that a page states for them."""
    sentence: str
    """The advice for those that moved."""


_SCHEDULE = Kind(
    "learning-rate schedules do not move on skipped steps",
    "{name} moved on {moves} of {skips} skipped steps. Step it only if update().applied is true.",
)
_AVERAGED = Kind(
    "averaged weights do not move on skipped steps",
    "{name} moved on {moves} of {skips} skipped steps. Update it only if update().applied is true.",
)
_NORMALISATION = Kind(
    "the statistics of BatchNorm do not move on skipped steps",
    "{name} was updated by {moves} of {skips} skipped steps. To undo this, pass GradScaler(protect=[model]).",
)
KINDS = (_SCHEDULE, _AVERAGED, _NORMALISATION)


class _Counter(NamedTuple):
    name: str
    read: Callable[[], int]
    """Returns a number that changes when the object moves."""
    start: int | None
    """The number before the first step; None if the object has changed since."""
    kind: Kind


class Followers:
    """The schedules, averaged weights and normalisation layers of a process, and how often each moved on a skip.

    They are collected before the first step; objects that a script makes later are not included. None of their methods
    is replaced: their own counters, and the versions that torch counts for each tensor, show whether they moved.
    """

    def __init__(self) -> None:
        self._after_loss: _Window | None = None
        self._before_update: _Window | None = None
        self._overflowed: Any = None

    def begin_step(self) -> None:
        """End the step before, at the first loss after its update: a schedule moves between the two."""
        if self._after_loss is None:
            # The schedules and modules of a script are not registered anywhere; the garbage collector lists them.
            objects = gc.get_objects()
            self._after_loss = _Window(_schedules_and_averages(objects))
            self._before_update = _Window(_normalisations(objects))
        if self._overflowed is not None:
            self._after_loss.end(self._overflowed)
            self._overflowed = None

    def end_step(self, overflowed: Any) -> None:
        """End the forward passes of a step, at its update."""
        self._overflowed = overflowed
        if self._before_update is not None:
            self._before_update.end(overflowed)

    def summary(self) -> Iterator[str]:
        """Yield a sentence for each class with objects that moved on a skipped step."""
        for sentences in self.sentences().values():
            yield from sentences

    def sentences(self) -> dict[Kind, list[str]]:
        """Return the same by kind."""
        if self._overflowed is not None and self._after_loss is not None:
            self._after_loss.end(self._overflowed)
            self._overflowed = None
        found: dict[Kind, list[str]] = {}
        for window in filter(None, (self._after_loss, self._before_update)):
            for kind, sentence in window.summary():
                found.setdefault(kind, []).append(sentence)
        return found

    def watched(self) -> dict[Kind, set[str]]:
        """Return the classes of the watched objects, by kind."""
        found: dict[Kind, set[str]] = {}
        for window in filter(None, (self._after_loss, self._before_update)):
            for counter in window.counters:
                found.setdefault(counter.kind, set()).add(counter.name)
        return found


class _Window:
    """The part of each step during which some objects are watched."""

    def __init__(self, counters: list[_Counter]) -> None:
        self.counters = counters
        self._last = [counter.start for counter in counters]
        self._waiting: list[tuple[Any, list[int]]] = []
        self._moves: Counter[str] = Counter()
        self._skips = 0

    def end(self, overflowed: Any) -> None:
        """End this part of a step. Synchronises with the device of `overflowed` every hundred steps at most."""
        now = [counter.read() for counter in self.counters]
        self._waiting.append((overflowed, [at for at, value in enumerate(now) if value != self._last[at]]))
        self._last[:] = now
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def summary(self) -> Iterator[tuple[Kind, str]]:
        """Yield a sentence for each class with objects that moved on a skipped step, and its kind."""
        self._count()
        kinds = {each.name: each.kind for each in self.counters}
        for name, moves in self._moves.items():
            yield kinds[name], kinds[name].sentence.format(name=name, moves=moves, skips=self._skips)

    def _count(self) -> None:
        skips = [moved for overflowed, moved in self._waiting if bool(overflowed)]
        self._waiting.clear()
        self._skips += len(skips)
        for moved in skips:
            self._moves.update({self.counters[at].name for at in moved})


def _schedules_and_averages(objects: list[Any]) -> list[_Counter]:
    schedules = [each for each in objects if issubclass(type(each), LRScheduler)]
    averages = [each for each in _modules(objects) if _AVERAGE.search(type(each).__name__)]
    return [
        *(_counter(each, partial(getattr, each, "last_epoch"), _SCHEDULE) for each in schedules),
        *(_counter(each, partial(_versions, each), _AVERAGED) for each in averages),
    ]


def _normalisations(objects: list[Any]) -> list[_Counter]:
    found = [each for each in _modules(objects) if torch.is_tensor(getattr(each, "num_batches_tracked", None))]
    counters = [_counter(each, partial(_batches_tracked, each), _NORMALISATION) for each in found]
    # The first forward pass is over: modules in training mode that count batches were changed by it.
    return [
        counter._replace(start=None) if each.training and _has_counted(each) else counter
        for each, counter in zip(found, counters, strict=True)
    ]


def _has_counted(module: Any) -> bool:
    """Return whether a layer has counted a batch. Synchronises with its device."""
    try:
        return bool(module.num_batches_tracked)
    except RuntimeError:  # it has no values, as on the meta device
        return False


def _counter(watched: Any, read: Callable[[], int], kind: Kind) -> _Counter:
    return _Counter(type(watched).__name__, read, read(), kind)


def _batches_tracked(module: Any) -> int:
    version: int = module.num_batches_tracked._version  # read again: loading a checkpoint may replace the tensor
    return version


def _modules(objects: list[Any]) -> list[Any]:
    # By type, not by `isinstance`, for which a proxy would import or compute its object.
    return [each for each in objects if issubclass(type(each), torch.nn.Module)]


def _versions(module: Any) -> int:
    """Return how often the tensors of a module were written in place."""
    return sum(tensor._version for tensor in module.state_dict(keep_vars=True).values() if torch.is_tensor(tensor))

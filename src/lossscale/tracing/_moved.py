"""Objects that change on skipped steps, although parameters do not: schedules, averaged weights, statistics."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lossscale.tracing._followers import Follower, moved_after_loss, moved_before_update

_MOST_WAITING = 100


class Followers:
    """The schedules, averaged weights and normalisation layers of a process, and how often each moved on a skip.

    They are collected before the first step; objects that a script makes later are not included. None of their methods
    is replaced: their own counters, and the versions that torch counts for each tensor, show whether they moved.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._after_loss: _Window | None = None
        self._before_update: _Window | None = None
        self._overflowed: Any = None

    def begin_step(self) -> None:
        """End the step before, at the first loss after its update: a schedule moves between the two."""
        if self._after_loss is None:
            # The schedules and modules of a script are not registered anywhere; the garbage collector lists them.
            objects = gc.get_objects()
            moved = [*moved_after_loss(objects, _versions)]
            self._after_loss = _Window(moved, [each.read() for each in moved])
            protected = self._protected()
            moved = [each for each in moved_before_update(objects, _versions) if id(each.it) not in protected]
            self._before_update = _Window(moved, [*map(_start_of, moved)])
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
        if self._overflowed is not None and self._after_loss is not None:
            self._after_loss.end(self._overflowed)
            self._overflowed = None
        for window in filter(None, (self._after_loss, self._before_update)):
            yield from window.summary()

    def _protected(self) -> set[int]:
        """Return the ids of the modules that `GradScaler(protect=)` restores after skipped steps."""
        protections = [each for each in self._scaler._observers if hasattr(each, "modules")]
        return {id(inner) for each in protections for module in each.modules() for inner in module.modules()}


class _Window:
    """The part of each step during which some objects are watched."""

    def __init__(self, followers: list[Follower], start: list[Any]) -> None:
        self._followers, self._last = followers, start
        self._waiting: list[tuple[Any, list[int]]] = []
        self._moves: Counter[str] = Counter()
        self._skips = 0

    def end(self, overflowed: Any) -> None:
        """End this part of a step. Synchronises with the device of `overflowed` every hundred steps at most."""
        now = [each.read() for each in self._followers]
        self._waiting.append((overflowed, [at for at, value in enumerate(now) if value != self._last[at]]))
        self._last[:] = now
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def summary(self) -> Iterator[str]:
        """Yield a sentence for each class with objects that moved on a skipped step."""
        self._count()
        kinds = {each.name: each.kind for each in self._followers}
        for name, moves in self._moves.items():
            yield kinds[name].sentence.format(name=name, moves=moves, skips=self._skips)

    def _count(self) -> None:
        skips = [moved for overflowed, moved in self._waiting if bool(overflowed)]
        self._waiting.clear()
        self._skips += len(skips)
        for moved in skips:
            self._moves.update({self._followers[at].name for at in moved})


def _start_of(follower: Follower) -> Any:
    """Return a layer's value before the first step; None in training mode, since the first forward has changed it."""
    layer = follower.it
    return None if layer.training and _has_counted(layer) else follower.read()


def _has_counted(module: Any) -> bool:
    """Return whether a layer has counted a batch. Synchronises with its device."""
    try:
        counted = getattr(module, "num_batches_tracked", None)
        return counted is None or bool(counted)
    except RuntimeError:  # it has no values, as on the meta device
        return False


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which tensors an object holds, and how often each was written in place, except through `.data`."""
    return [(id(each), 0 if each.is_inference() else each._version) for each in tensors]

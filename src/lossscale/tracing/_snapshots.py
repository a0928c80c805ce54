"""The values of what follows the steps, before and after the planned updates and the ones next to them."""

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from lossscale.tracing._digests import Same, digest
from lossscale.tracing._followers import (
    AVERAGES,
    SCHEDULES,
    STATISTICS,
    Follower,
    Kind,
    moved_after_loss,
    moved_before_update,
)

RATES = "learning rates"


class Snapshots:
    """The values of rates, schedules, averages and statistics when some updates begin.

    A forward pass comes before the first scaled loss, by which an update begins; so the statistics are those at the end
    of the update before. Averages and statistics are copied to the host one tensor at a time.
    """

    def __init__(self, updates: Iterable[int]) -> None:
        self._needed = {each for update in updates for each in (update, update + 1)}
        self._by_update: dict[int, dict[tuple[Kind, Same], Any]] = {}
        self._followers: dict[tuple[Kind, Same], Follower] = {}  # they keep the objects until the process ends

    def begin(self, update: int, optimizers: list[Any]) -> None:
        """Read rates, schedules and averages if a planned update, or one next to it, begins or has ended."""
        if update not in self._needed:
            return
        self._add(Follower(SCHEDULES, each, partial(_rates, each), RATES) for each in optimizers)
        self._add(moved_after_loss(gc.get_objects(), _digests))
        self._read(update, (SCHEDULES, AVERAGES))

    def end(self, update: int) -> None:
        """Read the statistics at the end of an update."""
        if update + 1 in self._needed:
            self._add(moved_before_update(gc.get_objects(), _digests))
            self._read(update + 1, (STATISTICS,))

    def close(self, update: int) -> None:
        """Read what is alive after the last update, unless the next one had begun."""
        if update in self._needed and not any(kind is not STATISTICS for kind, _ in self._by_update.get(update, ())):
            self._read(update, (SCHEDULES, AVERAGES))

    def names(self, kind: Kind) -> set[str]:
        """Return the names of the classes of a kind that were found."""
        return {each.name for each in self._followers.values() if each.kind is kind}

    def moved(self, update: int) -> Iterator[Follower]:
        """Yield what changed from the beginning of an update to that of the next one."""
        after = self._by_update.get(update + 1, {})
        for key, value in self._by_update.get(update, {}).items():
            if key in after and value != after[key]:
                yield self._followers[key]

    def compared(self, kind: Kind, updates: Iterable[int]) -> list[int]:
        """Return the updates over which something of a kind was compared."""
        values = self._by_update
        return [
            update
            for update in updates
            if any(key[0] is kind and key in values.get(update + 1, ()) for key in values.get(update, ()))
        ]

    def _add(self, followers: Iterable[Follower]) -> None:
        for each in followers:
            self._followers.setdefault((each.kind, Same(each.it)), each)

    def _read(self, update: int, kinds: tuple[Kind, ...]) -> None:
        now = {key: each.read() for key, each in self._followers.items() if each.kind in kinds}
        self._by_update.setdefault(update, {}).update(now)


def _digests(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    return [*map(digest, tensors)]


def _rates(optimizer: Any) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]

"""The values of what follows the steps, before and after the planned updates and the ones next to them."""

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from lossscale.tracing._digests import Same, digest
from lossscale.tracing._followers import (
    AVERAGES,
    SCHEDULES,
    STATISTICS,
    Kind,
    averages_in,
    live_tensors,
    normalisations_in,
    position_of,
    schedules_in,
    statistics_of,
    tensors_of,
)

RATES = "learning rates"


class Follower(NamedTuple):
    """An object that follows the steps, as a key."""

    kind: Kind
    name: str
    same: Same


class Snapshots:
    """The values of rates, schedules, averages and statistics when some updates begin.

    A forward pass comes before the first scaled loss, by which an update begins; so the statistics are those at the end
    of the update before. Averages and statistics are copied to the host one tensor at a time.
    """

    def __init__(self, updates: Iterable[int]) -> None:
        self._needed = {each for update in updates for each in (update, update + 1)}
        self._by_update: dict[int, dict[Follower, Any]] = {}
        self._reads: dict[Follower, Callable[[], Any]] = {}  # they keep the objects until the process ends

    def begin(self, update: int, optimizers: list[Any]) -> None:
        """Read rates, schedules and averages if a planned update, or one next to it, begins or has ended."""
        if update not in self._needed:
            return
        objects = gc.get_objects()
        self._add(SCHEDULES, optimizers, _rates, RATES)
        self._add(SCHEDULES, schedules_in(objects), position_of)
        live = live_tensors(objects)
        self._add(AVERAGES, averages_in(objects), lambda each: [*map(digest, tensors_of(each, live))])
        self._read(update, (SCHEDULES, AVERAGES))

    def end(self, update: int) -> None:
        """Read the statistics at the end of an update."""
        if update + 1 in self._needed:
            self._add(STATISTICS, normalisations_in(gc.get_objects()), lambda each: [*map(digest, statistics_of(each))])
            self._read(update + 1, (STATISTICS,))

    def close(self, update: int) -> None:
        """Read what is alive after the last update, unless the next one had begun."""
        if update in self._needed and not any(each.kind is not STATISTICS for each in self._by_update.get(update, ())):
            self._read(update, (SCHEDULES, AVERAGES))

    def names(self, kind: Kind) -> set[str]:
        """Return the names of the classes of a kind that were found."""
        return {each.name for each in self._reads if each.kind is kind}

    def moved(self, update: int) -> Iterator[Follower]:
        """Yield what changed from the beginning of an update to that of the next one."""
        after = self._by_update.get(update + 1, {})
        for each, value in self._by_update.get(update, {}).items():
            if each in after and value != after[each]:
                yield each

    def compared(self, kind: Kind, updates: Iterable[int]) -> list[int]:
        """Return the updates over which something of a kind was compared."""
        values = self._by_update
        return [
            update
            for update in updates
            if any(each.kind is kind and each in values.get(update + 1, ()) for each in values.get(update, ()))
        ]

    def _add(self, kind: Kind, objects: list[Any], read: Callable[[Any], Any], name: str = "") -> None:
        for each in objects:
            self._reads.setdefault(Follower(kind, name or type(each).__name__, Same(each)), partial(read, each))

    def _read(self, update: int, kinds: tuple[Kind, ...]) -> None:
        now = {each: read() for each, read in self._reads.items() if each.kind in kinds}
        self._by_update.setdefault(update, {}).update(now)


def _rates(optimizer: Any) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]

"""Who has scaled and unscaled what since the last step, kept apart for each trace, thread and replica."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf


class Pending:
    """What was called since a step's loss was first scaled; keeps no tensor alive."""

    def __init__(self, scaled_by_keras: bool) -> None:
        self.scaled_by_keras = scaled_by_keras
        self.calls: set[str] = set()
        self.applied: dict[Any, set[int]] = {}
        """The variables that this step's gradients were applied to, by graph: several applications may follow one loss,
        and those of two branches are one."""
        self._returned: dict[str, list[Any]] = {}

    def remember(self, call: str, tensors: Iterable[Any]) -> None:
        """Remember what a call returned, for as long as somebody else does."""
        alive = [each for each in self._returned.get(call, []) if each() is not None]
        self._returned[call] = alive + [weakref.ref(each) for each in tensors]

    def returned(self, call: str, tensors: Iterable[Any]) -> bool:
        """Return whether this call has returned one of these very tensors in this step."""
        return any(each is tensor for tensor in tensors for each in self.alive(call))

    def alive(self, call: str) -> list[Any]:
        """Return those tensors that this call has returned in this step and that somebody still holds."""
        return [tensor for each in self._returned.get(call, []) if (tensor := each()) is not None]


class Traces:
    """A `Pending` for each graph being traced, or thread of eager execution, and for each replica."""

    def __init__(self) -> None:
        self._eager = threading.local()
        self._graphs: weakref.WeakKeyDictionary[Any, dict[int, Pending]] = weakref.WeakKeyDictionary()
        self._last_scaled_by_keras = False
        self._made: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def begin(self, call: str, by_keras: bool = False) -> Pending:
        """Return what is pending, for a loss to be scaled: a new step's if the last one's gradients were applied."""
        records, replica = self._records(current_graph()), current_replica()
        pending = records.get(replica)
        if pending is None or pending.applied or pending.scaled_by_keras != by_keras:
            pending = records[replica] = Pending(by_keras)
        self._last_scaled_by_keras = by_keras
        pending.calls.add(call)
        return pending

    def current(self, variables: Iterable[Any] = ()) -> Pending:
        """Return what is pending here or around, for gradients of `variables` to be unscaled or applied.

        Where nothing is known, or a variable comes again, it is another step's; the last scaling says whose it is.
        """
        pending, keys = self._found(), set(map(id, variables))
        if pending is None or any(not keys.isdisjoint(pending.applied.get(graph, ())) for graph in graphs_around()):
            pending = self._another()
        return pending

    def unscale(self) -> Pending:
        """Return what is pending, for gradients to be unscaled: another step's, if its loss was scaled in a trace."""
        pending = self.current()
        if pending.applied and "get_scaled_loss" in self._open_elsewhere():
            pending = self._another()
        pending.calls.add("get_unscaled_gradients")
        return pending

    def apply(self, variables: Iterable[Any]) -> Pending:
        """Return what is pending for `variables`, and note that their gradients are applied."""
        pending = self.current(variables)
        pending.applied.setdefault(current_graph(), set()).update(map(id, variables))
        return pending

    def missing(self, pending: Pending, calls: Iterable[str]) -> list[str]:
        """Return which of `calls` were made neither in this step nor in another trace that leaves its step open."""
        return [call for call in calls if call not in pending.calls | self._open_elsewhere()]

    def remember_in_graph(self, tensors: Iterable[Any]) -> None:
        """Remember tensors of the graph being built, for as long as that is."""
        if not tf.executing_eagerly():
            self._made.setdefault(current_graph(), []).extend(map(weakref.ref, tensors))

    def remembered(self) -> list[Any]:
        """Return the tensors that were remembered in the graph being built and in those around it."""
        refs = (ref for graph in graphs_around() if graph is not None for ref in self._made.get(graph, ()))
        return [tensor for ref in refs if (tensor := ref()) is not None]

    def _open_elsewhere(self) -> set[str]:
        """Return the calls of traces whose gradients are not applied there."""
        open_ones = (each for records in list(self._graphs.values()) for each in records.values() if not each.applied)
        return {call for each in open_ones for call in each.calls}

    def _another(self) -> Pending:
        pending = self._records(current_graph())[current_replica()] = Pending(self._last_scaled_by_keras)
        return pending

    def _found(self) -> Pending | None:
        replica = current_replica()
        for graph in graphs_around():
            records = self._records(graph)
            if replica in records:
                return records[replica]
        return None

    def _records(self, graph: Any) -> dict[int, Pending]:
        if graph is None:
            return self._eager.__dict__.setdefault("records", {})
        return self._graphs.setdefault(graph, {})

    def __deepcopy__(self, _: Any) -> "Traces":
        return Traces()

    def __reduce__(self) -> Any:
        return Traces, ()


class Tally:
    """A count that goes on where a traced step runs, not only where it is traced."""

    def __init__(self) -> None:
        with tf.init_scope():
            self._count = tf.Variable(
                0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def add(self) -> None:
        """Count one more, for all replicas together."""
        self._count.assign_add(1)

    def __int__(self) -> int:
        return int(self._count.numpy())


def current_graph() -> Any:
    """Return the graph being built; None where execution is eager."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def graphs_around() -> Iterator[Any]:
    """Yield the graph being built and those around it, then None if what is around them executes eagerly."""
    graph = current_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
    if tf.compat.v1.executing_eagerly_outside_functions():
        yield None


def current_replica() -> int:
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group) or 0)

"""A record of each step's calls, by which missing and repeated ones are noticed.

One record serves each graph being traced, or thread of eager execution, and each replica in it. Graphs are looked up
weakly: a record must not keep a graph alive, and several graphs may be open at a time.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from lossscale_tf._verbs import Gradient, values_of


class StepRecord:
    """The calls since a step's loss was first scaled; keeps no tensor alive."""

    def __init__(self, scaled_by_keras: bool) -> None:
        self.scaled_by_keras = scaled_by_keras
        self.calls: set[str] = set()
        self._applied: dict[weakref.ref[Any] | None, set[int]] = {}
        self._returned: dict[str, list[Any]] = {}

    def remember(self, call: str, tensors: Iterable[Any]) -> None:
        """Remember what a call returned, for as long as somebody else does."""
        alive = [each for each in self._returned.get(call, []) if each() is not None]
        self._returned[call] = alive + [weakref.ref(each) for each in tensors]

    def returned(self, call: str) -> list[Any]:
        """Return those tensors that this call has returned in this step and that somebody still holds."""
        # No walrus: AutoGraph converts this function within a `tf.function`, and cannot convert one.
        held = [each() for each in self._returned.get(call, [])]
        return [tensor for tensor in held if tensor is not None]

    @property
    def is_applied(self) -> bool:
        """Whether gradients of this step were applied, to some variables at least."""
        return bool(self._applied)

    def apply(self, variables: Iterable[Any]) -> None:
        """Note that gradients of `variables` are applied in the graph being built.

        Several applications may follow one loss, and those of two branches, which are graphs of their own, are one.
        """
        self._applied.setdefault(_key(current_graph()), set()).update(map(id, variables))

    def is_applied_to(self, variables: Iterable[Any]) -> bool:
        """Return whether gradients of one of `variables` were applied in the graph being built or in one around it."""
        keys = set(map(id, variables))
        return any(not keys.isdisjoint(self._applied.get(_key(graph), ())) for graph in graphs_around())

    def has_returned(self, call: str, tensors: Iterable[Any]) -> bool:
        """Return whether this call has returned one of these very tensors in this step."""
        returned = self.returned(call)
        return any(each is tensor for tensor in tensors for each in returned)


class Place:
    """A graph being traced, or a thread of eager execution: the step of each replica, and what outlives a step."""

    def __init__(self) -> None:
        self.steps: dict[int, StepRecord] = {}
        self.scaled_losses: list[Any] = []
        self.made: list[weakref.ref[Any]] = []


class Records:
    """The records of one optimizer."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._graphs: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._last_scaled_by_keras = False

    def begin(self, call: str, by_keras: bool = False) -> StepRecord:
        """Return the record for a loss to be scaled: a new step's if the last one's gradients were applied."""
        steps, replica = self.here().steps, current_replica()
        record = steps.get(replica)
        if record is None or record.is_applied or record.scaled_by_keras != by_keras:
            record = steps[replica] = StepRecord(by_keras)
        self._last_scaled_by_keras = by_keras
        record.calls.add(call)
        return record

    def unscale(self) -> StepRecord:
        """Return the record for gradients to be unscaled: another step's, if its loss was scaled in a trace."""
        record = self._current()
        if record.is_applied and "get_scaled_loss" in self._open_in_graphs():
            record = self._another()
        record.calls.add("get_unscaled_gradients")
        return record

    def apply(self, variables: Iterable[Any]) -> StepRecord:
        """Return the record for gradients of `variables`, and note that they are applied."""
        record = self._current(variables)
        record.apply(variables)
        return record

    def missing(self, record: StepRecord, calls: Iterable[str]) -> list[str]:
        """Return which of `calls` were made neither in this step nor in another trace that leaves its step open."""
        return [call for call in calls if call not in record.calls and call not in self._open_in_graphs()]

    def here(self) -> Place:
        """Return the place of the graph being built, or of this thread where execution is eager."""
        return self._place(current_graph())

    def around(self) -> list[Place]:
        """Return the places of the graph being built and of those around it, the innermost first."""
        return [self._graphs[graph] for graph in graphs_around() if graph is not None and graph in self._graphs]

    def _current(self, variables: Iterable[Any] = ()) -> StepRecord:
        """Return the record here or around, for gradients of `variables` to be unscaled or applied.

        Where nothing is known, or a variable comes again, it is another step's; the last scaling says whose it is.
        """
        record = self._found()
        return self._another() if record is None or record.is_applied_to(variables) else record

    def _open_in_graphs(self) -> set[str]:
        """Return the calls of traces whose gradients are not applied there."""
        records = [record for place in list(self._graphs.values()) for record in place.steps.values()]
        return {call for record in records if not record.is_applied for call in record.calls}

    def _another(self) -> StepRecord:
        record = self.here().steps[current_replica()] = StepRecord(self._last_scaled_by_keras)
        return record

    def _found(self) -> StepRecord | None:
        replica = current_replica()
        found = (self._place(graph).steps.get(replica) for graph in graphs_around())
        return next((record for record in found if record is not None), None)

    def _place(self, graph: Any) -> Place:
        if graph is None:
            place = getattr(self._threads, "place", None) or Place()
            self._threads.place = place
        else:
            place = self._graphs.get(graph) or Place()
            self._graphs[graph] = place
        return place

    # What is of a thread or a graph cannot be copied or pickled; a copy of `v1`'s optimizer begins with a new step.
    def __reduce__(self) -> tuple[type["Records"], tuple[()]]:
        return Records, ()


def _key(graph: Any) -> "weakref.ref[Any] | None":
    return None if graph is None else weakref.ref(graph)


def current_graph() -> Any:
    """Return the graph being built; None where execution is eager."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def graphs_around() -> Iterator[Any]:
    """Yield the graph being built and those around it, then None if what is around them executes eagerly."""
    graph = current_graph()
    while graph is not None:
        yield graph
        # Only the graphs of functions have one, and that of a session does not.
        graph = getattr(graph, "outer_graph", None)
    if tf.compat.v1.executing_eagerly_outside_functions():
        yield None


def current_replica() -> int:
    """Return the number of this replica; 0 where there are no replicas."""
    context = tf.distribute.get_replica_context()
    # On TPUs the number may be a tensor without a value while a step is traced, as one trace serves all replicas:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/distribute_lib.py#L3514
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def dependencies(grads: Iterable[Gradient], sought: Iterable[Any]) -> tuple[set[int], set[str]]:
    """Return the ids of the tensors of `sought` that `grads` depend on, and the names of the operations up to them."""
    outside = {
        id(inner): outer for graph in graphs_around() for outer, inner in getattr(graph, "captures", ()) if graph
    }
    wanted, seen, found, names = {id(each) for each in sought}, set(), set(), set()
    tensors = [values_of(grad) for grad in grads]
    while tensors:
        tensor = tensors.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in wanted:
            found.add(id(tensor))
        elif id(tensor) in outside:
            tensors.append(outside[id(tensor)])
        # An eager tensor that a graph has captured has no operation.
        elif isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            names.add(tensor.op.name)
            tensors.extend(tensor.op.inputs)
    return found, names

"""Which loss scale multiplied the loss of which gradients, where several scaled losses wait for their gradients."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf._grads import is_gradient, scale_by, times
from lossscale_tf._trace import current_graph, current_replica, graphs_around

_REMEMBERED = 256
"""How many events of eager steps are kept: enough for the micro-batches of a step, and little to hold."""


class ScaledLosses:
    """The scaled losses of one optimizer, and the scale of each until its gradients are unscaled.

    An eager gradient is told by when it was made: a tensor's id grows with each tensor, and a loss notes when it is
    differentiated. A gradient in a graph is told by the operations that it depends on.
    """

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._traced: weakref.WeakKeyDictionary[Any, list[_Traced]] = weakref.WeakKeyDictionary()
        self._updates = 0
        self._lock = threading.Lock()

    def scale(self, loss: Any, loss_scale: Any) -> Any:
        """Return `loss` times `loss_scale`, and remember that it was."""
        if tf.executing_eagerly():
            return tf.nest.map_structure(lambda leaf: self._scaled_leaf(tf.convert_to_tensor(leaf), loss_scale), loss)
        records = self._traced.setdefault(current_graph(), [])
        records.append(_Traced(loss_scale, self._updates, current_replica()))
        return scale_by(loss, loss_scale)

    def updated_in_graph(self) -> None:
        """Note that a traced step updates the scale: what is scaled after it may be scaled by another number."""
        self._updates += 1

    def scale_of(self, grads: Sequence[Any], waiting_only: bool = False) -> Any:
        """Return the scale of the loss that `grads` are of; None where that loss was scaled in another trace.

        With `waiting_only`, None also where the gradients of every loss are unscaled already. Eagerly, reads the scales
        where several losses wait. Raises `CallOrderError` where `grads` may be of losses with different scales; these
        losses are forgotten then.
        """
        found = self._eager_sources(grads) if tf.executing_eagerly() else self._traced_sources(grads)
        if waiting_only:
            found = [each for each in found if each.is_waiting]
        for each in found:
            each.close()
        if len({each.distinct() for each in found} if len(found) > 1 else found) > 1:
            raise CallOrderError(
                "these gradients may be of losses that were scaled by different loss scales; unscale the gradients of "
                "one loss before the next loss is scaled, and before you process or add them up"
            )
        return found[-1].loss_scale() if found else None

    def made_since(self, grads: Sequence[Any], unscaled: Sequence[Any]) -> bool:
        """Return whether `grads` were computed from `unscaled`, which were unscaled in this step.

        Eagerly, they were if they have the same shapes, are newer, and no loss was scaled or differentiated in between.
        """
        if not tf.executing_eagerly():
            return bool(dependencies(grads, [values_of(each) for each in unscaled])[0])
        first, last = _number_of(min(grads, key=_number_of, default=None)), max(map(_number_of, unscaled), default=0)
        alike = [each.shape for each in grads] == [each.shape for each in unscaled]
        return alike and first > last and not any(last < each.number < first for each in self._own_events())

    def _scaled_leaf(self, leaf: tf.Tensor, loss_scale: Any) -> tf.Tensor:
        event = _Event(loss_scale)

        @tf.custom_gradient
        def with_note(leaf: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
            def backward(upstream: Any) -> Any:
                event.close()
                self._note(_Event(loss_scale, _number_of(upstream), is_waiting=True))
                return tf.cast(times(upstream, loss_scale), leaf.dtype)

            return times(leaf, loss_scale), backward

        scaled = with_note(leaf) if is_gradient(leaf) else times(leaf, loss_scale)
        event.number, event.scaled = _number_of(scaled), weakref.ref(scaled)
        self._note(event)
        return scaled

    def _note(self, event: "_Event") -> None:
        with self._lock:
            self._events = [*self._events[-_REMEMBERED:], event]

    def _own_events(self) -> list["_Event"]:
        """Return the events of this thread; where it scaled nothing, those of the others, whose gradients it has."""
        events, thread = self._events, threading.current_thread()
        return [each for each in events if each.thread is thread] or events

    def _eager_sources(self, grads: Sequence[Any]) -> list[Any]:
        events, found = self._own_events(), {}
        for number in {_number_of(grad) for grad in grads}:
            before = [each for each in events if each.number < number]
            sources = [each for each in before if each.is_waiting] or [
                each for each in before if each is before[-1] or each.is_open()
            ]
            found.update({id(each): each for each in sources})
        return sorted(found.values(), key=lambda each: each.number)

    def _traced_sources(self, grads: Sequence[Any]) -> list[Any]:
        replica = current_replica()
        around = [each for graph in graphs_around() if graph is not None for each in self._traced.get(graph, ())]
        records = [each for each in around if each.replica == replica and each.loss_scale() is not None]
        if len({each.updates for each in records}) < 2:
            return records[-1:]
        found, _ = dependencies(grads, [each.loss_scale() for each in records])
        return [each for each in records if id(each.loss_scale()) in found] or (
            [each for each in records if each.is_waiting] or records[-1:]
        )

    def __deepcopy__(self, _: Any) -> "ScaledLosses":
        return ScaledLosses()

    def __reduce__(self) -> Any:
        return ScaledLosses, ()


class _Event:
    """A loss was scaled eagerly, or differentiated: then its gradients wait to be unscaled."""

    def __init__(self, loss_scale: Any, number: float = 0.0, is_waiting: bool = False) -> None:
        self.thread, self.number, self.is_waiting = threading.current_thread(), number, is_waiting
        self.scaled: Any = None
        self._loss_scale = loss_scale

    def is_open(self) -> bool:
        """Return whether somebody still holds a scaled loss that was not differentiated."""
        return self.scaled is not None and self.scaled() is not None

    def close(self) -> None:
        """Note that the gradients are unscaled, or wait under an event of their own."""
        self.is_waiting, self.scaled = False, None

    def loss_scale(self) -> Any:
        return self._loss_scale

    def distinct(self) -> float:
        """Return what differs between two scales: their number."""
        return float(self._loss_scale)


class _Traced:
    """A loss that was scaled in a graph, after so many `updates` of the scale; does not keep the graph alive."""

    def __init__(self, loss_scale: Any, updates: int, replica: int) -> None:
        self.loss_scale, self.updates, self.replica = weakref.ref(loss_scale), updates, replica
        self.is_waiting = True

    def close(self) -> None:
        """Note that the gradients are unscaled."""
        self.is_waiting = False

    def distinct(self) -> float:
        """Return what differs between two scales: how often the scale was updated before."""
        return self.updates


def values_of(leaf: Any) -> Any:
    """Return the values of `IndexedSlices`, and a tensor as it is."""
    return leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf


def _number_of(leaf: Any) -> float:
    """Return the id of an eager tensor, which is larger than that of each older one; infinite for what has none."""
    return float(getattr(values_of(leaf), "_id", "inf"))


def dependencies(grads: Iterable[Any], sought: Iterable[Any]) -> tuple[set[int], set[str]]:
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
        elif isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            names.add(tensor.op.name)
            tensors.extend(tensor.op.inputs)
    return found, names

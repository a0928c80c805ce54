"""The loss scale that multiplied the loss of given gradients, where several scaled losses wait for theirs."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf._records import Records, current_replica, dependencies
from lossscale_tf._verbs import Gradient, Tree, is_gradient, scale_by, times, values_of

_REMEMBERED = 256
"""How many events of eager steps are kept: enough for the micro-batches of a step, and little to hold."""


class ScaledLosses:
    """The scaled losses of one optimizer, and the scale of each until its gradients are unscaled.

    An eager gradient is told by when it was made: a tensor's id grows with each tensor, and a loss notes when it is
    differentiated. A gradient in a graph is told by the operations that it depends on.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._events: list[_Event] = []
        self._updates = 0
        self._lock = threading.Lock()

    def scale(self, loss: Tree, loss_scale: tf.Tensor) -> Tree:
        """Return `loss` times `loss_scale`, and remember that it was."""
        if tf.executing_eagerly():
            return tf.nest.map_structure(lambda leaf: self._scaled_leaf(tf.convert_to_tensor(leaf), loss_scale), loss)
        self._records.here().scaled_losses.append(_Traced(loss_scale, self._updates, current_replica()))
        return scale_by(loss, loss_scale)

    def updated_in_graph(self) -> None:
        """Note that a traced step updates the scale: what is scaled after it may be scaled by another number."""
        self._updates += 1

    def scale_of(self, grads: Sequence[Gradient], waiting_only: bool = False) -> tf.Tensor | None:
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
        if len(found) > 1 and len({each.distinct() for each in found}) > 1:
            raise CallOrderError(
                "these gradients may be of losses that were scaled by different loss scales; unscale the gradients of "
                "one loss before the next loss is scaled, and before you process or add them up"
            )
        return found[-1].loss_scale() if found else None

    def made_since(self, grads: Sequence[Gradient], unscaled: Sequence[Gradient]) -> bool:
        """Return whether `grads` were computed from `unscaled`, which were unscaled in this step.

        Eagerly, they were if they have the same shapes, are newer, and no loss was scaled or differentiated in between.
        """
        if not tf.executing_eagerly():
            return bool(dependencies(grads, [values_of(each) for each in unscaled])[0])
        first = min(map(_number_of, grads), default=float("inf"))
        last = max(map(_number_of, unscaled), default=0.0)
        alike = [each.shape for each in grads] == [each.shape for each in unscaled]
        return alike and first > last and not any(last < each.number < first for each in self._own_events())

    def _scaled_leaf(self, leaf: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
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
            # A new list, since `_own_events` reads the old one without the lock, in other threads.
            self._events = [*self._events[-_REMEMBERED:], event]

    def _own_events(self) -> list["_Event"]:
        """Return the events of this thread; where it scaled nothing, those of the others, whose gradients it has."""
        events, thread = self._events, threading.current_thread()
        return [each for each in events if each.thread is thread] or events

    def _eager_sources(self, grads: Sequence[Gradient]) -> Sequence["_ScaledLoss"]:
        events: list[_Event] = self._own_events()
        found: dict[int, _Event] = {}
        for number in {_number_of(grad) for grad in grads}:
            before = [each for each in events if each.number < number]
            sources = [each for each in before if each.is_waiting] or [
                each for each in before if each is before[-1] or each.is_open()
            ]
            found.update({id(each): each for each in sources})
        return sorted(found.values(), key=lambda each: each.number)

    def _traced_sources(self, grads: Sequence[Gradient]) -> Sequence["_ScaledLoss"]:
        replica, places = current_replica(), self._records.around()
        losses: list[_Traced] = [
            each
            for place in places
            for each in place.scaled_losses
            if each.replica == replica and each.loss_scale() is not None
        ]
        # Without an update in between all of them have one scale, and the walk through the graph is saved.
        if len({each.updates for each in losses}) < 2:
            return losses[-1:]
        found, _ = dependencies(grads, [each.loss_scale() for each in losses])
        return [each for each in losses if id(each.loss_scale()) in found] or (
            [each for each in losses if each.is_waiting] or losses[-1:]
        )


class _Event:
    """A loss was scaled eagerly, or differentiated: then its gradients wait to be unscaled."""

    def __init__(self, loss_scale: tf.Tensor, number: float = 0.0, is_waiting: bool = False) -> None:
        self.thread, self.number, self.is_waiting = threading.current_thread(), number, is_waiting
        self.scaled: weakref.ref[Any] | None = None
        self._loss_scale = loss_scale

    def is_open(self) -> bool:
        """Return whether somebody still holds a scaled loss that was not differentiated."""
        return self.scaled is not None and self.scaled() is not None

    def close(self) -> None:
        """Note that the gradients are unscaled, or wait under an event of their own."""
        self.is_waiting, self.scaled = False, None

    def loss_scale(self) -> tf.Tensor:
        return self._loss_scale

    def distinct(self) -> float:
        """Return a number that differs between two scales. Synchronises with the host."""
        return float(self._loss_scale)


class _Traced:
    """A loss that was scaled in a graph, after so many `updates` of the scale; does not keep the graph alive."""

    def __init__(self, loss_scale: tf.Tensor, updates: int, replica: int) -> None:
        self.loss_scale, self.updates, self.replica = weakref.ref(loss_scale), updates, replica
        self.is_waiting = True

    def close(self) -> None:
        self.is_waiting = False

    def distinct(self) -> float:
        """Return how often the scale was updated before: its value is unknown while the graph is traced."""
        return self.updates


_ScaledLoss: TypeAlias = _Event | _Traced


def _number_of(leaf: Gradient) -> float:
    """Return the id of an eager tensor, which is larger than that of each older one; infinite for what has none."""
    # Nothing public tells of two tensors which is older; eager tensors have ids from one counter that only grows.
    return float(getattr(values_of(leaf), "_id", "inf"))

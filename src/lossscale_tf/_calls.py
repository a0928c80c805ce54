"""The calls of each step of an optimizer: the scale of its loss, and which calls are missing or repeated.

A record belongs to one graph being traced, or one thread of eager execution, and to one replica in it. Only a scaled
loss, or gradients of a variable that was applied already, begin the next step. Graphs are referenced weakly, so that
traces can be freed.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf._verbs import Gradient, is_narrow, unconverted

_Key: TypeAlias = "weakref.ref[Any] | None"
"""A weak reference to a graph; None for eager execution."""
_REMEMBERED = 64
"""The number of records to keep, for gradients that are unscaled after other losses are scaled."""


class Record:
    """The calls of one step.

    Attributes:
        owner: The `Calls` of its optimizer.
        by_keras: Whether `scale_loss` scaled the loss, so that the gradients are applied as they are.
        is_scaled: Whether a loss was scaled.
        is_unscaled: Whether gradients were unscaled.
        is_waiting: Whether a loss was scaled, and its gradients were not unscaled or applied yet.
        is_from_outside: Whether the loss was scaled in another graph or thread, if at all.

    """

    def __init__(self, owner: "Calls", by_keras: bool = False) -> None:
        self.owner = owner
        self.by_keras = by_keras
        self.is_scaled = self.is_unscaled = self.is_waiting = self.is_from_outside = False
        self._expected: set[int] = set()
        self._applied: set[tuple[_Key, int]] = set()
        self._held_in: _Key = None
        self._loss_scale: Callable[[], tf.Tensor | None] = lambda: None
        self._updates = self._since = 0

    @property
    def is_applied(self) -> bool:
        """Whether gradients of this step were applied to at least one variable."""
        return bool(self._applied)

    def hold(self, loss_scale: tf.Tensor, updates: int = 0) -> None:
        """Note that a loss was multiplied by `loss_scale`; `updates` counts its updates in traces so far."""
        if not self._since or self._expected:  # losses of one loop with the same scale count as old as the first one
            self._since = _number_of(loss_scale)
        self._held_in, self._updates = _here(), updates
        self._loss_scale = weakref.ref(loss_scale) if self._held_in else lambda: loss_scale
        self.is_scaled = self.is_waiting = True

    def has_other_scale(self, loss_scale: tf.Tensor, updates: int) -> bool:
        """Return whether the scale has changed since `hold`. Eagerly, synchronises with the host."""
        held = self._loss_scale()
        return self._updates != updates if held is None or self._held_in else float(held) != float(loss_scale)

    def loss_scale(self) -> tf.Tensor | None:
        """Return the noted scale; None in any other graph, which must not use this tensor."""
        return self._loss_scale() if self._held_in == _here() else None

    def is_older_than(self, grads: Sequence[Any]) -> bool:
        """Return whether at least one of `grads` was computed after the loss was scaled; others may be constants."""
        numbers = [_number_of(each) for each in grads if isinstance(each, tf.Tensor | tf.IndexedSlices)]
        return not numbers or self._since <= max(numbers)

    def is_as_old_as(self, last: "Record") -> None:
        """Take over the age of `last`, which has the same scale, so that its gradients are divided by this scale."""
        self._since = last._since

    def is_newer_than(self, other: "Record | None") -> bool:
        """Return whether the last loss was scaled after that of `other`; True if `other` is None."""
        return other is None or self._since > other._since

    def expect(self, variables: Iterable[Any]) -> None:
        """Note that one call has computed unscaled gradients of `variables`, which are to be applied later."""
        ids = set(map(id, variables))
        self._expected |= ids
        self._applied = {(key, each) for key, each in self._applied if each not in ids}
        self.is_unscaled, self.is_waiting = True, False

    def expects(self, variables: Sequence[Any]) -> bool:
        """Return whether gradients of one of `variables` (of any, if empty) are expected and not applied yet."""
        expected = not self._expected.isdisjoint(map(id, variables)) if variables else bool(self._expected)
        return expected and not self.is_applied_to(variables)

    def apply(self, variables: Iterable[Any]) -> None:
        """Note that gradients of `variables` are applied in the graph being built; each branch is its own graph."""
        here = _here()
        self._applied |= {(here, id(variable)) for variable in variables}
        self.is_waiting = False

    def is_applied_to(self, variables: Sequence[Any]) -> bool:
        """Return whether gradients of one of `variables` were applied in the graph being built or in one around it."""
        if not self._applied:
            return False
        keys = [_key(graph) for graph in graphs_around()]
        return any((key, id(variable)) in self._applied for key in keys for variable in variables)

    def as_from_outside(self) -> "Record":
        """Return a copy for a graph, without the scale, since an eager scale would be a constant in the graph."""
        copy = Record(self.owner, self.by_keras)
        copy.is_scaled, copy.is_unscaled, copy.is_from_outside = self.is_scaled, self.is_unscaled, True
        copy._applied, copy._expected, copy._since = set(self._applied), set(self._expected), self._since
        self.is_waiting = False
        return copy


_Steps: TypeAlias = deque[Record]


class Calls:
    """The records of one optimizer."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._graphs: weakref.WeakKeyDictionary[Any, dict[tuple[int, bool], _Steps]] = weakref.WeakKeyDictionary()
        self._latest: Record | None = None

    def scale(self, loss_scale: tf.Tensor, updates: int = 0, by_keras: bool = False) -> Record:
        """Return the record of a loss that is scaled by `loss_scale`: a new one if the last was applied.

        Raises `CallOrderError` if gradients of a loss with another scale were not applied yet.
        """
        steps = self._steps(current_graph())
        record, last = Record(self, by_keras), steps[-1] if steps else None
        if last is None or (last.is_scaled and last.has_other_scale(loss_scale, updates)):
            self._require_nothing_waits(last)
            steps.append(record)
        elif last.is_applied or last.by_keras != by_keras:
            record.is_as_old_as(last)
            steps[-1] = record
        else:
            record = last
        record.hold(loss_scale, updates)
        self._latest = record
        return record

    @unconverted
    def scale_and_unscale(self, loss_scale: tf.Tensor, variables: Iterable[Any]) -> Record:
        """Return the record of a call that scales and unscales; the record of a user's loop does not change."""
        steps = self._steps(current_graph(), are_whole=True)
        if not steps:
            steps.append(Record(self))
        steps[-1].hold(loss_scale)
        steps[-1].expect(variables)
        return steps[-1]

    def unscale(self, grads: Sequence[Any]) -> Record:
        """Return the record of gradients to unscale; a new record if their loss was scaled in a trace."""
        record = self._current()
        if record is None or (record.is_applied and (record.is_from_outside or self._is_scaled_elsewhere())):
            record = self._from_outside(by_keras=False)
        record = self.of(grads, record)
        record.is_unscaled, record.is_waiting = True, False
        return record

    def of(self, grads: Sequence[Any], latest: Record) -> Record:
        """Return the record of gradients: `latest`, or an older one if they were made before its loss was scaled."""
        if latest.is_older_than(grads):
            return latest
        older = [record for record in self._steps(current_graph()) if record.is_older_than(grads)]
        return older[-1] if older else latest  # constants are older than all losses

    def apply(self, variables: Sequence[Any], grads: Sequence[Any] = ()) -> Record:
        """Return the record of gradients of `variables`, and note that they are applied."""
        record, whole = self._current(), self._current(are_whole=True)
        if (
            whole is not None
            and whole.expects(variables)
            and whole.is_newer_than(record)
            and whole.is_older_than(grads)
        ):
            record = whole
        is_over = record is not None and record.is_applied and record.by_keras and self._is_scaled_elsewhere()
        if record is None or is_over or record.is_applied_to(variables):
            record = self._from_outside(by_keras=self._latest is not None and self._latest.by_keras)
        record.apply(variables)
        return record

    def mark_of(self, leaf: Any) -> "Mark | None":
        """Return the mark of a tensor that this optimizer has scaled or unscaled."""
        found: Mark | None = getattr(leaf, "_loss_scaling", None)
        return found if found is not None and found.record.owner is self else None

    def is_missing(self, record: Record) -> tuple[bool, bool]:
        """Return whether scaling and unscaling are missing, in this step and in traces that apply no gradients."""
        if record.is_scaled and record.is_unscaled:
            return False, False
        others = self._open_in_graphs()
        return (
            not record.is_scaled and not any(each.is_scaled for each in others),
            not record.is_unscaled and not any(each.is_unscaled for each in others),
        )

    def forget_here(self) -> None:
        """Drop the records of this graph or thread and this replica, as after an error."""
        self._steps(current_graph()).clear()

    def forget_eager(self) -> None:
        """Drop the eager records of all threads, as after another state is loaded."""
        self._threads = threading.local()

    def _require_nothing_waits(self, last: Record | None) -> None:
        if last is None or not last.is_waiting:
            return
        # Eager gradients may be passed to a traced function; its runs are not seen here.
        if not tf.executing_eagerly() or not self._is_applied_in_graphs():
            self.forget_here()
            raise CallOrderError(
                "the loss scale has changed while gradients of the last scaled loss are still to come; unscale and "
                "apply them before the next loss is scaled, or scale both losses before either is applied"
            )

    def _current(self, are_whole: bool = False) -> Record | None:
        """Return the record of this replica in this graph or around it; a graph gets a copy of an eager record.

        Return None if no call was recorded.
        """
        here = current_graph()
        steps = self._steps(here, are_whole)
        if steps or here is None:
            return steps[-1] if steps else None
        for graph in graphs_around():
            around = self._steps(graph, are_whole)
            if around and graph is None:
                steps.append(around[-1].as_from_outside())
                return steps[-1]
            if around:
                return around[-1]
        return None

    def _from_outside(self, by_keras: bool) -> Record:
        """Begin the record of a step with a loss that was scaled in another graph or thread, or not at all."""
        record = Record(self, by_keras)
        record.is_from_outside = True
        self._steps(current_graph()).append(record)
        if self._latest is not None:
            record.is_scaled, self._latest.is_waiting = self._latest.is_waiting, False
        return record

    def _in_graphs(self, are_whole: Iterable[bool] = (False, True)) -> list[Record]:
        places = list(self._graphs.values())
        return [steps[-1] for place in places for (_, whole), steps in place.items() if steps and whole in are_whole]

    def _open_in_graphs(self, are_whole: Iterable[bool] = (False, True)) -> list[Record]:
        """Return the records of traces that apply no gradients; another trace or eager code applies them."""
        return [record for record in self._in_graphs(are_whole) if not record.is_applied]

    def _is_scaled_elsewhere(self) -> bool:
        """Return whether a trace scales losses, and other code applies their gradients."""
        return any(record.is_scaled for record in self._open_in_graphs(are_whole=[False]))

    def _is_applied_in_graphs(self) -> bool:
        """Return whether a trace unscales or applies gradients, perhaps of losses that were scaled outside of it."""
        return any(record.is_unscaled or record.is_applied for record in self._in_graphs(are_whole=[False]))

    def _steps(self, graph: Any, are_whole: bool = False) -> _Steps:
        """Return the last steps of this replica in a graph, or in this thread for None."""
        if graph is None:
            place: dict[tuple[int, bool], _Steps] = vars(self._threads).setdefault("place", {})
        else:
            place = self._graphs.setdefault(graph, {})
        return place.setdefault((current_replica(), are_whole), deque(maxlen=_REMEMBERED))

    # State of a thread or a graph cannot be copied or pickled; a copy begins with a new step.
    def __reduce__(self) -> tuple[type["Calls"], tuple[()]]:
        return Calls, ()


class Mark(NamedTuple):
    """The kind of a tensor: a scaled loss, an unscaled gradient, or the argument of unscaling.

    In a graph, `origin` is the gradient before it was divided by `loss_scale`. When it is applied, one product unscales
    and clips it, and TensorFlow prunes the unscaled tensor, which saves a write and a read of all gradients.
    """

    record: Record
    kind: Literal["loss", "scaled", "unscaled"]
    origin: Gradient | None = None
    loss_scale: tf.Tensor | None = None


def mark_loss(leaf: tf.Tensor, record: Record) -> None:
    """Mark a scaled loss. This attribute is the only one that this package sets on tensors."""
    leaf._loss_scaling = Mark(record, "loss")


def mark_gradient(leaf: Gradient, record: Record, grad: Any, loss_scale: tf.Tensor) -> None:
    """Mark a gradient before and after unscaling; in a graph with its origin, unless its dtype has changed."""
    is_same = not tf.executing_eagerly() and leaf.dtype == grad.dtype and not is_narrow(grad.dtype)
    unscaled = Mark(record, "unscaled")
    leaf._loss_scaling = unscaled._replace(origin=grad, loss_scale=loss_scale) if is_same else unscaled
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = unscaled
    if isinstance(grad, tf.Tensor | tf.IndexedSlices):
        grad._loss_scaling = Mark(record, "scaled")


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before unscaling in this graph, and their common scale.

    If they have no common scale, return them unchanged, and None.
    """
    if tf.executing_eagerly():
        return grads, None
    marks = [getattr(grad, "_loss_scaling", None) for grad in grads]
    found = [(each.origin, each.loss_scale) for each in marks if each is not None and each.origin is not None]
    if len(found) < len(grads) or len({id(loss_scale) for _, loss_scale in found}) != 1:
        return grads, None
    return [grad for grad, _ in found], found[0][1]


def current_graph() -> Any:
    """Return the graph being built; None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def graphs_around() -> Iterator[Any]:
    """Yield the graph being built and those around it, then None if the outermost code executes eagerly."""
    graph = current_graph()
    while graph is not None:
        yield graph
        # Only the graphs of functions have an outer graph; the graph of a session does not.
        graph = getattr(graph, "outer_graph", None)
    if tf.compat.v1.executing_eagerly_outside_functions():
        yield None


def current_replica() -> int:
    """Return the number of this replica; 0 without replicas."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    # On TPUs the number may be a tensor without a value while a step is traced, as one trace serves all replicas:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/distribute_lib.py#L3514
    return int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def _here() -> _Key:
    return None if tf.executing_eagerly() else _key(current_graph())


def _key(graph: Any) -> _Key:
    return None if graph is None else weakref.ref(graph)


def _number_of(leaf: Gradient) -> int:
    """Return a number that is larger than that of each older tensor."""
    # No public API says which of two tensors is older. TensorFlow numbers all tensors, also in graphs:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/framework/tensor.py
    number: int = leaf.values._id if isinstance(leaf, tf.IndexedSlices) else leaf._id
    return number

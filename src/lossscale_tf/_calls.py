"""The calls of each step of an optimizer: the scale of its loss, and which calls are missing or repeated.

A record is of one graph being traced, or one thread of eager execution, and of one replica in it. Only a scaled loss,
or a variable that is applied again, begins the next step. Graphs are held weakly, so that traces can be let go.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf._verbs import Gradient, is_narrow

_Key: TypeAlias = "weakref.ref[Any] | None"
"""A graph, held weakly; None for eager execution."""


class Record:
    """The calls of one step.

    Attributes:
        owner: The calls of its optimizer.
        by_keras: Whether `scale_loss` scaled the loss, so that the gradients are applied as they are.
        losses: How many losses were scaled.
        unscalings: How often gradients were unscaled.
        is_whole: Whether one call, such as `minimize`, has scaled, differentiated and unscaled.
        is_from_outside: Whether the loss was scaled in another graph or thread, if at all.

    """

    def __init__(self, owner: "Calls", by_keras: bool = False) -> None:
        self.owner = owner
        self.by_keras = by_keras
        self.losses = self.unscalings = 0
        self.is_whole = self.is_from_outside = False
        self._applied: set[tuple[_Key, int]] = set()
        self._held_in: _Key = None
        self._loss_scale: Callable[[], tf.Tensor | None] = lambda: None
        self._updates = 0

    @property
    def is_applied(self) -> bool:
        """Whether gradients of this step were applied, to some variables at least."""
        return bool(self._applied)

    @property
    def is_open(self) -> bool:
        """Whether gradients of a scaled loss are still to come."""
        return self.losses > self.unscalings and not self._applied

    def hold(self, loss_scale: tf.Tensor, updates: int = 0) -> None:
        """Note that a loss was multiplied by `loss_scale`, which had been updated so often in traces before."""
        self.losses += 1
        self._held_in, self._updates = _here(), updates
        self._loss_scale = weakref.ref(loss_scale) if self._held_in else lambda: loss_scale

    def has_other_scale(self, loss_scale: tf.Tensor, updates: int) -> bool:
        """Return whether the scale has changed since it was held. Eagerly, synchronises with the host."""
        held = self._loss_scale()
        return self._updates != updates if held is None or self._held_in else float(held) != float(loss_scale)

    def loss_scale(self) -> tf.Tensor | None:
        """Return the scale that was held; None in another graph than it was held in, where no tensor may be used."""
        return self._loss_scale() if self._held_in == _here() else None

    def apply(self, variables: Iterable[Any]) -> None:
        """Note that gradients of `variables` are applied in the graph being built; two branches are two graphs."""
        here = _here()
        self._applied |= {(here, id(variable)) for variable in variables}

    def is_applied_to(self, variables: Sequence[Any]) -> bool:
        """Return whether gradients of one of `variables` were applied in the graph being built or in one around it."""
        if not self._applied:
            return False
        keys = [_key(graph) for graph in graphs_around()]
        return any((key, id(variable)) in self._applied for key in keys for variable in variables)

    def as_from_outside(self) -> "Record":
        """Return a copy for a graph, without the scale: an eager one would be a constant there."""
        copy = Record(self.owner, self.by_keras)
        copy.losses, copy.unscalings, copy._applied = self.losses, self.unscalings, set(self._applied)
        copy.is_whole, copy.is_from_outside = self.is_whole, True
        return copy


class Calls:
    """The records of one optimizer."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._graphs: weakref.WeakKeyDictionary[Any, dict[int, Record]] = weakref.WeakKeyDictionary()
        self._last_by_keras = False

    def scale(self, loss_scale: tf.Tensor, updates: int = 0, by_keras: bool = False) -> Record:
        """Return the record of a loss that is scaled by `loss_scale`: a new one if the last was applied.

        Raises `CallOrderError` if gradients of a loss with another scale are still to come.
        """
        here, replica = self._place(current_graph()), current_replica()
        record = here.get(replica)
        if record is None or record.is_applied or record.is_whole or record.by_keras != by_keras:
            record = here[replica] = Record(self, by_keras)
        elif record.is_open and record.has_other_scale(loss_scale, updates):
            if not tf.executing_eagerly() or not self._is_unscaled_elsewhere():
                self.forget_here()
                raise CallOrderError(
                    "the loss scale has changed while gradients of the last scaled loss are still to come; unscale "
                    "and apply them before the next loss is scaled, or scale both losses before either is applied"
                )
            record = here[replica] = Record(self, by_keras)
        record.hold(loss_scale, updates)
        self._last_by_keras = by_keras
        return record

    def scale_and_unscale(self, loss_scale: tf.Tensor) -> Record:
        """Return the record of one call that does both, which leaves the record of a loop as it is."""
        record = Record(self)
        record.is_whole, record.unscalings = True, 1
        record.hold(loss_scale)
        current = self._current()
        if current is None or current.is_whole:
            self._place(current_graph())[current_replica()] = record
        return record

    def unscale(self) -> Record:
        """Return the record of gradients to be unscaled: another one if their loss was scaled in a trace."""
        record = self._current()
        if record is None or record.is_whole or (record.is_applied and self._is_scaled_elsewhere()):
            record = self._from_outside(by_keras=False)
        record.unscalings += 1
        record.by_keras = False  # the loop unscales, and does not leave it to `apply_gradients`
        return record

    def apply(self, variables: Sequence[Any]) -> Record:
        """Return the record of gradients of `variables`, and note that they are applied."""
        record = self._current()
        is_over = record is not None and record.is_whole and record.is_applied and self._is_scaled_elsewhere()
        if record is None or is_over or record.is_applied_to(variables):
            record = self._from_outside(self._last_by_keras)
        record.apply(variables)
        return record

    def mark_of(self, leaf: Any) -> "Mark | None":
        """Return the mark of a tensor that this optimizer has scaled or unscaled."""
        found: Mark | None = getattr(leaf, "_loss_scaling", None)
        return found if found is not None and found.record.owner is self else None

    def is_missing(self, record: Record) -> tuple[bool, bool]:
        """Return whether scaling and unscaling are missing, in this step and in traces that leave theirs open."""
        if record.losses and record.unscalings:
            return False, False
        is_unscaled = record.unscalings or any(each.unscalings for each in self._open_in_graphs())
        return not record.losses and not self._is_scaled_elsewhere(), not is_unscaled

    def forget_here(self) -> None:
        """Forget the step of this place and replica, as after an error."""
        self._place(current_graph()).pop(current_replica(), None)

    def forget_eager(self) -> None:
        """Forget the eager steps of all threads, as after another state is loaded."""
        self._threads = threading.local()

    def _current(self) -> Record | None:
        """Return the record of this replica, in this graph or around it; that of eager execution is copied for a graph.

        None means that no call is known.
        """
        here, replica = current_graph(), current_replica()
        if here is None:
            return self._place(None).get(replica)
        for graph in graphs_around():
            record = self._place(graph).get(replica)
            if record is not None and graph is None:
                record = self._place(here)[replica] = record.as_from_outside()
            if record is not None:
                return record
        return None

    def _from_outside(self, by_keras: bool) -> Record:
        """Begin the record of a step that was scaled elsewhere, or not at all."""
        record = self._place(current_graph())[current_replica()] = Record(self, by_keras)
        record.is_from_outside = True
        return record

    def _in_graphs(self) -> list[Record]:
        return [record for place in list(self._graphs.values()) for record in place.values()]

    def _open_in_graphs(self) -> list[Record]:
        """Return the records of traces that apply no gradients: another trace, or eager code, does."""
        return [record for record in self._in_graphs() if not record.is_applied]

    def _is_scaled_elsewhere(self) -> bool:
        """Return whether a trace scales losses and leaves their gradients to others."""
        return any(record.losses for record in self._open_in_graphs())

    def _is_unscaled_elsewhere(self) -> bool:
        """Return whether a trace unscales or applies gradients of losses that are scaled outside of it."""
        return any(record.is_from_outside for record in self._in_graphs())

    def _place(self, graph: Any) -> dict[int, Record]:
        """Return the records of a graph, or of this thread for None, by replica."""
        if graph is not None:
            return self._graphs.setdefault(graph, {})
        places: dict[str, dict[int, Record]] = vars(self._threads)
        return places.setdefault("place", {})

    # What is of a thread or a graph cannot be copied or pickled; a copy begins with a new step.
    def __reduce__(self) -> tuple[type["Calls"], tuple[()]]:
        return Calls, ()


class Mark(NamedTuple):
    """What a returned tensor is: a scaled loss, or an unscaled gradient of a record.

    In a graph, `origin` is the gradient before it was divided by `loss_scale`. Who applies it unscales and clips by one
    product, and TensorFlow prunes the unscaled tensor: a write and a read of all gradients less a step.
    """

    record: Record
    is_gradient: bool
    origin: Gradient | None = None
    loss_scale: tf.Tensor | None = None


def mark_loss(leaf: tf.Tensor, record: Record) -> None:
    """Mark a scaled loss. This attribute is the only one that this package sets on tensors."""
    leaf._loss_scaling = Mark(record, is_gradient=False)


def mark_gradient(leaf: Gradient, record: Record, grad: Any, loss_scale: tf.Tensor) -> None:
    """Mark an unscaled gradient, in a graph with what it was before, unless its dtype has changed."""
    leaf._loss_scaling = unscaled = Mark(record, is_gradient=True)
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = unscaled
    if not tf.executing_eagerly() and leaf.dtype == grad.dtype and not is_narrow(grad.dtype):
        leaf._loss_scaling = Mark(record, is_gradient=True, origin=grad, loss_scale=loss_scale)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before they were unscaled in this graph, and the one scale that they had.

    If there is no such scale, they are returned as they are, with None.
    """
    if tf.executing_eagerly():
        return grads, None
    marks = [getattr(grad, "_loss_scaling", None) for grad in grads]
    found = [(each.origin, each.loss_scale) for each in marks if each is not None and each.origin is not None]
    if len(found) < len(grads) or len({id(loss_scale) for _, loss_scale in found}) != 1:
        return grads, None
    return [grad for grad, _ in found], found[0][1]


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
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    # On TPUs the number may be a tensor without a value while a step is traced, as one trace serves all replicas:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/distribute_lib.py#L3514
    return int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def _here() -> _Key:
    return None if tf.executing_eagerly() else _key(current_graph())


def _key(graph: Any) -> _Key:
    return None if graph is None else weakref.ref(graph)

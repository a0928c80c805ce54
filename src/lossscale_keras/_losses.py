"""The scale of the last loss, to which gradients belong unless the caller names another loss.

Each thread of eager execution, and each graph that TensorFlow traces, has a record for each replica. TensorFlow also
writes the scale to a variable, for gradients of a loss that was scaled in another graph or thread. Nothing is recorded
while JAX or torch.compile traces, since the arrays have no values then.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from lossscale_core.errors import CallOrderError
from lossscale_keras._backend import (
    BACKEND,
    graphs_around,
    is_compiling,
    is_traced,
    replica_number,
    shared_variable,
    xp,
)

_MAX_ELSEWHERE = 64
"""The number of places to remember, so that a loop that starts a thread for each step keeps a bounded number."""


class ScaledLoss(NamedTuple):
    """The mark of a scaled loss, in its attribute `_loss_scaling`."""

    owner: "Losses"
    loss_scale: Any


class Record:
    """The last loss that was scaled in a thread or a graph, and the calls since then."""

    def __init__(self, is_traced: bool = False) -> None:
        self.key = object()
        self.is_traced, self.has_applied = is_traced, False
        self.by_keras: bool | None = None
        """Whether `scale_loss` scaled the loss, as Keras does, or `get_scaled_loss`; None before the first loss."""
        self.loss_scale: Any = None
        """The scale of the loss; None if only the variable has it."""
        self.applied: set[int] = set()
        """The variables that were updated since the loss was scaled."""
        self.is_unscaled = False
        """Whether gradients were unscaled since the loss was scaled."""
        self.applied_since_unscaling: set[int] | None = None
        """The variables that were updated since gradients were unscaled; None before."""
        self.processes = False
        """Whether gradients were applied that the caller has processed after they were unscaled."""
        self.reads_scale = False
        """Whether the caller has read the scale since the loss was scaled, and may have divided by it."""
        self.computed: set[int] = set()
        """The variables with gradients from `compute_gradients`, which were not updated since."""

    def begin(self, by_keras: bool) -> None:
        """Record a new loss."""
        self.by_keras, self.loss_scale, self.applied, self.is_unscaled = by_keras, None, set(), False
        self.processes = self.reads_scale = False
        if by_keras:
            self.computed = set()


class Pending(NamedTuple):
    """A loss whose gradients were not yet applied to some variables."""

    by_keras: bool | None
    loss_scale: Any
    is_certain: bool
    """Whether it is the last loss for certain: no other graph or thread scales losses or unscales gradients."""
    is_untouched: bool
    """Whether no variable at all was updated since."""


class Gradients(NamedTuple):
    """What is known of gradients that are about to be applied."""

    loss_scale: Any
    """The scale to divide them by; None if they are unscaled."""
    is_scaled: bool = True
    """Whether their loss was scaled, as far as is known."""
    is_unscaled: bool = True
    """Whether they were unscaled where they had to be, as far as is known."""
    is_of_last: bool = True
    """Whether they are of the last loss, and not of `compute_gradients` or an earlier loss."""
    is_processed: bool = False
    """Whether the caller has processed them after they were unscaled."""


class Elsewhere(NamedTuple):
    """A thread or a graph that scales losses or unscales gradients, and applies none."""

    by_keras: bool | None
    is_traced: bool
    record: Any = None
    """A weak reference to the record of a graph, which dies with it, as after a trace that fails."""


class Losses:
    """The records of one optimizer."""

    def __init__(self) -> None:
        self.has_warned = self.has_traced = False
        self._threads = threading.local()
        self._replicas: dict[int, Record] = {}
        self._elsewhere: dict[Any, Elsewhere] = {}
        """The places that scale losses or unscale gradients, and apply none."""
        self._shared = shared_variable("last_loss_scale")

    # State of threads and graphs cannot be copied or pickled; a copy begins with a new step.
    def __reduce__(self) -> tuple[type["Losses"], tuple[()]]:
        return Losses, ()

    def scale(self, loss_scale: Any, by_keras: bool) -> Any:
        """Record that a loss is multiplied by `loss_scale`, and return the scale to keep with the loss."""
        if is_compiling() or (BACKEND != "tensorflow" and is_traced([loss_scale])):
            self.has_traced = True
            self._elsewhere["traced"] = Elsewhere(by_keras, True)
            return None
        records = self._records()
        for record in records:
            record.begin(by_keras)
        records[0].loss_scale = loss_scale
        self._note_elsewhere(records)
        if self._shared is not None:
            self._shared.assign(loss_scale if by_keras else -loss_scale)  # the sign says who scaled it
        return loss_scale

    def scale_with(self, loss: Any) -> Any:
        """Return the scale of a loss that this optimizer has scaled; None for anything else."""
        mark = getattr(loss, "_loss_scaling", None)
        return mark.loss_scale if isinstance(mark, ScaledLoss) and mark.owner is self else None

    def were_scaled(self) -> bool:
        """Return whether a loss was scaled in this thread, or in a place that applies no gradients."""
        return self.has_traced or bool(self._elsewhere) or self._of_thread().by_keras is not None

    def apply_traced(self) -> None:
        """Record that the trace of JAX that scaled a loss applies its gradients itself, and passes none on."""
        self._elsewhere.pop("traced", None)

    def unscale(self, present: Any) -> Any:
        """Record that gradients are unscaled, and return the scale of the last loss; `present` before the first."""
        records = self._records()
        loss_scale = self._last_scale(records, present)
        for record in records:
            record.is_unscaled, record.applied_since_unscaling = True, set()
        self._note_elsewhere(records)
        return loss_scale

    def read_scale(self) -> None:
        """Record that the caller reads the scale, perhaps to divide gradients by it."""
        for record in self._records():
            record.reads_scale = True

    def compute(self, variables: Iterable[Any]) -> None:
        """Record that `compute_gradients` returns gradients of these variables, which need not be applied."""
        for record in self._records():
            record.computed.update(map(id, variables))

    def look_up_unscaled(self, variables: Iterable[Any], is_computed: bool) -> Gradients:
        """Return what is known of gradients that this optimizer has unscaled, in `compute_gradients` or not."""
        pending = self._pending(self._records(), set(map(id, variables)), None)
        return Gradients(None, is_scaled=is_computed or pending is not None, is_of_last=not is_computed)

    def look_up(self, variables: Iterable[Any], takes_scaled: bool, present: Any, known: Any = None) -> Gradients:
        """Return what is known of gradients that are about to be applied.

        Args:
            variables: The variables to update.
            takes_scaled: Whether the caller takes scaled gradients; else unscaled ones, or those of Keras's losses.
            present: The present scale, which is that of the gradients if no loss was scaled.
            known: The scale of scaled gradients, of a loss that the caller names, or that was needed for their norm.

        Raises:
            CallOrderError: The gradients are scaled for certain, and the caller takes unscaled ones.
        """
        ids, records = set(map(id, variables)), self._records()
        pending = self._pending(records, ids, present)
        is_of_keras = pending is not None and pending.by_keras is True
        if known is not None and (takes_scaled or is_of_keras):
            return Gradients(known, is_of_last=known is records[0].loss_scale)
        is_of_loss = pending is not None and (takes_scaled or (is_of_keras and pending.is_untouched))
        if not is_of_loss and any(not ids.isdisjoint(record.computed) for record in records):
            return Gradients(None, is_of_last=False)
        since = [each.applied_since_unscaling for each in records if each.applied_since_unscaling is not None]
        may_be_unscaled = any(ids.isdisjoint(each) for each in since)
        is_raw = known is not None and known is records[0].loss_scale
        if may_be_unscaled and not is_raw and any(record.is_unscaled for record in records):
            return Gradients(None, is_scaled=pending is not None, is_processed=True)
        is_elsewhere = pending is not None and not pending.is_certain
        if is_elsewhere and not (takes_scaled or may_be_unscaled) and self._disagree():
            last = xp.convert_to_tensor(self._shared)
            return Gradients(xp.where(last > 0.0, last, 1.0))
        if takes_scaled or is_of_keras:
            return Gradients(present if pending is None else pending.loss_scale, is_scaled=pending is not None)
        processes = any(record.processes for record in records)
        may_be_divided = may_be_unscaled or processes or any(record.reads_scale for record in records)
        if is_raw or (pending is not None and pending.is_certain and not may_be_divided):
            self._elsewhere.pop(records[-1].key, None)  # a trace that fails here passes nothing on
            raise CallOrderError(
                "these gradients are still multiplied by the loss scale: get_scaled_loss was called, and "
                "get_unscaled_gradients was not; apply what get_unscaled_gradients(grads) returns, or use minimize"
            )
        if pending is not None or (processes and any(record.by_keras is not None for record in records)):
            return Gradients(None, is_processed=may_be_unscaled)
        return Gradients(None, is_scaled=False, is_unscaled=may_be_unscaled, is_processed=may_be_unscaled)

    def apply(self, variables: Iterable[Any], found: Gradients) -> None:
        """Record that these variables are updated, with gradients of which `look_up` has found something."""
        ids, records = set(map(id, variables)), self._records()
        for record in records:
            record.computed -= ids
            record.processes |= found.is_processed
        if not found.is_of_last:
            return
        # In the graph being built alone: of two branches both may update a variable.
        records[0].applied |= ids
        if records[0].applied_since_unscaling is not None:
            records[0].applied_since_unscaling |= ids
        for record in records:
            record.has_applied = True
            self._elsewhere.pop(record.key, None)

    def _pending(self, records: list[Record], ids: set[int], present: Any) -> Pending | None:
        """Return the last loss, if its gradients may not have been applied to all of these variables."""
        others = self._others(records[-1])
        applied = set().union(*(record.applied for record in records))
        last = next((record for record in records if record.by_keras is not None), None)
        if last is not None and ids.isdisjoint(applied):
            return Pending(last.by_keras, self._last_scale(records, present), not others, not applied)
        if graphs_around():
            eager = self._of_thread()
            if eager.by_keras is not None and ids.isdisjoint(eager.applied):
                return Pending(eager.by_keras, self._last_anywhere(present), False, not applied)
        if others:
            return Pending(others[-1].by_keras, self._last_anywhere(present), False, not applied)
        return None

    def _last_scale(self, records: list[Record], present: Any) -> Any:
        """Return the scale of the last loss in this graph or thread, unless another one may have scaled a later one."""
        # A graph may be called by several others, so it captures no tensor of a graph around it.
        own, others = records[0], self._others(records[-1])
        # Another thread does not overtake the loss of this one.
        is_overtaken = any(each.is_traced and (own.applied or not own.is_traced) for each in others)
        return self._last_anywhere(present) if own.loss_scale is None or is_overtaken else own.loss_scale

    def _last_anywhere(self, present: Any) -> Any:
        """Return the last scale that was used in any place; the present one before the first, and in JAX and torch."""
        if self._shared is None or present is None:
            return present
        last = xp.abs(xp.convert_to_tensor(self._shared))
        return xp.where(last > 0.0, last, present)

    def _disagree(self) -> bool:
        """Return whether `scale_loss` and `get_scaled_loss` are called in different places."""
        return self._shared is not None and len({each.by_keras for each in self._elsewhere.values()} - {None}) > 1

    def _others(self, own: Record) -> list[Elsewhere]:
        for key in [key for key, each in self._elsewhere.items() if each.record is not None and each.record() is None]:
            del self._elsewhere[key]
        return [each for key, each in self._elsewhere.items() if key is not own.key]

    def _note_elsewhere(self, records: list[Record]) -> None:
        # Each graph around, since a function that scales losses may be traced within one caller, and serve another.
        for record in records:
            if not record.has_applied:
                self._elsewhere.pop(record.key, None)
                reference = weakref.ref(record) if record.is_traced else None
                self._elsewhere[record.key] = Elsewhere(record.by_keras, record.is_traced, reference)
        while len(self._elsewhere) > _MAX_ELSEWHERE:
            self._elsewhere.pop(next(iter(self._elsewhere)))

    def _records(self) -> list[Record]:
        """Return the records of the graph being built and those around it, or that of the thread in eager execution."""
        return [self._of_graph(graph) for graph in graphs_around()] or [self._of_thread()]

    def _of_graph(self, graph: Any) -> Record:
        return _record_in(graph, (self, replica_number()), is_traced=True)

    def _of_thread(self) -> Record:
        replica = replica_number()
        if replica is None:
            return _record_in(self._threads, None)
        return self._replicas.setdefault(replica, Record())  # each run of a strategy starts new threads


def _record_in(place: Any, key: Any, is_traced: bool = False) -> Record:
    """Return the record in an attribute of a graph or thread, which dies with it; make it if there is none."""
    if not hasattr(place, "_loss_scaling"):
        place._loss_scaling = {}
    records: dict[Any, Record] = place._loss_scaling
    if key not in records:
        records[key] = Record(is_traced)
    return records[key]

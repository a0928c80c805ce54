"""The scale of the last loss, to which gradients belong unless the caller names another loss.

Each thread of eager execution, and each graph that TensorFlow traces, has a record for each replica. TensorFlow also
writes the scale to a variable, for gradients of a loss that was scaled in another graph or thread. Nothing is recorded
while JAX or torch.compile traces, since the arrays have no values then.

Records decide by what the gradients are divided, and whether a missing call is warned of. A step is refused only if
nothing but the last loss of this graph or thread can have its gradients, and the caller cannot have divided them.
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


class ScaledLoss(NamedTuple):
    """The mark of a scaled loss, in its attribute `_loss_scaling`, and part of the marks of its gradients."""

    owner: "Losses"
    loss_scale: Any
    applied: set[int] | None
    """The variables that were updated by its gradients; None for a loss of `compute_gradients`."""
    is_scaled: bool = True
    """Whether the loss was scaled; also true if that is not certain."""


class Gradients(NamedTuple):
    """What is known of gradients that are about to be applied."""

    loss_scale: Any
    """The scale to divide them by; None if they are unscaled."""
    applied: set[int] | None
    """That of their loss."""
    is_scaled: bool = True
    """That of their loss."""
    is_unscaled: bool = True
    """Whether they were unscaled where they had to be; also true if that is not certain."""


class Record:
    """The last loss that was scaled in a thread or a graph, and the calls since then."""

    def __init__(self, is_traced: bool) -> None:
        self.is_traced = is_traced
        self.by_keras: bool | None = None
        """Whether `scale_loss` scaled the loss, as Keras does, or `get_scaled_loss`; None before the first loss."""
        self.loss_scale: Any = None
        """The scale of the loss; None if only the variable has it."""
        self.applied: set[int] = set()
        """The variables that were updated since the loss was scaled."""
        self.is_unscaled = False
        """Whether gradients were unscaled since the loss was scaled."""
        self.reads_scale = False
        """Whether the caller has read the scale since the last step, and may divide by it."""
        self.applied_since_unscaling: set[int] | None = None
        """The variables that were updated since gradients were unscaled; None before."""
        self.computed: set[int] = set()
        """The variables with gradients from `compute_gradients`, which were not updated since."""

    def begin(self, by_keras: bool) -> None:
        """Record a new loss."""
        self.by_keras, self.loss_scale, self.applied, self.is_unscaled = by_keras, None, set(), False
        if by_keras:
            self.computed = set()


class Losses:
    """The records of one optimizer."""

    def __init__(self, present: Any) -> None:
        self.has_warned = False
        self._present = present
        """The variable of the present scale, which is that of gradients if no loss was scaled."""
        self._threads = threading.local()
        self._replicas: dict[int, Record] = {}
        self._open: weakref.WeakSet[Record] = weakref.WeakSet()
        """The records of losses whose gradients were not applied yet where the loss was scaled. Those of a graph die
        with it, as after a trace that fails."""
        self._last_of_threads: Record | None = None
        """Keeps the record of a thread that has ended."""
        self._trace = Record(is_traced=True)
        """That of all traces of JAX and torch.compile."""
        self._shared = shared_variable("last_loss_scale")
        """The last scale that was used anywhere, below zero if `get_scaled_loss` used it; 0 before the first."""

    def scale(self, loss_scale: Any, by_keras: bool) -> ScaledLoss | None:
        """Record that a loss is multiplied by `loss_scale`, and return the mark of the loss; None while JAX traces."""
        if is_compiling() or (BACKEND != "tensorflow" and is_traced([loss_scale])):
            self._trace.begin(by_keras)
            self._open.add(self._trace)
            return None
        records = self._records()
        for record in records:  # a function that scales losses may be traced within one caller, and serve another
            record.begin(by_keras)
        records[0].loss_scale = loss_scale
        self._open.update(records)
        if not records[0].is_traced:
            self._last_of_threads = records[0]
        if self._shared is not None:
            self._shared.assign(loss_scale if by_keras else -loss_scale)
        return ScaledLoss(self, loss_scale, records[0].applied)

    def mark_of(self, loss: Any) -> ScaledLoss | None:
        """Return the mark of a loss that this optimizer has scaled; None for anything else."""
        mark = getattr(loss, "_loss_scaling", None)
        return mark if isinstance(mark, ScaledLoss) and mark.owner is self else None

    def were_scaled(self) -> bool:
        """Return whether a loss was scaled in this thread, in a trace, or in a place that applies no gradients."""
        return bool(self._open) or any(each.by_keras is not None for each in (self._trace, self._of_thread()))

    def apply_traced(self) -> None:
        """Record that the trace of JAX that scaled a loss applies its gradients itself, and passes none on."""
        self._open.discard(self._trace)

    def unscale(self, named: ScaledLoss | None = None) -> ScaledLoss:
        """Record that gradients are unscaled, and return the mark of their loss: the last one, unless it is named."""
        records = self._records()
        for record in records:
            record.is_unscaled |= named is None or named.applied is record.applied
            record.applied_since_unscaling = set()
        if named is not None:
            return named
        others, own = self._others(records), records[0]
        is_own = own.loss_scale is not None and not self._is_overtaken(own, others)
        loss_scale = own.loss_scale if is_own else self._last_anywhere()
        is_scaled = any(record.by_keras is not None for record in records)
        return ScaledLoss(self, loss_scale, set() if others else own.applied, is_scaled or bool(others))

    def read_scale(self) -> None:
        """Record that the caller reads the scale, perhaps to divide gradients by it."""
        for record in self._records():
            record.reads_scale = True

    def compute(self, loss_scale: Any, variables: Iterable[Any]) -> ScaledLoss:
        """Record that `compute_gradients` returns gradients of these variables, which need not be applied."""
        for record in self._records():
            record.computed.update(map(id, variables))
        return ScaledLoss(self, loss_scale, None)

    def look_up_unscaled(self, loss: ScaledLoss, variables: Iterable[Any], loss_scale: Any) -> Gradients:
        """Return what is known of unscaled gradients of a loss; they are to be divided by `loss_scale`, if any."""
        is_first = loss.applied is None or loss.applied.isdisjoint(map(id, variables))
        return Gradients(loss_scale, loss.applied, loss.is_scaled and is_first)

    def look_up(self, variables: Iterable[Any], takes_scaled: bool, loss: ScaledLoss | None = None) -> Gradients:
        """Return what is known of gradients that are about to be applied.

        Args:
            variables: The variables to update.
            takes_scaled: Whether the caller takes scaled gradients; else unscaled ones, or those of Keras's losses.
            loss: The loss of scaled gradients, if the caller names it, or their marks do.

        Raises:
            CallOrderError: The gradients are scaled for certain, and the caller takes unscaled ones.
        """
        if loss is not None:
            return Gradients(loss.loss_scale, loss.applied)
        ids, records = set(map(id, variables)), self._records()
        others, own = self._others(records), records[0]
        by_keras = next((record.by_keras for record in records if record.by_keras is not None), None)
        applied = set().union(*(record.applied for record in records))
        is_own = by_keras is not None and ids.isdisjoint(applied) and not self._is_overtaken(own, others)
        is_known = is_own or bool(others)
        is_of_loss = is_known if takes_scaled else is_own and by_keras and not applied
        if not is_of_loss and any(not ids.isdisjoint(record.computed) for record in records):
            return Gradients(None, None)
        since = [each.applied_since_unscaling for each in records if each.applied_since_unscaling is not None]
        may_be_unscaled = any(ids.isdisjoint(each) for each in since)
        if may_be_unscaled and any(record.is_unscaled for record in records):
            return Gradients(None, own.applied, is_scaled=is_known)
        if is_own and (takes_scaled or by_keras):
            return Gradients(self._last_anywhere() if own.loss_scale is None else own.loss_scale, own.applied)
        if takes_scaled:
            return Gradients(self._last_anywhere() if others else self.present_scale(), own.applied, is_scaled=is_known)
        if others and not is_own and not may_be_unscaled:  # the last call decides when the step runs
            last = xp.convert_to_tensor(self._shared)
            may_be_right = any(each.by_keras or each.is_unscaled or each.reads_scale for each in (own, *others))
            return Gradients(xp.where(last > 0.0, last, 1.0), own.applied, is_unscaled=may_be_right)
        is_divided = any(each.is_unscaled for each in records)
        may_be_divided = any(each.reads_scale for each in (*records, self._of_thread()))  # a graph may get the scale
        if is_own and not (others or may_be_unscaled or is_divided or may_be_divided):
            self._open.difference_update(records)  # a trace that fails here passes nothing on
            raise CallOrderError(
                "get_scaled_loss was called and get_unscaled_gradients was not, so these gradients are taken to be "
                "multiplied by the loss scale; apply what get_unscaled_gradients(grads) returns, or use minimize. If "
                "you have divided them, or their loss was not scaled, read optimizer.loss_scale before apply_gradients"
            )
        return Gradients(None, own.applied, is_scaled=is_known, is_unscaled=may_be_unscaled or bool(others))

    def apply(self, variables: Iterable[Any], found: Gradients) -> None:
        """Record that these variables are updated, with gradients of which `found` is known."""
        ids, records = set(map(id, variables)), self._records()
        for record in records:
            record.computed -= ids
            record.reads_scale = False
        if found.applied is None:
            return
        # In the graph being built alone: of two branches both may update a variable.
        (found.applied if len(records) == 1 else records[0].applied).update(ids)
        if records[0].applied_since_unscaling is not None:
            records[0].applied_since_unscaling |= ids
        self._open.difference_update(records)

    def _is_overtaken(self, own: Record, others: list[Record]) -> bool:
        """Return whether a graph may have scaled a later loss; another thread does not overtake this one."""
        return any(each.is_traced for each in others) and (bool(own.applied) or not own.is_traced)

    def _last_anywhere(self) -> Any:
        """Return the last scale that was used in any place; the present one before the first, and in JAX and torch."""
        # A graph may be called by several others, so it captures no tensor of a graph around it.
        if self._shared is None:
            return self.present_scale()
        last = xp.abs(xp.convert_to_tensor(self._shared))
        return xp.where(last > 0.0, last, self.present_scale())

    def present_scale(self) -> Any:
        """Return the present scale, as a value of the graph being built."""
        value = self._present.value
        return xp.convert_to_tensor(value) if BACKEND == "tensorflow" else value

    def _others(self, records: list[Record]) -> list[Record]:
        return [each for each in self._open if each not in records]

    def _records(self) -> list[Record]:
        """Return the records of the graph being built and those around it, or that of the thread in eager execution."""
        return [self._of_graph(graph) for graph in graphs_around()] or [self._of_thread()]

    def _of_graph(self, graph: Any) -> Record:
        return _record_in(graph, (self, replica_number()), is_traced=True)

    def _of_thread(self) -> Record:
        replica = replica_number()
        if replica is None:
            return _record_in(self._threads, None, is_traced=False)
        return self._replicas.setdefault(replica, Record(is_traced=False))  # each run of a strategy starts new threads


def _record_in(place: Any, key: Any, is_traced: bool) -> Record:
    """Return the record in an attribute of a graph or thread, which dies with it; make it if there is none."""
    if not hasattr(place, "_loss_scaling"):
        place._loss_scaling = {}
    records: dict[Any, Record] = place._loss_scaling
    if key not in records:
        records[key] = Record(is_traced)
    return records[key]

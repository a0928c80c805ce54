"""The calls of a user's loop: which losses were scaled, by which scale, and what was done with their gradients.

A record belongs to one graph being traced, or to one thread of eager execution, and to one replica in it. Gradients
that `get_unscaled_gradients` or `compute_gradients` returned are marked. The record is for all others.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from lossscale_core.errors import CallOrderError
from lossscale_tf._graphs import ancestors, current_graph, current_replica, graphs_around
from lossscale_tf._verbs import Gradient, is_narrow, times, values_of

_TWO_SCALES = (
    "losses at two scales wait for their gradients, and it is unknown to which loss these gradients belong; pass the "
    "loss, as in get_unscaled_gradients(grads, loss=scaled_loss), and call forget_losses() wherever gradients are "
    "given up, as at `continue`"
)
_SCALED_OR_NOT = (
    "a loss that scale_loss scaled waits for its gradients, and unscaled gradients wait to be applied; it is unknown "
    "which of them these are. Pass scaled gradients to apply(grads, variables), and call forget_losses() wherever "
    "gradients are given up"
)


class ScaledLoss(NamedTuple):
    """The mark of a scaled loss. `_loss_scaling` is the only attribute that this package sets on tensors."""

    owner: "Calls"
    key: Any
    loss_scale: tf.Tensor


class Mark(NamedTuple):
    """The mark of a gradient."""

    owner: "Calls"
    kind: Literal["scaled", "unscaled", "whole"]
    """"scaled" was given to be unscaled, "unscaled" is the result, and "whole" comes from `compute_gradients`."""
    loss_scale: tf.Tensor
    origin: Any = None
    """In a graph, the gradient before it was unscaled. When it is applied, one product unscales and clips it, and
    TensorFlow prunes the unscaled tensor, which saves a write and a read of all gradients."""


@dataclass(eq=False)
class Losses:
    """The losses of one scale whose backward pass has run, and the calls that took their gradients."""

    key: Any
    by_keras: bool
    loss_scales: list[tf.Tensor] = field(default_factory=list)
    run: int = 0
    taken: int = 0
    per_call: set[float] = field(default_factory=set)
    """The numbers of losses per call, of the rounds before; a round is some losses, and then some calls."""

    def add(self, loss_scale: tf.Tensor) -> None:
        """Count a loss."""
        if self.taken:
            self.per_call.add(self.run / self.taken)
            self.run = self.taken = 0
        self.run += 1
        self.loss_scales = [loss_scale] if tf.executing_eagerly() else [*self.loss_scales, loss_scale]

    def are_over(self, later: "Losses") -> bool:
        """Return whether all gradients were taken, so that the next ones are of `later` losses.

        They were if each call took those of one loss, or always those of the same number, as with micro-batches.
        """
        if not self.taken:
            return False
        per_call = self.per_call | {self.run / self.taken}
        return max(per_call) <= 1.0 or per_call == {later.run / (later.taken + 1)}


@dataclass(eq=False)
class Record:
    """The calls in one place."""

    is_eager: bool
    losses: list[Losses] = field(default_factory=list)
    scaled: int = 0
    """The number of losses that were scaled."""
    unscaled: int = 0
    """The number of calls that unscaled gradients."""
    waiting: int = 0
    """The number of these calls whose gradients were not applied yet."""
    applied: dict[Any, tuple[int, int, int]] = field(default_factory=dict)
    """`scaled` and `unscaled` when a variable was updated last, and how often it was, by graph and variable."""
    whole: set[int] = field(default_factory=set)
    """The variables whose gradients `compute_gradients` has returned, and which were not updated since."""

    def open(self, key: Any, loss_scale: tf.Tensor, by_keras: bool) -> None:
        """Note a loss whose backward pass runs. Equal keys mean equal scales."""
        found = next((each for each in self.losses if (each.key, each.by_keras) == (key, by_keras)), None)
        losses = found or Losses(key, by_keras)
        losses.add(loss_scale)
        self.losses = [each for each in self.losses if each is not found] + [losses]

    def is_open(self, by_keras: bool) -> bool:
        """Return whether gradients of a loss are still to come."""
        return any(each.run > each.taken for each in self.losses if each.by_keras == by_keras)

    def take(self, grads: Iterable[Any], by_keras: bool) -> tf.Tensor:
        """Return the scale of the gradients that are taken now, of Keras's losses if they are open and `by_keras`.

        Raises `CallOrderError` if losses at two scales wait for theirs, and, in a graph, the operations from which the
        gradients are computed do not tell which.
        """
        if not self.is_open(by_keras):
            by_keras = not by_keras if self.is_open(not by_keras) else self.losses[-1].by_keras
        losses = [each for each in self.losses if each.by_keras == by_keras]
        while len(losses) > 1 and losses[0].are_over(losses[1]):
            self.losses.remove(losses.pop(0))
        if len(losses) > 1:
            by_read = {id(read): each for each in losses for read in each.loss_scales}
            computed_from = [] if tf.executing_eagerly() else ancestors(values_of(grad) for grad in grads)
            losses = list({id(each): by_read[id(each)] for each in computed_from if id(each) in by_read}.values())
            if len({each.key for each in losses}) != 1:
                raise CallOrderError(_TWO_SCALES)
        losses[0].taken += 1
        return losses[0].loss_scales[-1]

    def take_of(self, key: Any) -> None:
        """Note that the gradients of a loss with this key are taken, which the user has named."""
        for each in self.losses:
            each.taken += each.key == key
        self.losses = [each for each in self.losses[:-1] if each.taken < each.run] + self.losses[-1:]

    def calls_for(self, variables: Sequence[int]) -> tuple[bool, bool]:
        """Return whether a loss was scaled, and gradients were unscaled, since the last update of these variables."""
        graphs = [_key(graph) for graph in graphs_around()]
        last = [self.applied[key] for each in variables for g in graphs if (key := (g, each)) in self.applied]
        is_scaled = all(self.scaled > scaled or self.scaled > times for scaled, _, times in last)
        return self.scaled > 0 and is_scaled, self.unscaled > max((unscaled for _, unscaled, _ in last), default=0)

    def apply(self, variables: Sequence[int]) -> None:
        """Note that variables are updated in the graph being built; each branch is a graph of its own."""
        for key in ((_key(current_graph()), each) for each in variables):
            _, _, times = self.applied.get(key, (0, 0, 0))
            self.applied[key] = self.scaled, self.unscaled, times + 1
        self.whole -= set(variables)


class Calls:
    """The records of one optimizer, and the scale of the last loss in a variable, for gradients in another trace."""

    def __init__(self) -> None:
        self.updates = 0
        """The number of updates that are traced; each may change the scale."""
        self.has_begun = self.has_warned = False
        self._threads = threading.local()
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.init_scope():
            self.missing = tf.Variable(0, trainable=False, dtype=tf.int64, aggregation=first)
            """The number of steps that missed a call."""
            # Each replica sets its own. A mirrored variable needs a merge call, which a user's loop must not contain:
            # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/mirrored_run.py#L503
            self._used_scale = tf.Variable(
                0.0,
                trainable=False,
                name="used_loss_scale",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=first,
            )

    def scale(self, loss_scale: tf.Tensor, by_keras: bool) -> tuple[ScaledLoss, Callable[[], None]]:
        """Return the mark of a scaled loss, and the function to call when its backward pass runs."""
        record = self._here()
        record.scaled += 1
        self._used_scale.assign(loss_scale)
        key = float(loss_scale) if tf.executing_eagerly() else self.updates
        return ScaledLoss(self, key, loss_scale), lambda: record.open(key, loss_scale, by_keras)

    def unscale(self, grads: Sequence[Any], loss: ScaledLoss | None, present: tf.Tensor) -> tf.Tensor:
        """Return the scale of gradients that are unscaled now, of the loss that the user has named, if any."""
        record = self._nearest()
        if loss is None:
            loss_scale = self._taken(record, grads, by_keras=False, present=present)
        else:
            loss_scale = loss.loss_scale
            record.take_of(loss.key)
        record.unscaled += 1
        record.waiting += 1
        return loss_scale

    def compute(self, variables: Iterable[Any]) -> None:
        """Note that one call has computed unscaled gradients of `variables`, which need not be applied."""
        self._nearest().whole.update(map(id, variables))

    def apply_marked(self, variables: Sequence[Any]) -> bool:
        """Note that gradients are applied which are marked as unscaled; return whether their loss was scaled."""
        record, ids = self._nearest(), list(map(id, variables))
        is_scaled, _ = self._calls_for(record, ids)
        record.waiting = max(0, record.waiting - 1)
        record.apply(ids)
        return is_scaled

    def apply(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        accepts_scaled: bool,
        present: tf.Tensor,
        known: tf.Tensor | None,
    ) -> tuple[tf.Tensor | None, bool, bool]:
        """Note that gradients are applied which are not marked as unscaled; return their scale, or None without one.

        `known` is their scale if they were unscaled for another purpose, such as their norm. The other results say
        whether a loss was scaled, and whether gradients were unscaled. Raises `CallOrderError` if it is unknown whether
        the gradients are scaled, or by what.
        """
        record, ids = self._nearest(), list(map(id, variables))
        others = self._elsewhere(record)
        is_scaled, is_unscaled = self._calls_for(record, ids)
        is_whole = not record.whole.isdisjoint(ids)
        is_keras_waiting = any(each.is_open(by_keras=True) for each in (record, *others))
        is_unscaled_waiting = known is None and (is_whole or record.waiting > 0)
        if is_keras_waiting and is_unscaled_waiting and not accepts_scaled:
            raise CallOrderError(_SCALED_OR_NOT)
        losses = record.losses or [loss for each in others for loss in each.losses]
        by_keras = is_keras_waiting or (bool(losses) and losses[-1].by_keras)
        loss_scale = None
        if is_unscaled_waiting and not is_keras_waiting:
            is_scaled, is_unscaled = is_whole or is_scaled, True
            record.waiting -= not is_whole
        elif accepts_scaled and not (is_scaled or is_keras_waiting):
            raise CallOrderError(
                "apply was given gradients, but this optimizer scaled no loss for them, so that it is unknown "
                "whether they are scaled; scale the loss by scale_loss, or pass unscaled gradients to apply_gradients"
            )
        elif accepts_scaled or by_keras:
            loss_scale = self._taken(record, grads, by_keras, present) if known is None else known
        record.waiting -= known is not None and record.waiting > 0
        record.apply(ids)
        return loss_scale, is_scaled, is_unscaled and known is None

    def forget(self) -> None:
        """Drop the records of eager code, and what waits in the graph being built."""
        self._threads = threading.local()
        for graph in graphs_around():
            if (record := self._at(graph)) is not None:
                record.losses, record.waiting = [], 0
                record.whole.clear()

    def _taken(self, record: Record, grads: Sequence[Any], by_keras: bool, present: tf.Tensor) -> tf.Tensor:
        """Return the scale of gradients; that of the last loss, if it was scaled in another trace or thread."""
        is_foreign = record.is_eager and not tf.executing_eagerly()  # an eager scale would be a constant in the graph
        others = any(each.losses for each in self._elsewhere(record))
        if record.losses and not is_foreign and (record.is_open(by_keras) or not others):
            return record.take(grads, by_keras)
        used = tf.convert_to_tensor(self._used_scale)
        return tf.where(used > 0.0, used, present)  # none was used yet

    def _calls_for(self, record: Record, variables: Sequence[int]) -> tuple[bool, bool]:
        is_scaled, is_unscaled = record.calls_for(variables)
        others = self._elsewhere(record)
        return is_scaled or any(each.scaled for each in others), is_unscaled or any(each.unscaled for each in others)

    def _elsewhere(self, record: Record) -> list[Record]:
        """Return the records of places that apply no gradients, since other code applies them."""
        return [each for each in self._records if each is not record and not each.applied]

    def _nearest(self) -> Record:
        """Return the record of this graph or of one around it, or of this thread; a new one if there is none."""
        found = (self._at(graph) for graph in graphs_around())
        return next((each for each in found if each is not None), None) or self._here()

    def _here(self) -> Record:
        """Return the record of the graph being built, or of this thread; a new one if there is none."""
        graph = current_graph()
        if (record := self._at(graph)) is None:
            record = self._place(graph)[self, current_replica()] = Record(is_eager=graph is None)
            self._records.add(record)
        return record

    def _at(self, graph: Any) -> Record | None:
        return self._place(graph).get((self, current_replica()))

    def _place(self, graph: Any) -> dict[Any, Record]:
        """Return the records of a graph, which die with it, or of this thread."""
        owner = self._threads if graph is None else graph
        if not hasattr(owner, "_loss_scaling"):
            owner._loss_scaling = {}
        place: dict[Any, Record] = owner._loss_scaling
        return place

    # State of a thread or a graph cannot be copied or pickled; a copy begins with a new step.
    def __reduce__(self) -> tuple[type["Calls"], tuple[()]]:
        return Calls, ()


def _key(graph: Any) -> Any:
    return None if graph is None else weakref.ref(graph)


def mark_of(leaf: Any, owner: Calls) -> Any:
    """Return the mark that an optimizer has set on a tensor, or None."""
    found = getattr(leaf, "_loss_scaling", None)
    return found if found is not None and found.owner is owner else None


def mark_gradient(owner: Any, leaf: Gradient, grad: Any, loss_scale: tf.Tensor, kind: Any) -> None:
    """Mark a gradient before and after unscaling; in a graph with its origin, unless its dtype has changed."""
    unscaled = Mark(owner, kind, loss_scale)
    is_same = not tf.executing_eagerly() and leaf.dtype == grad.dtype and not is_narrow(grad.dtype)
    leaf._loss_scaling = unscaled._replace(origin=grad) if is_same else unscaled
    if isinstance(leaf, tf.IndexedSlices):
        leaf.values._loss_scaling = unscaled
    if isinstance(grad, tf.Tensor | tf.IndexedSlices):
        grad._loss_scaling = Mark(owner, "scaled", loss_scale)


def origins(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor | None]:
    """Return gradients as they were before unscaling in this graph, and their scale.

    If they have no common scale, return them unchanged, and None.
    """
    marks = [getattr(grad, "_loss_scaling", None) for grad in grads]
    found = [mark for mark in marks if mark is not None and mark.origin is not None]
    if len(found) < len(grads) or len({id(mark.loss_scale) for mark in found}) != 1:
        return grads, None
    return [mark.origin for mark in found], found[0].loss_scale


def scaled_with_gradient(leaf: Any, loss_scale: tf.Tensor, run_backward: Callable[[], None]) -> Any:
    """Return a loss times a scale; its backward pass calls a function first."""

    @tf.custom_gradient
    def scaled(leaf: Any) -> Any:
        def grad(upstream: Any) -> Any:
            run_backward()
            return times(upstream, loss_scale)

        return times(leaf, loss_scale), grad

    return None if leaf is None else scaled(leaf)


class ForgetWhenRestored(tf.train.experimental.PythonState):
    """Drops the records of an optimizer when a `tf.train.Checkpoint` restores it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def serialize(self) -> str:
        """Return nothing, as there is nothing to save."""
        return ""

    def deserialize(self, string_value: str) -> None:
        """Drop the records."""
        self._calls.forget()

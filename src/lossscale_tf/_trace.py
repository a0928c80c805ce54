"""Who has scaled and unscaled what since the last step, kept apart for each trace, thread and replica."""

import threading
from typing import Any

import tensorflow as tf


class Pending:
    """What was called since a step's loss was first scaled."""

    def __init__(self) -> None:
        self.used_state: Any = None
        """The state whose scale multiplied the loss: it divides the gradients, whatever an update does meanwhile."""
        self.scaled_by_keras = False
        self.scaled = False
        self.unscaled: list[Any] = []
        self.applied: set[int] = set()
        """The variables that this step's gradients were applied to; several optimizers' worth may follow one loss."""


class Traces:
    """A `Pending` for each graph being traced, or thread of eager execution, and for each replica."""

    def __init__(self) -> None:
        self._eager = threading.local()
        self._key = f"_loss_scale_{id(self)}"
        self.last_scaled_by_keras = False

    def begin(self, by_keras: bool) -> Pending:
        """Return what is pending, for a loss to be scaled: a new step's if the last one's gradients were applied."""
        records, replica = self._records(), _replica()
        pending = records.get(replica)
        if pending is None or pending.applied or pending.scaled_by_keras != by_keras:
            pending = records[replica] = Pending()
        pending.scaled_by_keras = self.last_scaled_by_keras = by_keras
        return pending

    def current(self, variables: Any = ()) -> Pending:
        """Return what is pending here or in the graph around, for gradients of `variables` to be unscaled or applied.

        Where nothing is known, or a variable comes again, it is another step's; the last scaling says whose it is.
        """
        pending = self._found()
        if pending is None or not pending.applied.isdisjoint(map(id, variables)):
            pending = self._records()[_replica()] = Pending()
            pending.scaled_by_keras = self.last_scaled_by_keras
        return pending

    def _found(self) -> Pending | None:
        replica = _replica()
        if tf.executing_eagerly():
            return self._records().get(replica)
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            for records in graph.get_collection(self._key):
                if replica in records:
                    return records[replica]
            graph = getattr(graph, "outer_graph", None)
        return None

    def _records(self) -> dict[int, Pending]:
        if tf.executing_eagerly():
            return self._eager.__dict__.setdefault("records", {})
        held = tf.compat.v1.get_default_graph().get_collection_ref(self._key)  # so that it goes when the graph goes
        if not held:
            held.append({})
        return held[0]

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


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group) or 0)

"""Who has scaled and unscaled what since the last step, kept apart for each trace and replica."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf


class Pending:
    """What was called since the last `apply_gradients`."""

    def __init__(self) -> None:
        self.used_state: Any = None
        """The state whose scale multiplied the loss: it divides the gradients, whatever an update does meanwhile."""
        self.scaled_by_keras = False
        self.scaled = False
        self.unscaled: list[Any] = []


class Traces:
    """A `Pending` for each graph being traced (eager execution is one) and each replica."""

    def __init__(self) -> None:
        self._by_graph: WeakKeyDictionary[Any, dict[int, Pending]] = WeakKeyDictionary()
        self._eager: dict[int, Pending] = {}
        self._lock = threading.Lock()

    def current(self) -> Pending:
        """Return what is pending here."""
        return self._here().setdefault(_replica(), Pending())

    def take(self) -> Pending:
        """Return what is pending here, and begin anew."""
        return self._here().pop(_replica(), None) or Pending()

    def _here(self) -> dict[int, Pending]:
        with self._lock:  # replicas run in threads of their own
            if tf.executing_eagerly():
                return self._eager
            return self._by_graph.setdefault(tf.compat.v1.get_default_graph(), {})


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group) or 0)

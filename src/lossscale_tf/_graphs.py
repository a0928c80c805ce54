"""The graph and the replica for which code runs."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf


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


def ancestors(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors of graphs from which `tensors` are computed, these among them, each once."""
    captures = (pair for graph in graphs_around() for pair in getattr(graph, "captures", ()))
    outside = {id(inner): outer for outer, inner in captures}
    waiting, seen = list(tensors), {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen[id(tensor)] = tensor
        yield tensor
        if id(tensor) in outside:
            waiting.append(outside[id(tensor)])
        # An eager tensor that a graph has captured has no operation.
        elif isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            waiting.extend(tensor.op.inputs)

"""The parts that `keras.ops` lacks, for the backend on which Keras runs in this process."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

BACKEND: str = keras.backend.backend()

xp: Any
"""The array namespace that `policy.update` gets."""
is_finite: Callable[[Any], Any]
"""Return whether a number is finite: an array, or a number on the host."""
half_squares: Callable[[Any], Any]
"""Return half the sum of squares of an array in float32 or wider, in one read and without a copy; shape `()`."""


def unconverted(function: Any) -> Any:
    """Keep TensorFlow's AutoGraph from converting a function, which takes seconds; elsewhere return it unchanged."""
    return tf.autograph.experimental.do_not_convert(function) if BACKEND == "tensorflow" else function


def is_compiling() -> bool:
    """Return whether torch.compile traces the caller, whose graph would break where an attribute is set."""
    return BACKEND == "torch" and torch.compiler.is_compiling()


# Not `keras.ops.vdot` for all: XLA would collect an array that is sharded over devices before it flattens it, and a
# matrix product may round to TF32. Not `ops.sum(ops.square(x))`: without a compiler it writes all squares to memory.
if BACKEND == "jax":
    import jax

    xp, half_squares, is_finite = jax.numpy, lambda x: 0.5 * xp.sum(xp.square(x)), jax.numpy.isfinite
elif BACKEND == "torch":
    import torch

    xp, half_squares, is_finite = torch, lambda x: 0.5 * torch.linalg.vector_norm(x) ** 2, torch.isfinite
elif BACKEND == "tensorflow":
    import tensorflow as tf

    xp, half_squares = tf, tf.nn.l2_loss

    def is_finite(number: Any) -> Any:
        return tf.math.is_finite(number) if tf.is_tensor(number) else bool(np.isfinite(number))

else:  # such as numpy, on which Keras cannot train
    xp, half_squares, is_finite = np, lambda x: 0.5 * np.sum(np.square(x)), np.isfinite


def without_duplicates(leaf: Any) -> Any:
    """Return TensorFlow's `IndexedSlices` as a tensor, with duplicates summed, and anything else as it is."""
    is_sparse = BACKEND == "tensorflow" and isinstance(leaf, tf.IndexedSlices)
    return tf.convert_to_tensor(leaf) if is_sparse else leaf


def require_training() -> None:
    """Raise `RuntimeError` if Keras runs on a backend that does not train."""
    if BACKEND not in ("jax", "torch", "tensorflow"):
        raise RuntimeError(
            f"Keras runs on {BACKEND}, which does not train; set KERAS_BACKEND to jax, torch or tensorflow before the "
            "first import of keras"
        )


def is_traced(arrays: list[Any]) -> bool:
    """Return whether these arrays have no values yet, since a compiler or a graph traces the step."""
    if BACKEND == "jax":
        return any(isinstance(array, jax.core.Tracer) for array in arrays)
    return BACKEND == "tensorflow" and not tf.executing_eagerly()


def graphs_around() -> list[Any]:
    """Return the graph that TensorFlow builds and those around it, innermost first; none in eager execution."""
    if BACKEND != "tensorflow" or tf.executing_eagerly():
        return []
    graphs = [tf.compat.v1.get_default_graph()]
    # The graph around a function that is called eagerly is the thread's, which is never built.
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None and outer.building_function:
        graphs.append(outer)
    return graphs


def replica_number() -> int | None:
    """Return the number of this replica; None without replicas."""
    if BACKEND != "tensorflow" or not tf.distribute.has_strategy():
        return None
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    # On TPUs the number may be a tensor without a value while a step is traced, as one trace serves all replicas:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/distribute_lib.py#L3514
    return int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def outside_traces(variables: list[Any]) -> Any:
    """Return a context that leaves the trace of TensorFlow, if the variables have values outside of it.

    They have none if the model is being built in it. Then only the trace can read them, as `ScheduleFreeAdamW` does.
    """
    if BACKEND != "tensorflow" or tf.executing_eagerly():
        return contextlib.nullcontext()
    with tf.init_scope():
        exist = tf.distribute.has_strategy() or all(
            bool((each.value if isinstance(each, keras.Variable) else each).is_initialized()) for each in variables
        )
    return tf.init_scope() if exist else contextlib.nullcontext()


def shared_variable(name: str) -> Any:
    """Return a float32 variable of TensorFlow at 0, with a value for each replica; None on other backends."""
    if BACKEND != "tensorflow":
        return None
    with tf.init_scope():
        # Each replica sets its own. A mirrored variable needs a merge call, which a user's loop must not contain:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/mirrored_run.py#L503
        return tf.Variable(
            0.0,
            trainable=False,
            name=name,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

"""The parts that `keras.ops` lacks, for the backend on which Keras runs in this process."""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

BACKEND: str = keras.backend.backend()

xp: Any
"""The array namespace that `policy.update` gets."""
half_squares: Callable[[Any], Any]
"""Return half the sum of squares of an array in float32 or wider, in one read and without a copy; shape `()`."""

# Not `keras.ops.vdot` for all: XLA would collect an array that is sharded over devices before it flattens it, and a
# matrix product may round to TF32. Not `ops.sum(ops.square(x))`: without a compiler it writes all squares to memory.
if BACKEND == "jax":
    import jax

    xp, half_squares = jax.numpy, lambda x: 0.5 * xp.sum(xp.square(x))
elif BACKEND == "torch":
    import torch

    xp, half_squares = torch, lambda x: 0.5 * torch.linalg.vector_norm(x) ** 2
elif BACKEND == "tensorflow":
    import tensorflow as tf

    from lossscale_keras import tensorflow

    xp = tf
else:  # such as numpy, on which Keras cannot train
    xp, half_squares = np, lambda x: 0.5 * np.sum(np.square(x))


def _sum_of_squares(arrays: list[Any]) -> Any:
    """Return the sum of the squares of real arrays in float32, or in float64 if an array is in it."""
    halves = [half_squares(array) for array in arrays]
    wide = "float64" if any("float64" in str(each.dtype) for each in halves) else "float32"
    halves = [each if wide in str(each.dtype) else ops.cast(each, wide) for each in halves]
    return 2.0 * functools.reduce(operator.add, halves, ops.zeros((), wide))


class _OneReplica:
    """What other backends do instead of the functions of `lossscale_keras.tensorflow`."""

    require_replica = staticmethod(lambda: None)
    merges_replicas = staticmethod(lambda: False)
    unconverted = sum_over_replicas = agree = staticmethod(lambda same: same)
    lock_of = outside_traces = staticmethod(contextlib.nullcontext)
    sum_of_squares = staticmethod(_sum_of_squares)
    call_once = staticmethod(lambda function: function())


IndexedSlices: Any = tf.IndexedSlices if BACKEND == "tensorflow" else ()
"""TensorFlow's type of sparse gradients, for `isinstance`; on another backend nothing is an instance."""
native: Any = tensorflow if BACKEND == "tensorflow" else _OneReplica
"""The functions of `lossscale_keras.tensorflow`, or what replaces them on another backend."""


def is_compiling() -> bool:
    """Return whether torch.compile traces the caller, whose graph would break where an attribute is set."""
    return BACKEND == "torch" and torch.compiler.is_compiling()


def is_traced(arrays: list[Any]) -> bool:
    """Return whether these arrays have no values yet, since a compiler or a graph traces the step."""
    if BACKEND == "jax":
        return any(isinstance(array, jax.core.Tracer) for array in arrays)
    return BACKEND == "tensorflow" and not tf.executing_eagerly()


def returns_gradients(loss: Any) -> bool:
    """Return whether this loss is scaled in a trace that stores nothing, but may return the gradients to any caller."""
    return is_compiling() or (BACKEND == "jax" and is_traced([loss]))


def require_training() -> None:
    """Raise `RuntimeError` if Keras runs on a backend that does not train."""
    if BACKEND not in ("jax", "torch", "tensorflow"):
        raise RuntimeError(
            f"Keras runs on {BACKEND}, which does not train; set KERAS_BACKEND to jax, torch or tensorflow before the "
            "first import of keras"
        )

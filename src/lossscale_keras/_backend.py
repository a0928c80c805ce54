"""Functions that `keras.ops` lacks, for the backend of Keras in this process: JAX, PyTorch or TensorFlow."""

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
"""The array namespace that `policy.update` computes in."""
half_squares: Callable[[Any], Any]
"""Return half the sum of squares of an array in float32 or wider, in one read and without a copy: shape `()`."""

# `keras.ops.vdot` does not fit: XLA would gather an array that is sharded over devices before it flattens the array,
# and a matrix product may round to TF32. Without a compiler, `ops.sum(ops.square(x))` writes all squares to memory.
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
else:  # for example numpy, on which Keras cannot train
    xp, half_squares = np, lambda x: 0.5 * np.sum(np.square(x))


def _sum_of_squares(arrays: list[Any]) -> Any:
    """Return the sum of the squares of real arrays: float32, or float64 if one of the arrays is float64."""
    halves = [half_squares(array) for array in arrays]
    wide = "float64" if any("float64" in str(half.dtype) for half in halves) else "float32"
    halves = [half if wide in str(half.dtype) else ops.cast(half, wide) for half in halves]
    return 2.0 * functools.reduce(operator.add, halves, ops.zeros((), wide))


class _OneReplica:
    """The functions of `lossscale_keras.tensorflow` for JAX and PyTorch, where a step has no replicas to combine."""

    require_replica = staticmethod(lambda: None)
    merges_replicas = staticmethod(lambda: False)
    unconverted = sum_over_replicas = agree = staticmethod(lambda value: value)
    lock_of = outside_traces = staticmethod(contextlib.nullcontext)
    sum_of_squares = staticmethod(_sum_of_squares)
    call_once = staticmethod(lambda function: function())


IndexedSlices: Any = tf.IndexedSlices if BACKEND == "tensorflow" else ()
"""TensorFlow's type of sparse gradients, for `isinstance`. On other backends nothing is an instance of `()`."""
native: Any = tensorflow if BACKEND == "tensorflow" else _OneReplica
"""The module `lossscale_keras.tensorflow`, or its replacement on another backend."""


def is_compiling() -> bool:
    """Return whether torch.compile traces the caller. Setting an attribute would then break its graph."""
    return BACKEND == "torch" and torch.compiler.is_compiling()


def is_traced(arrays: list[Any]) -> bool:
    """Return whether these arrays have no values yet, because a compiler or a graph traces the step."""
    if BACKEND == "jax":
        return any(isinstance(array, jax.core.Tracer) for array in arrays)
    return BACKEND == "tensorflow" and not tf.executing_eagerly()


def returns_gradients(loss: Any) -> bool:
    """Return whether this loss is scaled in a trace of torch.compile or JAX.

    Such a trace stores nothing, but it may return the gradients to its caller.
    """
    return is_compiling() or (BACKEND == "jax" and is_traced([loss]))


def require_training() -> None:
    """Raise `RuntimeError` if Keras runs on a backend that cannot train."""
    if BACKEND not in ("jax", "torch", "tensorflow"):
        raise RuntimeError(
            f"Keras runs on {BACKEND}, which does not train; set KERAS_BACKEND to jax, torch or tensorflow before the "
            "first import of keras"
        )

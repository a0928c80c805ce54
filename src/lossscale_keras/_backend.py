"""The parts that `keras.ops` lacks, for the backend on which Keras runs in this process."""

from collections.abc import Callable
from typing import Any

import keras

BACKEND: str = keras.backend.backend()

xp: Any
"""The array namespace that `policy.update` gets."""
number_in: Callable[[Any], Any]
"""Return the number in a Keras variable of shape `()`, on the host."""
squares: Callable[[Any], Any]
"""Return the sum of squares of an array in float32 or wider, in one read and without a copy; shape `()`."""


def unconverted(function: Any) -> Any:
    """Keep TensorFlow's AutoGraph from converting a function, which takes seconds; elsewhere return it unchanged."""
    return tf.autograph.experimental.do_not_convert(function) if BACKEND == "tensorflow" else function


# Not `keras.ops.vdot` for all: XLA would collect an array that is sharded over devices before it flattens it, and a
# matrix product may round to TF32. Not `ops.sum(ops.square(x))`: without a compiler it writes all squares to memory.
if BACKEND == "jax":
    import jax

    xp, squares, number_in = jax.numpy, lambda x: xp.sum(xp.square(x)), keras.ops.convert_to_numpy
elif BACKEND == "torch":
    import torch

    xp, squares, number_in = torch, lambda x: torch.linalg.vector_norm(x) ** 2, keras.ops.convert_to_numpy
elif BACKEND == "tensorflow":
    import tensorflow as tf

    xp, squares, number_in = tf, lambda x: 2.0 * tf.nn.l2_loss(x), lambda variable: variable.value.numpy()
else:  # such as numpy, on which Keras cannot train
    import numpy as np

    xp, squares, number_in = np, lambda x: np.sum(np.square(x)), keras.ops.convert_to_numpy


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

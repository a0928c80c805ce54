"""The time of a step with `lossscale_keras`, relative to Keras's own wrapper, on each backend.

    python benchmarks/bench_keras.py                             measure and print
    python benchmarks/bench_keras.py --quick                     a smoke test, with small variables
    python benchmarks/bench_keras.py --output-folder benchmarks  write the table to a file

A number is a ratio of two medians; the runs of both wrappers alternate. The time is the time of the optimizer's step
after the backward pass: Adam on float32 variables, as in `fit` on this backend. Each backend runs in its own process.
The status is 1 if a ratio exceeds its bar by more than the allowed noise.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

from measuring import Row, interleaved, run

BACKENDS = {"jax": "JAX, under jit", "torch": "PyTorch, eager", "tensorflow": "TensorFlow, in a graph"}


def step_of(optimizer: Any, shapes: list[tuple[int, ...]]) -> Callable[[], Any]:
    """Return a function that takes one step of a Keras optimizer, and waits for it."""
    import keras
    from keras import ops

    variables = [keras.Variable(ops.ones(shape)) for shape in shapes]
    grads = [ops.full(shape, 1e-3) for shape in shapes]
    optimizer.build(variables)
    if keras.backend.backend() == "torch":
        return lambda: optimizer.apply(grads, variables)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        in_graph = tf.function(lambda: optimizer.apply(grads, variables), autograph=False)
        return lambda: (in_graph(), variables[-1].numpy())
    import jax

    jitted = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    values = [[variable.value for variable in owner] for owner in (variables, optimizer.variables)]

    def step() -> None:
        values[:] = jax.block_until_ready(jitted(values[1], grads, values[0]))

    return step


def rows_of(backend: str, quick: bool) -> list[Row]:
    """Return the rows of one backend. A process can have only one backend."""
    os.environ["KERAS_BACKEND"] = backend
    import keras

    from lossscale_core import SpikeGuard
    from lossscale_keras import LossScaleOptimizer

    theirs = keras.optimizers.LossScaleOptimizer
    works = {
        "scaled": (None, {}),
        "scaled and clipped": (1.0, {}),
        "scaled, clipped and guarded, against Keras's clipped": (1.0, {"guard": SpikeGuard()}),
    }
    rows, shapes = [], [(64, 64)] if quick else [(1000, 1000)] * 4
    for work, (clipnorm, settings) in works.items():
        ours = LossScaleOptimizer(keras.optimizers.Adam(global_clipnorm=clipnorm), **settings)
        optimizers = ours, theirs(keras.optimizers.Adam(global_clipnorm=clipnorm))
        steps = [step_of(optimizer, shapes) for optimizer in optimizers]
        for step in steps:
            step()
        ours_s, theirs_s = interleaved(steps, 3 if quick else 60)
        rows.append(Row(f"{BACKENDS[backend]}: {work}", "×", ours_s / theirs_s, 1.1))
    return rows


def measure(quick: bool) -> list[Row]:
    """Return the rows of all backends."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        return [row for rows in processes.map(rows_of, BACKENDS, [quick] * len(BACKENDS)) for row in rows]


if __name__ == "__main__":
    packages = {"Keras": "keras", "JAX": "jax", "PyTorch": "torch", "TensorFlow": "tensorflow-cpu"}
    versions = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    notes = (
        "A number is the time of the optimizer's step for four million weights, divided by the time of the same step "
        "with `keras.optimizers.LossScaleOptimizer` instead of `lossscale_keras.LossScaleOptimizer`."
    )
    sys.exit(run("keras", "What loss scaling costs in Keras", measure, versions, __doc__ or "", notes))

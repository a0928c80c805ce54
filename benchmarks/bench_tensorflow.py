"""The time of a step in TensorFlow, relative to the wrappers of Keras 3, tf_keras and tf.compat.v1.

    python benchmarks/bench_tensorflow.py                             measure and print
    python benchmarks/bench_tensorflow.py --quick                     a smoke test
    python benchmarks/bench_tensorflow.py --output-folder benchmarks  write the table to a file

A number is a ratio of two medians; the runs of both wrappers alternate. The backward pass takes no
time: the loss has fixed gradients for the 161 parameters of ResNet-50. The optimizer is Adam. The benchmark runs on
TensorFlow's default device. The status is 1 if a ratio on the CPU exceeds its bar by more than the allowed noise.
"""

import os
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
import tf_keras
from measuring import Row, interleaved, resnet50_shapes, run

from lossscale_core import SpikeGuard
from lossscale_tf import LossScaleOptimizer, all_finite, v1

tf1 = tf.compat.v1
DEVICE = "cuda" if tf.config.list_physical_devices("GPU") else "cpu"
WHERE = f"161 tensors ({DEVICE})"
RATE = 1e-6

Step = Callable[[], Any]


def shapes(quick: bool) -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters; for a smoke test only the first 12."""
    return resnet50_shapes()[:12] if quick else resnet50_shapes()


class Parameters:
    """Variables, a loss, and the scaled gradients of this loss."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.variables = [tf.Variable(tf.random.normal(shape)) for shape in shapes]
        self.grads = [tf.random.normal(shape) for shape in shapes]
        self.loss = tf.custom_gradient(self._loss)

    def _loss(self, *variables: Any) -> tuple[Any, Any]:
        return tf.constant(
            0.0
        ), lambda _, variables=None: (self.grads, [None] * len(variables)) if variables else self.grads


def backward(parameters: Parameters, scale: Callable[[Any], Any]) -> Any:
    """Return the gradients of a scaled loss."""
    with tf.GradientTape() as tape:
        values = [tf.convert_to_tensor(variable) for variable in parameters.variables]
        tape.watch(values)
        scaled = scale(parameters.loss(*values))
    return tape.gradient(scaled, values)


def keras_step(parameters: Parameters, optimizer: Any, clip: float | None = None) -> Step:
    """Return a step of Keras 3, as in `fit`."""
    optimizer.build(parameters.variables)

    def step() -> None:
        grads = backward(parameters, optimizer.scale_loss)
        optimizer.apply_gradients(zip(grads, parameters.variables, strict=True))

    return step


def tf_keras_step(parameters: Parameters, optimizer: Any, clip: float | None = None) -> Step:
    """Return the step that tf_keras documents for a custom loop."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.build(parameters.variables)

    def step() -> None:
        grads = optimizer.get_unscaled_gradients(backward(parameters, optimizer.get_scaled_loss))
        if clip is not None:
            grads, _ = tf.clip_by_global_norm(grads, clip)
        optimizer.apply_gradients(zip(grads, parameters.variables, strict=True))

    return step


def v1_step(parameters: Parameters, optimizer: Any, clip: float | None = None) -> Step:
    """Return a step with an optimizer of `tf.compat.v1`."""

    def step() -> None:
        pairs = optimizer.compute_gradients(lambda: parameters.loss(*parameters.variables), parameters.variables)
        optimizer.apply_gradients(pairs)

    return step


def timed(
    make_steps: dict[str, Callable[[], Step]], quick: bool, compiled: Collection[str] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a step, and to trace and compile it, by name. XLA compiles the steps in `compiled`."""
    steps, compiling = {}, {}
    for name, make in make_steps.items():
        step = tf.function(make(), autograph=False, jit_compile=name in compiled)
        start = time.perf_counter()
        step()
        compiling[name] = time.perf_counter() - start
        steps[name] = step
    for step in steps.values():
        step()
    return dict(zip(steps, interleaved(list(steps.values()), 2 if quick else 21), strict=True)), compiling


def graph_rows(quick: bool) -> list[Row]:
    """Time the steps as graphs, with and without clipping, against each original."""
    of_resnet, rows = shapes(quick), []
    adam = {
        "Keras 3": lambda: keras.optimizers.Adam(RATE),
        "tf_keras": lambda: tf_keras.optimizers.Adam(RATE),
        "tf.compat.v1": lambda: tf1.train.AdamOptimizer(RATE),
    }
    makers = {"Keras 3": keras_step, "tf_keras": tf_keras_step, "tf.compat.v1": v1_step}
    theirs = {
        "Keras 3": lambda clip: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(RATE, global_clipnorm=clip)),
        "tf_keras": lambda clip: tf_keras.mixed_precision.LossScaleOptimizer(adam["tf_keras"]()),
        "tf.compat.v1": lambda clip: tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(
            adam["tf.compat.v1"](), "dynamic"
        ),
    }
    for tool, make in makers.items():
        wrapper = v1.LossScaleOptimizer if tool == "tf.compat.v1" else LossScaleOptimizer
        for clip, bar in ((None, 0.95), (1.0, 0.85))[: 1 if tool == "tf.compat.v1" else 2]:
            contenders = {
                "theirs": lambda make=make, tool=tool, clip=clip: make(Parameters(of_resnet), theirs[tool](clip), clip),
                "ours": lambda make=make, tool=tool, clip=clip, wrapper=wrapper: make(
                    Parameters(of_resnet),
                    wrapper(adam[tool](), "dynamic", **({} if clip is None else {"global_clipnorm": clip})),
                ),
            }
            if clip and tool == "Keras 3":
                contenders["no scaling"] = lambda: keras_step(
                    Parameters(of_resnet), keras.optimizers.Adam(RATE, global_clipnorm=1.0)
                )
                contenders["guarded"] = lambda: keras_step(
                    Parameters(of_resnet),
                    LossScaleOptimizer(adam["Keras 3"](), "dynamic", global_clipnorm=1.0, guard=SpikeGuard()),
                )
            times, tracing = timed(contenders, quick)
            work = f"{'clip + ' if clip else ''}Adam, graph, {WHERE}"
            rows.append(Row(work, f"× {tool}'s LossScaleOptimizer", times["ours"] / times["theirs"], bar))
            if "no scaling" in times:
                rows.append(Row(work, "× the same without scaling", times["ours"] / times["no scaling"], 1.05))
                guarded = times["guarded"] / times["ours"]
                rows.append(Row(f"with a spike guard, {work}", "× the same without a guard", guarded, 1.03))
            if clip is None and tool == "Keras 3":
                rows.append(Row(f"tracing it, {WHERE}", "× Keras 3's", tracing["ours"] / tracing["theirs"], 1.1))
    return rows


def xla_rows(quick: bool) -> list[Row]:
    """Time one compiled step against Keras 3's compiled step."""
    of_resnet = shapes(quick)

    def step(wrapper: Any) -> Callable[[], Step]:
        return lambda: keras_step(Parameters(of_resnet), wrapper(keras.optimizers.Adam(RATE)))

    contenders = {
        "theirs": step(keras.optimizers.LossScaleOptimizer),
        "ours": step(LossScaleOptimizer),
    }
    times, compiling = timed(contenders, quick, compiled=contenders)
    tool = "× Keras 3's LossScaleOptimizer"
    return [
        Row(f"Adam, one XLA step, {WHERE}", tool, times["ours"] / times["theirs"], 0.9),
        Row(f"compiling one XLA step, {WHERE}", "× Keras 3's", compiling["ours"] / compiling["theirs"], 0.55),
    ]


def check_rows(quick: bool) -> list[Row]:
    """Time the finite check alone."""
    grads, rows = Parameters(shapes(quick)).grads, []
    for name, jit_compile, bar in (("graph", False, 0.85), ("XLA", True, 1.05)):
        contenders = {
            "theirs": lambda: lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(grad)) for grad in grads]),
            "ours": lambda: lambda: all_finite(grads),
        }
        times, _ = timed(contenders, quick, compiled=contenders if jit_compile else ())
        rows.append(
            Row(f"all_finite, float32, {name}, {WHERE}", "× all(is_finite)", times["ours"] / times["theirs"], bar)
        )
    return rows


def eager_rows(quick: bool) -> list[Row]:
    """Time eager `apply_gradients` of four tiny variables."""
    steps = []
    for wrapper in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer):
        variables, optimizer = [tf.Variable([1.0, 2.0]) for _ in range(4)], wrapper(keras.optimizers.SGD(RATE))
        optimizer.build(variables)
        grads = [tf.ones(2) for _ in variables]

        def step(optimizer: Any = optimizer, variables: Any = variables, grads: Any = grads) -> None:
            optimizer.scale_loss(0.0)
            optimizer.apply_gradients(zip(grads, variables, strict=True))

        steps.append(step)
    theirs, ours = interleaved(steps, 3 if quick else 41, 3 if quick else 20)
    return [
        Row(
            f"apply_gradients, eager, 4 tiny variables ({DEVICE})", "× Keras 3's LossScaleOptimizer", ours / theirs, 1.0
        )
    ]


def measure(quick: bool) -> list[Row]:
    """Measure everything on TensorFlow's default device."""
    return check_rows(quick) + eager_rows(quick) + graph_rows(quick) + xla_rows(quick)


if __name__ == "__main__":
    gpu = "not measured on a GPU" if DEVICE == "cpu" else tf.config.list_physical_devices("GPU")[0].name
    versions = f"tensorflow {tf.__version__}, keras {keras.__version__}, {gpu}"
    sys.exit(run("tensorflow", "What loss scaling costs in TensorFlow", measure, versions, __doc__))

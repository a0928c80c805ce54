"""A report on the magnitudes that one forward and one backward pass of a model compute."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # tf.random.set_seed sets the seed; no public API reads it

from lossscale_core.adapters import (
    GRADIENT,
    NonfiniteInput,
    OperationRange,
    RangeReport,
    UnscaledGradient,
    check_loss_shape,
    unscaled_gradients,
)
from lossscale_tf._attach import attached_losses_at
from lossscale_tf._range_inputs import Inputs
from lossscale_tf._range_recorder import Recorder, Variables
from lossscale_tf._step import is_overwritten
from lossscale_tf._verbs import Gradient, lifted, summed_values, values_of

_SEED = 1441151881  # a seed that is unlikely to be set


def range_report(model: Any, loss_fn: Callable[[], tf.Tensor]) -> RangeReport:
    """Report which operations overflow, forward or backward, how much flushes to zero, and which loss scale fits.

    The report runs `loss_fn` once, eagerly, and a few backward passes (usually up to four) at different loss scales. It
    measures every computed float16, bfloat16 and float8 tensor. Three more passes, one of them with a loss times zero,
    find gradients that do not follow the loss scale; losses that `attach` adds follow it. Each `tf.function` runs as
    its Python code; a concrete function, or a function of a SavedModel, is one operation. Afterwards all variables and
    the states of random number generators are bit for bit as before, also if `loss_fn` raises. Synchronises with the
    host after every operation.

    Args:
        model: A Keras 3 or tf_keras model, or a `tf.Module`, for the names: an operation is named by the innermost
            layer, or by its name scope without layers; a gradient is named by its variable.
        loss_fn: Runs the forward pass as training does, and returns the loss, unscaled: a tensor with one element of
            any float dtype.

    Returns:
        The report. `print` it, `plot` it, or pass its `init_scale` on to `DynamicScaling`.

    Raises:
        TypeError: `loss_fn` does not return a tensor of floats.
        ValueError: The loss has several elements, or does not depend on a trainable variable.
        RuntimeError: The function is called in a graph.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("range_report reads numbers, which a graph has not; call it outside of tf.function")
    with _functions_run_eagerly(), _seeds_kept(), Variables() as variables:
        passes = _Passes(model, loss_fn, variables)
        report = RangeReport.measure(
            passes.forward,
            passes.backward,
            nonfinite_inputs=lambda: passes.nonfinite_inputs,
            unscaled_gradients=passes.unscaled_gradients,
        )
    # The first infinity of the forward pass may be that of a mask, which is harmless; the recorder finds the cause.
    return report if math.isfinite(report.loss) else dataclasses.replace(report, overflows_first=passes.cause)


class _Passes:
    """The forward pass, and backward passes for the search; the tape keeps the forward pass for all of them."""

    def __init__(self, model: Any, loss_fn: Callable[[], tf.Tensor], variables: Variables) -> None:
        self._model, self._loss_fn, self._variables = model, loss_fn, variables
        self._recorder = Recorder(model, variables, Inputs(model, loss_fn))
        self._tape = tf.GradientTape(persistent=True)
        self._loss: tf.Tensor
        self.cause: OperationRange | None = None
        """The operation in low precision that makes the loss infinite or NaN."""
        self.nonfinite_inputs: list[NonfiniteInput] = []

    def forward(self) -> tuple[float, Iterable[OperationRange]]:
        with self._recorder, self._tape, attached_losses_at(tf.zeros([])):
            loss = _checked(self._loss_fn())
            self._loss = lifted(loss)
        self.cause = self._recorder.cause(self._loss)
        self.nonfinite_inputs = self._recorder.nonfinite_inputs(self._loss)
        return float(tf.reshape(self._loss, [])), self._recorder.take()

    def backward(self, loss_scale: float) -> Iterable[OperationRange]:
        seed = self._seed(loss_scale)
        self._recorder.begin_backward(seed)
        with self._recorder:
            found = self._gradients(seed)
        records = self._recorder.take(values_of(grad) for grad, _ in found)
        if not found:
            raise ValueError(
                "the loss does not depend on a trainable variable; compute it from the model, and return it as it is"
            )
        return [*records, *self._measured(found)]

    def unscaled_gradients(self, loss_scale: float) -> list[UnscaledGradient]:
        names = _Names(self._model)

        def norms_at(factor: float) -> dict[str, float]:
            # A forward pass that is recomputed then draws the random numbers of the first one.
            self._variables.restore()
            with self._variables.watched():
                found = self._gradients(self._seed(factor))
            return {
                names.of(variable): float(tf.norm(tf.cast(tf.abs(summed_values(gradient)), tf.float64)))
                for gradient, variable in found
                if not names.is_overwritten(variable)
            }

        return unscaled_gradients(norms_at, loss_scale)

    def _seed(self, loss_scale: float) -> tf.Tensor:
        return tf.fill(self._loss.shape, tf.constant(loss_scale, self._loss.dtype))

    def _gradients(self, seed: tf.Tensor) -> list[tuple[Gradient, Any]]:
        variables = self._tape.watched_variables()
        with attached_losses_at(seed):
            gradients = self._tape.gradient(self._loss, variables, output_gradients=seed)
        return [(grad, variable) for grad, variable in zip(gradients, variables, strict=True) if grad is not None]

    def _measured(self, found: list[tuple[Gradient, Any]]) -> Iterator[OperationRange]:
        names = _Names(self._model)
        for gradient, variable in found:
            measured = OperationRange.of(summed_values(gradient).numpy(), GRADIENT, names.of(variable))
            yield measured._replace(scaled=True)


def _checked(loss: Any) -> tf.Tensor:
    if not isinstance(loss, tf.Tensor | tf.Variable) or not loss.dtype.is_floating:
        kind = f"a tensor of {loss.dtype.name}" if isinstance(loss, tf.Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn returned {kind}; range_report needs a tensor of floats: return the loss")
    check_loss_shape(tuple(loss.shape))
    return tf.convert_to_tensor(loss)


class _Names:
    """The names of variables, which are Keras paths for those of a Keras 3 model."""

    def __init__(self, model: Any) -> None:
        # A variable of Keras 3 holds one of TensorFlow.
        weights = [each for each in getattr(model, "trainable_variables", ()) if hasattr(each, "path")]
        self._of_keras = {id(each.value): each for each in weights}

    def of(self, variable: Any) -> str:
        of_keras = self._of_keras.get(id(variable))
        name: str = variable.name.partition(":")[0] if of_keras is None else of_keras.path
        return name

    def is_overwritten(self, variable: Any) -> bool:
        return is_overwritten(self._of_keras.get(id(variable)))


@contextlib.contextmanager
def _functions_run_eagerly() -> Iterator[None]:
    """Run each `tf.function` as Python code, so that its operations can be measured."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    """Draw random numbers under a global seed that only the report uses.

    The state of a random operation is in a kernel that is cached by its seeds, and cannot be restored:
    https://www.tensorflow.org/api_docs/python/tf/random/set_seed
    """
    eager = context.context()
    before = {name: getattr(eager, name) for name in ("_seed", "_rng") if hasattr(eager, name)}
    # `tf.random.set_seed` would also drop all kernels, and with them the states of a user's random operations:
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/context.py#L646
    eager._seed, eager._rng = _SEED, random.Random(_SEED)
    try:
        yield
    finally:
        # TensorFlow creates the generator when a seed is set, so that there may have been none.
        del eager._rng
        for name, value in before.items():
            setattr(eager, name, value)

"""Training on TensorFlow: the same network, data and Adam in one `tf.function`, with our `LossScaleOptimizer`."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lossscale.demo import _training
from lossscale.demo._data import Digits
from lossscale.demo._records import LEARNING_RATE, Step
from lossscale.demo._training import Checkpoint
from lossscale_core import ScalingPolicy, check_overflow_streak
from lossscale_tf import LossScaleOptimizer


class Training:
    """Float32 weights, the optimizer around them, and a step that is traced once."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, start: Checkpoint) -> None:
        self.dtype, self.weight, self.steps = dtype, tf.constant(weight), start.steps
        self.masters = [tf.Variable(array, name=f"master_{i}") for i, array in enumerate(start.weights)]
        self.optimizer = LossScaleOptimizer(keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-16), policy=policy)
        self.optimizer.build(self.masters)  # lest the step make variables, and be traced once more without
        for slot, arrays in (("momentum", start.mean), ("velocity", start.square)):
            for variable, array in zip(self._slots(slot), arrays, strict=True):
                variable.assign(array)
        self.optimizer.iterations.assign(start.adam_steps)
        self.optimizer.load_state_dict(start.scale_state)
        self._traced_step = tf.function(self._step, autograph=False)

    def step(self, images: Any, labels: Any, is_measured: bool) -> tuple[Step, float | None]:
        """Take a step; see `_training.Training`."""
        batch, before = (tf.constant(images), tf.constant(labels)), self.optimizer.scale_state
        exact = self.exact_gradients(*batch) if is_measured else []
        loss, stored, largest = self._traced_step(*batch)
        flushed = _flushed_share(stored, exact) if is_measured else None
        after = self.optimizer.scale_state
        is_skipped = bool(after.skipped_steps > before.skipped_steps)
        if is_skipped:  # which left the weights as they were
            largest = _largest(self.exact_gradients(*batch))
        self.steps += 1
        check_overflow_streak(self.optimizer.policy, after)
        return Step(float(loss), float(before.loss_scale), is_skipped, float(largest)), flushed

    def scale_state(self) -> dict[str, Any]:
        """Return the optimizer's scale state."""
        return self.optimizer.state_dict()

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to go on."""
        weights, mean, square = map(_plain, (self.masters, self._slots("momentum"), self._slots("velocity")))
        return Checkpoint(self.steps, weights, mean, square, int(self.optimizer.iterations), self.scale_state())

    def _slots(self, name: str) -> list[Any]:
        return [self.optimizer.get_slot(variable, name) for variable in self.masters]

    def _step(self, images: Any, labels: Any) -> tuple[Any, ...]:
        """Apply or skip a step; return the loss, the parameters' gradients and the largest one, the outputs' included.

        All gradients come back unscaled.
        """
        with tf.GradientTape() as tape:
            outputs = _forward(self.masters, self.dtype, images)
            loss = _cross_entropy(outputs[-1], labels)
            scaled = self.optimizer.get_scaled_loss(loss * self.weight)
        grads = self.optimizer.get_unscaled_gradients(tape.gradient(scaled, [*self.masters, *outputs]))
        stored = grads[: len(self.masters)]
        self.optimizer.apply_gradients(zip(stored, self.masters, strict=True))
        return loss, stored, _largest(grads)

    def exact_gradients(self, images: Any, labels: Any) -> list[Any]:
        """Return the parameters' unscaled gradients as float32 has them, from the same weights."""
        masters = [tf.convert_to_tensor(variable) for variable in self.masters]  # a trace serves any tensors
        return _exact_gradients(masters, images, labels, self.weight)

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        logits = _forward(self.masters, self.dtype, tf.constant(digits.test_images))[-1].numpy()
        return float((logits.argmax(axis=1) == digits.test_labels).mean())


train = functools.partial(_training.train, Training)


def _plain(variables: list[Any]) -> list[Any]:
    return [np.array(tf.convert_to_tensor(variable)) for variable in variables]


def _forward(masters: Any, dtype: str, images: Any) -> list[Any]:
    """Return every layer's output in `dtype`; the last are the logits.

    Products of what is stored in `dtype` are summed in float32 and rounded once. So are their gradients, since a cast
    casts its gradient back.
    """
    outputs: list[Any] = []
    hidden = tf.cast(images, dtype)
    for weight, bias in zip(masters[::2], masters[1::2], strict=True):
        product = tf.matmul(_wide(hidden), _wide(tf.cast(weight, dtype)))
        outputs.append(tf.cast(product + _wide(tf.cast(bias, dtype)), dtype))
        hidden = _relu(outputs[-1])
    return outputs


@tf.function(autograph=False)
def _exact_gradients(masters: Any, images: Any, labels: Any, weight: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(masters)
        loss = _cross_entropy(_forward(masters, "float32", images)[-1], labels) * weight
    return tape.gradient(loss, masters)


def _wide(stored: Any) -> Any:
    return tf.cast(stored, tf.float32)


def _relu(outputs: Any) -> Any:
    """Return the positive part; `tf.nn.relu` would make an infinite gradient of a negative output NaN, and not 0."""
    return tf.where(outputs <= 0, tf.zeros_like(outputs), outputs)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the mean cross-entropy, in float32."""
    logits = tf.cast(logits, tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _largest(grads: Any) -> Any:
    return tf.reduce_max([tf.reduce_max(tf.abs(grad)) for grad in grads])


def _flushed_share(stored: list[Any], exact: list[Any]) -> float:
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(stored, exact, strict=True)]
    flushed = sum(int(((a == 0) & (b != 0)).sum()) for a, b in pairs)
    return flushed / max(1, sum(int((b != 0).sum()) for _, b in pairs))

"""Training on TensorFlow: the same network, data and Adam in one `tf.function`, with our `LossScaleOptimizer`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lossscale_core._policy import ScalingPolicy
from lossscale_core._report import check_overflow_streak
from lossscale_core.demo import _network
from lossscale_core.demo._data import Digits
from lossscale_core.demo._records import BATCH_SIZE, LEARNING_RATE, MEASURE_EVERY, Run, Step
from lossscale_tf import LossScaleOptimizer


def train(
    digits: Digits,
    policy: ScalingPolicy,
    dtype: str,
    weight: float,
    seed: int,
    steps: int,
    on_step: Callable[[], Any],
) -> Run:
    """Train the network in `dtype` on `weight` times the cross-entropy, and return what happened."""
    training = _Training(policy, dtype, tf.constant(weight), seed)
    before = training.optimizer.scale_state
    steps_done, flushed = [], []
    for step, (images, labels) in enumerate(digits.batches(steps, BATCH_SIZE, seed)):
        batch = tf.constant(images), tf.constant(labels)
        is_measured = step % MEASURE_EVERY == 0
        exact = training.exact_gradients(*batch) if is_measured else []
        loss, stored, largest = training.step(*batch)
        if is_measured:
            flushed.append(_flushed_share(stored, exact))
        after = training.optimizer.scale_state
        is_skipped = bool(after.skipped_steps > before.skipped_steps)
        if is_skipped:  # which left the weights as they were
            largest = _largest(training.exact_gradients(*batch))
        steps_done.append(Step(float(loss), float(before.loss_scale), is_skipped, float(largest)))
        check_overflow_streak(policy, after)
        on_step()
        before = after
    return Run(steps_done, float(np.mean(flushed)), training.accuracy(digits), float(before.loss_scale))


class _Training:
    """Float32 weights, the optimizer around them, and a step that is traced once."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: Any, seed: int) -> None:
        self.dtype, self.weight = dtype, weight
        self.masters = [tf.Variable(array) for layer in _network.init_layers(seed) for array in layer]
        self.optimizer = LossScaleOptimizer(keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-16), policy=policy)
        self.optimizer.build(self.masters)  # lest the step make variables, and be traced once more without
        self.step = tf.function(self._step, autograph=False)

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

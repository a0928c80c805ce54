"""Training on TensorFlow: our `LossScaleOptimizer` around Keras's Adam, in one `tf.function`."""

from typing import Any

import keras
import tensorflow as tf

from lossscale.demo._network import LEARNING_RATE, PARAMETERS, forward
from lossscale_core import ScalingPolicy, StepInfo, step_info
from lossscale_core.adapters import check_overflow_streak
from lossscale_tf import LossScaleOptimizer


class Trainer:
    """Float32 variables, the optimizer around them, and a step that is traced once."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, weights: list[Any]) -> None:
        self.dtype, self.weight = dtype, tf.constant(weight)
        self.weights = [tf.Variable(array, name=f"weight_{i}") for i, array in enumerate(weights)]
        self.optimizer = LossScaleOptimizer(keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-16), policy=policy)
        self.optimizer.build(self.weights)  # variables made in the first step would make TensorFlow trace it twice
        self._traced_step = tf.function(self._step, autograph=False)

    def step(self, images: Any, labels: Any) -> tuple[Any, list[Any], StepInfo]:
        before = self.optimizer.scale_state
        loss, gradients = self._traced_step(images, labels)
        after = self.optimizer.scale_state
        check_overflow_streak(self.optimizer.policy, after)
        return loss, gradients, step_info(before, after)

    def exact_gradients(self, images: Any, labels: Any) -> list[Any]:
        # tf.function traces again for the variables of each trainer, and once for all tensors of one shape and dtype.
        weights = [tf.convert_to_tensor(variable) for variable in self.weights]
        return _traced_gradients(weights, "float32", images, labels, self.weight)[1]

    def logits(self, images: Any) -> Any:
        return _outputs(self.weights, self.dtype, images)[-1]

    def _step(self, images: Any, labels: Any) -> tuple[Any, list[Any]]:
        weight = self.optimizer.get_scaled_loss(self.weight)
        loss, scaled = _gradients(self.weights, self.dtype, images, labels, weight)
        gradients = self.optimizer.get_unscaled_gradients(scaled)
        self.optimizer.apply_gradients(zip(gradients[:PARAMETERS], self.weights, strict=True))
        return loss, gradients


def _gradients(weights: list[Any], dtype: str, images: Any, labels: Any, weight: Any) -> tuple[Any, list[Any]]:
    """Return the loss, and the gradients of `weight` times it."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        outputs = _outputs(weights, dtype, images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=_wide(outputs[-1]))
        loss = tf.reduce_mean(losses)
        weighted = loss * weight
    return loss, tape.gradient(weighted, [*weights, *outputs])


_traced_gradients = tf.function(_gradients, autograph=False)


def _outputs(weights: Any, dtype: str, images: Any) -> list[Any]:
    """Return every layer's output in `dtype`; gradients are rounded to it too, since a cast casts its gradient back."""

    def dense(inputs: Any, weight: Any, bias: Any) -> Any:
        product = tf.matmul(_wide(inputs), _wide(tf.cast(weight, dtype)))
        return tf.cast(product + _wide(tf.cast(bias, dtype)), dtype)

    return forward(weights, tf.cast(images, dtype), dense, _relu)


def _wide(stored: Any) -> Any:
    return tf.cast(stored, tf.float32)


def _relu(outputs: Any) -> Any:
    """Return the positive part; `tf.nn.relu` would make an infinite gradient of a negative output NaN, and not 0."""
    return tf.where(outputs <= 0, tf.zeros_like(outputs), outputs)

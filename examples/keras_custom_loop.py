"""Your own Keras loop in float16: micro-batches, clipping, an average of the weights, and checkpoints.

    pip install . scikit-learn    # on a fresh machine: '.[tensorflow]' instead of the dot
    python examples/keras_custom_loop.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. Each of these steps is skipped as a whole. If you stop the program and start it again, it continues from its
last checkpoint.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import step_info
from lossscale_tf import DynamicScaling, LossScaleOptimizer

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE, MICRO_BATCHES = 128, 4


class Training(tf.Module):
    """The state that a checkpoint saves as a whole, and the step that changes it."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_float16")
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, dtype="float32")]
        self.model = keras.Sequential([keras.Input((64,)), *layers])
        # The schedule counts applied steps.
        schedule = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=1, decay_rate=0.99)
        inner = keras.optimizers.SGD(schedule, momentum=0.9)
        self.optimizer = LossScaleOptimizer(inner, POLICY, global_clipnorm=1.0)
        self.optimizer.build(self.model.trainable_variables)
        self.average = [tf.Variable(weight) for weight in self.model.trainable_variables]

    @tf.function
    def step(self, images: tf.Tensor, labels: tf.Tensor) -> None:
        """Train on one batch."""
        before, weights = self.optimizer.scale_state, self.model.trainable_variables
        scaled_grads = [tf.zeros_like(weight) for weight in weights]
        micro_batches = zip(tf.split(images, MICRO_BATCHES), tf.split(labels, MICRO_BATCHES), strict=True)
        for micro_images, micro_labels in micro_batches:
            with tf.GradientTape() as tape:
                logits = self.model(micro_images, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(micro_labels, logits, from_logits=True)
                scaled_loss = self.optimizer.get_scaled_loss(tf.reduce_mean(losses) / MICRO_BATCHES)
            grads = tape.gradient(scaled_loss, weights)
            scaled_grads = [total + grad for total, grad in zip(scaled_grads, grads, strict=True)]
        grads = self.optimizer.get_unscaled_gradients(scaled_grads)  # once for all micro-batches
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        rate = tf.where(step_info(before, self.optimizer.scale_state).applied, 0.05, 0.0)
        for mean, weight in zip(self.average, weights, strict=True):
            mean.assign(tf.where(rate > 0, mean + rate * (weight - mean), mean))


def main(steps: int = 200, folder: str = "runs/keras_custom_loop") -> tuple[float, Training]:
    """Train, print the accuracy and a diagnosis, and return the accuracy and the training."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    training = Training()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(training=training), folder, max_to_keep=1)
    manager.restore_or_initialize()
    for step in range(int(training.optimizer.scale_state.steps), steps):
        rows = np.random.default_rng(step).integers(0, len(images), BATCH_SIZE)
        training.step(tf.constant(images[rows], tf.float32), tf.constant(labels[rows]))
        if step % 20 == 19:
            manager.save()
    training.model.set_weights([mean.numpy() for mean in training.average])
    accuracy = float((training.model(test_images).numpy().argmax(axis=1) == test_labels).mean())
    print(f"accuracy {accuracy:.3f}; {training.optimizer.diagnose()}")
    return accuracy, training


if __name__ == "__main__":
    main()

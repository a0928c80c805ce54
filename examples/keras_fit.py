"""Keras `fit` in float16: a skipped batch changes neither weights nor schedule nor BatchNorm's averages.

    pip install . scikit-learn    # on a fresh machine: '.[tensorflow]' instead of the dot
    python examples/keras_fit.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. A skipped step does not change the optimizer. `ProtectedModel` also protects the moving averages.
"""

from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_tf import DynamicScaling, LossScaleLogger, LossScaleOptimizer

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE = 128


class ProtectedModel(keras.Model):
    """A model that restores its moving averages if the optimizer skips the batch."""

    def train_step(self, data: Any) -> Any:
        """Call Keras's own step, and restore the averages if `iterations`, the count of applied steps, is unchanged."""
        averages = [variable for variable in self.non_trainable_variables if "float" in variable.dtype]
        before = [tf.identity(average) for average in averages]
        iterations = tf.identity(self.optimizer.iterations)
        logs = super().train_step(data)
        applied = tf.convert_to_tensor(self.optimizer.iterations) > iterations
        for average, old in zip(averages, before, strict=True):
            average.assign(tf.where(applied, tf.convert_to_tensor(average), old))
        return logs


def build() -> keras.Model:
    """Return the compiled model."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64)(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.9)(hidden)
    logits = keras.layers.Dense(10, dtype="float32")(keras.layers.ReLU()(hidden))
    model = ProtectedModel(inputs, logits)
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, decay_steps=1, decay_rate=0.99)
    optimizer = LossScaleOptimizer(keras.optimizers.AdamW(schedule), POLICY, global_clipnorm=1.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)  # this run is too short for XLA
    return model


def main(epochs: int = 10, steps_per_epoch: int = 20) -> tuple[float, keras.Model, dict[str, list[float]]]:
    """Train, print the accuracy and a diagnosis, and return the accuracy, the model and the history."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000, seed=0).repeat().batch(BATCH_SIZE)
    model = build()
    options = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "shuffle": False, "verbose": 0}
    history = model.fit(batches, callbacks=[LossScaleLogger()], **options).history
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"accuracy {accuracy:.3f}; {model.optimizer.diagnose()}")
    return accuracy, model, history


if __name__ == "__main__":
    main()

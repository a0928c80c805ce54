"""Loss scaling around the optimizers of Keras 3 and tf_keras, and logging of the loss scale in `fit`."""

from lossscale_keras import LossScaleLogger
from lossscale_tf.keras._optimizer import LossScaleOptimizer

__all__ = ["LossScaleLogger", "LossScaleOptimizer"]

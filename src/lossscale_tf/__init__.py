"""Loss scaling for TensorFlow and Keras: the five verbs, and `LossScaleOptimizer` around any Keras optimizer."""

from lossscale_core import GradientReport
from lossscale_tf import keras, v1
from lossscale_tf._range import range_report
from lossscale_tf._report import overflow_report
from lossscale_tf._state import init_state
from lossscale_tf._verbs import all_finite, scale, select, unscale
from lossscale_tf.keras import LossScaleLogger, LossScaleOptimizer

__all__ = [
    "GradientReport",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "all_finite",
    "init_state",
    "keras",
    "overflow_report",
    "range_report",
    "scale",
    "select",
    "unscale",
    "v1",
]

for _type in (LossScaleLogger, LossScaleOptimizer):  # a pickle names the public module, so that private ones may move
    _type.__module__ = __name__
del _type

"""Loss scaling for Keras 3 on JAX, PyTorch and TensorFlow: `LossScaleOptimizer` for `fit` and loops, and five verbs."""

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "keras":  # such as jax, if KERAS_BACKEND names a framework that is not installed
        raise
    raise ModuleNotFoundError(
        'lossscale_keras needs Keras 3, and keras is not installed; run: pip install "lossscale[keras]"', name="keras"
    ) from error

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, __version__
from lossscale_keras._logger import LossScaleLogger
from lossscale_keras._optimizer import LossScaleOptimizer
from lossscale_keras._report import overflow_report
from lossscale_keras._verbs import all_finite, init_state, scale, select, unscale

__all__ = [
    "DynamicScaling",
    "FixedScaling",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "NoScaling",
    "SpikeGuard",
    "__version__",
    "all_finite",
    "init_state",
    "overflow_report",
    "scale",
    "select",
    "unscale",
]

for _type in (LossScaleLogger, LossScaleOptimizer):  # a pickle stores the public module name
    _type.__module__ = __name__
del _type

"""Loss scaling for TensorFlow and Keras: the five verbs, and `LossScaleOptimizer` around any Keras optimizer."""

try:
    import keras as _keras  # noqa: F401
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow"):  # such as jax, if KERAS_BACKEND names a missing framework
        raise
    raise ModuleNotFoundError(
        f"lossscale_tf needs TensorFlow and Keras, and {error.name} is not installed; "
        'run: pip install "lossscale[tensorflow]"',
        name=error.name,
    ) from error

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, __version__
from lossscale_tf import v1
from lossscale_tf._report import overflow_report
from lossscale_tf._verbs import all_finite, init_state, scale, select, unscale
from lossscale_tf.keras import LossScaleLogger, LossScaleOptimizer

__all__ = [  # not the subpackage `keras`, because `import *` would hide Keras itself
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
    "v1",
]

LossScaleOptimizer.__module__ = __name__  # a pickle stores the public module name

"""Two devices on one CPU for TensorFlow, and the modes in which tests run a step.

Import this module first, before another module uses TensorFlow. A function that AutoGraph cannot convert is an error.
"""

import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
"""One for all tests: TensorFlow keeps the shapes of a process's collectives, and a second strategy would reuse them."""


def _refuse_warnings(record):
    """Raise an error for a record of AutoGraph, which logs each warning once per process."""
    assert "AutoGraph" not in record.getMessage(), record.getMessage()
    return True


tf.get_logger().addFilter(_refuse_warnings)


def eager(function):
    """Return a step unchanged."""
    return function


def traced(function):
    """Trace a step, without AutoGraph."""
    return tf.function(function, autograph=False)


def compiled(function):
    """Let XLA compile a step."""
    return tf.function(function, autograph=False, jit_compile=True)


_NAMES = "Adadelta Adagrad Adam Ftrl GradientDescent ProximalAdagrad ProximalGradientDescent RMSProp"
OPTIMIZERS_OF_V1 = [getattr(tf.compat.v1.train, f"{name}Optimizer") for name in _NAMES.split()]
EACH_MODE = pytest.mark.parametrize("mode", [eager, traced])
EACH_MODE_AND_XLA = pytest.mark.parametrize("mode", [eager, traced, compiled])

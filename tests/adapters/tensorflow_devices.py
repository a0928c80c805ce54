"""Two devices on one CPU for TensorFlow, made before any other module uses it: import this first."""

import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
"""One for all tests: TensorFlow keeps the shapes of a process's collectives, and a second strategy would reuse them."""

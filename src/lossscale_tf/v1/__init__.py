"""Loss scaling around the optimizers of `tf.compat.v1.train`, in graphs with sessions and eagerly.

```python
optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), "dynamic")
train_op = optimizer.minimize(loss, global_step)
```

The classes and functions have the interfaces of `tf.contrib.mixed_precision` and `tf.compat.v1.mixed_precision`. The
loss scale managers and loss scales of these modules are functions here, which return policies.
"""

from lossscale_tf._policies import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
)
from lossscale_tf.v1._optimizer import LossScaleOptimizer

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
]

MixedPrecisionLossScaleOptimizer = LossScaleOptimizer
"""The name of this class in `tf.compat.v1.mixed_precision`."""

LossScaleOptimizer.__module__ = __name__  # a pickle stores the public module name

"""The demo: a small network learns handwritten digits in real float16, with and without loss scaling.

At full loss weight this network does not underflow in float16. It is therefore trained the way losses of multi-task,
distillation and reinforcement learning really occur: with a small weight on the loss. Adam divides a gradient by its
own size, so float32 does not mind; float16 without scaling does.
"""

from lossscale.demo._experiment import DEFAULT_POLICY, DEFAULT_WEIGHT, Experiment, as_json, regimes, run_experiment
from lossscale.demo._training import Settings, train

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_WEIGHT",
    "Experiment",
    "Settings",
    "as_json",
    "regimes",
    "run_experiment",
    "train",
]

"""The demo: a small network learns handwritten digits in real float16, with and without loss scaling.

At full loss weight this network does not underflow in float16. It is therefore trained the way losses of multi-task,
distillation and reinforcement learning really occur: with a small weight on the loss. Adam divides a gradient by its
own size, so float32 does not mind; float16 without scaling does.
"""

from lossscale.demo._experiment import DEFAULT_POLICY, DEFAULT_WEIGHT, begin, run_experiment
from lossscale.demo._picture import as_png
from lossscale.demo._records import Experiment, Run, Settings, as_json
from lossscale.demo._training import Checkpoint, Training

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_WEIGHT",
    "Checkpoint",
    "Experiment",
    "Run",
    "Settings",
    "Training",
    "as_json",
    "as_png",
    "begin",
    "run_experiment",
]

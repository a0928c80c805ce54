"""The demo: a small network learns handwritten digits in real float16, with and without loss scaling.

With a loss weight of 1 the gradients of this network do not underflow in float16. The demo therefore uses a small
weight, as multi-task, distillation and reinforcement learning do. Adam divides each gradient by its own magnitude, so
that the weight has no effect in float32, but it does in float16 without scaling.
"""

from lossscale.demo._experiment import DEFAULT_POLICY, DEFAULT_WEIGHT, Experiment, regimes, run_experiment
from lossscale.demo._training import Settings, train

__all__ = ["DEFAULT_POLICY", "DEFAULT_WEIGHT", "Experiment", "Settings", "regimes", "run_experiment", "train"]

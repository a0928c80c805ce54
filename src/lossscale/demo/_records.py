"""What a run of the demo records, and the file it leaves behind."""

import math
from typing import Any, NamedTuple

from lossscale_core import ScalingPolicy, policy_to_dict

BATCH_SIZE = 512
LEARNING_RATE = 3e-3
MEASURE_EVERY = 20
"""Every framework's run has these; a backward pass in float32 beside the stored one is made every so many steps."""


class Step(NamedTuple):
    """One training step."""

    loss: float
    """The mean cross-entropy, before its weight."""
    loss_scale: float
    """The loss scale used."""
    skipped: bool
    """Whether the gradients overflowed and the step was skipped."""
    gradient_max: float
    """The largest magnitude among all gradients of the weighted loss, unscaled."""


class Run(NamedTuple):
    """One training run."""

    steps: list[Step]
    flushed: float
    """The share of gradient elements that are zero as stored, and would not be in float32."""
    accuracy: float
    """The share of test images recognised at the end."""
    final_scale: float
    """The loss scale after the last step."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped."""
        return sum(step.skipped for step in self.steps)


class Settings(NamedTuple):
    """What was run."""

    framework: str
    policy: ScalingPolicy
    weight: float
    seed: int
    steps: int


class Experiment(NamedTuple):
    """Every regime's run at the chosen weight, and its test accuracy by weight."""

    settings: Settings
    runs: dict[str, Run]
    sweep: dict[str, dict[float, float]]


def as_json(experiment: Experiment) -> dict[str, Any]:
    """Return the demo's record: the dynamic run's trace, which `lossscale simulate` reads, and every result."""
    settings, runs, sweep = experiment
    dynamic = list(runs.values())[-1].steps
    return {
        "version": 1,
        "framework": settings.framework,
        "dtype": "float16",
        "policy": policy_to_dict(settings.policy),
        "loss_weight": settings.weight,
        "seed": settings.seed,
        "steps": settings.steps,
        "loss_scale": [step.loss_scale for step in dynamic],
        "overflow": [int(step.skipped) for step in dynamic],
        "gradient_max": [step.gradient_max if math.isfinite(step.gradient_max) else None for step in dynamic],
        "loss": [step.loss for step in dynamic],
        "results": {
            name: {
                "accuracy": run.accuracy,
                "flushed": run.flushed,
                "skipped_steps": run.skipped_steps,
                "final_scale": run.final_scale,
            }
            for name, run in runs.items()
        },
        "accuracy_by_loss_weight": {name: {f"{w:g}": a for w, a in line.items()} for name, line in sweep.items()},
    }

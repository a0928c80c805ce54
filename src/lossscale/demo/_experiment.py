"""The experiment: four regimes at one weight of the loss, and again over a sweep of weights."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from lossscale.demo._network import load
from lossscale.demo._training import Run, Settings, train
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScalingPolicy, policy_to_dict

DEFAULT_WEIGHT = 1e-5
DEFAULT_POLICY = DynamicScaling(growth_interval=10, max_scale=2.0**48)
"""A policy that grows much faster than in real training, so that the scale settles within a few hundred steps."""
WEIGHTS = tuple(10.0**-exponent for exponent in range(7))


class Experiment(NamedTuple):
    """Every regime's run at the chosen weight, and its test accuracy by weight."""

    settings: Settings
    runs: dict[str, Run]
    sweep: dict[str, dict[float, float]]

    def as_json(self) -> dict[str, Any]:
        """Return the results and the trace of the dynamic run, which `lossscale simulate` reads, for a JSON file."""
        settings, runs, sweep = self
        dynamic = list(runs.values())[-1].steps
        results = ("accuracy", "flushed", "skipped_steps", "final_scale")
        return {
            "version": 1,
            "dtype": "float16",
            "policy": policy_to_dict(settings.policy),
            "loss_weight": settings.weight,
            "seed": settings.seed,
            "steps": settings.steps,
            "loss_scale": [step.loss_scale for step in dynamic],
            "overflow": [int(step.skipped) for step in dynamic],
            "gradient_max": [step.gradient_max if math.isfinite(step.gradient_max) else None for step in dynamic],
            "loss": [step.loss for step in dynamic],
            "results": {name: {result: getattr(run, result) for result in results} for name, run in runs.items()},
            "accuracy_by_loss_weight": {name: {f"{w:g}": a for w, a in line.items()} for name, line in sweep.items()},
        }


class Regime(NamedTuple):
    """A storage dtype and a policy."""

    name: str
    dtype: str
    policy: ScalingPolicy


def regimes(policy: ScalingPolicy) -> list[Regime]:
    """Return the four regimes; the last is float16 under `policy`."""
    return [
        Regime("float32", "float32", NoScaling()),
        Regime("float16, no scaling", "float16", NoScaling()),
        Regime("float16, fixed 64", "float16", FixedScaling(64.0)),
        Regime("float16, your policy" if policy != DEFAULT_POLICY else "float16, dynamic", "float16", policy),
    ]


def run_experiment(settings: Settings, on_run: Callable[[str, int], Callable[[], Any]]) -> Experiment:
    """Train every regime at the settings' weight and at each weight of the sweep.

    The sweep uses the same seed and number of steps.

    Args:
        settings: The settings of the run with the last regime.
        on_run: Called with the name and the number of steps of each group of runs; its result is called after each
            step.

    Returns:
        The runs and the accuracies of the sweep.

    Raises:
        OverflowStreakError: The policy's `max_overflow_streak` is reached.
    """
    digits, runs, sweep = load(), dict[str, Run](), dict[str, dict[float, float]]()
    weights = sorted({*WEIGHTS, settings.weight}, reverse=True)
    with threadpool_limits(1):  # for matrices this small, one thread is faster than several
        for name, dtype, policy in regimes(settings.policy):
            on_step = on_run(name, settings.steps * len(weights))
            at = {w: train(settings._replace(policy=policy, weight=w), dtype, digits, on_step) for w in weights}
            runs[name], sweep[name] = at[settings.weight], {weight: run.accuracy for weight, run in at.items()}
    return Experiment(settings, runs, sweep)

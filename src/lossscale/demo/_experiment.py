"""Four regimes side by side, and the same four over a sweep of the loss's weight."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from lossscale.demo import _data
from lossscale.demo._records import Experiment, Run, Settings
from lossscale.demo._training import Checkpoint, Training
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScalingPolicy

DEFAULT_WEIGHT = 1e-5
DEFAULT_POLICY = DynamicScaling(growth_interval=10, max_scale=2.0**48)
"""Grows much faster than in real training, so that a few hundred steps show it find its level."""
FIXED_SCALE = 64.0
TRAINERS = {name: f"lossscale.demo._{name}" for name in ("numpy", "torch", "jax", "tensorflow")}
"""The module whose `train` serves each framework, imported when it is asked for."""
WEIGHTS = tuple(10.0**-exponent for exponent in range(7))


class Regime(NamedTuple):
    """A dtype to store in, and a policy for the loss scale."""

    name: str
    dtype: str
    policy: ScalingPolicy


def regimes(policy: ScalingPolicy) -> list[Regime]:
    """Return the four regimes; the last is float16 under `policy`."""
    return [
        Regime("float32", "float32", NoScaling()),
        Regime("float16, no scaling", "float16", NoScaling()),
        Regime(f"float16, fixed {FIXED_SCALE:g}", "float16", FixedScaling(FIXED_SCALE)),
        Regime("float16, your policy" if policy != DEFAULT_POLICY else "float16, dynamic", "float16", policy),
    ]


def begin(settings: Settings, start: Checkpoint | None = None) -> Training:
    """Return the network in training in float16 under the settings' policy, from the beginning or from a checkpoint.

    The checkpoint may come from any framework.
    """
    start = Checkpoint.first(settings.seed, settings.policy) if start is None else start
    module = importlib.import_module(TRAINERS[settings.framework])
    training: Training = module.Training(settings.policy, "float16", settings.weight, start)
    return training


def run_experiment(settings: Settings, on_run: Callable[[str, int], Callable[[], Any]]) -> Experiment:
    """Train every regime at the settings' weight and at each weight of the sweep.

    `on_run(name, steps)` is called before each group of runs and returns what to call after every step. The sweep
    trains with the same seed and number of steps. Raises `OverflowStreakError` where the policy asks for it.
    """
    digits = _data.load()
    with threadpool_limits(1):  # matrices this small are multiplied faster by one thread than by several
        return _run_all(settings, digits, on_run)


def _run_all(settings: Settings, digits: _data.Digits, on_run: Callable[[str, int], Callable[[], Any]]) -> Experiment:
    train = importlib.import_module(TRAINERS[settings.framework]).train
    runs: dict[str, Run] = {}
    sweep: dict[str, dict[float, float]] = {}
    for regime in regimes(settings.policy):
        on_step = on_run(regime.name, settings.steps * (1 + len(set(WEIGHTS) - {settings.weight})))

        def at(weight: float, regime: Regime = regime, on_step: Callable[[], Any] = on_step) -> Run:
            run: Run = train(digits, regime.policy, regime.dtype, weight, settings.seed, settings.steps, on_step)
            return run

        runs[regime.name] = at(settings.weight)
        by_weight = {settings.weight: runs[regime.name].accuracy}
        by_weight.update({weight: at(weight).accuracy for weight in WEIGHTS if weight != settings.weight})
        sweep[regime.name] = dict(sorted(by_weight.items(), reverse=True))
    return Experiment(settings, runs, sweep)

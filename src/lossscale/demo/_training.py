"""The demo's training loop, which all frameworks share."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from lossscale.demo._network import PARAMETERS, Digits, init_weights
from lossscale_core import ScalingPolicy, StepInfo

BATCH_SIZE = 512
_MEASURE_EVERY = 20  # steps: a backward pass in float32 for each stored one would double the work


class Settings(NamedTuple):
    """The settings of a run."""

    framework: str
    policy: ScalingPolicy
    weight: float
    seed: int
    steps: int


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
        """The number of skipped steps."""
        return sum(step.skipped for step in self.steps)


class Trainer(Protocol):
    """The part of a run that depends on the framework; made from policy, dtype, loss weight and initial parameters.

    Gradients are those of the weighted loss, unscaled: of the parameters, then of the layers' outputs.
    """

    def step(self, images: Any, labels: Any) -> tuple[Any, list[Any], StepInfo]:
        """Apply or skip a step; return the loss before its weight, the gradients as stored, and the outcome.

        Raises `OverflowStreakError` if the policy's `max_overflow_streak` is reached.
        """
        ...

    def exact_gradients(self, images: Any, labels: Any) -> list[Any]:
        """Return the gradients computed in float32 from the same weights."""
        ...

    def logits(self, images: Any) -> Any:
        """Return the network's outputs for images."""
        ...


def begin(settings: Settings, dtype: str) -> Trainer:
    """Return a new trainer of the settings' framework; its module is imported now."""
    module = importlib.import_module(f"lossscale.demo._{settings.framework}")
    return module.Trainer(settings.policy, dtype, settings.weight, init_weights(settings.seed))


def train(settings: Settings, dtype: str, digits: Digits, on_step: Callable[[], Any] = lambda: None) -> Run:
    """Train in `dtype`, call `on_step` after every step, and return the run."""
    trainer, taken, flushed = begin(settings, dtype), list[Step](), list[float]()
    for images, labels in digits.batches(settings.steps, BATCH_SIZE, settings.seed):
        exact = trainer.exact_gradients(images, labels) if len(taken) % _MEASURE_EVERY == 0 else []
        loss, gradients, info = trainer.step(images, labels)
        if exact:
            flushed.append(_flushed_share(gradients, exact))
        if not info.applied:  # the stored gradients overflowed, and the weights are still those of before the step
            gradients = exact or trainer.exact_gradients(images, labels)
        taken.append(Step(float(loss), float(info.loss_scale_used), not info.applied, _largest(gradients)))
        on_step()
    logits = np.asarray(trainer.logits(digits.test_images))
    accuracy = float(np.mean(logits.argmax(axis=1) == digits.test_labels))
    return Run(taken, float(np.mean(flushed)), accuracy, float(info.loss_scale_after))


def _largest(gradients: list[Any]) -> float:
    return max(float(np.abs(gradient).max()) for gradient in map(np.asarray, gradients))


def _flushed_share(stored: list[Any], exact: list[Any]) -> float:
    """Return the share of the parameters' gradient elements that are zero as stored, and not in float32."""
    is_zero, was_zero = (np.concatenate([np.ravel(g) == 0 for g in grads[:PARAMETERS]]) for grads in (stored, exact))
    return float(np.sum(is_zero & ~was_zero) / max(1, np.sum(~was_zero)))

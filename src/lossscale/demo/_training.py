"""The demo's training loop: the core's verbs around a hand-written backward pass, and Adam."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lossscale.demo._network import PARAMETERS, Digits, Matrix, forward, gradients, init_weights
from lossscale_core import ScalingPolicy, StepInfo, all_finite, init_state, scale, select, step_info, unscale
from lossscale_core.adapters import check_overflow_streak

BATCH_SIZE = 512
LEARNING_RATE = 3e-3
_MEASURE_EVERY = 20  # steps: a backward pass in float32 for each stored one would double the work


class Settings(NamedTuple):
    """The settings of a run."""

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


class Learnt(NamedTuple):
    """The values that an applied step changes and a skipped step does not: float32 weights, and Adam's averages."""

    weights: list[Matrix]
    mean: list[Matrix]
    square: list[Matrix]
    adam_steps: int


class Trainer:
    """One run's weights and scale state.

    Gradients are those of the weighted loss, unscaled: of the parameters, then of the layers' outputs.
    """

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, weights: list[Matrix]) -> None:
        self.policy, self.dtype, self.weight = policy, dtype, np.float32(weight)
        zeros = [np.zeros_like(array) for array in weights]
        self.learnt, self.state = Learnt(weights, zeros, zeros, 0), init_state(policy)

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, images: Matrix, labels: Matrix) -> tuple[float, list[Matrix], StepInfo]:
        """Apply or skip a step; return the loss before its weight, the gradients as stored, and the outcome.

        Raises `OverflowStreakError` if the policy's `max_overflow_streak` is reached.
        """
        before = self.state
        loss, scaled = gradients(self.learnt.weights, self.dtype, images, labels, scale(self.weight, before))
        grads_finite = all_finite(scaled[:PARAMETERS])
        # With the scale before the update: the one that multiplied the loss.
        grads = unscale(scaled, before)
        self.learnt = select(grads_finite, _adam_step(self.learnt, grads[:PARAMETERS]), self.learnt)
        self.state = self.policy.update(before, grads_finite)
        check_overflow_streak(self.policy, self.state)
        return loss, grads, step_info(before, self.state)

    def exact_gradients(self, images: Matrix, labels: Matrix) -> list[Matrix]:
        """Repeat the backward pass from the same weights and activations without float16's limits."""
        return gradients(self.learnt.weights, self.dtype, images, labels, self.weight, "float32")[1]

    def logits(self, images: Matrix) -> Matrix:
        """Return the network's outputs for images."""
        return forward([array.astype(self.dtype) for array in self.learnt.weights], images.astype(self.dtype))[-1]


def _adam_step(learnt: Learnt, grads: list[Matrix]) -> Learnt:
    """Take a step of Adam (Kingma and Ba, 2015); its epsilon is too small to notice the weight of the loss."""
    steps = learnt.adam_steps + 1
    mean = [m + 0.1 * (g - m) for m, g in zip(learnt.mean, grads, strict=True)]
    square = [s + 0.001 * (g * g - s) for s, g in zip(learnt.square, grads, strict=True)]
    seen, seen_square = 1.0 - 0.9**steps, 1.0 - 0.999**steps
    weights = [
        w - LEARNING_RATE * (m / seen) / (np.sqrt(s / seen_square) + 1e-16)
        for w, m, s in zip(learnt.weights, mean, square, strict=True)
    ]
    return Learnt(weights, mean, square, steps)


def train(settings: Settings, dtype: str, digits: Digits, on_step: Callable[[], Any] = lambda: None) -> Run:
    """Train in `dtype`, call `on_step` after every step, and return the run."""
    trainer = Trainer(settings.policy, dtype, settings.weight, init_weights(settings.seed))
    taken, flushed = list[Step](), list[float]()
    for images, labels in digits.batches(settings.steps, BATCH_SIZE, settings.seed):
        exact = trainer.exact_gradients(images, labels) if len(taken) % _MEASURE_EVERY == 0 else []
        loss, grads, info = trainer.step(images, labels)
        if exact:
            flushed.append(_flushed_share(grads, exact))
        if not info.applied:  # the stored gradients overflowed, and the weights are still those of before the step
            grads = exact or trainer.exact_gradients(images, labels)
        taken.append(Step(loss, float(info.loss_scale_used), not info.applied, _largest(grads)))
        on_step()
    logits = trainer.logits(digits.test_images)
    accuracy = float(np.mean(logits.argmax(axis=1) == digits.test_labels))
    return Run(taken, float(np.mean(flushed)), accuracy, float(info.loss_scale_after))


def _largest(grads: list[Matrix]) -> float:
    return max(float(np.abs(grad).max()) for grad in grads)


def _flushed_share(stored: list[Any], exact: list[Any]) -> float:
    """Return the share of the parameters' gradient elements that are zero as stored, and not in float32."""
    is_zero, was_zero = (np.concatenate([np.ravel(g) == 0 for g in grads[:PARAMETERS]]) for grads in (stored, exact))
    return float(np.sum(is_zero & ~was_zero) / max(1, np.sum(~was_zero)))

"""Training on NumPy: float32 master weights, Adam, and the five verbs around a hand-written backward pass."""

import functools
from typing import Any

import numpy as np

from lossscale.demo import _network, _training
from lossscale.demo._data import Digits
from lossscale.demo._network import Backward, Layer, Matrix
from lossscale.demo._records import LEARNING_RATE, Step
from lossscale.demo._training import Checkpoint
from lossscale_core import (
    ScalingPolicy,
    all_finite,
    check_overflow_streak,
    scale,
    state_from_dict,
    state_to_dict,
    unscale,
)


class Training:
    """Float32 masters, Adam, and a scale state of host scalars."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, start: Checkpoint) -> None:
        self.policy, self.dtype, self.weight, self.steps = policy, dtype, np.float32(weight), start.steps
        self.masters = [
            Layer(*map(np.array, pair)) for pair in zip(start.weights[::2], start.weights[1::2], strict=True)
        ]
        self.adam = _Adam(start)
        self.state = state_from_dict(start.scale_state, policy)

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, images: Matrix, labels: Matrix, is_measured: bool) -> tuple[Step, float | None]:
        """Take a step; see `_training.Training`."""
        state, layers = self.state, _network.cast(self.masters, self.dtype)
        outputs = _network.forward(layers, images)
        loss, logits_grad = _network.cross_entropy(outputs[-1], labels)
        # The loss scale enters where backward begins: there the gradient of the scaled loss is the scale.
        scaled = _network.backward(layers, outputs, logits_grad * scale(self.weight, state))
        grads_finite = all_finite(scaled.grads)
        if grads_finite:
            self.adam.step(self.masters, unscale(scaled.grads, state))
        gradient_max, flushed = scaled.largest / float(state.loss_scale), None
        if is_measured or not grads_finite:
            exact = _in_float32(layers, outputs, logits_grad * self.weight)
            flushed = _flushed_share(scaled.grads, exact.grads)
            gradient_max = gradient_max if grads_finite else exact.largest
        self.steps, self.state = self.steps + 1, self.policy.update(state, grads_finite)
        check_overflow_streak(self.policy, self.state)
        return Step(loss, float(state.loss_scale), not grads_finite, gradient_max), flushed

    def scale_state(self) -> dict[str, Any]:
        """Return the scale state as `state_to_dict` does."""
        return state_to_dict(self.state, self.policy)

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to go on."""
        weights, mean, square = (
            [*map(np.array, each)] for each in (_flat(self.masters), self.adam.mean, self.adam.square)
        )
        return Checkpoint(self.steps, weights, mean, square, self.adam.count, self.scale_state())

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        logits = _network.forward(_network.cast(self.masters, self.dtype), digits.test_images)[-1]
        return float(np.mean(logits.argmax(axis=1) == digits.test_labels))


train = functools.partial(_training.train, Training)


class _Adam:
    """Adam (Kingma and Ba, 2015), with an epsilon small enough not to notice the weight of the loss."""

    def __init__(self, start: Checkpoint) -> None:
        self.count = start.adam_steps
        self.mean, self.square = [*map(np.array, start.mean)], [*map(np.array, start.square)]

    def step(self, layers: list[Layer], grads: list[Layer]) -> None:
        """Move `layers` in place along float32 `grads`."""
        self.count += 1
        for array, grad, mean, square in zip(_flat(layers), _flat(grads), self.mean, self.square, strict=True):
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            denominator = np.sqrt(square / (1.0 - 0.999**self.count)) + 1e-16
            array -= LEARNING_RATE * (mean / (1.0 - 0.9**self.count)) / denominator


def _in_float32(layers: list[Layer], outputs: list[Matrix], logits_grad: Matrix) -> Backward:
    """Repeat the backward pass from the same weights and activations without float16's limits."""
    return _network.backward(_network.cast(layers, np.float32), outputs, logits_grad)


def _flushed_share(stored: list[Layer], exact: list[Layer]) -> float:
    pairs = list(zip(_flat(stored), _flat(exact), strict=True))
    flushed = sum(int(np.count_nonzero((a == 0) & (b != 0))) for a, b in pairs)
    return flushed / max(1, sum(int(np.count_nonzero(b)) for _, b in pairs))


def _flat(layers: list[Layer]) -> list[Matrix]:
    return [array for layer in layers for array in layer]

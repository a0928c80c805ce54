"""Training on NumPy: float32 master weights, Adam, and the five verbs around a hand-written backward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lossscale_core._arrays import all_finite, scale, unscale
from lossscale_core._placement import init_state
from lossscale_core._policy import ScalingPolicy
from lossscale_core._report import check_overflow_streak
from lossscale_core.demo import _network
from lossscale_core.demo._data import Digits
from lossscale_core.demo._network import Backward, Layer, Matrix
from lossscale_core.demo._records import BATCH_SIZE, LEARNING_RATE, MEASURE_EVERY, Run, Step


class _Adam:
    """Adam (Kingma and Ba, 2015), with an epsilon small enough not to notice the weight of the loss."""

    def __init__(self, layers: list[Layer]) -> None:
        self.count = 0
        self.mean = [np.zeros_like(array) for array in _flat(layers)]
        self.square = [np.zeros_like(array) for array in _flat(layers)]

    def step(self, layers: list[Layer], grads: list[Layer]) -> None:
        """Move `layers` in place along float32 `grads`."""
        self.count += 1
        for array, grad, mean, square in zip(_flat(layers), _flat(grads), self.mean, self.square, strict=True):
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            denominator = np.sqrt(square / (1.0 - 0.999**self.count)) + 1e-16
            array -= LEARNING_RATE * (mean / (1.0 - 0.9**self.count)) / denominator


@np.errstate(over="ignore", invalid="ignore")
def train(
    digits: Digits,
    policy: ScalingPolicy,
    dtype: str,
    weight: float,
    seed: int,
    steps: int,
    on_step: Callable[[], Any],
) -> Run:
    """Train the network stored in `dtype` on `weight` times the cross-entropy, and return what happened."""
    masters = _network.init_layers(seed)
    adam = _Adam(masters)
    state = init_state(policy)
    steps_done, flushed = [], []
    for step, (images, labels) in enumerate(digits.batches(steps, BATCH_SIZE, seed)):
        layers = _network.cast(masters, dtype)
        outputs = _network.forward(layers, images)
        loss, logits_grad = _network.cross_entropy(outputs[-1], labels)
        # The loss scale enters where backward begins: there the gradient of the scaled loss is the scale.
        scaled = _network.backward(layers, outputs, logits_grad * scale(np.float32(weight), state))
        grads_finite = all_finite(scaled.grads)
        if grads_finite:
            adam.step(masters, unscale(scaled.grads, state))
        gradient_max = scaled.largest / float(state.loss_scale)
        if step % MEASURE_EVERY == 0 or not grads_finite:
            exact = _in_float32(layers, outputs, logits_grad * np.float32(weight))
            flushed.append(_flushed_share(scaled.grads, exact.grads))
            gradient_max = gradient_max if grads_finite else exact.largest
        steps_done.append(Step(loss, float(state.loss_scale), not grads_finite, gradient_max))
        state = policy.update(state, grads_finite)
        check_overflow_streak(policy, state)
        on_step()
    return Run(
        steps=steps_done,
        flushed=float(np.mean(flushed)),
        accuracy=_accuracy(_network.cast(masters, dtype), digits),
        final_scale=float(state.loss_scale),
    )


def _in_float32(layers: list[Layer], outputs: list[Matrix], logits_grad: Matrix) -> Backward:
    """Repeat the backward pass from the same weights and activations without float16's limits."""
    return _network.backward(_network.cast(layers, np.float32), outputs, logits_grad)


def _flushed_share(stored: list[Layer], exact: list[Layer]) -> float:
    pairs = list(zip(_flat(stored), _flat(exact), strict=True))
    flushed = sum(int(np.count_nonzero((a == 0) & (b != 0))) for a, b in pairs)
    return flushed / max(1, sum(int(np.count_nonzero(b)) for _, b in pairs))


def _flat(layers: list[Layer]) -> list[Matrix]:
    return [array for layer in layers for array in layer]


def _accuracy(layers: list[Layer], digits: Digits) -> float:
    logits = _network.forward(layers, digits.test_images)[-1]
    return float(np.mean(logits.argmax(axis=1) == digits.test_labels))

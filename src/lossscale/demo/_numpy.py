"""Training on NumPy: the core's verbs around a hand-written backward pass."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import lossscale_core
from lossscale.demo._network import forward
from lossscale.demo._verbs import VerbsTrainer

Matrix = NDArray[Any]


def backward(weights: Any, images: Matrix, outputs: list[Matrix], logits_grad: Matrix, dtype: str) -> list[Matrix]:
    """Return the gradients of weights and outputs stored in `dtype`: small ones flush to zero, large ones overflow."""
    inputs, grads, output_grads = [images, *map(_relu, outputs[:-1])], list[Matrix](), [logits_grad.astype(dtype)]
    for weight, received in zip(weights[-2::-2], reversed(inputs), strict=True):
        grad = output_grads[-1]
        grads += [grad.sum(axis=0, dtype=np.float32).astype(dtype), _product(received.T, grad).astype(dtype)]
        if len(grads) < len(weights):
            output_grads.append(np.where(received > 0, _product(grad, weight.T), 0.0).astype(dtype))
    return [*reversed(grads), *reversed(output_grads)]


def cross_entropy(logits: Matrix, labels: Matrix) -> tuple[float, Matrix]:
    """Return the mean cross-entropy and its gradient with respect to `logits`, both in float32."""
    shifted = logits.astype(np.float32) - logits.max(axis=1, keepdims=True).astype(np.float32)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1.0
    return float(-log_probabilities[rows, labels].mean()), grad / np.float32(len(labels))


def _gradients(
    weights: Any, dtype: str, batch: Any, weight: Any, grads_dtype: str | None = None
) -> tuple[float, list[Matrix]]:
    """Return the loss, and the gradients of `weight` times it; the loss scale starts the backward pass."""
    stored, images = [array.astype(dtype) for array in weights], batch[0].astype(dtype)
    outputs = forward(stored, images, _dense, _relu)
    loss, logits_grad = cross_entropy(outputs[-1], batch[1])
    return loss, backward(stored, images, outputs, logits_grad * weight, grads_dtype or dtype)


def _dense(inputs: Matrix, weight: Matrix, bias: Matrix) -> Matrix:
    return (_product(inputs, weight) + bias.astype(np.float32)).astype(weight.dtype)


def _relu(outputs: Matrix) -> Matrix:
    return np.maximum(outputs, outputs.dtype.type(0))


def _product(a: Matrix, b: Matrix) -> Matrix:
    """Return a product summed in float32; NumPy's own float16 product is slow and sums in float16."""
    return a.astype(np.float32, copy=False) @ b.astype(np.float32, copy=False)


class Trainer(VerbsTrainer):
    """NumPy arrays, and a scale state of host scalars."""

    xp, verbs = np, lossscale_core
    gradients = staticmethod(_gradients)
    share_seen = staticmethod(lambda decay, steps: 1.0 - decay ** int(steps))

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, images: Any, labels: Any) -> Any:
        return super().step(images, labels)

    def exact_gradients(self, images: Any, labels: Any) -> list[Matrix]:
        """Repeat the backward pass from the same weights and activations without float16's limits."""
        return _gradients(self.learnt.weights, self.dtype, (images, labels), self.weight, "float32")[1]

    def logits(self, images: Any) -> Matrix:
        stored = [array.astype(self.dtype) for array in self.learnt.weights]
        return forward(stored, images.astype(self.dtype), _dense, _relu)[-1]

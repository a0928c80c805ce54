"""The demo's task: scikit-learn's bundled digits, and a perceptron that classifies them, with its backward pass.

In float16 a product sums what is stored in float16 in float32 and rounds once, as tensor cores do.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TRAINING_IMAGES = 1347
WIDTHS = (64, 64, 32, 10)
PARAMETERS = 2 * (len(WIDTHS) - 1)
"""The number of parameter arrays: each layer's weight and bias in turn."""
Matrix = NDArray[Any]


class Digits(NamedTuple):
    """Images of shape `(n, 64)`, float32 from 0 to 1, and labels of shape `(n,)`, integers from 0 to 9."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    def batches(self, steps: int, batch_size: int, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield `steps` random batches of images and labels, drawn with replacement."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            rows = rng.integers(0, len(self.train_images), batch_size)
            yield self.train_images[rows], self.train_labels[rows]


def load() -> Digits:
    """Return the digits in the same random order every time; scikit-learn contains them, without a download."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:_TRAINING_IMAGES], order[_TRAINING_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def init_weights(seed: int) -> list[NDArray[np.float32]]:
    """Return each layer's weight (He et al., 2015), of shape `(inputs, outputs)`, and its bias of zeros, in turn."""
    rng = np.random.default_rng(seed)
    weights: list[NDArray[np.float32]] = []
    for n_in, n_out in itertools.pairwise(WIDTHS):
        weights += [rng.normal(0.0, np.sqrt(2.0 / n_in), (n_in, n_out)).astype(np.float32), np.zeros(n_out, np.float32)]
    return weights


def forward(weights: list[Matrix], images: Matrix) -> list[Matrix]:
    """Return every layer's output before its rectifier; the last one holds the logits."""
    outputs: list[Matrix] = []
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        outputs.append(_dense(_relu(outputs[-1]) if outputs else images, weight, bias))
    return outputs


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


def gradients(
    weights: list[Matrix], dtype: str, images: Matrix, labels: Matrix, weight: Any, grads_dtype: str | None = None
) -> tuple[float, list[Matrix]]:
    """Return the loss, and the gradients of `weight` times it as stored in a dtype.

    The gradients are those of the parameters, then of the layers' outputs.
    """
    stored, images = [array.astype(dtype) for array in weights], images.astype(dtype)
    outputs = forward(stored, images)
    loss, logits_grad = cross_entropy(outputs[-1], labels)
    return loss, backward(stored, images, outputs, logits_grad * weight, grads_dtype or dtype)


def _dense(inputs: Matrix, weight: Matrix, bias: Matrix) -> Matrix:
    return (_product(inputs, weight) + bias.astype(np.float32)).astype(weight.dtype)


def _relu(outputs: Matrix) -> Matrix:
    return np.maximum(outputs, outputs.dtype.type(0))


def _product(a: Matrix, b: Matrix) -> Matrix:
    """Return a product summed in float32; NumPy's own float16 product is slow and sums in float16."""
    return a.astype(np.float32, copy=False) @ b.astype(np.float32, copy=False)

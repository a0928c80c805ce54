"""A perceptron with a hand-written backward pass that stores in one dtype and accumulates in float32.

That is how tensor cores train in float16: weights, activations and gradients are stored in float16, and each product
is summed in float32 before it is rounded back. (NumPy's own float16 product is slow and sums in float16.)
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

WIDTHS = (64, 64, 32, 10)
Matrix = NDArray[Any]


class Layer(NamedTuple):
    """A dense layer, or the gradient of one: `weight` of shape `(inputs, outputs)`, `bias` of shape `(outputs,)`."""

    weight: Matrix
    bias: Matrix


class Backward(NamedTuple):
    """What the backward pass stored: a gradient for each layer, and the largest magnitude among all it stored."""

    grads: list[Layer]
    largest: float


def init_layers(seed: int) -> list[Layer]:
    """Return float32 master weights (He et al., 2015) for the network of `WIDTHS`."""
    rng = np.random.default_rng(seed)
    return [
        Layer(rng.normal(0.0, np.sqrt(2.0 / n_in), (n_in, n_out)).astype(np.float32), np.zeros(n_out, np.float32))
        for n_in, n_out in itertools.pairwise(WIDTHS)
    ]


def cast(layers: list[Layer], dtype: DTypeLike) -> list[Layer]:
    """Return `layers` stored in `dtype`."""
    return [Layer(layer.weight.astype(dtype), layer.bias.astype(dtype)) for layer in layers]


def forward(layers: list[Layer], images: Matrix) -> list[Matrix]:
    """Return the input and every layer's output, stored in the layers' dtype; the last are the logits."""
    dtype = layers[0].weight.dtype
    outputs = [images.astype(dtype)]
    for i, layer in enumerate(layers):
        summed = _product(outputs[-1], layer.weight) + layer.bias.astype(np.float32)
        is_hidden = i < len(layers) - 1
        outputs.append((np.maximum(summed, 0.0) if is_hidden else summed).astype(dtype))
    return outputs


def cross_entropy(logits: Matrix, labels: Matrix) -> tuple[float, Matrix]:
    """Return the mean cross-entropy and its gradient with respect to `logits`, both in float32."""
    shifted = logits.astype(np.float32) - logits.max(axis=1, keepdims=True).astype(np.float32)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1.0
    return float(-log_probabilities[rows, labels].mean()), grad / np.float32(len(labels))


def backward(layers: list[Layer], outputs: list[Matrix], logits_grad: Matrix) -> Backward:
    """Return the gradients of every layer in the layers' dtype: small ones flush to zero, large ones overflow."""
    dtype = layers[0].weight.dtype
    grad = logits_grad.astype(dtype)
    grads: list[Layer] = []
    stored = [grad]
    for layer, inputs in zip(reversed(layers), reversed(outputs[:-1]), strict=True):
        grads.append(Layer(_product(inputs.T, grad).astype(dtype), grad.sum(axis=0, dtype=np.float32).astype(dtype)))
        stored += grads[-1]
        if len(grads) < len(layers):
            grad = np.where(inputs > 0, _product(grad, layer.weight.T), 0.0).astype(dtype)
            stored.append(grad)
    largest = max(float(np.abs(array).max()) for array in stored)
    return Backward(grads[::-1], largest)


def _product(a: Matrix, b: Matrix) -> Matrix:
    product: Matrix = a.astype(np.float32, copy=False) @ b.astype(np.float32, copy=False)
    return product

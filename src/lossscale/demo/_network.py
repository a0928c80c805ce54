"""The demo's task for every framework: scikit-learn's bundled digits, and a perceptron that classifies them."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TRAINING_IMAGES = 1347
WIDTHS = (64, 64, 32, 10)
LEARNING_RATE = 3e-3
PARAMETERS = 2 * (len(WIDTHS) - 1)
"""The number of parameter arrays: each layer's weight and bias in turn."""


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


def forward(weights: Any, images: Any, dense: Callable[..., Any], relu: Callable[[Any], Any]) -> list[Any]:
    """Return every layer's output before its rectifier; the last one holds the logits.

    `dense(inputs, weight, bias)` and `relu(outputs)` are the framework's own. In float16, `dense` sums the products of
    what is stored in float16 in float32 and rounds once, as tensor cores do.
    """
    outputs: list[Any] = []
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        outputs.append(dense(relu(outputs[-1]) if outputs else images, weight, bias))
    return outputs

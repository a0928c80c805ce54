"""scikit-learn's bundled handwritten digits: 1797 real 8 × 8 images, split once for every run."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TRAINING_IMAGES = 1347


class Digits(NamedTuple):
    """Images of shape `(n, 64)`, float32 from 0 to 1, and labels of shape `(n,)`, integers from 0 to 9."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    def batches(self, steps: int, batch_size: int, seed: int) -> Any:
        """Yield `steps` random batches of images and labels, drawn with replacement."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            rows = rng.integers(0, len(self.train_images), batch_size)
            yield self.train_images[rows], self.train_labels[rows]


def load() -> Digits:
    """Return the digits, shuffled the same way every time; nothing is downloaded."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:_TRAINING_IMAGES], order[_TRAINING_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])

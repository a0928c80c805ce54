"""Plain JAX in float16: an overflow leaves weights, momentum, averaged weights and learning rate unchanged.

    pip install . scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    python examples/jax_plain.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow; `select` skips each of them as a whole, and the schedule counts only steps that were applied.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import ScaleState, ScaleWatch, diagnose, metrics
from lossscale_jax import DynamicScaling, init_state, select, value_and_grad

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
WIDTHS = (64, 64, 32, 10)
BATCH_SIZE = 128


class Training(NamedTuple):
    """The values that an applied step changes, and a skipped step leaves unchanged."""

    params: Any
    momentum: Any
    average: Any
    applied_steps: jax.Array


class Result(NamedTuple):
    """The accuracy of the averaged weights on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: Training


def init_params(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Return float32 master weights."""
    he = jax.nn.initializers.he_normal()
    shapes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(shapes))
    return [{"weight": he(k, shape), "bias": jnp.zeros(shape[1])} for k, shape in zip(keys, shapes, strict=True)]


def forward(params: Any, images: jax.Array) -> jax.Array:
    """Return the logits, computed in float16 and then converted to float32."""
    *hidden, last = jax.tree.map(lambda param: param.astype(jnp.float16), params)
    x = images.astype(jnp.float16)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return (x @ last["weight"] + last["bias"]).astype(jnp.float32)


def cross_entropy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss of a batch."""
    log_probabilities = jax.nn.log_softmax(forward(params, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


@jax.jit
def step(training: Training, scale_state: ScaleState, images: Any, labels: Any) -> tuple[Training, ScaleState]:
    """Return the training and the scale state after a step on one batch."""
    _, _, grads, finite = value_and_grad(cross_entropy)(scale_state, training.params, images, labels)
    rate = 0.3 * 0.99**training.applied_steps
    momentum = jax.tree.map(lambda m, grad: 0.9 * m + grad, training.momentum, grads)
    params = jax.tree.map(lambda param, m: param - rate * m, training.params, momentum)
    average = jax.tree.map(lambda mean, param: 0.95 * mean + 0.05 * param, training.average, params)
    stepped = Training(params, momentum, average, training.applied_steps + 1)
    return select(finite, stepped, training), POLICY.update(scale_state, finite)


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    params = init_params(jax.random.key(seed))
    training = Training(params, jax.tree.map(jnp.zeros_like, params), params, jnp.int32(0))
    scale_state = init_state(POLICY)
    watch, rng = ScaleWatch(), np.random.default_rng(seed)
    for n in range(steps):
        rows = rng.integers(0, len(images), BATCH_SIZE)
        training, scale_state = step(training, scale_state, images[rows], labels[rows])
        if n % 50 == 0:
            watch.log(POLICY, scale_state)
    guesses = forward(training.average, jnp.asarray(test_images)).argmax(axis=1)
    accuracy = float((guesses == test_labels).mean())
    applied_steps = metrics(scale_state)["applied_steps"]
    print(f"accuracy {accuracy:.3f} after {applied_steps} applied steps; {diagnose(POLICY, scale_state)}")
    return Result(accuracy, scale_state, training)


if __name__ == "__main__":
    main()

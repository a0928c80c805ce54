"""flax nnx in float16: a loss-scaled `nnx.Optimizer`, and BatchNorm that a skipped step leaves unchanged.

    pip install . flax scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    python examples/jax_flax_nnx.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. `loss_scaled` then leaves the weights and the optimizer state unchanged. The forward pass has already changed
the batch statistics, so the step copies them before the forward pass, and `select` restores the copy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import ScaleState, ScaleWatch, diagnose, metrics
from lossscale_jax import DynamicScaling, get_last_step, get_scale_state, loss_scaled, scale, select

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE = 128


class Network(nnx.Module):
    """A perceptron that computes in float16; flax stores its weights in float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, dtype=jnp.float16, rngs=rngs)
        self.bn = nnx.BatchNorm(64, momentum=0.9, dtype=jnp.float16, rngs=rngs)
        self.out = nnx.Linear(64, 10, dtype=jnp.float16, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits, in float16."""
        return self.out(nnx.relu(self.bn(self.hidden(images))))


class Result(NamedTuple):
    """The accuracy on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: Any


@nnx.jit
def step(network: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> None:
    """Train on one batch, and change the network and the optimizer in place."""
    scale_state = get_scale_state(optimizer.opt_state)
    old = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))  # a copy; nnx.state alone returns the network's variables

    def scaled_loss(network: Network) -> jax.Array:
        logits = network(images).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return scale(loss, scale_state)

    optimizer.update(network, nnx.grad(scaled_loss)(network))
    applied = get_last_step(optimizer.opt_state).applied
    new = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    nnx.update(network, select(applied, new, old))


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    network = Network(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(network, loss_scaled(optax.adam(1e-2), POLICY), wrt=nnx.Param)
    watch, rng = ScaleWatch(), np.random.default_rng(seed)
    for n in range(steps):
        rows = rng.integers(0, len(images), BATCH_SIZE)
        step(network, optimizer, images[rows], labels[rows])
        if n % 50 == 0:
            watch.log(POLICY, get_scale_state(optimizer.opt_state))
    network.eval()
    accuracy = float((network(test_images).argmax(axis=1) == test_labels).mean())
    scale_state = get_scale_state(optimizer.opt_state)
    applied_steps = metrics(scale_state)["applied_steps"]
    print(f"accuracy {accuracy:.3f} after {applied_steps} applied steps; {diagnose(POLICY, scale_state)}")
    return Result(accuracy, scale_state, nnx.to_pure_dict(nnx.state(network)))


if __name__ == "__main__":
    main()

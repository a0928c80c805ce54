"""Save and resume with Orbax: the loss scale, the counters and the spike guard continue bit for bit.

    pip install . orbax-checkpoint scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    python examples/jax_orbax.py

The optimizer state of `loss_scaled` is a pytree that contains all of them. After half of its steps, this run saves the
weights and this state, and continues from the checkpoint alone.
"""

import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from lossscale_core import ScaleState, ScaleWatch, diagnose
from lossscale_jax import DynamicScaling, LossScaledState, SpikeGuard, get_scale_state, loss_scaled, scale

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=20)
OPTIMIZER = loss_scaled(optax.adam(3e-2), POLICY, max_norm=1.0, guard=SpikeGuard())


class Training(NamedTuple):
    """The content of a checkpoint."""

    weights: jax.Array
    opt_state: LossScaledState


class Result(NamedTuple):
    """The accuracy on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: Training


def init() -> Training:
    """Return the state before the first step, with float32 weights."""
    weights = jnp.zeros((64, 10))
    return Training(weights, OPTIMIZER.init(weights))


@jax.jit
def step(training: Training, images: jax.Array, labels: jax.Array) -> Training:
    """Return the state after a step on one batch."""

    def scaled_loss(weights: jax.Array) -> jax.Array:
        logits = (images.astype(jnp.float16) @ weights.astype(jnp.float16)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return scale(losses.mean(), get_scale_state(training.opt_state))

    grads = jax.grad(scaled_loss)(training.weights)
    return Training(*OPTIMIZER.apply_gradients(grads, training.opt_state, training.weights))


def main(steps: int = 200, seed: int = 0, resumes: bool = True) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    training, watch, rng = init(), ScaleWatch(), np.random.default_rng(seed)
    for n in range(steps):
        if resumes and n == steps // 2:
            with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(f"{folder}/checkpoint", training)
                checkpointer.wait_until_finished()
                training = checkpointer.restore(f"{folder}/checkpoint", init())  # as in a new process
        rows = rng.integers(0, 1347, 128)
        training = step(training, images[rows] / 16, labels[rows])
        if n % 50 == 0:
            watch.log(POLICY, get_scale_state(training.opt_state))
    accuracy = float(((images[1347:] @ training.weights).argmax(axis=1) == labels[1347:]).mean())
    scale_state = get_scale_state(training.opt_state)
    print(f"accuracy {accuracy:.3f}; {diagnose(POLICY, scale_state)}")
    return Result(accuracy, scale_state, training)


if __name__ == "__main__":
    main()

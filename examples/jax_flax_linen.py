"""flax linen in float16: a `TrainState` with a loss-scaled optimizer that clips, and a network with BatchNorm.

    pip install . flax scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    python examples/jax_flax_linen.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. `loss_scaled` then leaves the weights and the optimizer state unchanged. The batch statistics are not a part
of its state, so the step restores them with `select`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import ScaleState, ScaleWatch, diagnose, metrics
from lossscale_jax import DynamicScaling, get_last_step, get_scale_state, loss_scaled, scale, select

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE = 128


class Network(nn.Module):
    """A perceptron that computes in float16; flax stores its weights in float32."""

    @nn.compact
    def __call__(self, images: jax.Array, is_training: bool) -> jax.Array:
        """Return the logits, in float16."""
        x = nn.Dense(64, dtype=jnp.float16)(images)
        x = nn.BatchNorm(use_running_average=not is_training, momentum=0.9, dtype=jnp.float16)(x)
        return nn.Dense(10, dtype=jnp.float16)(nn.relu(x))


class TrainState(train_state.TrainState):
    """flax's `TrainState`, with the running mean and variance of BatchNorm."""

    batch_stats: Any


class Result(NamedTuple):
    """The accuracy on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: TrainState


def init(seed: int) -> TrainState:
    """Return the state before the first step."""
    network = Network()
    variables = network.init(jax.random.key(seed), jnp.zeros((1, 64)), is_training=False)
    optimizer = loss_scaled(optax.adamw(1e-2), POLICY, max_norm=1.0)
    return TrainState.create(apply_fn=network.apply, tx=optimizer, **variables)


@functools.partial(jax.jit, donate_argnums=0)
def step(state: TrainState, images: jax.Array, labels: jax.Array) -> TrainState:
    """Return the state after a step on one batch; its `step` counts applied steps."""
    scale_state = get_scale_state(state.opt_state)

    def scaled_loss(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, is_training=True, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return scale(losses.mean(), scale_state), updated["batch_stats"]

    grads, batch_stats = jax.grad(scaled_loss, has_aux=True)(state.params)
    stepped = state.apply_gradients(grads=grads)
    applied = get_last_step(stepped.opt_state).applied
    count, batch_stats = select(applied, (stepped.step, batch_stats), (state.step, state.batch_stats))
    return stepped.replace(step=count, batch_stats=batch_stats)


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    state = init(seed)
    watch, rng = ScaleWatch(), np.random.default_rng(seed)
    for n in range(steps):
        rows = rng.integers(0, len(images), BATCH_SIZE)
        state = step(state, images[rows], labels[rows])
        if n % 50 == 0:
            watch.log(POLICY, get_scale_state(state.opt_state))
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, test_images, is_training=False)
    accuracy = float((logits.argmax(axis=1) == test_labels).mean())
    scale_state = get_scale_state(state.opt_state)
    applied_steps = metrics(scale_state)["applied_steps"]
    print(f"accuracy {accuracy:.3f} after {applied_steps} applied steps; {diagnose(POLICY, scale_state)}")
    return Result(accuracy, scale_state, state)


if __name__ == "__main__":
    main()

"""Sharded float16 training with gradient accumulation, in the style of MaxText: one compiled step for all devices.

    pip install . flax scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/jax_sharded.py

Weights, optimizer state and data are sharded over all devices. A step scans over its micro-batches and adds up their
scaled gradients. If a micro-batch overflows, the sum is not finite, and every device skips the step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import NamedSharding, P
from sklearn.datasets import load_digits

from lossscale_core import ScaleState, ScaleWatch, diagnose
from lossscale_jax import DynamicScaling, get_last_step, get_scale_state, loss_scaled, scale

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 32


class Result(NamedTuple):
    """The accuracy on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: TrainState


def forward(params: Any, images: jax.Array) -> jax.Array:
    """Return the logits, computed in float16 and then converted to float32."""
    hidden, out = (params[name].astype(jnp.float16) for name in ("hidden", "out"))
    return (jax.nn.relu(images.astype(jnp.float16) @ hidden) @ out).astype(jnp.float32)


def init(key: jax.Array) -> TrainState:
    """Return the state before the first step, with float32 weights."""
    params = {"hidden": jax.random.normal(key, (64, 64)) / 8, "out": jnp.zeros((64, 10))}
    return TrainState.create(apply_fn=forward, params=params, tx=loss_scaled(optax.adamw(1e-2), POLICY, max_norm=1.0))


def step(state: TrainState, images: jax.Array, labels: jax.Array) -> TrainState:
    """Return the state after a step on the mean of all micro-batches, which are the first dimension of the data."""
    scale_state = get_scale_state(state.opt_state)

    def scaled_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(params, images), labels)
        return scale(losses.mean() / MICRO_BATCHES, scale_state)

    def accumulate(total: Any, micro_batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(scaled_loss)(state.params, *micro_batch)), None

    grads, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, state.params), (images, labels))
    stepped = state.apply_gradients(grads=grads)
    applied = get_last_step(stepped.opt_state).applied
    return stepped.replace(step=jnp.where(applied, stepped.step, state.step))


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    mesh, rng, key = jax.make_mesh((jax.device_count(),), ("data",)), np.random.default_rng(seed), jax.random.key(seed)
    by_row, replicated, by_sample = (NamedSharding(mesh, spec) for spec in (P("data"), P(), P(None, "data")))
    shardings = jax.tree.map(lambda leaf: by_row if leaf.ndim else replicated, jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=shardings)(key)
    compiled = jax.jit(step, in_shardings=(shardings, by_sample, by_sample), out_shardings=shardings, donate_argnums=0)
    watch = ScaleWatch()
    for n, rows in enumerate(rng.integers(0, 1347, (steps, MICRO_BATCHES, MICRO_BATCH_SIZE))):
        state = compiled(state, images[rows] / 16, labels[rows])
        jax.block_until_ready(state)  # without it, virtual devices on one CPU may wait for each other forever
        if n % 50 == 0:
            watch.log(POLICY, get_scale_state(state.opt_state))
    accuracy = float((forward(state.params, images[1347:] / 16).argmax(axis=1) == labels[1347:]).mean())
    result = Result(accuracy, get_scale_state(state.opt_state), state)
    print(f"accuracy {accuracy:.3f} on {mesh.size} devices; {diagnose(POLICY, result.scale_state)}")
    return result


if __name__ == "__main__":
    main()

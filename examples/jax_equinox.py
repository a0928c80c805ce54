"""Equinox in float16: one call applies or skips the step; the model and the optimizer state are donated to `jit`.

    pip install . equinox scikit-learn    # on a fresh machine: '.[jax]' instead of the dot
    python examples/jax_equinox.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow. `apply_gradients` takes the scaled gradients. If they overflowed, it returns the old model and state.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lossscale_core import ScaleState, ScaleWatch, diagnose, metrics
from lossscale_jax import DynamicScaling, get_scale_state, loss_scaled, scale

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
OPTIMIZER = loss_scaled(optax.adam(1e-2), POLICY)
BATCH_SIZE = 128


class Result(NamedTuple):
    """The accuracy on the test images, and the state at the end."""

    accuracy: float
    scale_state: ScaleState
    training: eqx.Module


def predict(model: eqx.Module, images: jax.Array) -> jax.Array:
    """Return the logits, computed in float16 and then converted to float32."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    half = jax.tree.map(lambda param: param.astype(jnp.float16), params)
    return jax.vmap(eqx.combine(half, static))(images.astype(jnp.float16)).astype(jnp.float32)


@eqx.filter_jit(donate="all-except-first")
def step(batch: tuple[jax.Array, jax.Array], model: eqx.Module, opt_state: Any) -> tuple[eqx.Module, Any]:
    """Return model and optimizer state after a step on one batch."""
    images, labels = batch
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def scaled_loss(params: Any) -> jax.Array:
        logits = predict(eqx.combine(params, static), images)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return scale(loss, get_scale_state(opt_state))

    params, opt_state = OPTIMIZER.apply_gradients(jax.grad(scaled_loss)(params), opt_state, params)
    return eqx.combine(params, static), opt_state


def main(steps: int = 200, seed: int = 0) -> Result:
    """Train, print one line about the run, and return the outcome."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=450, random_state=0)
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(seed))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    watch, rng = ScaleWatch(), np.random.default_rng(seed)
    for n in range(steps):
        rows = rng.integers(0, len(images), BATCH_SIZE)
        model, opt_state = step((images[rows], labels[rows]), model, opt_state)
        if n % 50 == 0:
            watch.log(POLICY, get_scale_state(opt_state))
    accuracy = float((predict(model, test_images).argmax(axis=1) == test_labels).mean())
    scale_state = get_scale_state(opt_state)
    applied_steps = metrics(scale_state)["applied_steps"]
    print(f"accuracy {accuracy:.3f} after {applied_steps} applied steps; {diagnose(POLICY, scale_state)}")
    return Result(accuracy, scale_state, model)


if __name__ == "__main__":
    main()

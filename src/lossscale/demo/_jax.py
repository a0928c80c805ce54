"""Training on JAX: the verbs of `lossscale_jax` around `jax.grad`, under `jit`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import lossscale_jax
from lossscale.demo._network import forward
from lossscale.demo._verbs import VerbsTrainer

_ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}  # XLA on a GPU may otherwise skip rounding to float16


@functools.partial(jax.jit, static_argnums=1)
def _gradients(weights: Any, dtype: str, batch: Any, weight: Any) -> tuple[Array, list[Array]]:
    """Return the loss and its gradients; those of the layers' outputs are the gradients of zeros added to them."""
    zeros = [jnp.zeros((len(batch[0]), bias.size), dtype) for bias in weights[1::2]]
    (grads, output_grads), loss = jax.grad(_loss, argnums=(0, 1), has_aux=True)(weights, zeros, dtype, batch, weight)
    return loss, [*grads, *output_grads]


def _loss(weights: Any, zeros: Any, dtype: str, batch: Any, weight: Any) -> tuple[Array, Array]:
    """Return the weighted mean cross-entropy and the plain one, in float32."""
    images, labels = batch
    log_probabilities = jax.nn.log_softmax(_logits(weights, dtype, images, zeros).astype(jnp.float32))
    loss = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()
    return loss * weight, loss


@functools.partial(jax.jit, static_argnums=1)
def _logits(weights: Any, dtype: str, images: Any, zeros: Any) -> Array:
    left = iter(zeros)

    def dense(inputs: Array, weight: Array, bias: Array) -> Array:
        product = jnp.matmul(inputs, weight.astype(dtype), preferred_element_type=jnp.float32)
        return (product + bias.astype(dtype).astype(jnp.float32)).astype(dtype) + next(left)

    return forward(weights, images.astype(dtype), dense, jax.nn.relu)[-1]


class Trainer(VerbsTrainer):
    """Arrays on JAX's device, and a step that is compiled once for each policy and dtype."""

    xp, verbs = jnp, lossscale_jax
    gradients = staticmethod(_gradients)
    share_seen = staticmethod(lambda decay, steps: -jnp.expm1(steps * math.log(decay)))  # exact in float32

    def exact_gradients(self, images: Any, labels: Any) -> list[Array]:
        return _gradients(self.learnt.weights, "float32", (images, labels), self.weight)[1]

    def logits(self, images: Any) -> Array:
        return _logits(self.learnt.weights, self.dtype, images, (0.0, 0.0, 0.0))

    @classmethod
    @functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=_ROUND_AS_WRITTEN)
    def train_step(cls, policy: Any, dtype: str, learnt: Any, state: Any, batch: Any, weight: Any) -> Any:
        return super().train_step(policy, dtype, learnt, state, batch, weight)

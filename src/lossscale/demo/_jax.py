"""Training on JAX: the same network, data and optimizer under `jit`, with the verbs of `lossscale_jax`."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lossscale.demo import _network, _training
from lossscale.demo._data import Digits
from lossscale.demo._records import LEARNING_RATE, Step
from lossscale.demo._training import Checkpoint
from lossscale_core import ScalingPolicy, check_overflow_streak, state_from_dict, state_to_dict
from lossscale_jax import select, value_and_grad

_ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}  # lest a GPU leave out a float16 between two float32


class _Learnt(NamedTuple):
    """What a step changes, or leaves as it is where it is skipped: float32 weights, and Adam's memory."""

    masters: list[_network.Layer]
    steps: Array
    mean: Any
    square: Any


class Training:
    """Pytrees of weights and memory, and a scale state beside them."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, start: Checkpoint) -> None:
        self.policy, self.dtype, self.weight, self.steps = policy, dtype, weight, start.steps
        masters, mean, square = (_layers(arrays) for arrays in (start.weights, start.mean, start.square))
        self.learnt = _Learnt(masters, jnp.float32(start.adam_steps), mean, square)
        self.state = jax.tree.map(jnp.asarray, state_from_dict(start.scale_state, policy))

    def step(self, images: Any, labels: Any, is_measured: bool) -> tuple[Step, float | None]:
        """Take a step; see `_training.Training`."""
        batch, before, scale = (images, labels), self.learnt.masters, float(self.state.loss_scale)
        self.learnt, self.state, loss, stored, largest, is_applied = _step(
            self.policy, self.dtype, self.learnt, self.state, batch, self.weight
        )
        flushed = _flushed_share(stored, _exact_gradients(before, batch, self.weight)) if is_measured else None
        if not is_applied:
            largest = _largest(_exact_gradients(before, batch, self.weight))
        self.steps += 1
        check_overflow_streak(self.policy, self.state)
        return Step(float(loss), scale, not is_applied, float(largest)), flushed

    def scale_state(self) -> dict[str, Any]:
        """Return the scale state as `state_to_dict` does."""
        return state_to_dict(self.state, self.policy)

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to go on."""
        masters, count, mean, square = self.learnt
        weights, mean, square = ([*map(np.array, jax.tree.leaves(tree))] for tree in (masters, mean, square))
        return Checkpoint(self.steps, weights, mean, square, int(count), self.scale_state())

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        logits = np.asarray(_forward(self.learnt.masters, self.dtype, digits.test_images))
        return float((logits.argmax(axis=1) == digits.test_labels).mean())


train = functools.partial(_training.train, Training)


def _layers(arrays: list[Any]) -> list[_network.Layer]:
    on_device: list[Any] = [*map(jnp.asarray, arrays)]
    return [_network.Layer(*pair) for pair in zip(on_device[::2], on_device[1::2], strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=_ROUND_AS_WRITTEN)
def _step(policy: Any, dtype: str, training: _Learnt, state: Any, batch: Any, weight: Any) -> tuple[Any, ...]:
    """Return what a step changes, the scale state, the loss, the gradients, the largest one and their flag.

    Compiled once for each policy and dtype. The layers' outputs get a gradient too: that of zeros added to them.
    """
    zeros = [jnp.zeros((len(batch[0]), layer.bias.size), dtype) for layer in training.masters]
    backward = value_and_grad(_loss, argnums=(0, 1), has_aux=True)
    _, loss, grads, is_finite = backward(state, training.masters, zeros, dtype, batch, weight)
    after = select(is_finite, _adam_step(training, grads[0]), training)
    return after, policy.update(state, is_finite), loss, grads[0], _largest(grads), is_finite


def _adam_step(training: _Learnt, grads: Any) -> _Learnt:
    """Return weights and memory after a step of Adam; its epsilon is too small to notice the weight of the loss."""
    masters, steps = training.masters, training.steps + 1
    mean = jax.tree.map(lambda m, g: m + 0.1 * (g - m), training.mean, grads)
    square = jax.tree.map(lambda s, g: s + 0.001 * (g * g - s), training.square, grads)
    seen, seen_square = (-jnp.expm1(steps * math.log(decay)) for decay in (0.9, 0.999))  # 1 - decay**steps, exactly

    def moved(array: Array, m: Array, s: Array) -> Array:
        return array - LEARNING_RATE * (m / seen) / (jnp.sqrt(s / seen_square) + 1e-16)

    return _Learnt(jax.tree.map(moved, masters, mean, square), steps, mean, square)


@functools.partial(jax.jit, static_argnames="dtype")
def _forward(masters: Any, dtype: str, images: Any, nudges: Any = (0.0, 0.0, 0.0)) -> Array:
    """Return the logits in `dtype`, with `nudges` added to the layers' outputs; products are summed in float32."""
    hidden = images.astype(dtype)
    for i, (layer, nudge) in enumerate(zip(masters, nudges, strict=True)):
        weight, bias = (array.astype(dtype) for array in layer)
        product = jnp.matmul(jax.nn.relu(hidden) if i else hidden, weight, preferred_element_type=jnp.float32)
        hidden = (product + bias.astype(jnp.float32)).astype(dtype) + nudge
    return hidden


def _loss(masters: Any, nudges: Any, dtype: str, batch: Any, weight: Any) -> tuple[Array, Array]:
    """Return the weighted mean cross-entropy and the plain one, in float32."""
    images, labels = batch
    log_probabilities = jax.nn.log_softmax(_forward(masters, dtype, images, nudges).astype(jnp.float32))
    loss = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()
    return loss * weight, loss


@jax.jit
def _exact_gradients(masters: Any, batch: Any, weight: Any) -> Any:
    """Return the parameters' unscaled gradients as float32 has them, from the same weights."""
    return jax.grad(_loss, has_aux=True)(masters, (0.0, 0.0, 0.0), "float32", batch, weight)[0]


@jax.jit
def _largest(grads: Any) -> Array:
    return jnp.stack([jnp.abs(grad).max() for grad in jax.tree.leaves(grads)]).max()


def _flushed_share(stored: Any, exact: Any) -> float:
    pairs = list(zip(jax.tree.leaves(stored), jax.tree.leaves(exact), strict=True))
    flushed = sum(int(((a == 0) & (b != 0)).sum()) for a, b in pairs)
    return flushed / max(1, sum(int((b != 0).sum()) for _, b in pairs))

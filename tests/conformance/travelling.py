"""Functions with which each adapter begins, or continues from a saved scale state: its own wrapper, its way to load."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf
import torch

import lossscale_core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch
from lossscale_core import StepInfo

NEW: Any = object()
"""What stands for a saved state where a run begins."""


class Step(NamedTuple):
    """What a step with gradients of a given norm did."""

    saved: dict[str, Any]
    info: StepInfo | None = None
    """None where the adapter has no wrapper that says it."""
    bits: list[bytes] | None = None
    """Of all that a skipped step must leave as it was."""


def _bits(values):
    return [np.asarray(value).tobytes() for value in values]


def numpy_wrapper(saved, policy):
    """Return a function that takes a step with gradients of a norm; the core's verbs need no wrapper."""
    state = lossscale_core.state_from_dict(saved, policy)

    def step(norm):
        nonlocal state
        state = policy.update(state, lossscale_core.all_finite(np.full(1, norm, np.float16)))
        return Step(lossscale_core.state_to_dict(state, policy))

    return step


def torch_wrapper(saved, policy, guard=None, *, dtype="float32", max_norm=None, fused=False):
    """Do the same through `GradScaler`."""
    scaler = lossscale_torch.GradScaler("cpu", policy=policy, guard=guard)
    if saved is not NEW:
        scaler.load_state_dict(saved)
    param = torch.nn.Parameter(torch.tensor([0.5, -0.0], dtype=getattr(torch, dtype)))
    optimizer = torch.optim.Adam([param], lr=0.1, fused=fused)

    def step(norm):
        optimizer.zero_grad()
        scaler.scale(param[0] * float(norm)).backward()
        if max_norm:
            scaler.unscale_and_clip_(optimizer, max_norm)
        scaler.step(optimizer)
        info = scaler.update()
        values = [param, *(value for state in optimizer.state.values() for value in state.values())]
        return Step(scaler.state_dict(), info, _bits(value.detach() for value in values))

    return step


def jax_wrapper(saved, policy, guard=None, *, dtype="float32", compiled=True, **settings):
    """Do the same through `loss_scaled`, compiled with everything donated."""
    optimizer = lossscale_jax.loss_scaled(optax.adam(0.1), policy, guard=guard, **settings)
    params = jnp.array([0.5, -0.0], dtype)
    opt_state = optimizer.init(params)
    if saved is not NEW:
        opt_state = lossscale_jax.load_scale_state(opt_state, saved, policy)

    def train(params, opt_state, norm):
        grads = jnp.stack([norm, jnp.zeros_like(norm)]) * lossscale_jax.get_scale_state(opt_state).loss_scale
        return optimizer.apply_gradients(grads, opt_state, params)

    train = jax.jit(train, donate_argnums=(0, 1)) if compiled else train

    def step(norm):
        nonlocal params, opt_state
        before = jax.device_get(opt_state)
        params, opt_state = train(params, opt_state, jnp.asarray(norm, dtype))
        state, guard_state = opt_state.scale_state, opt_state.guard_state
        spiked = guard_state is not None and guard_state.spikes > before.guard_state.spikes
        return Step(
            lossscale_core.state_to_dict(state, policy, guard=guard_state),
            lossscale_core.step_info(before.scale_state, state, spiked=spiked),
            _bits(jax.tree.leaves((params, opt_state.inner_state))),
        )

    return step


GRAPH = tf.function(autograph=False)


def tensorflow_wrapper(saved, policy, guard=None, *, dtype="float32", wrap=GRAPH, **settings):
    """Do the same through TensorFlow's `LossScaleOptimizer`, in a graph."""
    optimizer = lossscale_tf.LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=policy, guard=guard, **settings)
    if saved is not NEW:
        optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.constant([0.5, -0.0], dtype))
    optimizer.build([variable])
    train = wrap(lambda norm: optimizer.minimize(lambda: variable[0] * norm, [variable]))

    def step(norm):
        train(tf.constant(norm, dtype))
        values = [variable, *(each.value for each in optimizer.inner_optimizer.variables)]
        return Step(optimizer.state_dict(), optimizer.last_step, _bits(values))

    return step


def v1_wrapper(saved, policy):
    """Do the same through `lossscale_tf.v1`, eagerly."""
    optimizer = lossscale_tf.v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1e-3), policy)
    optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.ones(3))

    def step(norm):
        optimizer.minimize(lambda: tf.reduce_sum(variable * norm), var_list=[variable])
        return Step(optimizer.state_dict())

    return step


def keras_wrapper(saved, policy):
    """Do the same through `lossscale_keras`, on the backend of this process."""
    optimizer = lossscale_keras.LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy)
    optimizer.load_state_dict(saved)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])

    def step(norm):
        optimizer.apply([optimizer.scale_loss(keras.ops.full((3,), norm))])
        return Step(optimizer.state_dict())

    return step


WRAPPERS = {
    "numpy": numpy_wrapper,
    "torch": torch_wrapper,
    "jax": jax_wrapper,
    "tensorflow": tensorflow_wrapper,
    "tf.compat.v1": v1_wrapper,
    "keras": keras_wrapper,
}

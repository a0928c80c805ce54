"""Functions with which each adapter continues from a saved scale state: its own wrapper, its own way to load."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
import torch

import lossscale_core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch


def numpy_wrapper(saved, policy):
    """Return a function that takes a step and returns the state as saved; the core's verbs need no wrapper."""
    state = lossscale_core.state_from_dict(saved, policy)

    def step(finite):
        nonlocal state
        grads = np.full(3, 1.0 if finite else np.inf, np.float16)
        state = policy.update(state, lossscale_core.all_finite(grads))
        return lossscale_core.state_to_dict(state, policy)

    return step


def torch_wrapper(saved, policy):
    """Do the same through `GradScaler`."""
    scaler = lossscale_torch.GradScaler("cpu", policy=policy)
    scaler.load_state_dict(saved)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=1e-3)

    def step(finite):
        optimizer.zero_grad()
        scaler.scale((param * (1.0 if finite else np.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.state_dict()

    return step


class Sgd(NamedTuple):
    """An optimizer of optax's shape, and not of its type."""

    def init(self, params):
        """Remember nothing."""
        return ()

    def update(self, grads, state, params=None):
        """Go down the gradient."""
        return jax.tree.map(lambda grad: -1e-3 * grad, grads), state


def jax_wrapper(saved, policy):
    """Do the same through `loss_scaled`, under `jit`."""
    optimizer = lossscale_jax.loss_scaled(Sgd(), policy)
    params = jnp.ones(3)
    opt_state = lossscale_jax.load_scale_state(optimizer.init(params), saved, policy)

    @jax.jit
    def train(params, opt_state, factor):
        def scaled_loss(params):
            return lossscale_jax.scale((params * factor).sum(), lossscale_jax.get_scale_state(opt_state))

        return optimizer.apply_gradients(jax.grad(scaled_loss)(params), opt_state, params)

    def step(finite):
        nonlocal params, opt_state
        params, opt_state = train(params, opt_state, 1.0 if finite else jnp.inf)
        return lossscale_core.state_to_dict(lossscale_jax.get_scale_state(opt_state), policy)

    return step


def tensorflow_wrapper(saved, policy):
    """Do the same through `LossScaleOptimizer`, in a graph."""
    optimizer = lossscale_tf.LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy)
    optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.ones(3))
    optimizer.build([variable])

    @tf.function(autograph=False)
    def train(factor):
        optimizer.minimize(lambda: tf.reduce_sum(variable * factor), [variable])

    def step(finite):
        train(tf.constant(1.0 if finite else np.inf))
        return optimizer.state_dict()

    return step


def v1_wrapper(saved, policy):
    """Do the same through `lossscale_tf.v1`, eagerly."""
    optimizer = lossscale_tf.v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1e-3), policy)
    optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.ones(3))

    def step(finite):
        optimizer.minimize(lambda: tf.reduce_sum(variable * (1.0 if finite else np.inf)), var_list=[variable])
        return optimizer.state_dict()

    return step


def keras_wrapper(saved, policy):
    """Do the same through `lossscale_keras`, on the backend of this process."""
    optimizer = lossscale_keras.LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy)
    optimizer.load_state_dict(saved)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])

    def step(finite):
        optimizer.apply([optimizer.scale_loss(keras.ops.full((3,), 1.0 if finite else np.inf))])
        return optimizer.state_dict()

    return step


WRAPPERS = {
    "numpy": numpy_wrapper,
    "torch": torch_wrapper,
    "jax": jax_wrapper,
    "tensorflow": tensorflow_wrapper,
    "tf.compat.v1": v1_wrapper,
    "keras": keras_wrapper,
}

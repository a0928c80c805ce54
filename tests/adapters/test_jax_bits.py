"""An applied step has the bits of the same step without scaling, if XLA fuses no product with a sum."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_jax import get_scale_state, loss_scaled, scale
from tests.adapters.jax_reading import bits

X, PARAMS = jax.random.normal(jax.random.key(0), (64, 32)), [jnp.eye(32) / 2] * 4


def _trained(inner, **settings):
    optimizer = loss_scaled(inner, 1024.0, **settings) if settings else inner

    def step(params, opt_state):
        def loss(params):
            value = jnp.mean((functools.reduce(lambda h, w: jnp.tanh(h @ w), params, X) - jnp.cos(X)) ** 2)
            return scale(value, get_scale_state(opt_state)) if settings else value

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = PARAMS, optimizer.init(PARAMS)
    step = jax.jit(step, compiler_options={"xla_disable_hlo_passes": "fusion"})
    for _ in range(10):
        state = step(*state)
    return bits(state[0])


@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_the_bits_without_loss_scaling(inner):
    """Loss scaling changes no bit of a step in which XLA rounds each product and each sum."""
    assert _trained(inner) == _trained(inner, skip_by="cond") == _trained(inner, skip_by="select")

"""An applied step has the bits of the same step without scaling, if XLA fuses no product with a sum."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import functools, jax, jax.numpy as jnp, optax
from lossscale_jax import get_scale_state, loss_scaled, scale

x, params = jax.random.normal(jax.random.key(0), (64, 32)), [jnp.eye(32) / 2] * 4

def trained(inner, **settings):
    optimizer = loss_scaled(inner, 1024.0, **settings) if settings else inner

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            value = jnp.mean((functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x) - jnp.cos(x)) ** 2)
            return scale(value, get_scale_state(opt_state)) if settings else value

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = params, optimizer.init(params)
    for _ in range(10):
        state = step(*state)
    return state[0]

for inner in (optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)):
    for skip_by in ("cond", "select"):
        print(all((a == b).all() for a, b in zip(trained(inner), trained(inner, skip_by=skip_by))))
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the flag is one of x86 processors")
def test_the_bits_without_loss_scaling():
    """With AVX only, XLA rounds each product and each sum, and loss scaling changes no bit of a step."""
    # XLA reads its flags when a process starts.
    environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment
    )
    assert result.stdout.split() == ["True"] * 4, result.stderr

"""`loss_scaled(skip="select")`: a skip without a conditional, since XLA could read its predicate on the host."""

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_jax import loss_scaled
from tests.adapters.jax_reading import bits

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0]), "half": jnp.ones((8, 2), jnp.float16)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {**GRADS, "w": GRADS["w"].at[5].set(jnp.nan)}
DEVICES = 8
SETTINGS = [
    {},
    {"max_norm": 1.0},
    {"guard": SpikeGuard()},
    {"keep_dtypes": True, "max_norm": 1.0, "guard": SpikeGuard()},
    {"accumulation_steps": 2, "max_norm": 1.0},
    {"accumulation_steps": 2, "drop": "micro_batch", "max_norm": 1.0, "guard": SpikeGuard()},
]


def _primitives(jaxpr):
    """Yield the names of the primitives of a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values())):
            if hasattr(parameter, "eqns"):
                yield from _primitives(parameter)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_a_step_holds_no_conditional(way, settings, monkeypatch):
    """Neither around the step nor in the check, the norm or the guard; by `cond` it holds some, and so on a CPU."""
    counts = {}
    for skip in ("cond", "select", "cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda skip=skip: skip)  # the default asks for it alone
        settings = {**settings, "skip": None if skip in ("cpu", "gpu") else skip}
        optimizer = loss_scaled(optax.adam(0.1, eps=1e-4), POLICY, **settings)
        jaxpr = jax.make_jaxpr(getattr(optimizer, way))(GRADS, optimizer.init(PARAMS), PARAMS)
        counts[skip] = list(_primitives(jaxpr)).count("cond")
    assert counts["select"] == counts["gpu"] == 0 < counts["cond"] == counts["cpu"]


@pytest.mark.parametrize("settings", [{}, {"guard": SpikeGuard(warmup=1)}], ids=["plain", "guard"])
def test_a_skip_shows_zeros_to_the_wrapped_optimizer(settings):
    """Neither what overflowed nor a spike, so that nothing in it fails, loops or reports because of them."""
    seen = []

    def record(updates, state, params=None):
        largest = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]).max()
        jax.debug.callback(lambda number: seen.append(float(number)), largest, ordered=True)
        return updates, state

    inner = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), record), optax.sgd(1.0))
    optimizer = loss_scaled(inner, 1.0, skip="select", **settings)
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    for grads in (GRADS, BAD, *[GRADS] * 3, jax.tree.map(lambda leaf: 1e3 * leaf, GRADS)):
        params, opt_state = step(grads, opt_state, PARAMS)
        jax.effects_barrier()
        assert (bits(params) == bits(PARAMS)) == (seen[-1] == 0.0)
    assert seen == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0 if "guard" in settings else 1e3]

"""Recipes of docs/jax.md: a limit of the norm, two optimizers, a finite loss, derivatives and export."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale_jax
from lossscale_core import DynamicScaling, GuardState, ScaleState, SpikeGuard
from lossscale_jax import get_scale_state, init_state, loss_scaled, value_and_grad
from tests.adapters.jax_reading import bits, step_of, times

POLICY = DynamicScaling(init_scale=2.0**10)
PARAMS = {"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}


def test_a_limit_of_the_norm():
    """`optax.MultiSteps` of one step inside leaves the parameters unchanged, and the policy counts a finite step."""
    is_large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)
    inner = optax.MultiSteps(optax.adam(0.1), 1, should_skip_update_fn=is_large)
    optimizer = loss_scaled(inner.gradient_transformation(), POLICY)
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    for size, moves in ((1.0, True), (3.0, False), (jnp.inf, False), (1.0, True)):
        grads = times(PARAMS, size * get_scale_state(opt_state).loss_scale)
        params, opt_state = step({**grads, "b": PARAMS["b"]}, opt_state, PARAMS)
        assert (bits(params) != bits(PARAMS)) == moves
    assert get_scale_state(opt_state).skipped_steps == 1


@pytest.mark.parametrize("bad", ["w", "b", None])
def test_two_optimizers_decide_together(bad):
    """An overflow in the gradients of one optimizer also skips the other optimizer."""
    inner = optax.partition({"w": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "w", "b": "b"})
    optimizer, grads = loss_scaled(inner, POLICY), jax.tree.map(jnp.ones_like, PARAMS)
    grads |= {bad: jnp.full(2, jnp.nan)} if bad else {}
    params, _ = optimizer.apply_gradients(grads, optimizer.init(PARAMS), PARAMS)
    assert [bits(params[key]) == bits(PARAMS[key]) for key in PARAMS] == [bad is not None] * 2


def test_a_loss_must_be_finite():
    """An infinite loss with finite gradients is an overflow if the flags are combined."""
    value, _, _, finite = value_and_grad(lambda x: x + jnp.inf)(init_state(POLICY), 1.0)
    assert finite
    assert POLICY.update(init_state(POLICY), finite & jnp.isfinite(value), xp=jnp).skipped_steps == 1


@pytest.mark.parametrize(("exponent", "is_finite"), [(15, True), (16, False)])
def test_a_float16_loss(exponent, is_finite):
    """As docs/troubleshooting.md says: every step at such a scale is skipped, although the true gradients are small."""
    grad_of = value_and_grad(lambda x: (x * 1e-3).astype(jnp.float16))
    assert grad_of(init_state(2.0**exponent), 1.0).grads_finite == is_finite


def test_a_step_can_be_differentiated():
    """The derivatives by learning rate and parameters equal the derivatives of a step of the optimizer alone."""

    def trained(learning_rate, params, wrap):
        optimizer = wrap(optax.sgd(learning_rate, momentum=0.9))
        opt_state = optimizer.init(params)
        for _ in range(3):
            grads = {"w": 2.0 * params["w"], "b": jnp.where(params["b"] > 0.0, 1.0, 0.0)}
            params, opt_state = step_of(optimizer, "update")(params, opt_state, grads)
        return jnp.sum(params["w"] ** 2)

    scaled = functools.partial(loss_scaled, policy=1.0, max_norm=1.0, guard=SpikeGuard())
    wraps = scaled, lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner)
    ours, plain = (jax.jit(jax.grad(functools.partial(trained, wrap=wrap), (0, 1)))(0.1, PARAMS) for wrap in wraps)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, plain)


def test_an_exported_step():
    """All types of the state are public and can be registered for export."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2, guard=SpikeGuard())
    types = (getattr(lossscale_jax, name) for name in ("LossScaledState", "LastStep", "Window"))
    for kind in (*types, ScaleState, GuardState, optax.EmptyState):
        jax.export.register_namedtuple_serialization(kind, serialized_name=f"{kind.__module__}.{kind.__name__}")
    arguments, step = (PARAMS, optimizer.init(PARAMS), PARAMS), jax.jit(optimizer.apply_gradients)
    exported = jax.export.deserialize(jax.export.export(step)(*arguments).serialize())
    assert bits(exported.call(*arguments)) == bits(step(*arguments))

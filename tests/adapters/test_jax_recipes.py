"""What docs/jax.md says in one line: logs, limits of a norm, two optimizers, a finite loss, export, older states."""

import functools

import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale_jax
from lossscale_core import DynamicScaling, GuardState, ScaleState, SpikeGuard
from lossscale_core.errors import ScaleStateError
from lossscale_jax import LossScaledState, get_last_step, get_scale_state, loss_scaled, scale, value_and_grad
from tests.adapters.jax_reading import WAYS, bits, step_of

POLICY = DynamicScaling(init_scale=2.0**10)
PARAMS = {"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}


def _steps(optimizer, factors, way="apply_gradients"):
    """Yield parameters and state after each step on scaled gradients that are multiples of the first parameters."""
    params, opt_state, step = PARAMS, optimizer.init(PARAMS), jax.jit(step_of(optimizer, way))
    for factor in factors:
        by = factor * get_scale_state(opt_state).loss_scale
        params, opt_state = step(params, opt_state, {"w": PARAMS["w"] * by, "b": PARAMS["b"]})
        yield params, opt_state


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_a_step_that_clips_nothing(way):
    """A `max_norm` of infinity computes it; a skipped step keeps that of the step before it."""
    optimizer = loss_scaled(optax.sgd(0.0), POLICY, max_norm=float("inf"))
    last_steps = [get_last_step(state) for _, state in _steps(optimizer, [2.0, jnp.inf, 1e30], way)]
    np.testing.assert_allclose([last_step.norm for last_step in last_steps], [10.0, 10.0, 5e30], rtol=1e-6)
    assert [last_step.applied for last_step in last_steps] == [True, False, True]
    assert [last_step.overflowed for last_step in last_steps] == [False, True, False]


def test_a_step_above_a_fixed_norm_is_skipped():
    """`optax.MultiSteps` of one step inside leaves the parameters, and the policy counts a finite step."""
    is_large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)
    inner = optax.MultiSteps(optax.adam(0.1), 1, should_skip_update_fn=is_large)
    first, *steps = _steps(loss_scaled(inner.gradient_transformation(), POLICY), [1.0, 3.0, jnp.inf, 1.0])
    assert [bits(params) == bits(first[0]) for params, _ in steps] == [True, True, False]
    assert get_scale_state(steps[-1][1]).skipped_steps == 1


@pytest.mark.parametrize("bad", ["w", "b", None])
def test_two_optimizers_decide_together(bad):
    """An overflow in the gradients of one leaves the parameters of the other."""
    inner = optax.partition({"w": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "w", "b": "b"})
    optimizer, grads = loss_scaled(inner, POLICY), jax.tree.map(jnp.ones_like, PARAMS)
    grads |= {bad: jnp.full(2, jnp.nan)} if bad else {}
    params, _ = optimizer.apply_gradients(grads, optimizer.init(PARAMS), PARAMS)
    assert [bits(params[key]) == bits(PARAMS[key]) for key in PARAMS] == [bad is not None] * 2


def test_a_loss_that_must_be_finite_too():
    """An infinite loss with finite gradients is an overflow if the flags are combined."""
    value, _, _, finite = value_and_grad(lambda x: x + jnp.inf)(POLICY.init_state(), 1.0)
    assert finite
    assert POLICY.update(POLICY.init_state(), finite & jnp.isfinite(value), xp=jnp).skipped_steps == 1


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"guard": SpikeGuard()}])
def test_a_step_can_be_differentiated(settings):
    """The derivative by the learning rate and the parameters is that of the optimizer alone."""
    clip = optax.clip_by_global_norm(settings.get("max_norm", 1e9))

    def loss(params, by):
        return scale(jnp.sum(params["w"] ** 2) + jnp.sum(jax.nn.relu(-params["b"])), by)

    def trained(learning_rate, params, is_scaled):
        inner = optax.sgd(learning_rate, momentum=0.9)
        optimizer = loss_scaled(inner, POLICY, **settings) if is_scaled else optax.chain(clip, inner)
        opt_state, unit = optimizer.init(params), lossscale_jax.init_state("none")
        for _ in range(3):
            grads = jax.grad(loss)(params, get_scale_state(opt_state) if is_scaled else unit)
            params, opt_state = step_of(optimizer, "update")(params, opt_state, grads)
        return loss(params, unit)

    derivative = jax.jit(jax.grad(trained, argnums=(0, 1)), static_argnums=2)
    ours, plain = (derivative(0.1, PARAMS, is_scaled) for is_scaled in (True, False))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, plain)


def test_an_exported_step():
    """All types of the state are public, and can be registered."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2, guard=SpikeGuard())
    types = (getattr(lossscale_jax, name) for name in ("LossScaledState", "LastStep", "Window"))
    for kind in (*types, ScaleState, GuardState, optax.EmptyState):
        jax.export.register_namedtuple_serialization(kind, serialized_name=f"{kind.__module__}.{kind.__name__}")
    arguments, step = (PARAMS, optimizer.init(PARAMS), PARAMS), jax.jit(optimizer.apply_gradients)
    exported = jax.export.deserialize(jax.export.export(step)(*arguments).serialize())
    assert bits(exported.call(*arguments)) == bits(step(*arguments))


def _as_older(state):
    """Return the parts of a state as versions before `last_step` had them."""
    parts = {name: part for name, part in state._asdict().items() if name != "last_step"}
    window = None if state.window is None else {**state.window._asdict(), "stepped": jnp.asarray(False)}
    return {**parts, "window": window}


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0, "guard": SpikeGuard()}, {"accumulation_steps": 2}])
def test_a_state_of_an_older_version(settings):
    """Its parts go into a new state; an unpickled one without a window goes on as it is."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    new, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    *_, (_, state) = _steps(optimizer, [1.0, 1.0])
    restored = flax.serialization.from_bytes(_as_older(new), flax.serialization.to_bytes(_as_older(state)))
    loaded = [new._replace(**{**restored, "window": new.window})]
    if new.window is None:
        loaded.append(LossScaledState(*_as_older(state).values()))
        with pytest.raises(ScaleStateError, match="older version"):
            get_last_step(loaded[-1])
    for each in loaded:
        assert bits(step(PARAMS, each, PARAMS)) == bits(step(PARAMS, state, PARAMS))

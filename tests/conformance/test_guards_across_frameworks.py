"""A run with a spike guard, begun in one framework, continues in another as the simulated run over the same norms."""

import functools
import itertools
import json

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict
from lossscale_core.testing import simulate
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from lossscale_tf import LossScaleOptimizer
from lossscale_torch import GradScaler

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
GUARD = SpikeGuard(warmup=4, memory=8)
STEPS, SAVED_AT = 24, 12


def _norms():
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(STEPS)).astype(np.float32)
    norms[[9, 11, 12, 20]] *= 50
    norms[[5, 10, 15]] = np.inf
    return norms


NORMS = _norms()
EXPECTED = simulate(POLICY, np.isfinite(NORMS), norms=NORMS, guard=GUARD)


def _in_torch(saved):
    """Return a function that takes a step with gradients of a norm and returns what is saved; through `GradScaler`."""
    scaler = GradScaler("cpu", policy=POLICY, guard=GUARD)
    if saved:
        scaler.load_state_dict(saved)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1e-3)

    def step(norm):
        optimizer.zero_grad()
        scaler.scale(param[0] * float(norm)).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.state_dict()

    return step


def _in_jax(saved):
    """Do the same through `loss_scaled`, eagerly, since a compiler may round less often."""
    optimizer = loss_scaled(optax.sgd(1e-3), POLICY, guard=GUARD)
    params = jnp.ones(2)
    opt_state = optimizer.init(params)
    if saved:
        opt_state = load_scale_state(opt_state, saved, POLICY)

    def step(norm):
        nonlocal params, opt_state
        grads = jnp.array([norm, 0.0]) * get_scale_state(opt_state).loss_scale
        params, opt_state = optimizer.apply_gradients(grads, opt_state, params)
        return state_to_dict(get_scale_state(opt_state), POLICY, guard=opt_state.guard_state)

    return step


def _in_keras(saved):
    """Do the same through `LossScaleOptimizer`, eagerly."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy=POLICY, guard=GUARD)
    if saved:
        optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.ones(2))

    def step(norm):
        optimizer.minimize(lambda: variable[0] * norm, [variable])
        return optimizer.state_dict()

    return step


FRAMEWORKS = {"torch": _in_torch, "jax": _in_jax, "keras": _in_keras}


@functools.cache
def _saved_by(framework):
    """Return the JSON text of a framework's checkpoint."""
    step = FRAMEWORKS[framework](None)
    return json.dumps([step(norm) for norm in NORMS[:SAVED_AT]][-1])


def _guard_states():
    """Return what is saved of the guard after each step of the simulated run."""
    state = GUARD.init_state()
    for norm in NORMS:
        _, state = GUARD.check(state, norm)
        yield state_to_dict(POLICY.init_state(), guard=state)["guard"]


def test_the_run_is_not_trivial():
    """A spike lies on either side of the checkpoint, which is in the middle of a streak."""
    assert list(np.flatnonzero(EXPECTED.spiked)) == [9, 11, 12, 20]
    assert list(np.flatnonzero(EXPECTED.skipped)) == [5, 10, 15]
    assert json.loads(_saved_by("torch"))["guard"]["streak"] == 2.0


@pytest.mark.parametrize(("origin", "target"), list(itertools.product(FRAMEWORKS, FRAMEWORKS)))
def test_a_guarded_run_continues_in_another_framework(origin, target):
    """The guard's state is the host's and the scale's the simulated one after each step, bit for bit."""
    step = FRAMEWORKS[target](json.loads(_saved_by(origin)))
    for n, guard_state in list(enumerate(_guard_states()))[SAVED_AT:]:
        saved = step(NORMS[n])
        assert saved["guard"] == guard_state
        for name in ("growth_tracker", "steps", "skipped_steps", "overflow_streak"):
            assert saved[name] == getattr(EXPECTED, name)[n]
        assert saved["loss_scale"] == EXPECTED.loss_scale_after[n]

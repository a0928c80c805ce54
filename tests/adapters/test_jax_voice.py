"""What is logged of a loop in JAX where its state is read, and an error at the floor."""

import logging

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling, ScaleWatch, check_overflow_streak, diagnose, state_to_dict
from lossscale_core.errors import ScaleFloorError
from lossscale_jax import get_scale_state, loss_scaled


@pytest.fixture(autouse=True)
def _hear_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _events(caplog):
    return [(record.event, record.steps) for record in caplog.records if record.name == "lossscale"]


def _stuck(policy, transform):
    """Return the scale state after thirty NaNs."""
    optimizer = loss_scaled(optax.sgd(0.1), policy)
    params = jnp.ones(2)
    opt_state = optimizer.init(params)
    step = transform(optimizer.apply_gradients)
    for _ in range(30):
        params, opt_state = step(jnp.full(2, jnp.nan), opt_state, params)
    return get_scale_state(opt_state)


@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_reading_the_state_logs_once(transform, caplog):
    """The steps are pure and say nothing; `diagnose`, a saved state and a check that reads do, once for a policy."""
    policy = DynamicScaling(growth_interval=3 + (transform is jax.jit), max_overflow_streak=1000)
    state = _stuck(policy, transform)
    assert _events(caplog) == []
    for read in (check_overflow_streak, diagnose, lambda policy, state: state_to_dict(state, policy)):
        read(policy, state)
        assert _events(caplog) == [("floor", 30)]


def test_a_check_raises_at_the_floor_if_asked_to():
    """On the host, where the state is read; a step under `jit` cannot."""
    policy = DynamicScaling(growth_interval=5)
    state = _stuck(policy, jax.jit)
    check_overflow_streak(policy, state)
    with pytest.raises(ScaleFloorError, match=r"^loss_scale=1 has reached min_scale=1, .*forward pass"):
        check_overflow_streak(policy, state, on_floor="raise")


def test_a_watch_of_ones_own_keeps_runs_apart(caplog):
    """Two runs under one policy that is read through a `ScaleWatch` each are both heard."""
    policy = DynamicScaling(growth_interval=6)
    state = _stuck(policy, jax.jit)
    for watch in (ScaleWatch(), ScaleWatch()):
        watch.log(policy, state)
        watch.log(policy, state)
    assert _events(caplog) == [("floor", 30)] * 2

"""The scalers of jmp and flax, compared with their translations."""

import random

import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.serialization import to_state_dict
from flax.training.dynamic_scale import DynamicScale

from lossscale import from_tool, state_from_tool
from lossscale_core.adapters import SMALLEST_SCALE
from tests.sweeping import seeds


def _jmp(config):
    """Return jmp's scaler, its step, and a function that returns its checkpoint."""
    arrays = {key: jnp.float32(value) if "scale" in key else value for key, value in config.items()}
    return jmp.DynamicLossScale(**arrays), lambda scaler, finite: scaler.adjust(finite), vars


def _flax(config):
    """Return flax's scaler, its step, and a function that returns its checkpoint."""

    def step(scaler, finite):
        return scaler.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))(jnp.float32(1.0))[0]

    return DynamicScale(**config), step, to_state_dict


CONFIGS = [
    ("jmp", _jmp, {"loss_scale": 2.0**10, "period": 2}),
    ("jmp", _jmp, {"loss_scale": 4.0, "period": 1, "factor": 4, "min_loss_scale": 0.25}),
    ("flax", _flax, {"growth_interval": 2}),
    ("flax", _flax, {"growth_interval": 0, "scale": 4.0, "minimum_scale": 1.0}),
    ("flax", _flax, {"growth_interval": -1, "growth_factor": 4.0, "backoff_factor": 0.25, "minimum_scale": None}),
]


@pytest.mark.parametrize(("name", "make", "config"), CONFIGS)
def test_the_policy_does_what_the_scaler_does(name, make, config):
    """Scales are equal after every step, also in a run that is saved at any step and resumed."""
    for seed in seeds(50):
        draw, policy = random.Random(seed), from_tool(name, config)
        original, step, saved = make(config)
        states, stop = [policy.init_state()], draw.randrange(20)
        for n in range(40):
            if n == stop:
                states.append(state_from_tool(name, saved(original), policy))
            finite = draw.random() < 0.7
            original = step(original, jnp.asarray(finite))
            states = [policy.update(state, finite) for state in states]
            scale = original.loss_scale if name == "jmp" else original.scale
            assert {float(state.loss_scale) for state in states} == {float(scale)}


def test_the_fields_of_a_scaler_are_a_config():
    """`state_from_tool` accepts `vars` of a scaler, with its arrays."""
    policy = from_tool("flax", vars(DynamicScale(growth_interval=5)))
    assert (policy.growth_interval, policy.min_scale) == (6, SMALLEST_SCALE)
    policy = from_tool("jmp", vars(jmp.DynamicLossScale(jnp.float32(8.0))))
    assert (policy.init_scale, policy.growth_interval) == (8.0, 2000)
    np.testing.assert_array_equal(policy.init_state().loss_scale, np.float32(8.0))


@pytest.mark.parametrize("place", [jnp.asarray, lambda value: jnp.asarray([value])])
def test_arrays_in_a_checkpoint(place):
    """A device array of shape `()` or of one element counts as its number."""
    state = state_from_tool("flax", {"scale": place(8.0), "fin_steps": place(7)})
    assert (state.loss_scale, state.growth_tracker) == (8.0, 7)

"""The scalers of jmp and flax, compared with their translations."""

import jax.numpy as jnp
import jmp
import pytest
from flax.serialization import to_state_dict
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given
from hypothesis import strategies as st

from lossscale import from_tool
from tests.other_tools import check_scaler
from tests.strategies import overflow_traces
from tests.sweeping import few_examples

SCALES = st.integers(0, 20).map(lambda power: 2.0**power)


def _jmp(config):
    """Return the step of jmp's scaler, a function that returns its checkpoints, and the policies of its fields."""
    arrays = {key: jnp.float32(value) if "scale" in key else value for key, value in config.items()}
    scaler = jmp.DynamicLossScale(**arrays)

    def step(finite):
        nonlocal scaler
        scaler = scaler.adjust(jnp.asarray(finite))
        return scaler.loss_scale

    return step, lambda: [vars(scaler)], [from_tool("jmp", vars(scaler))]


def _flax(config):
    """Return the same of flax's scaler."""
    scaler = DynamicScale(**config)

    def step(finite):
        nonlocal scaler
        scaler = scaler.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))(jnp.float32(1.0))[0]
        return scaler.scale

    def saved():
        entries = to_state_dict(scaler)
        return [entries, vars(scaler), {key: jnp.asarray([value]) for key, value in entries.items()}]

    return step, saved, [from_tool("flax", vars(scaler))]


JMP = st.fixed_dictionaries(
    {"loss_scale": SCALES, "period": st.integers(1, 4)},
    optional={"factor": st.sampled_from([2, 4]), "min_loss_scale": st.just(2.0**-4)},
)
FLAX = st.fixed_dictionaries(
    {"growth_interval": st.integers(-1, 4)},
    optional={
        "scale": SCALES,
        "growth_factor": st.sampled_from([2.0, 4.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25]),
        "minimum_scale": st.sampled_from([None, 2.0**-4]),
    },
)


@pytest.mark.parametrize(("name", "make", "configs"), [("jmp", _jmp, JMP), ("flax", _flax, FLAX)])
@few_examples
@given(data=st.data(), grads_finite=overflow_traces(max_steps=40), stop=st.integers(0, 20))
def test_a_policy_has_the_scalers_scales(name, make, configs, data, grads_finite, stop):
    """The policy of a scaler's config has the scaler's scales, also in a run that continues a saved run."""
    config = data.draw(configs)
    check_scaler(name, config, *make(config), grads_finite, stop)

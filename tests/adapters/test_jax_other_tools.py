"""jmp's and flax's own scalers against their translations."""

import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.serialization import to_state_dict
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given
from hypothesis import strategies as st

from lossscale import from_tool, state_from_tool
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from tests.strategies import overflow_traces
from tests.sweeping import few_examples

SCALES = st.integers(0, 30).map(lambda power: 2.0**power)


def _assert_alike(name, config, original, step, saved, grads_finite, stop):
    """Compare the whole run, and one resumed from what the original saves after `stop` steps."""
    policy = from_tool(name, config)
    states = [policy.init_state()]
    for index, finite in enumerate(grads_finite):
        if index == stop:
            states.append(state_from_tool(name, saved(original), policy))
        original, scale = step(original, jnp.asarray(finite))
        if not SMALLEST_SCALE < scale < LARGEST_SCALE:
            return
        states = [policy.update(state, finite) for state in states]
        assert {float(state.loss_scale) for state in states} == {float(scale)}


@few_examples
@given(
    st.fixed_dictionaries(
        {"loss_scale": SCALES, "period": st.integers(1, 5)},
        optional={"factor": st.sampled_from([2, 4]), "min_loss_scale": st.sampled_from([1.0, 0.25])},
    ),
    overflow_traces(max_steps=40),
    st.integers(0, 20),
)
def test_jmp(config, grads_finite, stop):
    """`DynamicLossScale.adjust`, eagerly, where it keeps its floor."""
    arrays = {key: jnp.float32(value) if "scale" in key else value for key, value in config.items()}

    def step(scaler, finite):
        scaler = scaler.adjust(finite)
        return scaler, scaler.loss_scale

    _assert_alike("jmp", config, jmp.DynamicLossScale(**arrays), step, vars, grads_finite, stop)


@few_examples
@given(
    st.fixed_dictionaries(
        {"growth_interval": st.integers(-1, 4)},
        optional={
            "scale": SCALES,
            "growth_factor": st.sampled_from([2.0, 4.0]),
            "backoff_factor": st.sampled_from([0.5, 0.25]),
            "minimum_scale": st.sampled_from([None, 1.0]),
        },
    ),
    overflow_traces(max_steps=40),
    st.integers(0, 20),
)
def test_flax(config, grads_finite, stop):
    """`DynamicScale.value_and_grad`, and what `flax.serialization` saves of it."""

    def step(scaler, finite):
        gradient_of = scaler.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))
        scaler, *_ = gradient_of(jnp.float32(1.0))
        return scaler, scaler.scale

    _assert_alike("flax", config, DynamicScale(**config), step, to_state_dict, grads_finite, stop)


def test_the_fields_of_a_scaler_are_a_config():
    """`vars` of a scaler is read as it is, arrays and all."""
    policy = from_tool("flax", vars(DynamicScale(growth_interval=5)))
    assert (policy.growth_interval, policy.min_scale) == (6, SMALLEST_SCALE)
    policy = from_tool("jmp", vars(jmp.DynamicLossScale(jnp.float32(8.0))))
    assert (policy.init_scale, policy.growth_interval) == (8.0, 2000)
    np.testing.assert_array_equal(policy.init_state().loss_scale, np.float32(8.0))


@pytest.mark.parametrize("place", [jnp.asarray, lambda value: jnp.asarray([value])])
def test_arrays_in_a_checkpoint(place):
    """Device arrays, of no dimension or of one element, are the numbers they hold."""
    state = state_from_tool("flax", {"scale": place(8.0), "fin_steps": place(7)})
    assert (state.loss_scale, state.growth_tracker) == (8.0, 7)

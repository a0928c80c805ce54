"""What jmp's and flax's scalers did, a translated policy does; and a state saved with Orbax continues where it was."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.testing import overflow_traces
from lossscale_jax import get_scale_state, init_state, loss_scaled, scale, value_and_grad
from tests.sweeping import few_examples


def _scales(policy, grads_finite):
    """Return the scale after each step of a jitted run."""

    def step(state, finite):
        state = policy.update(state, finite)
        return state, state.loss_scale

    return np.asarray(jax.lax.scan(step, init_state(policy), jnp.asarray(grads_finite, bool))[1])


@few_examples
@given(st.integers(1, 5), st.sampled_from([2, 4, 16]), st.sampled_from([1.0, 64.0]), overflow_traces(max_steps=40))
def test_jmp(period, factor, floor, grads_finite):
    """`period` is `growth_interval`, `factor` both factors; jmp has no ceiling, so the run is kept below ours."""
    policy = DynamicScaling(
        init_scale=2.0**15,
        growth_interval=period,
        growth_factor=float(factor),
        backoff_factor=1.0 / factor,
        min_scale=floor,
        max_scale=LARGEST_SCALE,
    )
    grads_finite = grads_finite[: 27 * period]

    def step(state, finite):
        state = jmp.DynamicLossScale(*state, period, factor, jnp.float32(floor)).adjust(finite)
        return (state.loss_scale, state.counter), state.loss_scale

    start = jnp.float32(2.0**15), jnp.int32(0)
    _, expected = jax.lax.scan(step, start, jnp.asarray(grads_finite, bool))
    np.testing.assert_array_equal(_scales(policy, grads_finite), expected)


@few_examples
@given(st.integers(0, 4), st.sampled_from([2.0, 4.0]), st.sampled_from([SMALLEST_SCALE, 1.0]), overflow_traces(40))
def test_flax(growth_interval, factor, floor, grads_finite):
    """flax grows one step later than its `growth_interval` says, and has almost no ceiling."""
    policy = DynamicScaling(
        growth_interval=growth_interval + 1,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        min_scale=floor,
        max_scale=LARGEST_SCALE,
    )

    def step(state, finite):
        dynamic_scale = DynamicScale(factor, 1.0 / factor, growth_interval, state[0], state[1], floor)
        gradient_of = dynamic_scale.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.inf))
        after, *_ = gradient_of(jnp.float32(1.0))
        return (after.fin_steps, after.scale), after.scale

    start = jnp.int32(0), jnp.float32(2.0**16)
    _, expected = jax.lax.scan(step, start, jnp.asarray(grads_finite, bool))
    np.testing.assert_array_equal(_scales(policy, grads_finite), expected)


def test_flaxs_value_and_grad_is_ours():
    """Same loss, same gradients, same flag."""

    def loss(params, x):
        return jnp.sum((params * x) ** 2), {"x": x}

    params, x = jnp.arange(3.0), jnp.float16(0.5)
    theirs = DynamicScale(scale=jnp.float32(2.0**10)).value_and_grad(loss, has_aux=True)(params, x)
    ours = value_and_grad(loss, has_aux=True)(init_state(2.0**10), params, x)
    assert ours.grads_finite == theirs.finite
    assert (ours.value, ours.aux) == theirs.aux
    np.testing.assert_array_equal(ours.grads, theirs.grad)


@pytest.mark.filterwarnings("default")  # what Orbax warns of is Orbax's
@pytest.mark.parametrize("settings", [
    pytest.param({}, id="plain"),
    pytest.param({"max_norm": 1.0, "guard": SpikeGuard()}, id="guarded"),
])  # fmt: skip
def test_orbax(settings, tmp_path):
    """The whole optimizer state is a pytree: a run continued from a checkpoint is bit for bit the run without one."""
    policy = DynamicScaling(init_scale=2.0**20, growth_interval=3)
    optimizer = loss_scaled(optax.adam(0.1), policy, **settings)

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            return scale(jnp.sum(params.astype(jnp.float16) ** 2).astype(jnp.float32), get_scale_state(opt_state))

        return optimizer.apply_gradients(jax.grad(loss)(params), opt_state, params)

    carry = jnp.ones(3), optimizer.init(jnp.ones(3))
    for _ in range(7):
        carry = step(*carry)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", carry)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: carry))
    assert get_scale_state(restored[1]).skipped_steps > 0
    for _ in range(5):
        carry, restored = step(*carry), step(*restored)
        jax.tree.map(np.testing.assert_array_equal, carry, restored)

"""`retrying_value_and_grad`: an overflow is differentiated again at a lower scale, with the same data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from lossscale_core.errors import PolicyError
from lossscale_jax import init_state, retrying_value_and_grad, value_and_grad

POLICY = DynamicScaling(init_scale=2.0**20, growth_interval=3)


def _loss(params, batch):
    """Return a loss with float16 gradients that overflow above a scale of about 2**12."""
    return jnp.sum(params.astype(jnp.float16) * batch.astype(jnp.float16) * jnp.float16(8))


PARAMS = jnp.linspace(-1.0, 1.0, 8)
BATCH = jnp.full(8, 1.5)


def _by_hand(policy, state, retries):
    """Return the gradients and the state of the last try, from a Python loop."""
    for _ in range(retries):
        result = value_and_grad(_loss)(state, PARAMS, BATCH)
        if bool(result.grads_finite):
            break
        state = policy.update(state, result.grads_finite)
    return value_and_grad(_loss)(state, PARAMS, BATCH), state


def _equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("retries", [0, 1, 7, 8, 32])
def test_it_is_the_run_that_begins_at_that_scale(retries, transform):
    """The same gradients and counters, bit for bit, as a loop on the host; exhausted, the last try is not finite."""
    retrying = transform(retrying_value_and_grad(_loss, POLICY, retries=retries))
    state = init_state(POLICY)
    gradients, after = retrying(state, PARAMS, BATCH)
    expected, expected_state = _by_hand(POLICY, state, retries)
    _equal(gradients, expected)
    _equal(after, expected_state)
    assert bool(gradients.grads_finite) == (retries >= 8)
    assert int(after.skipped_steps) == min(retries, 8)


@pytest.mark.parametrize(
    "policy", [DynamicScaling(init_scale=2.0**20, hysteresis=3), DynamicScaling(min_scale=2.0**14)]
)
def test_each_try_counts_for_the_policy(policy):
    """Hysteresis and bounds hold: tries that do not lower the scale are tries, too."""
    state = init_state(policy)
    gradients, after = retrying_value_and_grad(_loss, policy, retries=5)(state, PARAMS, BATCH)
    expected, expected_state = _by_hand(policy, state, 5)
    _equal(gradients, expected)
    _equal(after, expected_state)
    assert not gradients.grads_finite


@pytest.mark.parametrize("policy", [FixedScaling(2.0**20), NoScaling()])
def test_a_policy_that_does_not_adapt_is_not_retried(policy):
    """Its state comes back as it was; the caller counts the overflow."""
    state = init_state(policy)
    _, after = retrying_value_and_grad(_loss, policy, retries=5)(state, PARAMS * jnp.inf, BATCH)
    _equal(after, state)


def test_the_function_is_traced_once_for_its_shapes_and_once_for_the_loop():
    """It is traced as often for any number of retries; a second call traces nothing."""
    traces = []

    def loss(params, batch):
        traces.append(1)
        return _loss(params, batch)

    step = jax.jit(retrying_value_and_grad(loss, POLICY, retries=32))
    for _ in range(2):
        gradients, _ = step(init_state(POLICY), PARAMS, BATCH)
        assert bool(gradients.grads_finite)
    assert len(traces) <= 3
    text = (
        jax.jit(retrying_value_and_grad(_loss, POLICY, retries=32)).lower(init_state(POLICY), PARAMS, BATCH).as_text()
    )
    assert text.count("stablehlo.while") == 1


def test_aux_argnums_and_keywords_pass_through():
    """As with `value_and_grad`; each try has the same random key."""

    def loss(params, *, batch, key):
        noise = jax.random.normal(key, params.shape)
        return _loss(params + noise, batch), {"noise": noise}

    key = jax.random.key(0)
    retrying = retrying_value_and_grad(loss, POLICY, retries=32, has_aux=True)
    gradients, state = jax.jit(retrying)(init_state(POLICY), PARAMS, batch=BATCH, key=key)
    assert bool(gradients.grads_finite)
    _equal(gradients.aux["noise"], jax.random.normal(key, PARAMS.shape))
    assert float(state.loss_scale) == 2.0**12


def test_in_a_scan_the_first_step_calibrates():
    """Later steps need no retry, and growth is tried as ever."""
    retrying = retrying_value_and_grad(_loss, POLICY, retries=32)

    def step(carry, _):
        params, state = carry
        gradients, state = retrying(state, params, BATCH)
        after = POLICY.update(state, gradients.grads_finite, xp=jnp)
        return (params - 0.01 * gradients.grads, after), (gradients.grads_finite, after.skipped_steps)

    (_, state), (finite, skipped) = jax.jit(partial(jax.lax.scan, step, length=5))((PARAMS, init_state(POLICY)), None)
    assert finite.tolist() == [True] * 5
    assert skipped.tolist() == [8, 8, 8, 9, 9]
    assert int(state.steps) == 5 + 9


@pytest.mark.parametrize("retries", [-1, True, 1.5, None])
def test_the_number_of_retries_is_checked(retries):
    """The message names the value and the rule."""
    with pytest.raises(PolicyError, match=f"retries={retries!r} must be a whole number from 0"):
        retrying_value_and_grad(_loss, POLICY, retries=retries)

"""A penalty on gradients: the loss is differentiated twice, and both times it is scaled."""

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling, FixedScaling
from lossscale_jax import get_scale_state, init_state, loss_scaled, scale, unscale, value_and_grad

KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = [0.02 * jax.random.normal(key, shape) for key, shape in zip(KEYS, [(4, 8), (8, 8), (8, 1)], strict=False)]
X, Y = jax.random.normal(KEYS[3], (16, 4)), jax.random.normal(KEYS[4], (16,))
WEIGHT = 1e7  # these small weights make small slopes, so that the penalty counts only with a large factor


def _loss(params, x, dtype):
    hidden = x.astype(dtype)
    for weight in params[:-1]:
        hidden = jnp.tanh(hidden @ weight.astype(dtype))
    return jnp.mean(((hidden @ params[-1].astype(dtype)).astype(jnp.float32)[:, 0] - Y) ** 2)


def _penalized(params, x, state, dtype, inner=True):
    """Return the loss and the squared gradient by the inputs, which is taken of the scaled loss, or not."""
    if inner:
        slopes = unscale(jax.grad(lambda x: scale(_loss(params, x, dtype), state))(x), state)
    else:
        slopes = jax.grad(lambda x: _loss(params, x, dtype))(x)
    return _loss(params, x, dtype) + WEIGHT * jnp.sum(slopes**2)


def _distance(grads, expected):
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(grads, expected, strict=True))


EXPECTED = jax.grad(_penalized)(PARAMS, X, None, jnp.float32, inner=False)


@pytest.mark.parametrize("loss_scale", [2.0**-3, 1.0, 2.0**10, 2.0**16])
def test_in_float32_the_loss_scale_changes_nothing(loss_scale):
    """Not one bit of the gradients, since powers of two round nothing."""
    state = init_state(FixedScaling(loss_scale))
    result = value_and_grad(_penalized)(state, PARAMS, X, state, jnp.float32)
    assert all((a == b).all() for a, b in zip(result.grads, EXPECTED, strict=True))


@pytest.mark.parametrize("loss_scale", [2.0**8, 2.0**10, 2.0**13])
def test_in_float16_the_gradients_are_those_of_float32(loss_scale):
    """Within the rounding of float16, at each scale that fits both passes."""
    state = init_state(FixedScaling(loss_scale))
    result = value_and_grad(_penalized)(state, PARAMS, X, state, jnp.float16)
    assert bool(result.grads_finite)
    assert _distance(result.grads, EXPECTED) < 5e-3


def test_small_slopes_need_the_inner_scale():
    """Of a loss that is not scaled they flush to zero in float16, whatever the loss scale of the penalty is."""
    params, state = [0.05 * weight for weight in PARAMS], init_state(FixedScaling(2.0**16))

    def penalty(dtype, inner):
        return float(_penalized(params, X, state, dtype, inner) - _loss(params, X, dtype))

    expected = penalty(jnp.float32, inner=False)
    assert penalty(jnp.float16, inner=True) == pytest.approx(expected, rel=1e-2)
    assert penalty(jnp.float16, inner=False) == 0.0


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_an_overflow_of_the_inner_gradient_skips_the_step(transform):
    """It makes the penalty and so the gradients infinite or NaN; the scale comes down until both passes fit."""
    optimizer = loss_scaled(optax.sgd(0.01), DynamicScaling(init_scale=2.0**30))

    @transform
    def step(params, opt_state):
        state = get_scale_state(opt_state)
        grads = jax.grad(lambda params: scale(_penalized(params, X, state, jnp.float16), state))(params)
        return optimizer.apply_gradients(grads, opt_state, params)

    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for _ in range(30):
        before, skipped = params, int(get_scale_state(opt_state).skipped_steps)
        params, opt_state = step(params, opt_state)
        if int(get_scale_state(opt_state).skipped_steps) == skipped:
            break
        assert all((a == b).all() for a, b in zip(before, params, strict=True))
    assert 2.0**10 <= float(get_scale_state(opt_state).loss_scale) <= 2.0**16
    moved = [(a - b) / -0.01 for a, b in zip(params, PARAMS, strict=True)]
    assert _distance(moved, EXPECTED) < 5e-3

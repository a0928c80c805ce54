"""The five verbs, `value_and_grad` and `overflow_report`, beyond what the conformance suite asks of every adapter."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale_core
from lossscale_core import FixedScaling
from lossscale_jax import init_state, loss_scaled, overflow_report, select, unscale, value_and_grad
from tests.adapters.jax_reading import WRAPS, bits
from tests.jax_names import enable_x64

EACH_WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def _statistics():
    """Return the state of an Equinox model after an overflow in its BatchNorm, and before it."""
    norm, before = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    spoil = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return spoil(jnp.full((3, 2), jnp.inf), before)[1], before


PAIRS = [_statistics(), (jax.random.key(1), jax.random.key(0)), (jnp.full(2, 3.0), np.ones(2))]


@EACH_WRAP
@pytest.mark.parametrize(("new", "old"), PAIRS, ids=["statistics", "keys", "float64"])
def test_select_takes_any_array(new, old, wrap):
    """`select` chooses models' states and PRNG keys; without x64, NumPy's float64 is float32."""
    assert bits(new) != bits(old)
    for flag, expected in ((True, new), (False, old)):
        assert bits(wrap(select)(jnp.asarray(flag), new, old)) == bits(jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize("flag", [np.True_, jnp.asarray(False)])
def test_select_keeps_equal_functions(flag):
    """Equal leaves that are not arrays pass through."""
    new, old = ({"activation": jax.nn.relu, "name": str(0.1), "w": number} for number in (1.0, 0.0))
    assert select(flag, new, old) == (new if flag else old)


def test_init_state_is_placed():
    """`init_state` accepts a device."""
    assert init_state("dynamic", device=jax.devices()[3]).steps.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("options", [{}, {"argnums": (0, 1), "has_aux": True}], ids=["plain", "options"])
def test_value_and_grad(options):
    """Loss, `aux` and gradients equal the results of `jax.value_and_grad` at every scale, with its options, too."""

    def loss(params, inputs, *, factor):
        value = jnp.sum((inputs @ params["w"] + params["b"]) ** 2) * factor
        return (value, {"inputs": inputs}) if options else value

    arguments = {"w": jnp.arange(3.0), "b": jnp.ones(())}, jnp.arange(6.0).reshape(2, 3) / 4
    expected = jax.value_and_grad(loss, **options)(*arguments, factor=2.0)
    out = value_and_grad(jax.checkpoint(loss), **options)(init_state(2.0**12), *arguments, factor=2.0)
    value = (out.value, out.aux) if options else out.value
    jax.tree.map(np.testing.assert_array_equal, (value, out.grads), expected)
    assert out.grads_finite
    assert options or out.aux is None


def test_overflow_report():
    """`overflow_report` names non-finite leaves by their paths, and the loss decides the verdict."""
    grads = {"layers": [{"w": jnp.array([1.0, jnp.nan, jnp.inf, -3.0])}, {"w": jnp.ones(2)}], "n": jnp.arange(2)}
    (report,) = overflow_report(grads)
    assert report == ("['layers'][0]['w']", 1, 1, 0, 3.0)
    assert overflow_report(grads, loss=jnp.float32(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(grads, loss=np.nan).verdict.startswith("the loss itself is NaN or infinite")


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@EACH_WRAP
def test_float64_gradients_are_divided(wrap, dtype):
    """`unscale` divides float64 gradients with the bits of NumPy at every scale, and a window keeps their precision."""
    grads, policy = np.random.default_rng(0).standard_normal(1000).astype(dtype), FixedScaling(1234.567)
    expected = lossscale_core.unscale(grads, policy.init_state())
    with enable_x64():
        assert (wrap(unscale)(grads, init_state(policy)) == expected).all()
        optimizer, params = loss_scaled(optax.sgd(-1.0), policy, accumulation_steps=3), jnp.zeros(1000, dtype)
        opt_state = optimizer.init(params)
        for factor in (1, 2, 3):
            params, opt_state = wrap(optimizer.apply_gradients)(factor * grads, opt_state, params)
        np.testing.assert_allclose(params, 2 * expected, rtol=1e-15)

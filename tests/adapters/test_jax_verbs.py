"""The five verbs, `value_and_grad` and `overflow_report`, beyond what the conformance suite asks of every adapter."""

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


@EACH_WRAP
@pytest.mark.parametrize(("new", "old"), [(jax.random.key(1), jax.random.key(0)), (jnp.full(2, 3.0), np.ones(2))])
def test_select_takes_any_array(new, old, wrap):
    """`select` chooses PRNG keys; without x64, NumPy's float64 is float32."""
    for flag, expected in ((True, new), (False, old)):
        assert bits(wrap(select)(jnp.asarray(flag), new, old)) == bits(jnp.asarray(expected))


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

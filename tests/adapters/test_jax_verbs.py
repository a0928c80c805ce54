"""The five verbs, `value_and_grad` and `overflow_report`, beyond what the conformance suite asks of every adapter."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale_core
from lossscale_core import FixedScaling
from lossscale_jax import init_state, loss_scaled, overflow_report, scale, select, unscale, value_and_grad
from tests.adapters.jax_reading import FLOAT8, WRAPS, bits
from tests.jax_names import enable_x64

EACH_WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@EACH_WRAP
@pytest.mark.parametrize("shape", [(3,), (0, 3)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_leaves(dtype, shape, wrap):
    """Every verb accepts float8 leaves, and converts them to float32 like float16."""
    state, leaf = init_state(2.0), jnp.ones(shape, dtype)
    for out, value in ((wrap(unscale)(leaf, state), 0.5), (wrap(scale)(leaf, state), 2.0)):
        assert (out.dtype, out.shape) == (jnp.float32, shape)
        assert (out == value).all()
    assert wrap(select)(jnp.asarray(True), leaf, leaf).dtype == dtype
    assert overflow_report(leaf) == []


def _statistics():
    """Return the state of an Equinox model after an overflow in its BatchNorm, and before it."""
    norm, before = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    spoil = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return spoil(jnp.full((3, 2), jnp.inf), before)[1], before


PAIRS = {
    "statistics": _statistics(),
    "keys": (jax.random.key(1), jax.random.key(0)),
    "NumPy's float64": (jnp.full(2, 3.0), np.ones(2)),
}


@EACH_WRAP
@pytest.mark.parametrize(("new", "old"), PAIRS.values(), ids=PAIRS)
def test_select_takes_any_array(new, old, wrap):
    """`select` chooses models' states and PRNG keys; without x64, NumPy's float64 is float32."""
    assert bits(new) != bits(old)
    for flag, expected in ((True, new), (False, old)):
        selected = wrap(select)(jnp.asarray(flag), new, old)
        assert (type(selected), bits(selected)) == (type(new), bits(jax.tree.map(jnp.asarray, expected)))


@pytest.mark.parametrize("flag", [np.True_, jnp.asarray(False)])
def test_select_keeps_equal_functions(flag):
    """Equal leaves that are not arrays pass through."""
    new, old = ({"activation": jax.nn.relu, "name": str(0.1), "w": number} for number in (1.0, 0.0))
    assert select(flag, new, old) == (new if flag else old)


def test_init_state_is_placed():
    """`init_state` accepts a device or a sharding."""
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert init_state("dynamic", device=jax.devices()[3]).loss_scale.devices() == {jax.devices()[3]}
    assert init_state("dynamic", device=sharding).steps.sharding == sharding


@pytest.mark.parametrize("wrap", [*WRAPS.values(), jax.checkpoint], ids=[*WRAPS, "checkpoint"])
@pytest.mark.parametrize("options", [{}, {"argnums": (0, 1), "has_aux": True}], ids=["plain", "options"])
def test_value_and_grad(options, wrap):
    """Loss, `aux` and gradients equal the results of `jax.value_and_grad` at every scale, with its options, too."""

    def loss(params, inputs, *, factor):
        value = jnp.sum((inputs @ params["w"] + params["b"]) ** 2) * factor
        return (value, {"inputs": inputs}) if options else value

    arguments = {"w": jnp.arange(3.0), "b": jnp.ones(())}, jnp.arange(6.0).reshape(2, 3) / 4
    expected = jax.value_and_grad(loss, **options)(*arguments, factor=2.0)
    out = value_and_grad(wrap(loss), **options)(init_state(2.0**12), *arguments, factor=2.0)
    value = (out.value, out.aux) if options else out.value
    jax.tree.map(np.testing.assert_array_equal, (value, out.grads), expected)
    assert out.grads_finite
    assert options or out.aux is None


def test_overflow_report():
    """`overflow_report` names non-finite leaves by their paths, and the loss decides the verdict."""
    grads = {"layers": [{"w": jnp.array([1.0, jnp.nan, jnp.inf, -3.0])}, {"w": jnp.ones(2)}], "n": jnp.arange(2)}
    (report,) = overflow_report(grads)
    assert report == ("['layers'][0]['w']", 1, 1, 0, 3.0)
    assert overflow_report({"w": jnp.ones(2)}) == []
    assert overflow_report(grads, loss=jnp.float32(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(grads, loss=float("nan")).verdict.startswith("the loss itself is NaN or infinite")


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@EACH_WRAP
def test_float64_gradients_are_divided(wrap, dtype):
    """`unscale` and `loss_scaled` divide float64 gradients with the bits of NumPy, at every scale."""
    grads, policy = np.random.default_rng(0).standard_normal(1000).astype(dtype), FixedScaling(1234.567)
    expected = lossscale_core.unscale(grads, policy.init_state())
    with enable_x64():
        assert (wrap(unscale)(grads, init_state(policy)) == expected).all()
        for steps, rtol in ((1, 0.0), (3, 1e-15)):
            optimizer = loss_scaled(optax.sgd(-1.0), policy, accumulation_steps=steps)
            params = jnp.zeros(1000, dtype)
            opt_state, factors = optimizer.init(params), range(1, steps + 1)
            for factor in factors:
                params, opt_state = wrap(optimizer.apply_gradients)(factor * grads, opt_state, params)
            np.testing.assert_allclose(params, np.mean(factors) * expected, rtol=rtol)

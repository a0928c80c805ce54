"""The five verbs, `value_and_grad` and `overflow_report`: values, dtypes and transforms."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale_core
from lossscale_core import FixedScaling
from lossscale_jax import init_state, loss_scaled, overflow_report, scale, select, unscale, value_and_grad
from tests.adapters.jax_reading import bits
from tests.jax_names import enable_x64

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e8m0fnu"]


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_leaves(dtype, shape):
    """Every verb accepts float8 leaves and converts them to float32 like float16, eagerly and compiled."""
    state, leaf = init_state(2.0), jnp.ones(shape, dtype)
    for wrap in (lambda f: f, jax.jit):
        for out, value in ((wrap(unscale)(leaf, state), 0.5), (wrap(scale)(leaf, state), 2.0)):
            assert (out.dtype, out.shape) == (jnp.float32, shape)
            assert (out == value).all()
        assert wrap(select)(jnp.asarray(True), leaf, leaf).dtype == dtype
    assert overflow_report(leaf) == []


def test_a_loss_must_be_a_float():
    """An integer, a bool or a PRNG key in place of a loss raises an error, because its gradient would be zero."""
    for loss in (3, True, jnp.int32(3), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"a loss of dtype (int32|bool|key<fry>) has no gradient; pass a float"):
            scale(loss, init_state(2.0))
    for fun in (lambda params: params.astype(jnp.int32).sum(), lambda params: (params > 0.0).all()):
        with pytest.raises(TypeError, match="has no gradient"):
            jax.jit(value_and_grad(fun))(init_state(2.0), jnp.ones(3))


def test_select_takes_keys_and_functions():
    """`select` chooses PRNG keys, and passes through equal leaves that are not arrays."""
    new, old = ({"key": jax.random.key(seed), "activation": jax.nn.relu, "name": str(0.1)} for seed in (1, 0))
    for flag in (np.True_, jnp.asarray(True), jnp.asarray(False)):
        chosen = select(flag, new, old)
        assert (jax.random.key_data(chosen["key"]) == jax.random.key_data((new if flag else old)["key"])).all()
        assert (chosen["activation"], chosen["name"]) == (jax.nn.relu, "0.1")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_select_restores_the_state_of_an_equinox_model(wrap):
    """After an overflow, the statistics of BatchNorm are the same as before the forward pass."""
    norm, old = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    _, new = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(jnp.full((3, 2), jnp.inf), old)
    assert bits(new) != bits(old)
    for flag, expected in ((True, new), (False, old)):
        selected = wrap(select)(jnp.asarray(flag), new, old)
        assert (type(selected), bits(selected)) == (eqx.nn.State, bits(expected))


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ({"w": jnp.ones(2)}, {"v": jnp.ones(2)}, "w"),
        ({"w": jnp.ones(2)}, {"w": jnp.ones(())}, r"\['w'\] is float32\[2\] in new and float32\[\] in old"),
        ({"f": jax.nn.relu}, {"f": jax.nn.gelu}, "a leaf that is not an array must not change: pass arrays"),
        ([jnp.ones(2)], [jnp.ones(2, jnp.float16)], r"is float32\[2\] in new and float16\[2\] in old"),
    ],
)
def test_select_refuses_what_does_not_match(new, old, message):
    """`select` raises an error instead of broadcasting or dropping a leaf."""
    with pytest.raises(ValueError, match=message):
        select(jnp.asarray(True), new, old)


def test_init_state_is_placed():
    """`init_state` accepts a device or a sharding."""
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert init_state("dynamic", device=jax.devices()[3]).loss_scale.devices() == {jax.devices()[3]}
    assert init_state("dynamic", device=sharding).steps.sharding == sharding


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("options", [{}, {"argnums": (0, 1), "has_aux": True}], ids=["plain", "options"])
def test_value_and_grad(options, wrap):
    """Loss, `aux` and gradients equal the results of `jax.value_and_grad` at every scale, with its options, too."""

    def loss(params, inputs, *, factor):
        value = jnp.sum((inputs @ params["w"] + params["b"]) ** 2) * factor
        return (value, {"inputs": inputs}) if options else value

    arguments = {"w": jnp.arange(3.0), "b": jnp.ones(())}, jnp.arange(6.0).reshape(2, 3) / 4
    expected = jax.value_and_grad(loss, **options)(*arguments, factor=2.0)
    out = value_and_grad(wrap(loss), **options)(init_state(2.0**12), *arguments, factor=2.0)
    assert options or out.aux is None
    found = (out.value, out.aux) if options else out.value
    jax.tree.map(np.testing.assert_array_equal, (found, out.grads), expected)
    assert out.grads_finite


def test_overflow_report():
    """`overflow_report` names non-finite leaves by their paths."""
    grads = {"layers": [{"w": jnp.array([1.0, jnp.nan, jnp.inf, -3.0])}, {"w": jnp.ones(2)}], "n": jnp.arange(2)}
    (report,) = overflow_report(grads)
    assert report == ("['layers'][0]['w']", 1, 1, 0, 3.0)
    assert overflow_report({"w": jnp.ones(2)}) == []
    assert overflow_report(grads, loss=jnp.float32(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(grads, loss=float("nan")).verdict.startswith("the loss itself is NaN or infinite")


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_float64_gradients_are_divided_as_in_numpy(wrap, dtype):
    """`unscale` and `loss_scaled` divide float64 gradients with the bits of NumPy, at every scale."""
    grads, policy = np.random.default_rng(0).standard_normal(1000).astype(dtype), FixedScaling(1234.567)
    expected = lossscale_core.unscale(grads, policy.init_state())
    optimizer = loss_scaled(optax.sgd(-1.0), policy)
    windowed = loss_scaled(optax.sgd(-1.0), policy, accumulation_steps=3)
    with enable_x64():
        assert (wrap(unscale)(grads, init_state(policy)) == expected).all()
        zeros = jnp.zeros(1000, dtype)
        applied, _ = wrap(optimizer.apply_gradients)(grads, optimizer.init(zeros), zeros)
        assert (applied == expected).all()
        opt_state, mean = windowed.init(zeros), zeros
        for micro_batch in (grads, 2.0 * grads, 3.0 * grads):
            mean, opt_state = wrap(windowed.apply_gradients)(micro_batch, opt_state, mean)
        np.testing.assert_allclose(mean, 2.0 * expected, rtol=1e-15)


def test_select_takes_numpy_float64_without_x64():
    """Without x64, `select` accepts a new float32 array and an old float64 NumPy array."""
    old = {"w": np.ones(2)}
    new = {"w": jnp.full(2, 3.0)}
    for flag in (jnp.asarray(True), jnp.asarray(False)):
        chosen = select(flag, new, old)["w"]
        assert (chosen.dtype, chosen.tolist()) == (jnp.float32, [3.0 if flag else 1.0] * 2)

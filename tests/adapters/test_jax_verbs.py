"""The five verbs and `value_and_grad` over pytrees: values, dtypes, and every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, diagnose, metrics
from lossscale_core.testing import assert_traces_equal, overflow_traces, policies, simulate
from lossscale_jax import all_finite, init_state, overflow_report, scale, select, unscale, value_and_grad
from tests.adapters.jax_reading import late_gradients, reading_refused
from tests.jax_names import enable_x64
from tests.sweeping import few_examples

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]
BAD = [jnp.inf, -jnp.inf, jnp.nan]


def _loss(params, inputs):
    return jnp.sum((inputs @ params["w"] + params["b"]) ** 2)


def _params(dtype=jnp.float32):
    return {"w": jnp.arange(3, dtype=dtype), "b": jnp.ones((), dtype)}


INPUTS = jnp.arange(6.0).reshape(2, 3) / 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_half_loss_is_lifted(dtype):
    """2**16 times a float16 loss is finite."""
    scaled = scale({"loss": jnp.ones((2,), dtype)}, init_state("dynamic"))["loss"]
    assert scaled.dtype == jnp.float32
    assert scaled.tolist() == [2.0**16] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_unscaled_gradients_are_float32(dtype):
    """Small float16 gradients do not flush when they are unscaled; integers and None pass."""
    grads = unscale({"w": jnp.full((2,), 2.0**-8, dtype), "n": jnp.arange(2), "none": None}, init_state("dynamic"))
    assert grads["w"].dtype == jnp.float32
    assert grads["w"].tolist() == [2.0**-24] * 2
    assert grads["n"].dtype == jnp.int32
    assert grads["none"] is None


def test_strict_promotion():
    """Nothing relies on JAX promoting dtypes by itself."""
    with jax.numpy_dtype_promotion("strict"):
        out = jax.jit(value_and_grad(lambda p: jnp.sum(p.astype(jnp.float16))))(init_state(2.0), jnp.ones(2))
        assert out.grads.tolist() == [1.0, 1.0]
        assert unscale(jnp.ones(2, jnp.bfloat16), init_state(2.0)).tolist() == [0.5, 0.5]
        assert all_finite([jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16), jnp.ones(2)])


def test_float64_stays_float64():
    """With x64 on, master weights in float64 get gradients in float64, and the state stays 32 bits wide."""
    with enable_x64(True):
        state = init_state("dynamic")
        params = {"w": jnp.ones(3, jnp.float64)}
        out = jax.jit(value_and_grad(lambda p: jnp.sum(p["w"] ** 2)))(state, params)
        assert out.grads["w"].dtype == jnp.float64
        assert out.grads["w"].tolist() == [2.0] * 3
        state = jax.jit(DynamicScaling().update)(state, out.grads_finite)
        assert [leaf.dtype for leaf in state] == [jnp.float32] + [jnp.int32] * 5
        assert all_finite([jnp.full(2, 1e300)])
        assert not all_finite([jnp.array([1e300, jnp.nan])])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_position_is_checked(dtype, bad):
    """One bad element anywhere, in small and large arrays, alone and among others."""
    check = jax.jit(all_finite)
    for size in (1, 7, 5000):
        clean = jnp.ones(size, dtype)
        assert check([clean, jnp.ones(3)])
        for position in {0, size // 2, size - 1}:
            assert not check([clean.at[position].set(bad), jnp.ones(3)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_finite_values_are_finite(dtype):
    """The largest number of a dtype is never flagged in any count, though its square overflows."""
    assert all_finite([jnp.full((5000,), jnp.finfo(dtype).max), -jnp.full((3,), jnp.finfo(dtype).max)])


def test_what_does_not_count():
    """Nothing, None, empty and integer leaves are finite; complex parts count; anything but an array is refused."""
    assert all_finite({})
    assert all_finite([None, jnp.zeros((0, 3)), jnp.arange(3), np.float32(1), 1])
    assert not all_finite(jnp.array([1 + 1j * jnp.inf]))
    assert all_finite(jnp.array([1e30 + 1e30j]))
    with pytest.raises(TypeError, match="'w' is not an array"):
        all_finite({"a": "w"})


FLOAT8 = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float8_e3m4, jnp.float8_e8m0fnu]


def test_python_scalars():
    """A number is a leaf like any other, in every verb."""
    state = init_state(2.0**10)
    assert scale(1.0, state) == 2.0**10
    assert scale({"loss": 1j}, state)["loss"] == 2.0**10 * 1j
    assert unscale(1.0, state) == 2.0**-10
    assert unscale(3, state) == 3
    assert all_finite(1.0)
    assert not all_finite({"a": float("nan"), "n": 1})
    assert not all_finite(float("-inf"))
    assert select(jnp.asarray(False), 1.0, 2.0) == 2.0
    assert overflow_report(float("nan"))[0].nan == 1


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8])
def test_empty_and_float8_leaves(dtype, shape):
    """Every verb takes them, eagerly and compiled; float8 is lifted to float32 as float16 is."""
    state, leaf = init_state(2.0), jnp.ones(shape, dtype)
    for wrap in (lambda f: f, jax.jit):
        assert wrap(all_finite)(leaf)
        for out, value in ((wrap(unscale)(leaf, state), 0.5), (wrap(scale)(leaf, state), 2.0)):
            assert out.dtype == jnp.float32
            assert out.shape == shape
            assert (out == value).all()
        assert wrap(select)(jnp.asarray(True), leaf, leaf).dtype == dtype
    assert overflow_report(leaf) == []


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_nan_of_float8_is_found(dtype):
    """In dtypes that have no infinity as well as in those that have one."""
    bad = jnp.ones(5, dtype).at[3].set(jnp.nan)
    assert not all_finite(bad)
    assert not jax.jit(all_finite)([bad, jnp.ones(2)])
    assert overflow_report({"w": bad})[0][:2] == ("['w']", 1)


def test_what_is_not_a_loss_is_named():
    """Integers and bools, whose gradients are zeros and so finite, or a PRNG key in place of a loss."""
    for loss in (3, True, jnp.int32(3), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"a loss of dtype (int32|bool|key<fry>) has no gradient; pass a float"):
            scale(loss, init_state(2.0))
    for fun in (lambda params: params.astype(jnp.int32).sum(), lambda params: (params > 0.0).all()):
        with pytest.raises(TypeError, match="has no gradient"):
            jax.jit(value_and_grad(fun))(init_state(2.0), jnp.ones(3))


def test_select_takes_everything_or_nothing():
    """Parameters, optimizer state, counters, keys and other objects than arrays, in one call."""
    new = {"w": jnp.ones(2), "n": 2, "key": jax.random.key(1), "activation": jax.nn.relu, "none": None}
    old = {"w": jnp.zeros(2), "n": 1, "key": jax.random.key(0), "activation": jax.nn.relu, "none": None}
    for flag in (True, False, np.True_, jnp.asarray(True), jnp.asarray(False)):
        expected = new if flag else old
        chosen = select(flag, new, old)
        assert chosen["w"].tolist() == expected["w"].tolist()
        assert int(chosen["n"]) == expected["n"]
        assert (jax.random.key_data(chosen["key"]) == jax.random.key_data(expected["key"])).all()
        assert chosen["activation"] is jax.nn.relu
    assert select(False, new, old)["w"] is old["w"]


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ({"w": jnp.ones(2)}, {"v": jnp.ones(2)}, "w"),
        ({"w": jnp.ones(2)}, {"w": jnp.ones(())}, r"\['w'\] is float32\[2\] in new and float32\[\] in old"),
        ({"f": jax.nn.relu}, {"f": jax.nn.gelu}, "a leaf that is not an array must not change"),
        ([jnp.ones(2)], [None], "None"),
        ([jnp.ones(2)], [jnp.ones(2, jnp.float16)], r"is float32\[2\] in new and float16\[2\] in old"),
    ],
)
def test_select_refuses_what_does_not_match(new, old, message):
    """Nothing is broadcast and nothing is dropped in silence."""
    with pytest.raises(ValueError, match=message):
        select(jnp.asarray(True), new, old)


def test_select_takes_one_flag():
    """Several, such as a `pmap` returns, would pick columns; and NaN in place of a bool would apply the step."""
    for flag in (jnp.array([True, False]), jnp.float32(jnp.nan), 1.0, 1):
        with pytest.raises(TypeError, match=r"grads_finite=.* must be a bool of shape \(\); call select\("):
            select(flag, jnp.ones((2, 2)), jnp.zeros((2, 2)))


@few_examples
@given(policies(), overflow_traces(max_steps=60))
def test_the_jitted_trace_is_the_hosts(policy, grads_finite):
    """State by state, to the last bit."""

    def step(state, finite):
        after = policy.update(state, finite)
        return after, after

    state = init_state(policy)
    _, states = jax.lax.scan(step, state, jnp.asarray(grads_finite, bool))
    expected = simulate(policy, grads_finite)
    np.testing.assert_array_equal(states.loss_scale, expected.loss_scale_after)


def test_one_compilation_serves_the_run():
    """The state's leaves are strongly typed from the first step on."""
    policy = DynamicScaling(growth_interval=2, hysteresis=2, cooldown=1)
    update = jax.jit(policy.update)
    state = init_state(policy)
    for step in range(12):
        state = update(state, jnp.asarray(step % 5 != 4))
        assert not any(leaf.weak_type for leaf in state)
    assert update._cache_size() == 1
    assert metrics(state)["applied_steps"] == 10
    assert diagnose(policy, state)


def test_init_state_is_placed():
    """On a device or a sharding."""
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert init_state("dynamic", device=jax.devices()[3]).loss_scale.devices() == {jax.devices()[3]}
    assert init_state("dynamic", device=sharding).steps.sharding == sharding


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_value_and_grad(wrap):
    """Loss and gradients are those of `jax.value_and_grad`, whatever the scale."""
    expected = jax.value_and_grad(_loss)(_params(), INPUTS)
    out = value_and_grad(wrap(_loss))(init_state(2.0**12), _params(), INPUTS)
    assert out.value == expected[0]
    assert out.aux is None
    assert out.grads_finite
    jax.tree.map(np.testing.assert_array_equal, out.grads, expected[1])


def test_value_and_grad_takes_what_jaxs_takes():
    """`argnums`, `has_aux` and keyword arguments."""

    def loss(a, b, *, factor):
        return jnp.sum(a * b) * factor, {"a": a}

    out = jax.jit(value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        init_state("dynamic"), jnp.ones(2), jnp.full(2, 3.0), factor=2.0
    )
    assert out.value == 12.0
    assert out.aux["a"].tolist() == [1.0, 1.0]
    assert [grad.tolist() for grad in out.grads] == [[6.0, 6.0], [2.0, 2.0]]


def test_jit_takes_static_arguments_by_name():
    """The state comes first; the function may have a parameter of this name."""

    def loss(params, x, n=2):
        return jnp.sum(params * x) * n

    params, x = jnp.ones(2), jnp.ones(2)
    run = jax.jit(value_and_grad(loss), static_argnames="n")
    assert run(init_state("dynamic"), params, x, n=3).grads.tolist() == [3.0, 3.0]
    out = value_and_grad(lambda params, *, state: jnp.sum(params * state))(init_state("dynamic"), params, state=2.0)
    assert out.grads.tolist() == [2.0, 2.0]


def test_the_verbs_read_nothing(monkeypatch):
    """No array becomes a number of the host, eagerly or compiled."""
    state, policy, params = init_state("dynamic"), DynamicScaling(), _params()
    for wrap in (lambda f: f, jax.jit):
        with reading_refused(monkeypatch):
            out = wrap(value_and_grad(_loss))(state, params, INPUTS)
            assert all_finite(out.grads).shape == ()
            state = policy.update(state, out.grads_finite)
            select(out.grads_finite, out.grads, params)
            metrics(state)


def test_the_compiled_verbs_do_not_wait():
    """They return while the device still computes what they are about."""

    @jax.jit
    def step(state, grads):
        finite = all_finite(grads)
        return select(finite, unscale(grads, state), grads), DynamicScaling().update(state, finite)

    state = init_state("dynamic")
    step(state, jnp.ones(4))
    grads = late_gradients()
    step(state, grads)
    assert not grads.is_ready()


def test_float16_needs_the_scale():
    """A gradient of 2**-30 is zero in float16 without scaling, and exact with it."""

    def loss(params):
        return (params.astype(jnp.float16) * jnp.float16(2.0**-15)).sum() * jnp.float16(2.0**-15)

    params = jnp.ones(2, jnp.float32)
    assert value_and_grad(loss)(init_state("none"), params).grads.tolist() == [0.0, 0.0]
    assert value_and_grad(loss)(init_state(2.0**15), params).grads.tolist() == [2.0**-30] * 2


def test_an_overflow_is_found():
    """In float16 a scale of 2**16 is too much for a gradient of 1."""

    def loss(params):
        return params.astype(jnp.float16).sum()

    out = jax.jit(value_and_grad(loss))(init_state("dynamic"), jnp.ones(2))
    assert not out.grads_finite
    assert out.value == 2.0


def test_below_a_scale_of_one_the_unscaled_gradients_decide():
    """A gradient that becomes infinite by being unscaled is an overflow."""
    out = value_and_grad(lambda p: jnp.sum(p * 1e38))(init_state(2.0**-20), jnp.ones(2))
    assert out.grads_finite
    out = value_and_grad(lambda p: jnp.sum(p * jnp.float32(3e38)) * 8.0)(init_state(2.0**-20), jnp.ones(2))
    assert not out.grads_finite


def _train(policy, overflows, params, state):
    """Take a step a flag under `lax.scan`, selecting everything that is carried."""

    def step(carry, overflow):
        params, count, state = carry
        out = value_and_grad(_loss)(state, params, jnp.where(overflow, jnp.inf, INPUTS))
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, out.grads), count + 1
        params, count = select(out.grads_finite, new, (params, count))
        state = policy.update(state, out.grads_finite)
        return (params, count, state), state.loss_scale

    return jax.lax.scan(step, (params, jnp.int32(0), state), overflows)


def test_scan_over_steps():
    """A whole run in one compiled loop: what the core simulates, and skipped steps leave no trace."""
    policy = DynamicScaling(init_scale=64.0, growth_interval=3)
    overflows = np.array([0, 0, 1, 0, 0, 0, 1, 1, 0], bool)
    (params, count, _), scales = jax.jit(functools.partial(_train, policy))(overflows, _params(), init_state(policy))
    np.testing.assert_array_equal(scales, simulate(policy, list(~overflows)).loss_scale_after)
    (expected, *_), _ = _train(policy, np.zeros(6, bool), _params(), init_state(policy))
    assert count == 6
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_vmap_over_an_ensemble():
    """Each member has a scale of its own."""
    policy = DynamicScaling(init_scale=64.0, growth_interval=3)
    overflows = np.array([[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1]], bool)
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)  # noqa: E731
    train = jax.jit(jax.vmap(functools.partial(_train, policy)))
    _, scales = train(overflows, stack(_params()), stack(init_state(policy)))
    for row, flags in zip(scales, overflows, strict=True):
        np.testing.assert_array_equal(row, simulate(policy, list(~flags)).loss_scale_after)


def test_a_named_vmap_axis_decides_together():
    """`axis_name` works for `vmap`, too: gradients are averaged, and one overflow is everyone's."""
    run = jax.vmap(value_and_grad(_loss, axis_name="batch"), in_axes=(None, None, 0), axis_name="batch")
    inputs = jnp.stack([INPUTS, 2 * INPUTS])
    out = run(init_state("dynamic"), _params(), inputs)
    expected = jax.grad(lambda p: (_loss(p, inputs[0]) + _loss(p, inputs[1])) / 2)(_params())
    assert out.grads_finite.tolist() == [True, True]
    np.testing.assert_allclose(out.grads["w"][0], expected["w"], rtol=1e-6)
    out = run(init_state("dynamic"), _params(), inputs.at[1, 0, 0].set(jnp.nan))
    assert out.grads_finite.tolist() == [False, False]


def test_overflow_report():
    """Names what is not finite by its path."""
    grads = {"layers": [{"w": jnp.array([1.0, jnp.nan, jnp.inf, -3.0])}, {"w": jnp.ones(2)}], "n": jnp.arange(2)}
    (report,) = overflow_report(grads)
    assert report == ("['layers'][0]['w']", 1, 1, 0, 3.0)
    assert overflow_report({"w": jnp.ones(2)}) == []
    assert overflow_report(grads, loss=jnp.float32(1.0)).verdict == "finite loss: a smaller loss scale fixes this"
    assert overflow_report(grads, loss=float("nan")).verdict.startswith("the loss itself is not finite")


@given(st.lists(st.sampled_from([0.0, 1.0, -65504.0, 1e-8, jnp.inf, jnp.nan]), max_size=12))
def test_float16_like_numpy(values):
    """Any float16 array is checked as `np.isfinite` does."""
    array = np.array(values, np.float16)
    assert bool(all_finite(array)) == bool(np.isfinite(array).all())


def test_traces_compare():
    """The trace helpers of the core take what JAX yields."""
    trace = simulate("dynamic", [True, False])
    assert_traces_equal(trace, trace)

"""`loss_scaled`: clipping, accumulation, dtypes, memory and state; `test_jax_programs.py` tests its steps."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict
from lossscale_jax import get_last_step, get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import WAYS, bits, reads_told, refuse, step_of
from tests.jax_names import enable_x64

SCALE = 2.0**10
POLICY = DynamicScaling(init_scale=SCALE, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0]), "b": jnp.ones((2, 3))}
GRADS = {"w": jnp.array([1.0, -2.0, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}
BAD = {"w": jnp.array([1.0, jnp.nan, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}


def _times(grads, factor):
    return jax.tree.map(lambda grad: grad * factor, grads)


WRAPS = pytest.mark.parametrize("wrap", [jax.jit, lambda step: step], ids=["jit", "eager"])


@pytest.mark.parametrize("inner", [optax.adam, optax.lamb], ids=["adam", "lamb"])
def test_updates_take_the_memory_of_the_gradients(inner):
    """A compiled step in two calls needs hardly more temporary memory than `apply_gradients`."""
    optimizer = loss_scaled(inner(0.1), POLICY)
    params = [jnp.ones((64, 64))] * 4

    def loss(params, x):
        return jnp.tanh(x @ params[0] @ params[1] @ params[2] @ params[3]).sum()

    def temporary(way):
        def step(params, opt_state, x):
            return step_of(optimizer, way)(params, opt_state, jax.grad(loss)(params, x))

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), jnp.ones((2, 64)))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary("update") <= 1.1 * temporary("apply_gradients")


def test_complex_parameters():
    """Complex gradients are clipped by the norm of both parts; a skip leaves all bits unchanged."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, max_norm=1.0)
    in_one, in_two = (jax.jit(step_of(optimizer, way)) for way in WAYS)
    params = jnp.array([complex(-0.0, -0.0), 1.0])
    after, opt_state = in_two(params, optimizer.init(params), jnp.array([jnp.nan, 1j]))
    assert bits(after) == bits(params)
    after, opt_state = in_one(jnp.zeros(2, complex), opt_state, jnp.array([complex(3e38, 3e38), 0.0]))
    assert get_scale_state(opt_state).skipped_steps == 1
    assert jnp.linalg.norm(after) <= 1.0 + 1e-6  # clipped to less, since the norm exceeds float32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
def test_an_eager_step_reads_nothing(way, settings):
    """An eager step converts no array to a Python number, whether it overflows or not."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    carry = PARAMS, optimizer.init(PARAMS)
    with reads_told(refuse):
        for grads in (GRADS, BAD):
            carry = step_of(optimizer, way)(*carry, grads)
        with pytest.raises(AssertionError, match="the host read an array"):
            bool(get_scale_state(carry[1]).loss_scale > 0)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_without_gradients_is_applied(max_norm):
    """A step without gradients, as with frozen parameters, is applied, and its norm is 0."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, max_norm=max_norm)
    _, opt_state = optimizer.apply_gradients({}, optimizer.init({}), {})
    assert get_scale_state(opt_state).skipped_steps == 0


@pytest.mark.parametrize("skip_by", ["cond", "select"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float64"), ("float32", "float64")])
def test_a_norm_is_right_wherever_squares_overflow(dtypes, skip_by):
    """The norm is right at every dtype and scale; an element that overflows after it is unscaled is detected."""
    for scale in (2.0**-20, 1.0, 1000.0, 2.0**126):
        optimizer = loss_scaled(optax.sgd(-1.0), scale, max_norm=1.0, skip_by=skip_by)
        with enable_x64():
            step = jax.jit(optimizer.update)
            for exponent in (0, 62, 66, 100, 126, 500, 1020):
                grads = [jnp.asarray([3.0, -4.0], dtype) * 2.0**exponent for dtype in dtypes]
                updates, opt_state = step(grads, optimizer.init(grads))
                with np.errstate(all="ignore"):
                    unscaled = [np.asarray(grad) / np.asarray(scale, grad.dtype) for grad in grads]
                    exact = np.hypot.reduce(np.concatenate(unscaled).astype(max(dtypes)))
                last_step = get_last_step(opt_state)
                assert last_step.applied == all(np.isfinite(grad).all() for grad in unscaled)
                if last_step.applied and exact < jnp.finfo(exact.dtype).max / 16:
                    with np.errstate(over="ignore"):
                        np.testing.assert_allclose(last_step.norm, exact.astype(np.float32), rtol=1e-6)
                    for update, grad in zip(updates, unscaled, strict=True):
                        np.testing.assert_allclose(update, grad / max(exact, 1.0), rtol=1e-5)


def test_finite_micro_batches_make_no_infinite_sum():
    """The mean of finite micro-batches is finite, and is applied."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, accumulation_steps=2)
    params, opt_state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
    for _ in range(2):
        params, opt_state = jax.jit(step_of(optimizer, "apply_gradients"))(params, opt_state, jnp.full(2, 3e38))
    np.testing.assert_allclose(params, -3e38, rtol=1e-6)
    assert get_scale_state(opt_state).skipped_steps == 0


def test_extra_args_reach_the_inner_optimizer():
    """Extra arguments reach an inner optimizer that accepts them, also through a chain."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda update: update * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = optax.chain(loss_scaled(inner, 1.0), loss_scaled(optax.scale(1.0), 1.0))
    updates, _ = jax.jit(optimizer.update)(GRADS, optimizer.init(PARAMS), PARAMS, value=3.0, unknown=1.0)
    np.testing.assert_allclose(updates["w"], 3.0 * GRADS["w"])


@pytest.mark.parametrize("max_norm", [float("inf"), 1e300, jnp.float32(8.0), 0.0])
@pytest.mark.parametrize("size", [3.0, 0.0])
def test_a_large_max_norm_clips_nothing_and_one_of_zero_all(max_norm, size):
    """An infinite `max_norm` clips nothing, and 0 clips everything; a gradient of zero stays zero."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", max_norm=max_norm)
    updates, opt_state = optimizer.update(jnp.full(2, size), optimizer.init(jnp.zeros(2)))  # it needs no parameters
    assert updates.tolist() == [-size if max_norm else 0.0] * 2
    assert get_last_step(opt_state).norm == pytest.approx(2**0.5 * size)


def test_a_rebuilt_optimizer_has_everything():
    """An optimizer that flax rebuilds from its leaves keeps its settings, and equals its deep copy."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    assert repr(optimizer) == f"loss_scaled(..., policy={POLICY}, accumulation_steps=1)"
    assert copy.deepcopy(optimizer) == optimizer
    rebuilt = jax.tree.map(copy.deepcopy, optimizer)
    assert (type(rebuilt), rebuilt.policy) == (type(optimizer), POLICY)
    opt_state = rebuilt.init(PARAMS)
    for way in WAYS:
        expected = getattr(optimizer, way)(GRADS, opt_state, PARAMS)
        assert bits(getattr(rebuilt, way)(GRADS, opt_state, PARAMS)) == bits(expected)


HALVES = {"h": jnp.ones(3, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2)}


def _dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.adam(0.1, mu_dtype=jnp.bfloat16)], ids=["adam", "mu_dtype"])
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
@WRAPS
def test_updates_and_state_of_halves_are_float32(wrap, settings, inner):
    """With parameters in half precision, updates and states are float32, except for a dtype that the optimizer sets."""
    optimizer = loss_scaled(inner, POLICY, **settings)
    opt_state = optimizer.init(HALVES)
    expected = inner.init(jax.tree.map(jnp.float32, HALVES))
    for grads in (HALVES, {**HALVES, "h": jnp.full(3, jnp.inf, jnp.float16)}, HALVES, _times(HALVES, 0.0)):
        assert _dtypes(opt_state.inner_state) == _dtypes(expected)
        updates, opt_state = wrap(optimizer.update)(_times(grads, 8.0), opt_state, HALVES)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates))
    assert get_scale_state(opt_state).skipped_steps == 1


def test_a_restored_scale_moves_to_the_mesh_as_a_new_one_does():
    """A restored scale stays on a device that the user chose; otherwise a step may move it."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    opt_state = optimizer.init(PARAMS)
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    step = jax.jit(step_of(optimizer, "apply_gradients"))
    for each in (opt_state, load_scale_state(opt_state, saved, POLICY)):
        step(PARAMS, each, GRADS)
    assert step._cache_size() == 1
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step(jax.device_put(PARAMS, everywhere), load_scale_state(opt_state, saved, POLICY), GRADS)
    placed = load_scale_state(jax.device_put(opt_state, jax.devices()[3]), saved, POLICY)
    assert get_scale_state(placed).loss_scale.devices() == {jax.devices()[3]}


# -- `skip_by="select"`: a skip without a conditional, since XLA could read its predicate on the host -----------------


SETTINGS = [
    {},
    {"max_norm": 1.0},
    {"guard": SpikeGuard()},
    {"accumulation_steps": 2, "max_norm": 1.0, "guard": SpikeGuard()},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_a_step_by_select_holds_no_conditional(way, settings, monkeypatch):
    """`skip_by="select"` compiles no conditional, and `"cond"` does."""
    counts = {}
    for skip_by in ("cond", "select", "cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=skip_by: backend)  # the default asks for it alone
        settings = {**settings, "skip_by": None if skip_by in ("cpu", "gpu") else skip_by}
        optimizer = loss_scaled(optax.adam(0.1, eps=1e-4), POLICY, **settings)
        jaxpr = jax.make_jaxpr(getattr(optimizer, way))(GRADS, optimizer.init(PARAMS), PARAMS)
        counts[skip_by] = str(jaxpr).count(" cond[")
    assert counts["select"] == counts["gpu"] == 0 < counts["cond"] == counts["cpu"]


@pytest.mark.parametrize("settings", [{}, {"guard": SpikeGuard(warmup=1)}], ids=["plain", "guard"])
def test_a_skip_by_select_shows_zeros_to_the_wrapped_optimizer(settings):
    """With `select`, the wrapped optimizer gets zeros in place of gradients that overflowed or spiked."""
    seen = []

    def record(updates, state, params=None):
        largest = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]).max()
        jax.debug.callback(lambda number: seen.append(float(number)), largest, ordered=True)
        return updates, state

    inner = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), record), optax.sgd(1.0))
    optimizer = loss_scaled(inner, 1.0, skip_by="select", **settings)
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    for grads in (ones, BAD, *[ones] * 3, _times(ones, 1e3)):
        params, opt_state = step(grads, opt_state, PARAMS)
        jax.effects_barrier()
        assert (bits(params) == bits(PARAMS)) == (seen[-1] == 0.0)
    assert seen == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0 if "guard" in settings else 1e3]

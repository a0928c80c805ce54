"""`loss_scaled`: its arguments, gradients of unusual values and structures, memory and placement.

`test_jax_programs.py` compares its steps with training without loss scaling.
"""

import copy
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict
from lossscale_jax import get_last_step, get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import WAYS, WRAPS, bits, reads_told, refuse, step_of, times
from tests.jax_names import enable_x64

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0]), "b": jnp.ones((2, 3))}
GRADS = {"w": jnp.array([1.0, -2.0, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}
BAD = {**GRADS, "w": jnp.array([1.0, jnp.nan, 0.5, 4.0])}
SETTINGS = [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}]
EACH_WAY, EACH_SETTING = pytest.mark.parametrize("way", WAYS), pytest.mark.parametrize("settings", SETTINGS)
EACH_WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_extra_args_reach_the_inner_optimizer():
    """Extra arguments reach an inner optimizer that accepts them, also through a chain."""

    def update(updates, state, params=None, *, value, **extra_args):
        return times(updates, value), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = optax.chain(loss_scaled(inner, 1.0), loss_scaled(optax.scale(1.0), 1.0))
    updates, _ = jax.jit(optimizer.update)(GRADS, optimizer.init(PARAMS), PARAMS, value=3.0, unknown=1.0)
    np.testing.assert_allclose(updates["w"], 3.0 * GRADS["w"])


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


def test_max_norm_may_differ_between_runs():
    """A saved state continues with another `max_norm`, and its norm is 0 until the next applied step."""
    clipping, plain = loss_scaled(optax.sgd(0.1), 1.0, max_norm=1.0), loss_scaled(optax.sgd(0.1), 1.0)
    for optimizer, other, norms in ((clipping, plain, [0.0, 2.0]), (plain, clipping, [None, None])):
        opt_state = other.apply_gradients(jnp.ones(4), other.init(jnp.ones(4)), jnp.ones(4))[1]
        for size, norm in zip((jnp.inf, 1.0), norms, strict=True):
            _, opt_state = optimizer.apply_gradients(jnp.full(4, size), opt_state, jnp.ones(4))
            assert get_last_step(opt_state).norm == norm


# -- values and structures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [-0.0, complex(-0.0, -0.0)])
@EACH_WAY
def test_a_skip_keeps_negative_zeros(way, zero):
    """A skipped step keeps the signs of zeros, in both parts of complex parameters, too."""
    optimizer, params = loss_scaled(optax.sgd(0.1), 1.0), jnp.array([zero])
    after, _ = jax.jit(step_of(optimizer, way))(params, optimizer.init(params), jnp.array([zero * np.nan]))
    assert bits(after) == bits(params)


@pytest.mark.parametrize("skip_by", ["cond", "select"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float64"), ("float32", "float64")])
def test_the_norm_where_squares_overflow(dtypes, skip_by):
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


SIZES = np.full(2, 3.0)
STEPS = {
    **{f"max_norm={limit}": ({"max_norm": limit}, [SIZES], -SIZES) for limit in (np.inf, 1e300, jnp.float32(8.0))},
    "max_norm=0": ({"max_norm": 0.0}, [SIZES], 0.0 * SIZES),
    "zeros": ({"max_norm": 1.0}, [0.0 * SIZES], 0.0 * SIZES),
    "no gradients": ({}, [{}], {}),
    "no gradients to clip": ({"max_norm": 1.0}, [{}], {}),
    "large micro-batches": ({"accumulation_steps": 2}, [1e38 * SIZES] * 2, -1e38 * SIZES),
    "complex": ({"max_norm": 1.0}, [1e37 * SIZES * 1j], -np.sqrt([0.5, 0.5]) * 1j),
    "a norm above float32": ({"max_norm": 1.0}, [1e38 * SIZES], 0.0 * SIZES),
    "an overflow before": ({"max_norm": 9.0}, [np.inf * SIZES, SIZES], -SIZES),
}
"""Settings, the gradients of some calls as NumPy arrays, and the updates of the last call."""


@EACH_WAY
@pytest.mark.parametrize(("settings", "batches", "expected"), STEPS.values(), ids=STEPS)
def test_steps_on_numpy_arrays(settings, batches, expected, way):
    """Eager steps on NumPy arrays compute in float32 without x64, and apply the right updates in extreme cases."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", **settings)
    params = times(expected, 0.0)
    opt_state = optimizer.init(params)
    for grads in batches:
        result, opt_state = getattr(optimizer, way)(grads, opt_state, params)
    last_step = get_last_step(opt_state)
    assert last_step.applied
    with np.errstate(over="ignore"):
        norm = np.float32(np.linalg.norm(jax.tree.leaves(batches[-1])))
    assert last_step.norm is None or last_step.norm == pytest.approx(norm)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(result)} <= {"float32", "complex64"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), result, expected)
    assert get_scale_state(opt_state).skipped_steps == any(np.isinf(leaf).any() for leaf in jax.tree.leaves(batches))


class Model(eqx.Module):
    """A model with parts that are not trained."""

    weight: jax.Array
    count: jax.Array
    activation: Callable


@EACH_WRAP
def test_gradients_without_untrained_parameters(wrap):
    """None may replace the gradient of an untrained array or a function, as in Equinox and optax."""
    model, optimizer = Model(jnp.ones(3), jnp.int32(5), jax.nn.relu), loss_scaled(optax.adamw(0.1), POLICY)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(lambda model: model.weight.sum() * 2.0**16)(model)
    updates, opt_state = wrap(functools.partial(optimizer.update, params=model))(grads, opt_state)
    assert get_last_step(opt_state).applied
    assert float(eqx.apply_updates(model, updates).weight[0]) < 1.0


@EACH_WRAP
def test_an_optimizer_that_sums_samples(wrap):
    """The gradients have one more dimension than the updates; the updates of a skipped step are zero."""
    optimizer = loss_scaled(optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0), POLICY)
    grads, opt_state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), GRADS), optimizer.init(PARAMS)
    for bad in (1.0, jnp.inf):
        grads = {**grads, "b": grads["b"].at[0].multiply(bad)}
        updates, opt_state = wrap(optimizer.update)(grads, opt_state, PARAMS)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
        assert any(map(jnp.any, jax.tree.leaves(updates))) == get_last_step(opt_state).applied == np.isfinite(bad)


# -- memory, placement and host reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [optax.adam, optax.lamb], ids=["adam", "lamb"])
def test_updates_take_the_memory_of_gradients(inner):
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


@EACH_WAY
@EACH_SETTING
def test_an_eager_step_reads_nothing(way, settings):
    """An eager step converts no array to a Python number, whether it overflows or not."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    carry = PARAMS, optimizer.init(PARAMS)
    with reads_told(refuse):
        for grads in (GRADS, BAD):
            carry = step_of(optimizer, way)(*carry, grads)
        with pytest.raises(AssertionError, match="the host read an array"):
            bool(get_scale_state(carry[1]).loss_scale > 0)


def test_where_a_restored_scale_is_placed():
    """A restored scale stays on a device that the user chose; otherwise a step may move it."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    opt_state = optimizer.init(PARAMS)
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    step = jax.jit(step_of(optimizer, "apply_gradients"))
    for state in (opt_state, load_scale_state(opt_state, saved, POLICY)):
        step(PARAMS, state, GRADS)
    assert step._cache_size() == 1
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step(jax.device_put(PARAMS, everywhere), load_scale_state(opt_state, saved, POLICY), GRADS)
    placed = load_scale_state(jax.device_put(opt_state, jax.devices()[3]), saved, POLICY)
    assert get_scale_state(placed).loss_scale.devices() == {jax.devices()[3]}


# -- `skip_by="select"`: a skip without a conditional, since XLA could read its predicate on the host -----------------


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"guard": SpikeGuard()}, {"accumulation_steps": 2}])
@EACH_WAY
def test_select_compiles_no_conditional(way, settings, monkeypatch):
    """`skip_by="select"`, the default on a GPU, compiles no conditional, and `"cond"` does."""
    counts = {}
    for skip_by in ("cond", "select", "cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=skip_by: backend)  # the default asks for it alone
        settings = {**settings, "skip_by": None if skip_by in ("cpu", "gpu") else skip_by}
        optimizer = loss_scaled(optax.adam(0.1, eps=1e-4), POLICY, **settings)
        jaxpr = jax.make_jaxpr(getattr(optimizer, way))(GRADS, optimizer.init(PARAMS), PARAMS)
        counts[skip_by] = str(jaxpr).count(" cond[")
    assert counts["select"] == counts["gpu"] == 0 < counts["cond"] == counts["cpu"]


@pytest.mark.parametrize("settings", [{}, {"guard": SpikeGuard(warmup=1)}], ids=["plain", "guard"])
def test_select_passes_zeros_to_the_optimizer(settings):
    """With `select`, the wrapped optimizer gets zeros in place of gradients that overflowed or spiked."""
    largest = []

    def record(updates, state, params=None):
        sizes = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)])
        jax.debug.callback(lambda size: largest.append(float(size)), sizes.max(), ordered=True)
        return updates, state

    inner = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), record), optax.sgd(1.0))
    optimizer = loss_scaled(inner, 1.0, skip_by="select", **settings)
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    for grads in (ones, BAD, *[ones] * 3, times(ones, 1e3)):
        params, opt_state = step(grads, opt_state, PARAMS)
        jax.effects_barrier()
        assert (bits(params) == bits(PARAMS)) == (largest[-1] == 0.0)
    assert largest == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0 if "guard" in settings else 1e3]

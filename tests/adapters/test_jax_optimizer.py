"""`loss_scaled`: its arguments, gradients of unusual values and structures, memory and placement.

`test_jax_programs.py` compares its steps with training without loss scaling.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict
from lossscale_jax import get_last_step, get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import WRAPS, bits, reads_refused, step_of, times
from tests.jax_names import enable_x64

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0]), "b": jnp.ones((2, 3))}
GRADS = {"w": jnp.array([1.0, -2.0, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}
BAD = {**GRADS, "w": jnp.array([1.0, jnp.nan, 0.5, 4.0])}
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
    assert copy.deepcopy(optimizer) == optimizer
    rebuilt = jax.tree.map(copy.deepcopy, optimizer)
    assert rebuilt.policy == POLICY
    arguments = GRADS, rebuilt.init(PARAMS), PARAMS
    assert bits(rebuilt.apply_gradients(*arguments)) == bits(optimizer.apply_gradients(*arguments))


def test_max_norm_may_differ_between_runs():
    """A saved state continues with another `max_norm`, and its norm is 0 until the next applied step."""
    clipping, plain = loss_scaled(optax.sgd(0.1), 1.0, max_norm=1.0), loss_scaled(optax.sgd(0.1), 1.0)
    for optimizer, other, norms in ((clipping, plain, [0.0, 2.0]), (plain, clipping, [None, None])):
        opt_state = other.apply_gradients(jnp.ones(4), other.init(jnp.ones(4)), jnp.ones(4))[1]
        for size, norm in zip((jnp.inf, 1.0), norms, strict=True):
            _, opt_state = optimizer.apply_gradients(jnp.full(4, size), opt_state, jnp.ones(4))
            assert get_last_step(opt_state).norm == norm


# -- values and structures ---------------------------------------------------------------------------------------------


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
    "no gradients": ({"max_norm": 1.0}, [{}], {}),
    "large micro-batches": ({"accumulation_steps": 2}, [1e38 * SIZES] * 2, -1e38 * SIZES),
    "a norm above float32": ({"max_norm": 1.0}, [1e38 * SIZES], 0.0 * SIZES),
    "complex": ({"max_norm": 1.0}, [1e37 * SIZES * 1j], -np.sqrt([0.5, 0.5]) * 1j),
}
"""Settings, the gradients of some calls as NumPy arrays, and the updates of the last call."""


@pytest.mark.parametrize(("settings", "batches", "expected"), STEPS.values(), ids=STEPS)
def test_steps_on_numpy_arrays(settings, batches, expected):
    """Eager steps on NumPy arrays compute in float32 without x64, and apply the right updates in extreme cases."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", **settings)
    params = times(expected, 0.0)
    opt_state = optimizer.init(params)
    for grads in batches:
        result, opt_state = optimizer.apply_gradients(grads, opt_state, params)
    assert get_last_step(opt_state).applied
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(result)} <= {"float32", "complex64"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), result, expected)


def test_gradients_without_untrained_parameters():
    """None may replace the gradient of an untrained array or a function, as in a model of Equinox."""
    model = {"weight": jnp.ones(3), "count": jnp.int32(5), "activation": jax.nn.relu}
    optimizer = loss_scaled(optax.adamw(0.1), POLICY)
    opt_state = optimizer.init({**model, "count": None, "activation": None})
    grads = {"weight": jnp.full(3, 2.0**16), "count": None, "activation": None}
    updates, opt_state = optimizer.update(grads, opt_state, model)
    assert (updates["weight"] < 0.0).all()
    assert updates["count"] is updates["activation"] is None


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


# -- placement and host reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["apply_gradients", "update"])
@pytest.mark.parametrize("settings", [{"max_norm": 1.0, "guard": SpikeGuard()}, {"accumulation_steps": 2}])
def test_an_eager_step_reads_nothing(way, settings):
    """An eager step converts no array to a Python number, whether it overflows or not."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    carry = PARAMS, optimizer.init(PARAMS)
    with reads_refused():
        for grads in (GRADS, BAD):
            carry = step_of(optimizer, way)(*carry, grads)
        with pytest.raises(AssertionError, match="the host read an array"):
            bool(get_scale_state(carry[1]).loss_scale > 0)


def test_where_a_restored_scale_is_placed():
    """A restored scale stays on a device that the user chose; otherwise a step may move it."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    opt_state = optimizer.init(PARAMS)
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    optimizer.update(jax.device_put(GRADS, everywhere), load_scale_state(opt_state, saved, POLICY))
    placed = load_scale_state(jax.device_put(opt_state, jax.devices()[3]), saved, POLICY)
    assert get_scale_state(placed).loss_scale.devices() == {jax.devices()[3]}


# -- `skip_by="select"`: a skip without a conditional, since XLA could read its predicate on the host -----------------


def test_select_compiles_no_conditional(monkeypatch):
    """`skip_by="select"`, the default on a GPU, compiles no conditional, and `"cond"` does."""
    counts = {}
    for skip_by in ("cond", "select", "cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=skip_by: backend)  # the default asks for it alone
        settings = {} if skip_by in ("cpu", "gpu") else {"skip_by": skip_by}
        optimizer = loss_scaled(optax.adam(0.1), POLICY, max_norm=1.0, **settings)
        jaxpr = jax.make_jaxpr(optimizer.apply_gradients)(GRADS, optimizer.init(PARAMS), PARAMS)
        counts[skip_by] = str(jaxpr).count(" cond[")
    assert counts["select"] == counts["gpu"] == 0 < counts["cond"] == counts["cpu"]


def test_select_passes_zeros_to_the_optimizer():
    """With `select`, the wrapped optimizer gets zeros in place of gradients that overflowed or spiked."""
    largest = []

    def record(updates, state, params=None):
        jax.debug.callback(lambda size: largest.append(float(size)), jnp.abs(updates["w"]).max(), ordered=True)
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), record)
    optimizer = loss_scaled(inner, 1.0, skip_by="select", guard=SpikeGuard(warmup=1))
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.update)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    for grads in (ones, BAD, *[ones] * 3, times(ones, 1e3)):
        _, opt_state = step(grads, opt_state, PARAMS)
    jax.effects_barrier()
    assert largest == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]

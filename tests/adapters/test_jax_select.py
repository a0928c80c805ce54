"""`loss_scaled(skip="select")`: a skip without a conditional, since XLA could read its predicate on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import PolicyError
from lossscale_jax import get_scale_state, loss_scaled

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0]), "half": jnp.ones((8, 2), jnp.float16)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {**GRADS, "w": GRADS["w"].at[5].set(jnp.nan)}
DEVICES = 8
SETTINGS = [
    {},
    {"max_norm": 1.0},
    {"guard": SpikeGuard()},
    {"keep_dtypes": True, "max_norm": 1.0, "guard": SpikeGuard()},
    {"accumulation_steps": 2, "max_norm": 1.0},
    {"accumulation_steps": 2, "drop": "micro_batch", "max_norm": 1.0, "guard": SpikeGuard()},
]


def _bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def _primitives(jaxpr):
    """Yield the names of the primitives of a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values())):
            if hasattr(parameter, "eqns"):
                yield from _primitives(parameter)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_a_step_holds_no_conditional(way, settings):
    """Neither around the step nor in the check, the norm or the guard; by `cond` it holds some."""
    counts = {}
    for skip in ("cond", "select"):
        optimizer = loss_scaled(optax.adam(0.1, eps=1e-4), POLICY, skip=skip, **settings)
        jaxpr = jax.make_jaxpr(getattr(optimizer, way))(GRADS, optimizer.init(PARAMS), PARAMS)
        counts[skip] = list(_primitives(jaxpr)).count("cond")
    assert counts["select"] == 0 < counts["cond"]


@pytest.mark.parametrize("settings", [{}, {"guard": SpikeGuard(warmup=1)}], ids=["plain", "guard"])
def test_a_skip_shows_zeros_to_the_wrapped_optimizer(settings):
    """Neither what overflowed nor a spike, so that nothing in it fails, loops or reports because of them."""
    seen = []

    def record(updates, state, params=None):
        largest = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]).max()
        jax.debug.callback(lambda number: seen.append(float(number)), largest, ordered=True)
        return updates, state

    inner = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), record), optax.sgd(1.0))
    optimizer = loss_scaled(inner, 1.0, skip="select", **settings)
    opt_state, step = optimizer.init(PARAMS), jax.jit(optimizer.apply_gradients)
    for grads in (GRADS, BAD, *[GRADS] * 3, jax.tree.map(lambda leaf: 1e3 * leaf, GRADS)):
        params, opt_state = step(grads, opt_state, PARAMS)
        jax.effects_barrier()
        assert (_bits(params) == _bits(PARAMS)) == (seen[-1] == 0.0)
    assert seen == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0 if "guard" in settings else 1e3]


def test_it_continues_a_run_by_cond():
    """The state is the same, and one compilation with everything donated serves overflows and growth."""
    by_cond, by_select = (loss_scaled(optax.adam(0.1), POLICY, skip=skip) for skip in ("cond", "select"))
    step = jax.jit(by_select.apply_gradients, donate_argnums=(1, 2))
    params, opt_state = by_cond.apply_gradients(BAD, by_cond.init(PARAMS), PARAMS)
    for n in range(5):
        before = jax.device_get((params, opt_state.inner_state))
        params, opt_state = step(BAD if n == 2 else GRADS, opt_state, params)
        assert (_bits((params, opt_state.inner_state)) == _bits(before)) == (n == 2)
    assert get_scale_state(opt_state).skipped_steps == 2
    assert step._cache_size() == 1


@pytest.mark.parametrize("inside_shard_map", [False, True])
def test_sharded_gradients_have_one_decision(inside_shard_map):
    """One device's NaN skips the step everywhere, under sharded `jit` and with an axis name."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = {"axis_name": "data"} if inside_shard_map else {"max_norm": 1.0}
    optimizer = loss_scaled(optax.sgd(0.5), POLICY, skip="select", **axis)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    params = place(PARAMS)
    opt_state, step = optimizer.init(params), optimizer.apply_gradients
    if inside_shard_map:
        specs = P("data"), P(), P("data")
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"), P()))
    step = jax.jit(step)
    for grads, is_skipped in ((BAD, True), (GRADS, False)):
        before = params
        params, opt_state = step(place(grads), opt_state, params)
        assert (_bits(params) == _bits(before)) == is_skipped
    assert get_scale_state(opt_state).skipped_steps == 1


@pytest.mark.parametrize("skip", ["where", None, True])
def test_other_ways_to_skip_are_refused(skip):
    """The error names the two allowed values."""
    with pytest.raises(PolicyError, match=rf"skip={skip!r} must be 'cond' or 'select'"):
        loss_scaled(optax.sgd(1.0), POLICY, skip=skip)

"""`loss_scaled(guard=)`: a spike skips a step as an overflow does, and the loss scale never learns of it."""

import functools
import json
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling, SpikeGuard, diagnose, state_to_dict, step_info
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_core.testing import simulate
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import late_gradients, reading_refused
from tests.jax_names import enable_x64

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
GUARD = SpikeGuard(warmup=4, memory=8)
STEPS = 48
DEVICES = 8
PARAMS = {"w": jnp.array([0.5, -0.0])}
ADAM = optax.adam(0.1)


def _norms():
    """Return a norm for each step, some of them spikes, and infinity for an overflow."""
    random = np.random.default_rng(0)
    norms = np.exp(0.3 * random.standard_normal(STEPS)).astype(np.float32)
    norms[[10, 11, 20, 30, 40]] *= 50
    norms[[3, 12, 21, 33, 34]] = np.inf
    return norms


NORMS = _norms()
FINITE = list(np.isfinite(NORMS))
EXPECTED = simulate(POLICY, FINITE, norms=NORMS, guard=GUARD)


def _judged(norms, guard=GUARD):
    """Return the guard's state after these norms, on the host."""
    state = guard.init_state()
    for norm in norms:
        _, state = guard.check(state, norm)
    return state


def _bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def _grads(norm, opt_state, dtype=jnp.float32):
    """Return scaled gradients with exactly this norm when they are unscaled."""
    scale = get_scale_state(opt_state).loss_scale
    return {"w": jnp.stack([norm * scale, jnp.zeros_like(scale)]).astype(dtype)}


def _in_two(optimizer):
    def step(params, opt_state, norm):
        updates, opt_state = optimizer.update(_grads(norm, opt_state), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _in_one(optimizer):
    return lambda params, opt_state, norm: optimizer.apply_gradients(_grads(norm, opt_state), opt_state, params)


def _check_run(step, optimizer, exactly=False):
    """Take every step, and compare it with the simulated one."""
    params, opt_state = jax.tree.map(jnp.copy, PARAMS), optimizer.init(PARAMS)
    for n, norm in enumerate(NORMS):
        before = jax.device_get((params, opt_state))
        params, opt_state = step(params, opt_state, jnp.float32(norm))
        state, guard_state = get_scale_state(opt_state), opt_state.guard_state
        assert state.loss_scale == EXPECTED.loss_scale_after[n]
        assert (state.steps, state.skipped_steps) == (EXPECTED.steps[n], EXPECTED.skipped_steps[n])
        assert guard_state.spikes == np.cumsum(EXPECTED.spiked)[n]
        is_skipped = bool(EXPECTED.skipped[n] or EXPECTED.spiked[n])
        assert is_skipped == (_bits((params, opt_state.inner_state)) == _bits((before[0], before[1].inner_state)))
        info = step_info(before[1].scale_state, state, spiked=guard_state.spikes > before[1].guard_state.spikes)
        assert (info.applied, info.overflowed, info.spiked) == (not is_skipped, not FINITE[n], EXPECTED.spiked[n])
        np.testing.assert_allclose(guard_state, _judged(NORMS[: n + 1]), rtol=0 if exactly else 1e-5)
    return params, opt_state


def test_the_simulated_run_is_not_trivial():
    """It has spikes, two in a row among them, overflows, and a scale that grows and backs off."""
    assert list(np.flatnonzero(EXPECTED.spiked)) == [10, 11, 20, 30, 40]
    assert EXPECTED.skipped.sum() == 5
    assert len(set(EXPECTED.loss_scale_after)) > 3


@pytest.mark.parametrize(
    ("way", "settings"),
    [(_in_two, {}), (_in_one, {"max_norm": 0.5}), (_in_one, {"keep_dtypes": True})],
    ids=["in two", "in one, clipped", "in one, keep_dtypes"],
)
def test_a_compiled_run_goes_as_simulated(way, settings):
    """One compilation with everything donated; a spike leaves parameters, inner state and scale state bit for bit."""
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD, **settings)
    step = jax.jit(way(optimizer), donate_argnums=(0, 1))
    _check_run(step, optimizer)
    assert step._cache_size() == 1


def test_an_eager_run_goes_as_simulated():
    """The guard's state has the bits of the host's."""
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD)
    _check_run(_in_one(optimizer), optimizer, exactly=True)


def test_a_guard_that_refuses_nothing_changes_nothing():
    """Clipped steps are those of an optimizer without a guard, bit for bit."""
    with_guard = loss_scaled(ADAM, POLICY, max_norm=0.5, guard=SpikeGuard(warmup=STEPS))
    without = loss_scaled(ADAM, POLICY, max_norm=0.5)
    ends = []
    for optimizer in (with_guard, without):
        step, params, opt_state = jax.jit(_in_one(optimizer)), PARAMS, optimizer.init(PARAMS)
        for norm in NORMS:
            params, opt_state = step(params, opt_state, norm)
        ends.append(_bits((params, opt_state[:3])))
    assert ends[0] == ends[1]


def _windows(drop):
    """Return the norm of each window of three micro-batches, infinite where it is dropped, and each policy flag."""
    windows = NORMS.reshape(-1, 3)
    if drop == "window":
        return np.where(np.isfinite(windows).all(1), windows.mean(1, dtype=np.float32), np.inf)
    return np.array([window[np.isfinite(window)].mean(dtype=np.float32) for window in windows])


@pytest.mark.parametrize(
    ("drop", "max_norm", "jitted"), [("window", None, True), ("micro_batch", 0.5, True), ("window", 0.5, False)]
)
def test_a_window_is_judged_by_the_norm_of_its_mean(drop, max_norm, jitted):
    """The mean is checked once, at the end of a window; in its middle the streak of spikes continues."""
    guard = SpikeGuard(warmup=2, memory=4)
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=3, drop=drop, max_norm=max_norm, guard=guard)
    step = jax.jit(_in_one(optimizer)) if jitted else _in_one(optimizer)
    params, opt_state, expected = PARAMS, optimizer.init(PARAMS), guard.init_state()
    spikes = 0
    for n, norm in enumerate(_windows(drop)):
        before = params
        for micro_batch in NORMS[3 * n : 3 * n + 3]:
            assert float(opt_state.guard_state.streak) == float(expected.streak)
            params, opt_state = step(params, opt_state, jnp.float32(micro_batch))
        accepted, expected = guard.check(expected, norm)
        spikes += np.isfinite(norm) and not accepted
        np.testing.assert_allclose(opt_state.guard_state, expected, rtol=1e-5)
        assert bool(opt_state.window.stepped) == bool(accepted)
        assert (_bits(params) == _bits(before)) != bool(accepted)
    assert spikes >= 2


def test_a_spiked_window_does_not_count():
    """Nor does the finite micro-batch that completes it; but an overflow in that very call lowers the scale."""
    guard = SpikeGuard(warmup=2)
    for drop, last, counted, scale in (
        ("window", 99.0, 3, 2.0**10),
        ("micro_batch", 99.0, 7, 2.0**10),
        ("micro_batch", np.inf, 8, 2.0**9),
    ):
        policy = DynamicScaling(init_scale=2.0**10, growth_interval=20)
        optimizer = loss_scaled(optax.sgd(0.1), policy, accumulation_steps=2, drop=drop, guard=guard)
        step, params, opt_state = jax.jit(_in_one(optimizer)), PARAMS, optimizer.init(PARAMS)
        for norm in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 99.0, last):
            params, opt_state = step(params, opt_state, jnp.float32(norm))
        assert opt_state.guard_state.spikes == 1
        state = get_scale_state(opt_state)
        assert (state.steps, state.loss_scale) == (counted, scale)


def test_in_a_scan_of_an_ensemble():
    """Under `scan` and `vmap` each member has a guard of its own."""
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD)
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)  # noqa: E731

    def steps(carry, norms):
        return jax.vmap(_in_one(optimizer))(*carry, norms), None

    quiet = np.where(EXPECTED.spiked, 1.0, NORMS)
    norms = jnp.stack([NORMS, quiet], axis=1).astype(jnp.float32)
    (_, opt_state), _ = jax.jit(lambda carry: lax.scan(steps, carry, norms))(
        (stack(PARAMS), stack(optimizer.init(PARAMS)))
    )
    assert opt_state.guard_state.spikes.tolist() == [5, 0]
    assert get_scale_state(opt_state).steps.tolist() == [STEPS - 5, STEPS]
    assert get_scale_state(opt_state).loss_scale[0] == EXPECTED.loss_scale_after[-1]


def test_with_x64_and_strict_promotion():
    """A norm beyond float32 is checked as float32's largest."""
    for settings in ({}, {"accumulation_steps": 2, "max_norm": 1.0}):
        with enable_x64(True), jax.numpy_dtype_promotion("strict"):
            optimizer = loss_scaled(optax.scale(jnp.float64(-1.0)), 1.0, guard=SpikeGuard(warmup=1), **settings)
            params = jnp.ones(2, jnp.float64)
            opt_state = optimizer.init(params)
            for size in (1.0, jnp.inf, 1e100):
                for _ in range(settings.get("accumulation_steps", 1)):
                    grads = jnp.full(2, size, jnp.float64)
                    params, opt_state = optimizer.apply_gradients(grads, opt_state, params)
            assert [leaf.dtype.name for leaf in opt_state.guard_state] == ["float32"] * 3 + ["int32", "float32"]
            assert opt_state.guard_state.spikes == 1
            assert get_scale_state(opt_state).skipped_steps == 1


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}], ids=str)
def test_nothing_waits(settings, monkeypatch):
    """A compiled step returns while its gradients are computed, and an eager step reads no array."""
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD, **settings)
    params = jnp.ones(4)
    step, opt_state = jax.jit(optimizer.apply_gradients), optimizer.init(params)
    step(params, opt_state, params)
    grads = late_gradients()
    step(grads, opt_state, params)
    assert not grads.is_ready()
    with reading_refused(monkeypatch):
        optimizer.apply_gradients(params, opt_state, params)


MEAN = optax.GradientTransformation(lambda _: (), lambda grads, state, _: (lax.pmean(grads, "data"), state))


def _on_devices(n):
    """Return the norm that each device has at a step: all the same, or a spike or an overflow on one of them."""
    norms = np.full(DEVICES, NORMS[n], np.float32)
    if EXPECTED.spiked[n] or EXPECTED.skipped[n]:
        norms = np.ones(DEVICES, np.float32)
        norms[n % DEVICES] = NORMS[n] * DEVICES**0.5
    return norms


def _total(norms):
    with np.errstate(over="ignore", invalid="ignore"):
        return np.float32(np.sqrt(np.sum(norms.astype(np.float64) ** 2)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_check_one_norm(check_vma):
    """With `axis_name` it is that of all devices' gradients; a spike on one of eight skips on all of them."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    optimizer = loss_scaled(optax.chain(MEAN, ADAM), POLICY, axis_name="data", guard=GUARD)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()), check_vma=check_vma
    )
    def step(params, opt_state, norms):
        scale = get_scale_state(opt_state).loss_scale
        grads = {"w": jnp.concatenate([norms * scale, jnp.zeros_like(norms)])}
        return optimizer.apply_gradients(grads, opt_state, params)

    params, opt_state = PARAMS, optimizer.init(PARAMS)
    expected = GUARD.init_state()
    for n in range(STEPS):
        before, norms = params, _on_devices(n)
        params, opt_state = step(params, opt_state, norms)
        accepted, expected = GUARD.check(expected, _total(norms))
        np.testing.assert_allclose(opt_state.guard_state, expected, rtol=1e-5)
        assert get_scale_state(opt_state).skipped_steps == EXPECTED.skipped_steps[n]
        assert (_bits(params) == _bits(before)) != bool(accepted)
    for leaf in jax.tree.leaves((params, opt_state)):
        first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert others == [first] * (DEVICES - 1)
    assert expected.spikes >= 4


def test_sharded_arrays_have_one_norm():
    """Under sharded `jit` the norm is global without an axis name, and one compilation serves."""
    mesh = jax.make_mesh((DEVICES,), ("data",))
    optimizer = loss_scaled(ADAM, 1.0, max_norm=1.0, guard=GUARD)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    params = place(jnp.ones(DEVICES))
    opt_state, step = optimizer.init(params), jax.jit(optimizer.apply_gradients)
    for n in range(12):
        grads = place(np.where(np.arange(DEVICES) == 5, 100.0 if n in (7, 9) else 1.0, 1.0).astype(np.float32))
        before = params
        params, opt_state = step(grads, opt_state, params)
        assert (_bits(before) == _bits(params)) == (n in (7, 9))
    assert opt_state.guard_state.spikes == 2
    assert step._cache_size() == 1


def test_a_saved_guard_continues():
    """Through the plain dict, however deep the state is nested, and through a pickle."""
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD)
    step, params, opt_state = _in_one(optimizer), PARAMS, optimizer.init(PARAMS)
    for norm in NORMS[:12]:
        params, opt_state = step(params, opt_state, jnp.float32(norm))
    saved = json.loads(json.dumps(state_to_dict(get_scale_state(opt_state), POLICY, guard=opt_state.guard_state)))
    assert saved["guard"]["spikes"] == 2
    begun = optimizer.init(PARAMS)
    (restored,) = load_scale_state((begun,), saved, POLICY)
    assert _bits(restored.guard_state) == _bits(opt_state.guard_state)
    assert _bits(restored.scale_state) == _bits(opt_state.scale_state)
    assert _bits(restored.inner_state) == _bits(begun.inner_state)
    assert "The guard refused 2 spikes" in diagnose(POLICY, restored.scale_state, guard=restored.guard_state)
    again = pickle.loads(pickle.dumps(jax.device_get(opt_state)))
    assert _bits(again) == _bits(opt_state)
    without = {name: value for name, value in saved.items() if name != "guard"}
    with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
        fresh = load_scale_state(opt_state, without, POLICY)
    assert _bits(fresh.guard_state) == _bits(begun.guard_state)
    assert load_scale_state(loss_scaled(ADAM, POLICY).init(PARAMS), saved, POLICY).guard_state is None


def test_a_state_without_a_guard_continues_under_one():
    """It takes the guard's state from a new optimizer state."""
    opt_state = loss_scaled(ADAM, POLICY).init(PARAMS)
    assert opt_state.guard_state is None
    optimizer = loss_scaled(ADAM, POLICY, guard=GUARD)
    guarded = opt_state._replace(guard_state=optimizer.init(PARAMS).guard_state)
    _, after = optimizer.update(PARAMS, guarded, PARAMS)
    assert after.guard_state.norms == 1


def test_what_does_not_fit_is_refused():
    """A state of the other kind, and a guard that is not one."""
    plain, guarded = loss_scaled(ADAM, POLICY), loss_scaled(ADAM, POLICY, guard=GUARD)
    with pytest.raises(PolicyError, match="do not fit a state made without accumulation and without a guard"):
        guarded.update(PARAMS, plain.init(PARAMS), PARAMS)
    with pytest.raises(PolicyError, match=r"guard=None do not fit .* with a guard"):
        plain.update(PARAMS, guarded.init(PARAMS), PARAMS)
    with pytest.raises(PolicyError, match=r"guard=8\.0 must be a SpikeGuard"):
        loss_scaled(ADAM, POLICY, guard=8.0)

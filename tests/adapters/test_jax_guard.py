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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling, SpikeGuard, diagnose, state_to_dict
from lossscale_core.errors import PolicyError
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY, STEPS

DEVICES = 8
PARAMS = {"w": jnp.array([0.5, -0.0])}
ADAM = optax.adam(0.1)


def _bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def _grads(norm, opt_state, dtype=jnp.float32):
    """Return scaled gradients with exactly this norm when they are unscaled."""
    scale = get_scale_state(opt_state).loss_scale
    return {"w": jnp.stack([norm * scale, jnp.zeros_like(scale)]).astype(dtype)}


def _in_one(optimizer):
    return lambda params, opt_state, norm: optimizer.apply_gradients(_grads(norm, opt_state), opt_state, params)


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
    assert load_scale_state(loss_scaled(ADAM, POLICY).init(PARAMS), saved, POLICY).guard_state is None


def test_what_does_not_fit_is_refused():
    """A state of the other kind, and a guard that is not one."""
    plain, guarded = loss_scaled(ADAM, POLICY), loss_scaled(ADAM, POLICY, guard=GUARD)
    with pytest.raises(PolicyError, match="do not fit a state made without accumulation and without a guard"):
        guarded.update(PARAMS, plain.init(PARAMS), PARAMS)
    with pytest.raises(PolicyError, match=r"guard=None do not fit .* with a guard"):
        plain.update(PARAMS, guarded.init(PARAMS), PARAMS)
    with pytest.raises(PolicyError, match=r"guard=8\.0 must be a SpikeGuard"):
        loss_scaled(ADAM, POLICY, guard=8.0)

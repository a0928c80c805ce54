"""`loss_scaled(guard=)`: a spike skips the step like an overflow, but does not change the scale state."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lossscale_core import SpikeGuard
from lossscale_jax import get_last_step, get_scale_state, loss_scaled
from tests.adapters.jax_reading import bits
from tests.core.guarded_run import GUARD, NORMS, POLICY

DEVICES = 8
PARAMS = {"w": jnp.array([0.5, -0.0])}
ADAM = optax.adam(0.1)


def _in_one(optimizer):
    """Return a step on scaled gradients with exactly this norm after they are unscaled."""

    def step(params, opt_state, norm):
        scale = get_scale_state(opt_state).loss_scale
        return optimizer.apply_gradients({"w": jnp.stack([norm * scale, jnp.zeros_like(scale)])}, opt_state, params)

    return step


def _windows():
    """Return the norm of each window of three micro-batches; it is infinite if the window is dropped."""
    windows = NORMS.reshape(-1, 3)
    return np.where(np.isfinite(windows).all(1), windows.mean(1, dtype=np.float32), np.inf)


@pytest.mark.parametrize(("max_norm", "jitted"), [(None, True), (0.5, True), (0.5, False)])
def test_a_window_is_judged_by_the_norm_of_its_mean(max_norm, jitted):
    """The mean is checked once, at the end of a window; in its middle the streak of spikes continues.

    `applied` says whether the last call moved the parameters. The policy does not count a window that is a spike.
    """
    guard = SpikeGuard(warmup=2, memory=4)
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=3, max_norm=max_norm, guard=guard)
    step = jax.jit(_in_one(optimizer)) if jitted else _in_one(optimizer)
    params, opt_state, expected = PARAMS, optimizer.init(PARAMS), guard.init_state()
    spikes = 0
    for n, norm in enumerate(_windows()):
        before = params
        for micro_batch in NORMS[3 * n : 3 * n + 3]:
            assert float(opt_state.guard_state.streak) == float(expected.streak)
            old, (params, opt_state) = params, step(params, opt_state, jnp.float32(micro_batch))
            assert bool(get_last_step(opt_state).applied) == (bits(params) != bits(old))
        accepted, expected = guard.check(expected, norm)
        spikes += np.isfinite(norm) and not accepted
        np.testing.assert_allclose(opt_state.guard_state, expected, rtol=1e-5)
        assert (bits(params) == bits(before)) != bool(accepted)
        assert get_last_step(opt_state).spiked == (np.isfinite(norm) and not accepted)
        assert not accepted or get_last_step(opt_state).norm == pytest.approx(norm)
        assert get_scale_state(opt_state).steps == n + 1 - spikes
    assert spikes >= 2


MEAN = optax.GradientTransformation(lambda _: (), lambda grads, state, _: (lax.pmean(grads, "data"), state))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_check_one_norm(check_vma):
    """With `axis_name` the guard compares the norm over all devices; a spike on one device skips the step on all."""
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
    for n in range(24):
        before, norms = params, np.ones(DEVICES, np.float32)
        norms[n % DEVICES] = {10: 50.0, 11: 50.0, 12: np.inf, 20: 1e3}.get(n, 2.0)
        params, opt_state = step(params, opt_state, norms)
        accepted, expected = GUARD.check(expected, np.sqrt(np.sum(norms**2)))
        np.testing.assert_allclose(opt_state.guard_state, expected, rtol=1e-5)
        assert get_scale_state(opt_state).skipped_steps == (n >= 12)
        assert (bits(params) == bits(before)) != bool(accepted)
    for leaf in jax.tree.leaves((params, opt_state)):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert expected.spikes == 3

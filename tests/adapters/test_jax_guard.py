"""`loss_scaled(guard=)`: a spike skips the step like an overflow, but does not change the scale state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import SpikeGuard
from lossscale_jax import get_last_step, get_scale_state, loss_scaled
from tests.adapters.jax_reading import bits
from tests.core.guarded_run import NORMS, POLICY

PARAMS = jnp.array([0.5, -0.0])


def _windows():
    """Return the norm of each window of three micro-batches; it is infinite if the window is dropped."""
    windows = NORMS.reshape(-1, 3)
    return np.where(np.isfinite(windows).all(1), windows.mean(1, dtype=np.float32), np.inf)


@pytest.mark.parametrize(("max_norm", "jitted"), [(None, True), (0.5, True), (0.5, False)])
def test_the_norm_of_a_windows_mean(max_norm, jitted):
    """The mean is checked once, at the end of a window; in its middle the streak of spikes continues.

    `applied` says whether the last call moved the parameters. The policy does not count a window that is a spike.
    """
    guard = SpikeGuard(warmup=2, memory=4)
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=3, max_norm=max_norm, guard=guard)

    def step(params, opt_state, norm):
        """Take a step on scaled gradients with exactly this norm after they are unscaled."""
        scale = get_scale_state(opt_state).loss_scale
        return optimizer.apply_gradients(jnp.stack([norm * scale, jnp.zeros_like(scale)]), opt_state, params)

    step = jax.jit(step) if jitted else step
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

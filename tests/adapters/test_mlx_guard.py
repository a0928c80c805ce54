"""The spike guard: a spike skips the step, and the loss scale does not learn of it."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict
from lossscale_core.errors import SpikeStreakError
from lossscale_core.testing import simulate
from lossscale_mlx import LossScaleOptimizer
from tests.adapters.mlx_training import bits

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
GUARD = SpikeGuard(warmup=4, memory=8)
STEPS = 40


def _norms():
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(STEPS)).astype(np.float32)
    norms[[10, 11, 20, 30]] *= 50
    norms[[3, 12, 21, 33, 34]] = np.inf
    return norms


NORMS = _norms()


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["measured", "clipped"])
def test_a_run_is_the_simulated_one(max_norm):
    """Flags, loss scale and the guard's state, bit for bit; the guard sees the norm before clipping."""
    optimizer = LossScaleOptimizer(optim.Adam(0.1), POLICY, guard=GUARD, max_norm=max_norm)
    expected = simulate(POLICY, list(np.isfinite(NORMS)), norms=NORMS, guard=GUARD)
    weight, guard_state = {"w": mx.ones(2)}, GUARD.init_state()
    for n, norm in enumerate(NORMS):
        before = bits([weight, optimizer.inner.state])
        weight = optimizer.apply_gradients({"w": optimizer.scale(mx.array(np.array([norm, 0], "f")))}, weight)
        _, guard_state = GUARD.check(guard_state, norm)
        info = optimizer.last_step
        assert info.spiked.item() == expected.spiked[n]
        assert info.overflowed.item() == (not np.isfinite(norm))
        assert info.applied.item() == (not info.spiked.item() and not info.overflowed.item())
        assert (bits([weight, optimizer.inner.state]) == before) == (n > 0 and not info.applied.item())
        assert info.loss_scale_after.item() == expected.loss_scale_after[n]
        assert optimizer.scale_state.steps.item() == expected.steps[n]
        assert [each.item() for each in optimizer.guard_state] == [each.item() for each in guard_state]
        assert optimizer.last_norm.item() == norm
    assert optimizer.metrics()["spikes"].item() == expected.spiked.sum()
    assert "refused" in optimizer.diagnose()
    assert optimizer.state_dict()["guard"] == state_to_dict(POLICY.init_state(), guard=guard_state)["guard"]


def test_a_norm_beyond_float32_is_a_spike():
    """It is no overflow: all gradients are finite."""
    optimizer = LossScaleOptimizer(optim.SGD(0.1), 1.0, guard=GUARD)
    for _ in range(6):
        optimizer.apply_gradients({"w": mx.ones(4)}, {"w": mx.ones(4)})
    optimizer.apply_gradients({"w": mx.full(4, 3e38)}, {"w": mx.ones(4)})
    assert (optimizer.last_step.spiked.item(), optimizer.last_step.overflowed.item()) == (True, False)
    assert optimizer.last_norm.item() == float(np.finfo(np.float32).max)
    assert optimizer.guard_state.spikes.item() == 1


def test_an_overflow_by_the_cast_back_leaves_the_guard_as_it_is():
    """The norm in float32 is finite, and the step is an overflow."""
    optimizer = LossScaleOptimizer(optim.SGD(1.0), 2.0**-4, guard=GUARD, keep_dtypes=True)
    before = bits([*optimizer.guard_state])
    optimizer.apply_gradients({"w": mx.array([2.0**14], mx.float16)}, {"w": mx.ones(1, mx.float16)})
    assert optimizer.last_step.overflowed.item()
    assert bits([*optimizer.guard_state]) == before


def test_a_streak_is_an_error_where_it_is_asked_for():
    """`check_overflow_streak` looks at the guard's `max_streak`, too, and names the norm."""
    optimizer = LossScaleOptimizer(optim.SGD(0.1), 1.0, guard=SpikeGuard(warmup=2, max_streak=2))
    for norm in (1.0, 1.0, 1.0, 90.0, 80.0):
        optimizer.check_overflow_streak()
        optimizer.apply_gradients({"w": mx.array([norm])}, {"w": mx.ones(1)})
    with pytest.raises(SpikeStreakError, match=r"norm of 80 is the spike number 2 in a row"):
        optimizer.check_overflow_streak()

"""The spike guard: rejected norms, its statistics, its messages and its saved state."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, GuardState, SpikeGuard, check_limits, diagnose, metrics, state_to_dict
from lossscale_core.adapters import clip_divisor, guard_state_from_dict
from lossscale_core.errors import OverflowStreakError
from lossscale_core.testing import simulate

NORMS = st.lists(st.floats(0.0, 2.0**100, width=32) | st.sampled_from([math.inf, math.nan, 1e300, 0.0]), max_size=60)


def _log_normal(steps, seed, sigma=0.3):
    return np.exp(sigma * np.random.default_rng(seed).standard_normal(steps)).astype(np.float32)


def _judged(norms, guard=None, state=None):
    """Return whether each norm was accepted, and the state after the last."""
    guard = guard or SpikeGuard()
    state = state or guard.init_state()
    accepted = []
    for norm in norms:
        flag, state = guard.check(state, norm)
        accepted.append(bool(flag))
    return np.array(accepted), state


CALM = {
    "no change": np.ones(10_000),
    "slow growth, a hundredfold": np.geomspace(1, 100, 5000),
    "a fall": np.repeat([1.0, 1e-6], [500, 1500]),
}


@pytest.mark.parametrize("name", CALM)
@pytest.mark.parametrize("seed", range(5))
def test_healthy_norms_are_accepted(name, seed):
    """A guard accepts log-normal norms of sigma 0.3, also while they grow slowly or fall."""
    assert _judged(_log_normal(len(CALM[name]), seed) * CALM[name])[0].all()


@pytest.mark.parametrize(("times", "most"), [(5, 30), (100, 35), (1e20, 80)])
def test_a_new_level_is_learnt(times, most):
    """After a lasting jump of the norms a guard refuses some norms, and then accepts all."""
    norms = _log_normal(1000, 2)
    norms[500:] *= times
    accepted, _ = _judged(norms)
    refused = np.flatnonzero(~accepted)
    assert refused[0] == 500
    assert refused[-1] < 500 + most
    assert accepted[500 + most :].all()


@given(NORMS)
@example([1.0] * 12 + [1e30] * 6)  # a streak in which the weight grows
def test_a_spike_counts_as_the_limit(norms):
    """The statistics include each accepted norm, the limit in place of each spike, and no norm that is not finite."""
    guard = SpikeGuard(warmup=3, memory=8)
    state = guard.init_state()
    for norm in norms:
        limit = guard.limit(state)
        accepted, after = guard.check(state, norm)
        on_arrays = guard.check(GuardState(*map(np.asarray, state)), norm)
        assert on_arrays == (accepted, after)
        assert {type(value) for value in on_arrays[1]} == {np.ndarray}
        with np.errstate(all="ignore"):
            alike = guard.check(GuardState(*(np.stack([value] * 2) for value in state)), np.float32([norm] * 2))
        assert [accepted, *after] == [alike[0][1], *(value[1] for value in alike[1])]
        finite = norm < 2.0**128  # in float32
        spiked = finite and not accepted
        assert finite or not accepted
        assert spiked == (finite and state.norms >= 3 and limit < norm)
        assert after.spikes == state.spikes + spiked
        assert after.streak == (state.streak + 1 if spiked else 0 if finite else state.streak)
        is_remembered = finite and norm >= 2.0**-126  # norms of zero are steps without gradients
        weight = max(float(state.streak) - 2, 1) / min(float(state.norms) + 1, 8)  # from the third spike on, it grows
        known = float(limit if spiked else norm if is_remembered else state.mean)
        mean = float(state.mean) + (known - float(state.mean)) * min(weight, 1)
        assert float(after.mean) == pytest.approx(mean, rel=1e-5, abs=1e-37)
        assert after.norms == state.norms + is_remembered
        assert is_remembered or after[:2] == state[:2]
        if spiked:
            calm = state._replace(norms=np.float32(0))  # where any norm is accepted
            assert guard.check(calm, limit)[1].mean == limit
        assert all(math.isfinite(value) and value >= 0 for value in after)
        state = after
    loaded = guard_state_from_dict(json.loads(json.dumps(state_to_dict(DynamicScaling().init_state(), guard=state))))
    assert [(type(value), value) for value in loaded] == [(type(value), value) for value in state]


def test_simulate_checks_recorded_norms():
    """In `simulate` a spike skips the step and changes no counter of the policy; an overflow is not a spike."""
    flags = [step not in (20, 30) for step in range(40)]
    norms = [100.0 if step in (25, 30) else 1.0 for step in range(40)]
    trace = simulate(DynamicScaling(growth_interval=10), flags, norms=norms, guard=SpikeGuard())
    assert np.flatnonzero(trace.spiked).tolist() == [25]
    assert np.flatnonzero(trace.skipped).tolist() == [20, 30]
    calm = simulate(DynamicScaling(growth_interval=10), flags[:25] + flags[26:])
    np.testing.assert_array_equal(np.delete(trace.loss_scale_after, 25), calm.loss_scale_after)


def test_a_limit_on_spikes_raises():
    """`check_limits` raises after `max_streak` spikes in a row, and the error names the mean norm."""
    guard = SpikeGuard(max_streak=3)
    _, state = _judged([2.0] * 20 + [100.0] * 2, guard)
    check_limits("none", None, guard=guard, guard_state=state)
    _, state = guard.check(state, 100.0)
    with pytest.raises(OverflowStreakError, match=r"3 gradient norms in a row were.*mean of the norms is 2\.\d"):
        check_limits("none", None, guard=guard, guard_state=state)
    check_limits("none", None, guard=SpikeGuard(), guard_state=state)


def test_a_diagnosis_includes_spikes():
    """A diagnosis and metrics include a guard's spikes; within a streak the diagnosis has a remedy."""
    policy = DynamicScaling()
    state = policy.update(policy.init_state(), True)
    assert diagnose(policy, state, guard=SpikeGuard().init_state()) == diagnose(policy, state)
    _, guard = _judged([1.0] * 20 + [100.0, 1.0])
    assert diagnose(policy, state, guard=guard).endswith("The guard refused 1 spike; the mean norm is 1.13636.")
    _, guard = _judged([1.0] * 20 + [100.0] * 5)
    assert diagnose(policy, state, guard=guard).startswith("healthy: 0 of 1 steps skipped")
    assert "The last 5 norms in a row were spikes" in diagnose(policy, state, guard=guard)
    numbers = metrics(state, guard=guard)
    assert (numbers["spikes"], numbers["spike_streak"], numbers["norm_mean"]) == (5, 5, guard.mean)


@pytest.mark.parametrize(
    ("norm", "max_norm", "divisor"),
    [(1.5, 2.0, 1.0), (3.0, 2.0, 1.5), (math.inf, 2.0, math.inf), (3.0, 1e300, 1.0)],
)
def test_the_divisor_that_clips(norm, max_norm, divisor):
    """`clip_divisor` is 1 up to the largest accepted norm, and the quotient of both norms above."""
    assert clip_divisor(np.float32(norm), max_norm, xp=np) == divisor

"""The states of a scaler on the host and on a device: both follow the policy, bit for bit, also if they are loaded."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, FixedScaling, metrics, state_from_dict, state_to_dict
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_steps import CALLS, EITHER_KIND, INF, one, ready, take_step
from tests.core.own_policies import AdditiveScaling
from tests.strategies import overflow_traces, policies
from tests.sweeping import examples, few_examples

RULES = st.builds(
    DynamicScaling,
    init_scale=st.sampled_from([2.0**10, 3.0, 2.0**-3]),
    growth_factor=st.sampled_from([2.0, 1.7, 1.0001, 2.0**20]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.999, 2.0**-20]),
    growth_interval=st.integers(1, 4),
    refill_on_finite=st.booleans(),
    refill_on_backoff=st.booleans(),
    min_scale=st.sampled_from([2.0**-126, 2.0**-3]),
    max_scale=st.sampled_from([2.0**126, 2.0**12]),
)
BEYOND = (
    {"growth_tracker": 9},  # beyond the interval, which the kernel compares with ==
    {"growth_tracker": -2},
    {"hysteresis_tracker": 3},
    {"steps": 2**31 - 3, "skipped_steps": 5},
    {"steps": 2**31 - 1, "skipped_steps": 2**31 - 1, "overflow_streak": 2**31 - 1},
)
"""Entries of checkpoints with which torch's kernel could not continue."""
WIDE = DynamicScaling(min_scale=2.0**-126, max_scale=2.0**126, growth_interval=2)
TOLERANT = dataclasses.replace(WIDE, hysteresis=2)
OTHERS = WIDE, TOLERANT, dataclasses.replace(WIDE, refill_on_finite=False, refill_on_backoff=True), FixedScaling(4.0)
TRACES = overflow_traces(max_steps=12)
CHANGES = st.lists(st.tuples(st.sampled_from(OTHERS), TRACES), max_size=2)


@examples(50)
@given(RULES | policies(), TRACES, st.none() | st.sampled_from(BEYOND), CHANGES)
@example(DynamicScaling(), [True] * 4, None, [(WIDE, [True])])
@example(WIDE, [], None, [(TOLERANT, [True]), (WIDE, [False])])
def test_a_device_follows_each_policy(policy, trace, entries, changes):
    """Each state and each outcome is the policy's own, also after a checkpoint, and after changes of the policy."""
    with Emulated("mps"), np.errstate(over="ignore"):
        (_, optimizer), scaler = one(True, "mps"), GradScaler("mps", policy=policy)
        expected = policy.init_state()

        def follow(policy, trace):
            nonlocal expected
            for finite in trace:
                info = take_step(scaler, optimizer, 1.0 if finite else INF)
                before, expected = expected, policy.update(expected, finite)
                scales = [float(state.loss_scale) for state in (before, expected)]
                fields = [finite, *scales, float(expected.overflow_streak), not finite]
                assert [float(field) for field in info[:5]] == fields
            assert not trace or scaler.state_dict().items() >= expected._asdict().items()

        follow(policy, trace)
        if entries is not None:
            saved = {**state_to_dict(expected, policy), **entries}
            scaler.load_state_dict(saved)
            expected = state_from_dict(saved, policy)
            follow(policy, trace[::-1])
        for other, trace_of_other in changes if isinstance(policy, DynamicScaling) else ():
            scaler.policy = other
            follow(other, trace_of_other)


def test_an_own_policy_on_a_device():
    """Its floats and its counts are among the metrics."""
    policy = AdditiveScaling()
    with Emulated("mps"):
        (_, optimizer), scaler = one(True, "mps"), GradScaler("mps", policy=policy)
        expected = policy.init_state()
        for finite in (True, True, False, True):
            take_step(scaler, optimizer, 1.0 if finite else INF)
            expected = policy.update(expected, finite)
            assert {name: float(number) for name, number in scaler.metrics().items()} == metrics(expected)


@pytest.mark.parametrize("call", CALLS)
@EITHER_KIND
def test_states_loaded_within_a_step(fused, call):
    """The step is dropped: its gradients are refused, and the next scaled loss begins another step."""
    (param, optimizer), scaler = one(fused), GradScaler("cpu", init_scale=8.0)
    take_step(scaler, optimizer, 0.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((1,), 8.0)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(GradScaler("cpu", init_scale=2.0).state_dict())
    with pytest.raises(CallOrderError, match="replaced the loss scale; scale another loss, and call backward"):
        getattr(scaler, call)(optimizer, *([INF] if "clip" in call else []))
    assert scaler.update().applied is False
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    assert take_step(scaler, optimizer, 1.0).loss_scale_used == 2.0
    assert param.item() == 0.5


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("value", [2.0, float("nan")])
@EITHER_KIND
def test_flags_that_a_trainer_reduces(fused, value, device):
    """A flag that was changed in place between `unscale_` and `step` counts as an overflow, unless it is 0."""
    with Emulated("mps"):
        (param, optimizer), scaler = one(fused, device), ready(device=device, init_scale=8.0)
        param.grad = torch.ones(1, device=device)
        scaler.unscale_(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            flag.fill_(value)
        scaler.step(optimizer)
        assert scaler.update().overflowed
        assert (param.item(), scaler.get_scale()) == (1.0, 4.0)


def test_states_loaded_before_a_replay():
    """Each replay scales the loss again, so that its gradients have the scale that was loaded."""
    (param, optimizer), scaler = one(), GradScaler("cpu", init_scale=8.0)
    with RecordedGraph() as graph:
        scaler.scale(param.sum()).backward()
    scaler.load_state_dict(GradScaler("cpu", init_scale=2.0).state_dict())
    param.grad.zero_()
    graph.replay()
    scaler.step(optimizer)
    assert scaler.update().applied
    assert param.item() == 0.0


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        (DynamicScaling(), DynamicScaling(refill_on_finite=False, refill_on_backoff=True)),
        (DynamicScaling(hysteresis=2), DynamicScaling(hysteresis=2)),
        (DynamicScaling(cooldown=1), DynamicScaling(cooldown=1)),
    ],
)
@given(trace=overflow_traces(max_steps=10))
@few_examples
def test_replays_follow_each_policy(policy, other, trace):
    """A loaded state and another policy take effect at the next replay of a recorded step."""
    (param, optimizer), scaler = one(fused=True), GradScaler("cpu", policy=policy)
    param.grad = torch.zeros(1)
    scaler.place_on("cpu")
    with RecordedGraph() as graph:
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(state_to_dict(policy.init_state(), policy))
    scaler.policy, expected = other, other.init_state()
    for finite in trace:
        param.grad.fill_(1.0 if finite else INF)
        graph.replay()
        expected = other.update(expected, finite)
        assert state_from_dict(scaler.state_dict(), other) == expected

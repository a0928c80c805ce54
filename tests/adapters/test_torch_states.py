"""The two states of a scaler: when the host is the truth; and the device's own update is the policy's, bit for bit."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, SpikeGuard, state_from_dict, state_to_dict
from lossscale_core.testing import overflow_traces, policies
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.recorded_graph import RecordedGraph
from tests.sweeping import few_examples

INF = float("inf")


def _one(device="cpu", **kwargs):
    param = torch.nn.Parameter(torch.ones(2, device=device))
    return param, torch.optim.SGD([param], lr=0.5, **kwargs)


def _scaler(device, policy, state=None):
    """Return a scaler under a policy, from a state where one is given."""
    scaler = GradScaler(device, policy=policy)
    if state is not None:
        scaler.load_state_dict(state_to_dict(state, policy))
    scaler.place_on(device)
    return scaler


def _require_states(policy, trace, state=None):
    """Step a fused optimizer on a device over a trace; each state and each outcome is the policy's own."""
    expected = policy.init_state() if state is None else state
    with Emulated("mps"):
        param, optimizer = _one("mps", fused=True)
        scaler = _scaler("mps", policy, state)
        for finite in trace:
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((2,), 1.0 if finite else INF, device="mps")
            scaler.step(optimizer)
            info = scaler.update()
            before, expected = expected, policy.update(expected, finite)
            fields = [float(each) for each in info[:5]]
            scales = [float(each.loss_scale) for each in (before, expected)]
            assert fields == [finite, *scales, float(expected.overflow_streak), not finite]
        assert state_from_dict(scaler.state_dict(), policy) == expected


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


@settings(deadline=None)
@given(RULES, overflow_traces(max_steps=30))
def test_the_kernels_update_is_the_policys(policy, trace):
    """Scale, trackers, counters and outcomes, at the bounds too, with all four ways to refill the tolerance."""
    _require_states(policy, trace)


@few_examples
@given(policies(), overflow_traces(max_steps=12))
def test_every_policy_on_a_device(policy, trace):
    """Those that torch's kernel cannot follow, too."""
    _require_states(policy, trace)


@pytest.mark.parametrize(
    "fields",
    [
        {"growth_tracker": 9},  # beyond the interval, which the kernel compares with ==
        {"growth_tracker": -2},
        {"hysteresis_tracker": 3},
        {"steps": 2**31 - 3, "skipped_steps": 5},
        {"steps": 2**31 - 1, "skipped_steps": 2**31 - 1, "overflow_streak": 2**31 - 1},
        {"loss_scale": 4.0, "growth_tracker": 1},
    ],
    ids=str,
)
def test_states_that_the_kernel_could_not_continue(fields):
    """A checkpoint may hold any state; the policy's own update is used where the kernel would do something else."""
    policy = DynamicScaling(init_scale=4.0, growth_interval=3, min_scale=2.0**-4, max_scale=2.0**8)
    start = policy.init_state()
    types = {name: type(getattr(start, name)) for name in fields}
    state = start._replace(**{name: types[name](value) for name, value in fields.items()})
    for trace in ([True] * 5, [False] * 5, [True, False, True, True, True, False]):
        with np.errstate(over="ignore"):
            saved = state_from_dict(state_to_dict(state, policy), policy)
            _require_states(policy, trace, saved)


def test_how_many_calls_an_update_on_a_device_makes(monkeypatch):
    """After a fused optimizer: at most ten, and at most eight that a graph records; torch's own scaler makes one."""
    param, optimizer = _one(fused=True)
    scaler = GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    with RecordedGraph() as graph:
        scaler.step(optimizer)
        before = len(graph._calls)
        scaler.update()
        assert len(graph._calls) - before <= 8
    calls = []
    dispatch = OnDevice.__torch_dispatch__

    def counting(_, operation, *args):
        calls.append(operation)
        return dispatch(operation, *args)

    # Not by a dispatch mode, which the scaler would take for a recording.
    monkeypatch.setattr(OnDevice, "__torch_dispatch__", classmethod(counting))
    with Emulated("mps"):
        param, optimizer = _one("mps", fused=True)
        scaler = GradScaler("mps")
        for _ in range(2):
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.ones(2, device="mps")
            scaler.step(optimizer)
            calls.clear()
            scaler.update()
        assert len([each for each in calls if each is not torch.ops.prim.device.default]) <= 10


@pytest.mark.parametrize("policy", ["dynamic", DynamicScaling(cooldown=1), DynamicScaling(hysteresis=2)])
@given(trace=overflow_traces(max_steps=10))
@few_examples
def test_replays_update_as_the_policy_does(policy, trace):
    """Every counter included; a loaded state and a new scale take effect at the next replay."""
    param, optimizer = _one(fused=True)
    scaler = GradScaler("cpu", policy=policy)
    param.grad = torch.zeros(2)
    scaler.place_on("cpu")
    with RecordedGraph() as graph:
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(state_to_dict(scaler.policy.init_state(), scaler.policy))
    expected = scaler.policy.init_state()
    for finite in trace:
        param.grad.fill_(1.0 if finite else INF)
        graph.replay()
        expected = scaler.policy.update(expected, finite)
        assert state_from_dict(scaler.state_dict(), scaler.policy) == expected


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False), (True, True)])
def test_two_updates_of_one_step_on_a_device(flags):
    """They count as one step with their combined flag, as on the host, and leave exactly the policy's state."""
    policy = DynamicScaling(init_scale=2.0**10, growth_interval=2)
    with Emulated("mps"):
        params, optimizers = zip(*(_one("mps", fused=True) for _ in range(2)), strict=True)
        scaler = _scaler("mps", policy)
        expected = policy.init_state()
        for step in range(4):
            scaler.scale(torch.ones((), requires_grad=True))
            for param, finite in zip(params, flags if step == 2 else (True, True), strict=True):
                param.grad = torch.full((2,), 1.0 if finite else INF, device="mps")
            for optimizer in optimizers:
                scaler.step(optimizer)
                scaler.update()
            expected = policy.update(expected, step != 2 or all(flags))
        assert state_from_dict(scaler.state_dict(), policy) == expected


def test_reading_the_scale_tensor_once_changes_nothing_for_good():
    """On a CPU the host stays the truth: what others write is seen, and the numbers stay plain."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler.scale(param.sum())
    kept = scaler._scale
    for expected in (1024.0, 2048.0, 2048.0):
        scaler.scale(torch.ones(()))
        param.grad = torch.ones(2)
        scaler.step(optimizer)
        info = scaler.update()
        assert type(info.loss_scale_after) is float
        assert kept.item() == info.loss_scale_after == expected
    kept.data.fill_(8.0)  # much later, without a new version
    assert scaler.scale(torch.ones(())).item() == 8.0
    param.grad = torch.full((2,), 8.0)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    assert scaler.update().loss_scale_used == 8.0


def test_a_tensor_that_was_handed_out_on_a_device():
    """An ordinary optimizer's step reads it with the flag, so that the host stays the truth there, too."""
    with Emulated("mps"):
        param, optimizer = _one("mps")
        scaler = GradScaler("mps", init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.ones((), device="mps"))
        kept = scaler._scale
        for step, expected in enumerate((1024.0, 2048.0, 16.0)):
            if step == 2:
                kept.fill_(16.0)
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((2,), kept.item(), device="mps")
            before = param[0].item()
            scaler.step(optimizer)
            assert before - param[0].item() == 0.5
            assert scaler.update().loss_scale_after == expected
        assert kept.item() == scaler.get_scale() == 16.0


@pytest.mark.parametrize("guard", [None, SpikeGuard()])
@pytest.mark.parametrize("fused", [False, True])
def test_ten_thousand_optimizers_leave_nothing_behind(fused, guard):
    """An optimizer for each phase of a program that runs for long."""
    param = torch.nn.Parameter(torch.ones(1))
    scaler = GradScaler("cpu", init_scale=8.0, guard=guard)
    for _ in range(10_000):
        optimizer = torch.optim.SGD([param], lr=0.0, fused=fused)
        scaler.scale(torch.ones(()))
        param.grad = torch.ones(1)
        scaler.step(optimizer)
        scaler.update()
    del optimizer
    gc.collect()
    sizes = [len(each) for each in vars(scaler).values() if isinstance(each, dict | list)]
    assert max(sizes) <= 1, sizes
    if guard is not None:
        assert isinstance(scaler.state_dict()["guard"], dict)

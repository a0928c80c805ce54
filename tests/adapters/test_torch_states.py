"""The two states of a scaler: when the host is the truth; and the device's own update is the policy's, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, FixedScaling, state_from_dict, state_to_dict
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_steps import EITHER_KIND, INF, one, ready, take_step
from tests.strategies import overflow_traces, policies
from tests.sweeping import few_examples


def _require_states(policy, trace, state=None, is_there=False):
    """Step a fused optimizer on a device over a trace; each state and each outcome is the policy's own.

    A given state is loaded first, by a scaler that may have its state on the device already.
    """
    expected = policy.init_state() if state is None else state
    with Emulated("mps"):
        (_, optimizer), scaler = one(True, "mps"), GradScaler("mps", policy=policy)
        if is_there:
            take_step(scaler, optimizer, 1.0)
        if state is not None:
            scaler.load_state_dict(state_to_dict(state, policy))
        for finite in trace:
            info = take_step(scaler, optimizer, 1.0 if finite else INF)
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
@given(RULES | policies(), overflow_traces(max_steps=20))
def test_the_kernels_update_is_the_policys(policy, trace):
    """Scale, trackers, counters and outcomes, at the bounds too, also of policies that torch's kernel cannot follow."""
    _require_states(policy, trace)


BEYOND = (
    {"growth_tracker": 9},  # beyond the interval, which the kernel compares with ==
    {"growth_tracker": -2},
    {"hysteresis_tracker": 3},
    {"steps": 2**31 - 3, "skipped_steps": 5},
    {"steps": 2**31 - 1, "skipped_steps": 2**31 - 1, "overflow_streak": 2**31 - 1},
    {"loss_scale": 4.0, "growth_tracker": 1},
)


@pytest.mark.parametrize("fields", BEYOND, ids=str)
@pytest.mark.parametrize("is_there", [False, True])
def test_states_that_the_kernel_could_not_continue(fields, is_there):
    """A checkpoint may hold any state; the policy's own update is used where the kernel would do something else."""
    policy = DynamicScaling(init_scale=4.0, growth_interval=3, min_scale=2.0**-4, max_scale=2.0**8)
    saved = {**state_to_dict(policy.init_state(), policy), **fields}
    for trace in ([True] * 5, [False] * 5, [True, False, True, True, True, False]):
        with np.errstate(over="ignore"):
            _require_states(policy, trace, state_from_dict(saved, policy), is_there)


def _step(scaler, param, optimizer, finite=True):
    """Take a step on the emulated device; return its outcome, and what `update` runs there."""
    scaler.scale(torch.ones((), device="mps"))
    param.grad = torch.full((1,), 1.0 if finite else INF, device="mps")
    scaler.step(optimizer)
    before = len(Emulated.calls)
    return scaler.update(), Emulated.calls[before:]


def test_what_an_update_runs_on_a_device():
    """After an ordinary step the host has read the flag, and writes only a changed scale; else seven or eight calls."""
    with Emulated("mps"):
        param, fused = one(True, "mps")
        ordinary = torch.optim.SGD([param], lr=0.5)
        scaler = GradScaler("mps", growth_interval=2)
        _step(scaler, param, ordinary)
        calls = [[str(each) for each in _step(scaler, param, ordinary, finite)[1]] for finite in (1, 1, 0, 1, 1)]
        assert [len(each) for each in calls[:2] + calls[3:]] == [1, 0, 0, 1]
        assert [each for each in calls[2] if "fill_" in each] == calls[2][:1]  # what follows looks at the loss
        _step(scaler, param, fused)  # places the state on the device
        for optimizer, most in ((fused, 7), (fused, 7), (ordinary, 8), (fused, 7), (ordinary, 8)):
            calls = [str(each) for each in _step(scaler, param, optimizer)[1]]
            assert len([each for each in calls if "unbind" not in each]) <= most, calls  # it makes views


@EITHER_KIND
def test_loading_leaves_the_state_where_it_is(fused):
    """The scale is written in place, as a new one is, and the outcome of a step is known where it was known before.

    Accelerate makes the tensors a second time after each load under FSDP2, which does nothing.
    """
    with Emulated("mps"):
        param, optimizer = one(fused, "mps")
        scaler = GradScaler("mps", init_scale=8.0)
        before, kept, tracker = _step(scaler, param, optimizer)[0], scaler._scale, scaler._growth_tracker
        scaler.load_state_dict(GradScaler("cpu", init_scale=64.0).state_dict())
        scaler._lazy_init_scale_growth_tracker("mps")
        scaler._lazy_init_scale_growth_tracker(torch.device("mps"))
        assert scaler._scale is kept
        assert scaler._growth_tracker is tracker
        assert (kept.item(), tracker.item()) == (64.0, 0)
        after, _ = _step(scaler, param, optimizer)
        assert isinstance(after.applied, torch.Tensor) == isinstance(before.applied, torch.Tensor) == fused
        assert (after.loss_scale_used, scaler.state_dict()["steps"]) == (64.0, 1)
        scaler.update(16.0)
        assert scaler._scale is kept
        assert kept.item() == scaler.get_scale() == 16.0


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("call", ["unscale_", "step", "unscale_and_clip_"])
@pytest.mark.parametrize("before", [None, "unscale_", "step", "unscale_and_clip_", "skip"])
@EITHER_KIND
def test_a_state_that_is_loaded_in_the_middle_of_a_step(fused, before, call, device):
    """The step is dropped: its gradients are refused, and the next scaled loss begins another one."""
    with Emulated("mps"):
        (param, optimizer), scaler = one(fused, device), GradScaler(device, init_scale=8.0)
        take_step(scaler, optimizer, 0.0)
        saved, calls = GradScaler("cpu", init_scale=2.0).state_dict(), {"unscale_and_clip_": [INF]}
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full((1,), 8.0, device=device)
        if before is not None:
            getattr(scaler, before)(optimizer, *calls.get(before, []))
        weight = param.item()
        for _ in range(2):
            scaler.load_state_dict(saved)
            with pytest.raises(CallOrderError, match="replaced the loss scale; scale another loss, and call backward"):
                getattr(scaler, call)(optimizer, *calls.get(call, []))
        if before is not None:  # torch's scaler goes on, too
            assert scaler.update().applied is False
            assert scaler.get_scale() == 2.0
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.skip(optimizer)
        assert not scaler.update().applied
        assert take_step(scaler, optimizer, 1.0).loss_scale_used == 2.0
        assert param.item() == weight - 0.5


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("value", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("call", ["unscale_", "unscale_and_clip_"])
@EITHER_KIND
def test_a_flag_that_was_changed_in_place_counts(fused, call, value, device):
    """A trainer may reduce the flags over its ranks between `unscale_` and `step`; any but 0 is an overflow."""
    with Emulated("mps"):
        param, optimizer = one(fused, device)
        scaler = GradScaler(device, init_scale=8.0)
        for scale in (4.0, 2.0):  # while the host knows the state, and from then on
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.ones(1, device=device)
            getattr(scaler, call)(optimizer, *[1.0] * (call != "unscale_"))
            for flag in scaler._found_inf_per_device(optimizer).values():
                (flag.data if device == "cpu" else flag).fill_(value)  # on the host also without a new version
            scaler.step(optimizer)
            assert bool(scaler.update().overflowed)
            assert (param.item(), scaler.get_scale()) == (1.0, scale)


REPLACING = DynamicScaling(refill_on_finite=False, refill_on_backoff=True), FixedScaling(4.0)


@pytest.mark.parametrize("policy", [*REPLACING, DynamicScaling(growth_interval=2)])
def test_a_policy_that_is_replaced_on_a_device_is_followed(policy):
    """The state on a device moves as the new policy moves a state on the host, also the counters.

    A count of finite steps above a lowered growth interval reaches it at the next finite step.
    """
    with Emulated("mps"):
        (_, optimizer), scaler = one(True, "mps"), GradScaler("mps", policy=DynamicScaling(init_scale=8.0))
        for grad in (INF, 1.0, 1.0, 1.0):
            take_step(scaler, optimizer, grad)
        expected, scaler.policy = state_from_dict(scaler.state_dict(), scaler.policy), policy
        for grad in (1.0, INF, INF, 1.0):
            take_step(scaler, optimizer, grad)
            expected = policy.update(expected, grad != INF)
        assert state_from_dict(scaler.state_dict(), policy) == expected


def test_each_flag_is_on_the_device_of_its_key():
    """Until `step`, which combines them."""
    with Emulated("mps") as mode:
        params = [torch.nn.Parameter(torch.ones(2, device=device)) for device in ("mps", "cpu")]
        optimizer = torch.optim.SGD(params, lr=0.5, foreach=False)
        scaler = ready(device="mps", init_scale=8.0)
        for param, value in zip(params, (8.0, INF), strict=True):
            param.grad = torch.full_like(param, value)
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert {device: flag.item() for device, flag in found.items()} == {mode.device: 0.0, params[1].device: 1.0}
        assert all(flag.device == device for device, flag in found.items())
        scaler.step(optimizer)
        assert not scaler.update().applied


def _recorded(policy):
    """Return a parameter, its scaler, and a graph of one fused step."""
    param, optimizer = one(fused=True)
    scaler = GradScaler("cpu", policy=policy)
    param.grad = torch.zeros(1)
    scaler.place_on("cpu")
    with RecordedGraph() as graph:
        scaler.step(optimizer)
        scaler.update()
    return param, scaler, graph


def test_a_state_that_is_loaded_before_the_first_replay():
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


def test_a_replay_counts_by_the_policy_that_was_assigned_after_the_recording():
    """The graph reads the memory of the policy's table, so that the same memory holds the table of another policy."""
    param, scaler, graph = _recorded(DynamicScaling())
    scaler.policy = REPLACING[0]
    param.grad.fill_(INF)
    graph.replay()
    assert scaler.state_dict()["hysteresis_tracker"] == 1


@pytest.mark.parametrize("policy", ["dynamic", DynamicScaling(cooldown=1), DynamicScaling(hysteresis=2)])
@given(trace=overflow_traces(max_steps=10))
@few_examples
def test_replays_update_as_the_policy_does(policy, trace):
    """Every counter included; a loaded state and a new scale take effect at the next replay."""
    param, scaler, graph = _recorded(policy)
    scaler.load_state_dict(state_to_dict(scaler.policy.init_state(), scaler.policy))
    expected = scaler.policy.init_state()
    for finite in trace:
        param.grad.fill_(1.0 if finite else INF)
        graph.replay()
        expected = scaler.policy.update(expected, finite)
        assert state_from_dict(scaler.state_dict(), scaler.policy) == expected

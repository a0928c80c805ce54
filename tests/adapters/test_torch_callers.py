"""Callers that interrupt a step, keep what they were handed, use an id again, or change an optimizer on its way."""

import gc
import subprocess
import sys
import weakref
from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated

INF = float("inf")
AGAINST_TORCH = pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])


def _one(fused=False):
    param = torch.nn.Parameter(torch.zeros(1))
    return param, torch.optim.SGD([param], lr=1.0, fused=fused)


def _backward(scaler, *params):
    for param in params:
        param.grad = None
    scaler.scale(sum(param.sum() for param in params)).backward()


# -- tensors that are kept ---------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_a_kept_scale_that_is_written_between_step_and_update(make_scaler):
    """The update continues from what the tensor holds."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=8.0, growth_interval=1)
    _backward(scaler, param)
    kept = scaler._scale
    for _ in range(2):
        _backward(scaler, param)
        scaler.step(optimizer)
        kept.fill_(4.0)
        scaler.update()
        assert scaler.get_scale() == kept.item() == 8.0


@AGAINST_TORCH
def test_a_kept_tracker_that_is_written(make_scaler):
    """After any read of the scale."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=8.0, growth_interval=1000)
    _backward(scaler, param)
    kept = scaler._growth_tracker
    scaler.get_scale()
    kept.fill_(7)
    _backward(scaler, param)
    scaler.step(optimizer)
    kept.fill_(100)
    scaler.update()
    assert scaler._get_growth_tracker() == kept.item() == 101


@AGAINST_TORCH
def test_a_state_that_is_loaded_over_a_written_scale(make_scaler):
    """The loaded one counts, although the scaler had the same before."""
    param, _ = _one()
    scaler = make_scaler("cpu", init_scale=8.0)
    _backward(scaler, param)
    kept, saved = scaler._scale, scaler.state_dict()
    kept.fill_(4.0)
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == kept.item() == 8.0


def test_a_kept_scale_on_a_device_that_is_written_between_step_and_update():
    """The host notices by the tensor's version, and leaves the update to the device."""
    with Emulated("mps"):
        param = torch.nn.Parameter(torch.ones(1, device="mps"))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = GradScaler("mps", init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones((), device="mps"))
        kept = scaler._scale
        for write, new_scale, expected in ((4.0, None, 8.0), (4.0, 16.0, 16.0)):
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.ones(1, device="mps")
            scaler.step(optimizer)
            kept.fill_(write)
            scaler.update(new_scale)
            assert scaler.get_scale() == kept.item() == expected


# -- steps that are interrupted ----------------------------------------------------------------------------------------


@EITHER_KIND
def test_a_state_loaded_after_unscaling_was_interrupted(fused, monkeypatch):
    """The next gradients are divided by the scale of their own loss."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    saved = {**scaler.state_dict(), "scale": 2.0, "loss_scale": 2.0}
    _backward(scaler, param)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.unscale_(optimizer)
    scaler.load_state_dict(saved)
    _backward(scaler, param)
    scaler.step(optimizer)
    assert param.item() == -1.0


@AGAINST_TORCH
def test_a_scale_written_between_a_check_and_the_step(make_scaler):
    """A fused optimizer divides by what the tensor holds at its step."""
    param, optimizer = _one(fused=True)
    scaler = make_scaler("cpu", init_scale=8.0)
    _backward(scaler, param)
    scaler._check_inf_per_device(optimizer)
    scaler._scale.fill_(2.0)
    scaler.step(optimizer)
    assert param.item() == -4.0


# -- several optimizers ------------------------------------------------------------------------------------------------


def test_gradients_that_come_after_a_joint_clip_without_them():
    """They are checked and unscaled by the step."""
    (p, first), (q, second) = _one(), _one()
    scaler = GradScaler("cpu", init_scale=8.0)
    _backward(scaler, p)
    scaler.unscale_and_clip_([first, second], INF)
    scaler.scale(q.sum()).backward()
    scaler.step(second)
    assert q.item() == -1.0


@AGAINST_TORCH
def test_an_optimizer_that_becomes_fused(make_scaler):
    """And one that no longer is."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=8.0)
    for step, is_fused in enumerate((False, True, False)):
        optimizer._step_supports_amp_scaling = is_fused
        optimizer.param_groups[0].update(fused=is_fused)
        _backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        assert param.item() == -1.0 - step


def _spiked(kind=GradScaler):
    """Return two parameters, their optimizers and a scaler with a guard that has warmed up on both."""
    (p, first), (q, second) = _one(), _one()
    scaler = kind("cpu", init_scale=4.0, guard=SpikeGuard(warmup=2))
    for _ in range(4):
        _backward(scaler, p, q)
        for optimizer in (first, second):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    p.data.zero_()
    q.data.zero_()
    return p, first, q, second, scaler


def test_a_spike_in_a_joint_clip_of_a_subclass():
    """It is not an overflow, and the loss scale stays."""

    class Unscaling(GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)

    p, first, q, second, scaler = _spiked(Unscaling)
    _backward(scaler, p, q)
    q.grad.mul_(1e4)
    scaler.unscale_and_clip_([first, second], INF)
    for optimizer in (first, second):
        scaler.step(optimizer)
    info = scaler.update()
    assert (info.spiked, info.overflowed, scaler.get_scale()) == (True, False, 4.0)


def test_a_guard_counts_no_step_without_gradients():
    """As without a guard."""
    _, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=4.0, guard=SpikeGuard())
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


def test_what_is_said_of_a_step_that_was_left_out():
    """It had gradients, which were not checked."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=4.0)
    _backward(scaler, param)
    scaler.skip(optimizer)
    scaler.update()
    assert "no gradients" not in scaler.diagnose()
    optimizer.zero_grad()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert "no gradients" in scaler.diagnose()


# -- subclasses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
def test_a_flag_that_the_decision_raises(clips):
    """A subclass reduces the flags over ranks in `_maybe_opt_step`, and calls ours."""

    class Reducing(GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            for flag in optimizer_state["found_inf_per_device"].values():
                flag.fill_(1.0)
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    param, optimizer = _one()
    scaler = Reducing("cpu", init_scale=8.0)
    _backward(scaler, param)
    if clips:
        scaler.unscale_and_clip_(optimizer, INF)
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == (0.0, 4.0)


@pytest.mark.parametrize("base", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_a_subclass_with_its_own_step_and_update(base):
    """It keeps what it takes from the records, which it replaces at each update; and nothing warns."""

    class Own(base):
        def step(self, optimizer, *args, **kwargs):
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            assert state["found_inf_per_device"]
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            state["stage"] = OptState.STEPPED
            return result

        def update(self, new_scale=None):
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([param], lr=1.0)
    scaler = Own("cpu", init_scale=8.0)
    for _ in range(3):
        _backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
    assert param.item() == pytest.approx(-3.0)


def test_a_fused_optimizer_without_a_state():
    """It needs no more than the flag and the factor."""

    class Stateless:
        _step_supports_amp_scaling = True

        def __init__(self, param):
            self.param_groups = [{"params": [param]}]

        def step(self):
            param = self.param_groups[0]["params"][0]
            param.data -= param.grad / self.grad_scale * (1.0 - self.found_inf)

    param = torch.nn.Parameter(torch.zeros(1))
    scaler = GradScaler("cpu", init_scale=8.0)
    _backward(scaler, param)
    scaler.step(Stateless(param))
    assert param.item() == -1.0


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_new_scale_after_a_spike(device):
    """The step was not applied, on the host or on the device."""
    with Emulated("mps"):
        param = torch.nn.Parameter(torch.zeros(2, device=device))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
        scaler = GradScaler(device, init_scale=8.0, guard=SpikeGuard(warmup=2))
        for size in (1.0, 1.0, 1.0, 1e4):
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.full((2,), size, device=device)
            scaler.step(optimizer)
            info = scaler.update(16.0)
            assert bool(info.applied) == bool(info.applied_of(optimizer)) == (size == 1.0)
            assert bool(info.spiked) == (size == 1e4)


# -- how long things live ----------------------------------------------------------------------------------------------


def test_a_scaler_is_freed_at_once():
    """Nothing waits for the garbage collector, so that the hooks of `protect=` end with it."""
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gc.disable()
    try:
        for _ in range(3):
            scaler = GradScaler("cpu", protect=[model])
            scaler.scale(model(torch.ones(2, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            alive = weakref.ref(scaler)
            del scaler
            assert alive() is None
        assert not model._forward_pre_hooks
    finally:
        gc.enable()


_MANY_SCALERS = """
import gc, torch
from lossscale_torch import GradScaler

def work():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gc.disable()
    for _ in range(20):
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    gc.enable()

for _ in range(20):
    work()
"""


def test_many_scalers_of_one_optimizer():
    """Weak references with callbacks in garbage cycles have crashed the interpreter."""
    subprocess.run([sys.executable, "-c", _MANY_SCALERS], check=True, timeout=100)

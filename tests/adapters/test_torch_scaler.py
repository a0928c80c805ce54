"""`GradScaler` by its public names: losses, policies, outcomes, checkpoints, a disabled scaler, and other threads.

`test_torch_fuzz.py` shows that it does what torch's scaler does, and `test_torch_differences.py` where it does not.
"""

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lossscale_core
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_steps import COPIES, EITHER_KIND, INF, one, take_step
from tests.core.own_policies import AdditiveScaling


def _steps(scaler, trace, fused=False, device="cpu"):
    """Step over a trace of flags; return the outcomes."""
    _, optimizer = one(fused, device)
    return [take_step(scaler, optimizer, 1.0 if finite else INF) for finite in trace]


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_losses_of_every_dtype_and_shape(dtype, shape):
    """Half losses are lifted, one-dimensional ones too; float64 stays. A device may be given by its object."""
    scaled = GradScaler(torch.device("cpu")).scale(torch.full(shape, 2, dtype=dtype))
    assert scaled.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert (scaled == 2.0**17).all()


def test_nested_losses():
    """Containers keep their type, dicts scale their values, and other iterables stay lazy."""
    scaler, one = GradScaler("cpu", init_scale=4.0), torch.ones(())
    nested = scaler.scale({"a": [one, (one,)]})
    assert nested["a"][1][0].item() == 4.0
    assert [t.item() for t in scaler.scale(iter([one, one]))] == [4.0, 4.0]
    assert type(scaler.scale(torch.return_types.max((one, one)))) is torch.return_types.max


@pytest.mark.parametrize("is_on_device", [False, True])
def test_losses_within_functional_transforms(is_on_device):
    """`torch.func.grad`, `grad_and_value` and `vmap` of it scale as eager code does, on the host and on the device."""
    scaler = GradScaler("cpu", init_scale=8.0)
    with RecordedGraph() if is_on_device else contextlib.nullcontext():
        _steps(scaler, [True], fused=is_on_device)
    values = torch.tensor([1.0, 2.0])

    def loss(weight):
        return scaler.scale((weight * weight).sum())

    assert torch.func.grad(loss)(values).tolist() == [16.0, 32.0]
    assert torch.func.grad_and_value(loss)(values)[1].item() == 40.0
    assert torch.func.vmap(torch.func.grad(loss))(values).tolist() == [16.0, 32.0]


# -- policies ----------------------------------------------------------------------------------------------------------


def test_a_policy_of_ones_own_tells_torch_nothing_false():
    """Torch's scaler refuses the dict."""
    scaler = GradScaler("cpu", policy=AdditiveScaling())
    _steps(scaler, [True, False, True])
    with pytest.raises(KeyError, match="scale"):
        torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


# -- outcomes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "is_recorded"), [(False, False), (True, False), (False, True)])
def test_what_the_host_knows_is_plain_numbers(fused, is_recorded):
    """`json.dumps` takes it, and `applied is True`, on a CPU whatever the optimizer, also after a recorded update."""
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    if is_recorded:  # it leaves the state in tensors
        with RecordedGraph():
            scaler.scale(torch.ones(()))
            param, optimizer = one()
            param.grad = torch.ones(1)
            scaler.unscale_(optimizer)
            scaler.update(1024.0)
    (info,) = _steps(scaler, [True], fused)
    assert info.applied is True is scaler.last_step.applied
    assert json.loads(json.dumps(info))[:6] == [True, 1024.0, 2048.0, 0, False, False]
    assert json.loads(json.dumps(scaler.metrics()))["applied_steps"] == 1
    assert {type(number) for number in scaler.metrics().values()} == {int, float}
    assert isinstance(info, lossscale_core.StepInfo)
    replaced = info._replace(applied=False)
    assert (replaced.applied, replaced.by_optimizer, replaced.had_gradients) == (False, info.by_optimizer, True)


def test_the_repr_shows_policy_scale_and_whether_it_is_enabled():
    """A loss scale that only a device knows is not read."""
    scaler = GradScaler("cpu", policy=8.0)
    assert repr(scaler) == "GradScaler(policy=FixedScaling(init_scale=8.0), loss_scale=8.0, enabled=True)"
    assert repr(GradScaler("cpu", enabled=False)).endswith("enabled=False)")
    with Emulated("mps") as device:
        scaler = GradScaler("mps")
        _steps(scaler, [True], fused=True, device="mps")
        assert "loss_scale=on mps:0" in repr(scaler)
        assert device.reads == 0


def test_what_a_device_knows_stays_what_it_was():
    """The numbers of a fused step on a device are tensors, and no later step and no checkpoint changes them."""
    with Emulated("mps"):
        scaler = GradScaler("mps", init_scale=1024.0, growth_interval=1)
        infos, numbers = [], []
        for _ in range(3):
            infos += _steps(scaler, [True], fused=True, device="mps")
            numbers.append(scaler.metrics())
        assert [info.loss_scale_used.item() for info in infos] == [1024.0, 2048.0, 4096.0]
        assert [info.loss_scale_after.item() for info in infos] == [2048.0, 4096.0, 8192.0]
        assert [each["steps"].item() for each in numbers] == [1, 2, 3]
        saved, infos = scaler.state_dict(), infos + _steps(scaler, [False], fused=True, device="mps")
        scaler.load_state_dict(saved)
        assert infos[-1].overflow_streak.item() == 1
    assert all(isinstance(field, OnDevice) for field in infos[0][:5])


# -- checkpoints and copies --------------------------------------------------------------------------------------------


@COPIES
def test_a_disabled_scaler(copied):
    """Every method passes through, a user's skip counts, and no attribute is missing, nor in a copy.

    A protected module gets no hooks.
    """
    original = GradScaler("cpu", enabled=False, protect=(module := torch.nn.Identity()))
    assert not module._forward_pre_hooks
    assert all(hasattr(each, name) for each in (original, copied(original)) for name in vars(GradScaler("cpu")))
    for scaler in (original, copied(original)):
        (param, optimizer), loss = one(), torch.ones(())
        assert scaler.scale(loss) is loss
        param.grad = torch.ones(1)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert param.item() == 0.0
        assert scaler.update().applied_of(optimizer)
        scaler.skip(optimizer)
        assert copied(scaler).update().applied
        assert not scaler.update().applied_of(optimizer)
        for attempt in scaler.attempts(module):
            assert (attempt.number, attempt.info) == (0, None)
            take_step(scaler, optimizer, 1.0)
        assert attempt.info is scaler.last_step
        scaler.load_state_dict({})
        assert (scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()) == ({}, 1.0, False)
        assert (scaler.get_growth_factor(), scaler.metrics()["steps"]) == (2.0, 0)
        assert scaler.diagnose().startswith("disabled")


# -- other threads -----------------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_another_thread_reads_while_steps_run(device, fused):
    """A logger that calls `get_scale`, `metrics` and `state_dict` at any time raises nothing, and changes nothing."""
    scaler, is_over, interval = GradScaler(device, growth_interval=3), threading.Event(), sys.getswitchinterval()

    def read():
        while not is_over.is_set():
            scaler.get_scale()
            scaler.metrics()
            scaler.state_dict()

    sys.setswitchinterval(1e-6)
    with Emulated("mps"), ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        try:
            _steps(scaler, [True, True, False] * 15, fused, device)
        finally:
            is_over.set()
            sys.setswitchinterval(interval)
        alone = GradScaler(device, growth_interval=3)
        _steps(alone, [True, True, False] * 15, fused, device)
        assert scaler.state_dict() == alone.state_dict()
    reading.result()

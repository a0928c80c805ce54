"""`GradScaler` by its public names: losses, new scales, outcomes, and a disabled scaler.

`test_torch_fuzz.py` shows that it does what torch's scaler does, and `test_torch_differences.py` where it does not.
"""

import json
import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import lossscale_core
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler, guarded
from tests.adapters.emulated_device import Emulated, OnDevice
from tests.adapters.torch_steps import COPIES, EITHER_KIND, INF, one, take_step

# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_losses_of_every_dtype_and_shape(dtype, shape):
    """A scaled loss of any shape is float32, or float64 if the loss is float64."""
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


def test_losses_do_not_keep_their_base():
    """The scaler keeps a loss until `update`, but it does not keep the tensor of which the loss is a view."""
    scaler, weight = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    logits = weight * torch.ones(1000)
    storage = StorageWeakRef(logits.untyped_storage())
    scaler.scale(logits[0]).backward()
    del logits
    assert storage.expired()


@pytest.mark.parametrize(("new_scale", "expected"), [(math.nan, 8.0), (-3.0, 8.0), (4.0, 4.0)])
def test_new_scales_on_a_device(new_scale, expected):
    """A new scale on a device is not read, and changes nothing if it is NaN or not positive."""
    with Emulated("mps") as device:
        scaler = GradScaler("mps", init_scale=8.0)
        scaler.place_on("mps")
        reads = device.reads
        scaler.update(torch.tensor(new_scale, device="mps"))
        assert device.reads == reads
        assert scaler.get_scale() == expected


# -- outcomes ----------------------------------------------------------------------------------------------------------


@EITHER_KIND
def test_outcomes_on_a_host(fused):
    """An outcome on a CPU has plain numbers; it knows its optimizers, and a copy of its fields knows the whole step."""
    (_, optimizer), scaler = one(fused), GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    info = take_step(scaler, optimizer, 1.0)
    assert info.applied is True is scaler.last_step.applied is info._replace(overflow_streak=5).applied_of(optimizer)
    assert json.loads(json.dumps(info))[:6] == [True, 1024.0, 2048.0, 0, False, False]
    assert {type(number) for number in scaler.metrics().values()} == {int, float}
    assert isinstance(info, lossscale_core.StepInfo)
    with pytest.raises(CallOrderError, match=r"SGD that took no part .* pass the object that was passed to"):
        info.applied_of(one()[1])


def test_outcomes_on_a_device():
    """The numbers of a fused step on a device are tensors, and no later step and no checkpoint changes them."""
    with Emulated("mps"):
        (_, optimizer), scaler = one(fused=True, device="mps"), GradScaler("mps", init_scale=1024.0, growth_interval=1)
        infos, numbers = [], []
        for grad in (1.0, 1.0, INF):
            infos.append(take_step(scaler, optimizer, grad))
            numbers.append(scaler.metrics())
        scaler.load_state_dict(GradScaler("cpu").state_dict())
        assert [info.loss_scale_used.item() for info in infos] == [1024.0, 2048.0, 4096.0]
        assert [info.loss_scale_after.item() for info in infos] == [2048.0, 4096.0, 2048.0]
        assert [info.overflow_streak.item() for info in infos] == [0, 0, 1]
        assert [each["steps"].item() for each in numbers] == [1, 2, 3]
    assert all(isinstance(field, OnDevice) for field in infos[0][:5])


# -- disabled scalers --------------------------------------------------------------------------------------------------


@COPIES
def test_a_disabled_scaler(copied):
    """A disabled scaler and its copies have every attribute, and take the steps of the bare optimizer."""
    original = GradScaler("cpu", enabled=False, protect=(module := torch.nn.Identity()))
    assert not module._forward_pre_hooks
    for scaler in (original, copied(original)):
        assert vars(scaler).keys() >= vars(GradScaler("cpu")).keys()
        (param, optimizer), loss = one(), torch.ones(())
        assert scaler.scale(loss) is loss
        for attempt in scaler.attempts(module):
            assert (attempt.number, attempt.info) == (0, None)
            take_step(scaler, optimizer, 1.0)
        assert attempt.info is scaler.last_step
        assert param.item() == 0.0
        scaler.load_state_dict({})
        assert (scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()) == ({}, 1.0, False)
        assert (scaler.get_growth_factor(), scaler.metrics()["steps"]) == (2.0, 0)
        assert scaler.diagnose().startswith("disabled")


@pytest.mark.parametrize("calls", ["step skip", "skip step", "skip", "unscale_ step", "step step"])
def test_outcomes_of_disabled_scalers(calls):
    """The outcome says whether the step was taken, also if the loop skips the step besides."""
    (param, optimizer), scaler = one(), GradScaler("cpu", enabled=False)
    param.grad = torch.ones(1)
    for call in calls.split():
        getattr(scaler, call)(optimizer)
    info = scaler.update()
    assert bool(info) == info.applied_of(optimizer) == (param.item() != 1.0)
    assert (info == bool(info), info == (not info), info != bool(info)) == (True, False, False)
    assert info == scaler.last_step == (*info,)


def test_guarded_optimizers_under_disabled_scalers():
    """A guarded optimizer decides about its step, and the outcome of a disabled scaler reports the decision."""
    (_, optimizer), scaler = one(), GradScaler("cpu", enabled=False)
    guarded(optimizer)
    for value in (1.0, math.nan, 1.0):
        info = take_step(scaler, optimizer, value)
        assert bool(info.applied) is bool(info.applied_of(optimizer)) is (value == 1.0)
    assert scaler.metrics()["loss_scale"] == scaler.get_scale() == 1.0

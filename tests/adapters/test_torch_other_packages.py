"""How other packages read, write, patch and override torch's private names: each way works as with torch's scaler."""

from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import EITHER_KIND, INF, one, take_step

AGAINST_TORCH = pytest.mark.parametrize("base", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])


def _backward(scaler, param, finite=True):
    param.grad = None
    scaler.scale(param.sum()).backward()
    if not finite:
        param.grad.fill_(INF)


def _step(scaler, param, optimizer, finite=True):
    """Take a whole step; return how far the parameter moved."""
    before = param.item()
    _backward(scaler, param, finite)
    scaler.step(optimizer)
    scaler.update()
    return before - param.item()


# -- names -------------------------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_the_names_are_there(base):
    """Before a loss, after it, and in a step; ignite asks for an instance of torch's class."""
    scaler = base("cpu", init_scale=8.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    settings = (scaler._init_scale, scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval)
    assert settings == (8.0, 2.0, 0.5, 2000)
    assert (scaler._init_growth_tracker, scaler._enabled, scaler._device) == (0, True, "cpu")
    assert scaler._scale is None is scaler._growth_tracker
    param, optimizer = one()
    _backward(scaler, param)
    assert (scaler._get_scale_async().item(), scaler._growth_tracker.dtype) == (8.0, torch.int32)
    assert scaler._check_scale_growth_tracker("step") == (scaler._scale, scaler._growth_tracker)
    assert scaler._found_inf_per_device(optimizer) == {}
    assert scaler._check_inf_per_device(optimizer) == {torch.device("cpu"): 0.0}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.125), torch.zeros(()), False)
    assert (found, param.grad.item()) == ({torch.device("cpu"): 0.0}, 1.0)


# -- tensors -----------------------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_what_is_written_in_place_is_seen_at_once(base):
    """By `get_scale`, by `state_dict`, by the next loss and by its step; so is an assigned scale."""
    param, optimizer = one()
    scaler = base("cpu", init_scale=1024.0, growth_interval=4)
    _step(scaler, param, optimizer)
    scaler._growth_tracker.fill_(3)
    assert scaler.state_dict()["_growth_tracker"] == 3
    scaler._scale.fill_(32.0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == scaler.scale(torch.ones(())).item() == 32.0
    assert _step(scaler, param, optimizer) == 1.0
    assert (scaler.get_scale(), scaler._growth_tracker.item()) == (64.0, 0)
    scaler._scale = torch.tensor(128.0)
    assert _step(scaler, param, optimizer) == 1.0
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    ("base", "device"), [(torch.amp.GradScaler, "cpu"), (GradScaler, "cpu"), (GradScaler, "mps")], ids=str
)
def test_what_is_written_between_step_and_update(base, device):
    """The update continues from what the tensors hold, and a loaded state and a new scale replace it."""
    with Emulated("mps"):
        param, optimizer = one(device=device)
        scaler = base(device, init_scale=8.0, growth_interval=1)
        saved = scaler.state_dict()
        scaler.scale(torch.ones((), device=device))
        kept = scaler._scale
        for new_scale, expected in ((None, 8.0), (16.0, 16.0), (None, 8.0)):
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.ones(1, device=device)
            scaler.step(optimizer)
            kept.fill_(4.0)
            scaler.update(new_scale)
            assert scaler.get_scale() == kept.item() == expected
        kept.fill_(4.0)
        scaler.load_state_dict(saved)
        assert scaler.get_scale() == kept.item() == 8.0


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_scale_that_is_set_at_each_update(device):
    """mmengine's fixed loss scale; a spike is still no applied step, on the host and on the device."""
    with Emulated("mps"):
        (_, optimizer), scaler = one(True, device), GradScaler(device, init_scale=16.0, guard=SpikeGuard(warmup=2))
        for size in (1.0, 1.0, 1.0, 1e4):
            info = take_step(scaler, optimizer, size, new_scale=16.0)
            assert bool(info.applied) == bool(info.applied_of(optimizer)) == (size == 1.0)
            assert (bool(info.spiked), scaler.get_scale()) == (size == 1e4, 16.0)


# -- flags -------------------------------------------------------------------------------------------------------------


def _raise_flags(flags, value=1.0):
    """Raise flags as an `all_reduce` over other ranks does: in place, and without a new version."""
    for flag in flags.values():
        flag.detach().numpy().fill(value)


@EITHER_KIND
@AGAINST_TORCH
def test_a_flag_that_is_raised_after_the_step_backs_off(base, fused):
    """The step was taken, and the scale follows the flag, which is found in the records, too."""
    param, optimizer = one(fused)
    scaler = base("cpu", init_scale=1024.0)
    for in_records, expected in ((False, 512.0), (True, 256.0)):
        _backward(scaler, param)
        scaler.step(optimizer)
        record = scaler._per_optimizer_states[id(optimizer)]
        _raise_flags(record["found_inf_per_device"] if in_records else scaler._found_inf_per_device(optimizer))
        scaler.update()
        assert scaler.get_scale() == expected
    assert param.item() == -1.0


# -- subclasses and patches --------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_a_subclass_decides_on_the_step(base):
    """`_maybe_opt_step` is called with the record, as NeMo, Composer and torch_xla override it."""

    class Deciding(base):
        vetoes = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            if sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values()) or self.vetoes:
                return None
            return optimizer.step(*args, **kwargs)

    param, optimizer = one()
    scaler = Deciding("cpu", init_scale=1024.0)
    for scaler.vetoes, finite, expected in ((0, True, 1.0), (1, True, 0.0), (0, False, 0.0)):
        assert _step(scaler, param, optimizer, finite) == expected
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("clips", [False, True])
def test_a_subclass_raises_a_flag_when_it_decides(clips):
    """It reduces the flags over ranks in `_maybe_opt_step`, and calls ours."""

    class Reducing(GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            _raise_flags(optimizer_state["found_inf_per_device"])
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    param, optimizer = one()
    scaler = Reducing("cpu", init_scale=8.0)
    _backward(scaler, param)
    if clips:
        scaler.unscale_and_clip_(optimizer, INF)
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert (param.item(), scaler.get_scale()) == (1.0, 4.0)


@AGAINST_TORCH
@EITHER_KIND
def test_a_subclass_adds_to_the_check(base, fused):
    """`step` calls `unscale_`, or `_check_inf_per_device` for a fused optimizer, as torch's ShardedGradScaler needs."""

    class Checking(base):
        calls = overflows_elsewhere = 0

        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            self._add(optimizer)

        def _check_inf_per_device(self, optimizer):
            super()._check_inf_per_device(optimizer)
            self._add(optimizer)

        def _add(self, optimizer):
            self.calls += 1
            _raise_flags(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"], self.overflows_elsewhere)

    param, optimizer = one(fused)
    scaler = Checking("cpu", init_scale=1024.0)
    for scaler.overflows_elsewhere in (0, 1):
        assert _step(scaler, param, optimizer) == 1.0 - scaler.overflows_elsewhere
    assert (scaler.calls, scaler.get_scale()) == (2, 512.0)


@AGAINST_TORCH
def test_a_subclass_updates_with_torchs_own_kernel(base):
    """`update` writes the persistent tensors itself and replaces the records, as Megatron's and NeMo's do."""

    class Updating(base):
        def update(self, new_scale=None):
            scale, tracker = self._check_scale_growth_tracker("update")
            flags = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            settings = (self._growth_factor, self._backoff_factor, self._growth_interval)
            torch._amp_update_scale_(scale, tracker, sum(flags), *settings)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    param, optimizer = one()
    scaler = Updating("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for finite in (True, True, True, False, True, True):
        moved = _step(scaler, param, optimizer, finite)
        seen.append((moved, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [(1, 1024, 1), (1, 2048, 0), (1, 2048, 1), (0, 1024, 0), (1, 1024, 1), (1, 2048, 0)]


@AGAINST_TORCH
@pytest.mark.parametrize("clips", [False, True])
def test_unscaling_that_is_replaced_on_the_instance(base, clips):
    """As kohya's sd-scripts do in full float16, which let float16 gradients pass."""
    model = torch.nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = base("cpu", init_scale=8.0)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inverse, found, _: original(optimizer, inverse, found, True)
    scaler.scale(torch.ones(()))
    model.weight.grad = torch.full_like(model.weight, 8.0)
    is_ours = clips and base is GradScaler
    scaler.unscale_and_clip_(optimizer, 0.5) if is_ours else scaler.unscale_(optimizer)
    assert model.weight.grad.item() == pytest.approx(0.5 if is_ours else 1.0, rel=1e-3)
    scaler.step(optimizer)
    scaler.update()


@AGAINST_TORCH
def test_an_optimizer_becomes_fused_and_ordinary_again(base):
    """What it takes is asked of the instance at each step, as Accelerate's patched `step` needs."""
    param, optimizer = one()
    scaler = base("cpu", init_scale=8.0)
    for is_fused in (False, True, False):
        optimizer._step_supports_amp_scaling = is_fused
        optimizer.param_groups[0].update(fused=is_fused)
        assert _step(scaler, param, optimizer) == 1.0

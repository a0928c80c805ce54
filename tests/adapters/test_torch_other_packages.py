"""Uses of torch's private names in other packages, which work as with torch's scaler.

The random programs of `test_torch_fuzz.py` have other subclasses, and write to the tensors at any time.
"""

from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import EITHER_KIND, INF, one, take_step

AGAINST_TORCH = pytest.mark.parametrize("base", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])


# -- names -------------------------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_private_names_of_torch(base):
    """The scaler has the private names of torch's scaler, and is an instance of both classes of torch."""
    scaler = base("cpu", init_scale=8.0)
    assert isinstance(scaler, torch.amp.GradScaler if base is torch.amp.GradScaler else torch.cuda.amp.GradScaler)
    assert (scaler._init_scale, scaler._init_growth_tracker, scaler._enabled, scaler._device) == (8.0, 0, True, "cpu")
    assert scaler._scale is None is scaler._growth_tracker
    (param, optimizer), _ = one(), scaler.scale(torch.ones(()))
    assert (scaler._get_scale_async().item(), scaler._growth_tracker.dtype) == (8.0, torch.int32)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    param.grad = torch.full((1,), 8.0)
    flags = scaler._unscale_grads_(optimizer, torch.tensor(0.125), torch.zeros(()), False)
    assert (flags, param.grad.item()) == ({torch.device("cpu"): 0.0}, 1.0)


class _TorchsStep(GradScaler):
    """A subclass with torch's own methods for the step."""

    step, _maybe_opt_step = torch.amp.GradScaler.step, torch.amp.GradScaler._maybe_opt_step


@pytest.mark.parametrize("has_torchs_records", [False, True])
@EITHER_KIND
def test_a_subclass_with_torchs_step(fused, has_torchs_records):
    """The outcome of the step follows from its flags, even if a factory of torch makes the records."""
    param, optimizer = one(fused)
    scaler = _TorchsStep("cpu", init_scale=8.0)
    for size in (1.0, INF):
        if has_torchs_records:
            scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        before = param.item()
        assert bool(take_step(scaler, optimizer, size)) == (param.item() != before) == (size == 1.0)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_writes_between_step_and_update():
    """An update on a device continues from the values in the tensors; a loaded state or a new scale replaces them."""
    with Emulated("mps"):
        (_, optimizer), scaler = one(device="mps"), GradScaler("mps", init_scale=8.0, growth_interval=1)
        state = scaler.state_dict()
        scaler.place_on("mps")
        tensor = scaler._scale
        optimizer.register_step_post_hook(lambda *_: tensor.fill_(4.0))
        for new_scale, expected in ((None, 8.0), (16.0, 16.0), (None, 8.0)):
            take_step(scaler, optimizer, 1.0, new_scale)
            assert scaler.get_scale() == tensor.item() == expected
        tensor.fill_(4.0)
        scaler.load_state_dict(state)
        assert scaler.get_scale() == tensor.item() == 8.0


# -- subclasses and patches --------------------------------------------------------------------------------------------


@AGAINST_TORCH
@pytest.mark.parametrize("clips", [False, True])
def test_replaced_unscaling(base, clips):
    """A scaler with another `_unscale_grads_` accepts float16 gradients, as sd-scripts need in full float16."""
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

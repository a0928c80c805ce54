"""Uses of torch's private names in other packages, which work as with torch's scaler.

The random programs of `test_torch_fuzz.py` use more of these names, and have subclasses as other packages do.
"""

import pytest
import torch

from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import one, take_step, take_steps


@pytest.mark.parametrize("base", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_private_names_of_torch(base):
    """The scaler has the private names of torch's scaler before and after its tensors are made."""
    scaler = base("cpu", init_scale=8.0)
    assert (scaler._init_scale, scaler._init_growth_tracker, scaler._enabled, scaler._device) == (8.0, 0, True, "cpu")
    assert scaler._scale is None is scaler._growth_tracker
    assert base is not GradScaler or isinstance(scaler, torch.cuda.amp.GradScaler)
    scaler.scale(torch.ones(()))
    assert (scaler._get_scale_async().item(), scaler._growth_tracker.dtype) == (8.0, torch.int32)


def test_writes_between_step_and_update():
    """An update on a device continues from the scale in the tensor; a new scale replaces it, and nothing else does."""
    with Emulated("mps"):
        (_, optimizer), scaler = one(device="mps"), GradScaler("mps", init_scale=8.0, growth_interval=1)
        scaler.place_on("mps")
        optimizer.register_step_post_hook(lambda *_: scaler._scale.fill_(4.0))
        for new_scale, expected in ((None, 8.0), (16.0, 16.0), (None, 8.0)):
            take_step(scaler, optimizer, 1.0, new_scale)
            scaler._lazy_init_scale_growth_tracker("mps")  # Accelerate calls it again
            assert scaler.get_scale() == expected


@pytest.mark.parametrize(("base", "clips"), [(torch.amp.GradScaler, False), (GradScaler, False), (GradScaler, True)])
def test_replaced_unscaling(base, clips):
    """A scaler with another `_unscale_grads_` accepts float16 gradients, as sd-scripts need in full float16."""
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), base("cpu", init_scale=8.0)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inverse, found, _: original(optimizer, inverse, found, True)
    prepare = [(scaler.unscale_and_clip_, optimizer, 0.5)] if clips else []
    take_steps([param], [optimizer], scaler, 1.0, prepare=prepare)
    assert param.item() == pytest.approx(0.5 if clips else 0.0, rel=1e-3)


def test_replaced_checks():
    """The step of a fused optimizer is skipped if a replaced check has found an overflow elsewhere."""
    (param, optimizer), scaler = one(fused=True), GradScaler("cpu")
    original = scaler._check_inf_per_device
    scaler._check_inf_per_device = lambda optimizer: [flag.fill_(1.0) for flag in original(optimizer).values()]
    assert not take_step(scaler, optimizer, 1.0).applied
    assert param.item() == 1.0

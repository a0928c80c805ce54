"""The scaler under packages that call one in another way than in the recipes: Fabric and Accelerate, on a CPU."""

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision

from lossscale_torch import GradScaler

pytestmark = pytest.mark.filterwarnings("default")  # what these packages warn of is theirs
OVERFLOWS = {2, 5}
STEPS = 8


def _data():
    torch.manual_seed(0)
    return [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(STEPS)]


def _spoil(module):
    module.weight.grad[0, 0] = float("inf")


def test_fabric():
    """Fabric scales in backward, and unscales, steps and updates in the optimizer's step."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    fabric = Fabric(accelerator="cpu", plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler)])
    model = torch.nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (images, targets) in enumerate(_data()):
        optimizer.zero_grad()
        fabric.backward((wrapped(images) - targets).square().mean())
        if step in OVERFLOWS:
            _spoil(model)
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, model.weight) == (step in OVERFLOWS)
    assert scaler.get_scale() == 2.0**8


def test_accelerate_with_two_optimizers():
    """Accelerate updates after each of them: both get their true gradients, and one loss counts as one step."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1, updates_per_step=2)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler  # it offers no option for a CPU
    first, second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizers = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=0.0) for m in (first, second)))
    for step, (images, targets) in enumerate(_data()):
        for module in (first, second):
            module.zero_grad()
        loss = (first(images) + second(images) - targets).square().mean()
        expected = torch.autograd.grad(loss, second.weight, retain_graph=True)[0]
        accelerator.backward(loss)
        if step in OVERFLOWS:
            _spoil(first)
        before = scaler.get_scale()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(second.weight.grad, expected)
        assert scaler.get_scale() == before * (0.5 if step in OVERFLOWS else 2.0)
    assert int(scaler.metrics()["steps"]) == STEPS

"""A penalty on gradients: the loss is differentiated twice, and both times it is scaled."""

import pytest
import torch
from torch import nn

from lossscale_torch import GradScaler

torch.manual_seed(0)
X, Y = torch.randn(16, 4), torch.randn(16, 1)


def _gradients(scaler, half=False):
    """Return the gradients of a loss with a penalty on its gradient by the inputs, unscaled."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), X.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = nn.functional.mse_loss(model(x).float(), Y)
    (scaled_slopes,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    slopes = scaled_slopes / scaler.get_scale()
    scaler.scale(loss + 10.0 * slopes.square().sum()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("loss_scale", [2.0**-3, 1.0, 2.0**10, 2.0**16])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_the_gradients_are_those_of_float32(half, loss_scale):
    """In float32 bit for bit, since powers of two round nothing; in float16 within its rounding."""
    found = _gradients(GradScaler("cpu", init_scale=loss_scale), half)
    expected = _gradients(torch.amp.GradScaler("cpu", enabled=False))
    for grad, right in zip(found, expected, strict=True):
        assert (grad - right).norm() < 1e-2 * right.norm() if half else torch.equal(grad, right)

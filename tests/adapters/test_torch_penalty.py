"""A penalty on gradients: the loss is differentiated twice, and both times it is scaled."""

import pytest
import torch
from torch import nn

from lossscale_torch import GradScaler, overflow_report

torch.manual_seed(0)
X, Y = torch.randn(16, 4), torch.randn(16, 1)


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _losses(model, scaler, half):
    """Return the loss and the loss with a penalty on its gradient by the inputs."""
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = nn.functional.mse_loss(model(x).float(), Y)
    (scaled_slopes,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    slopes = scaled_slopes / scaler.get_scale()
    return loss, loss + 10.0 * slopes.square().sum()


def _expected():
    """Return the gradients in float32, without a scaler."""
    model, x = _model(), X.clone().requires_grad_()
    loss = nn.functional.mse_loss(model(x), Y)
    (slopes,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + 10.0 * slopes.square().sum(), list(model.parameters()))


def _distance(grads):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(grads, _expected(), strict=True))


@pytest.mark.parametrize("loss_scale", [2.0**-3, 1.0, 2.0**10, 2.0**16])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_the_gradients_are_those_of_float32(half, loss_scale):
    """In float32 bit for bit, since powers of two round nothing; in float16 within its rounding."""
    model = _model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=loss_scale)
    scaler.scale(_losses(model, scaler, half)[1]).backward()
    scaler.unscale_(optimizer)
    grads = [parameter.grad for parameter in model.parameters()]
    assert _distance(grads) < 1e-2
    assert half or all(torch.equal(a, b) for a, b in zip(grads, _expected(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_the_inner_gradient_skips_the_step(fused):
    """The penalty is not finite then; the scale falls until both passes fit, and the loss alone shows the cause."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**30)
    for _ in range(30):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss, penalized = _losses(model, scaler, half=True)
        scaler.scale(penalized).backward()
        scaler.step(optimizer)
        if scaler.update().applied:
            break
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert overflow_report(model.named_parameters(), loss=loss).verdict.startswith("finite loss: a smaller")
    assert 2.0**10 <= scaler.get_scale() <= 2.0**18
    assert _distance([(a.detach() - b) / -0.01 for a, b in zip(model.parameters(), before, strict=True)]) < 1e-2

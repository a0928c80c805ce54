"""Unusual optimizers: little more than `step`, kernels of their own, a compiled `step`, and wrappers."""

import pytest
import torch

from lossscale_core.errors import CheckpointWarning
from lossscale_torch import GradScaler
from tests.adapters.odd_optimizers import Container, Delegating, Duck, FusedDuck
from tests.adapters.torch_steps import INF, Legacy, take_step


def _compiled(params):
    """Return an optimizer whose `step` is compiled, as in docs/works-with.md; the usual backend needs a compiler."""
    optimizer = torch.optim.SGD(params, lr=1.0)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


OPTIMIZERS = {
    "no more than step": Duck,
    "a kernel of its own": FusedDuck,
    "compiled": _compiled,
    "delegates": lambda params: Delegating(torch.optim.SGD(params, lr=1.0)),
    "delegates to a fused one": lambda params: Delegating(torch.optim.SGD(params, lr=1.0, fused=True)),
    "holds a fused one": lambda params: Container([torch.optim.SGD(params, lr=1.0, fused=True)]),
    "of the old contract": lambda params: Legacy(params, lr=1.0),
}


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # in the compiler
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clips", [False, True])
def test_unusual_optimizers(make, clips):
    """They are unscaled, clipped, stepped and skipped as any other, leave the scale alone, and nothing warns."""
    param, scaler = torch.nn.Parameter(torch.ones(1)), GradScaler("cpu", init_scale=1024.0)
    optimizer, moves = make([param]), []
    for value in (1.0, INF, 1.0):
        param.grad = None
        scaler.scale((param * value).sum()).backward()
        if clips:
            scaler.unscale_and_clip_(optimizer, 0.5)
        before = param.item()
        scaler.step(optimizer)
        scaler.update()
        moves.append(before - param.item())
    assert moves == pytest.approx([0.5, 0.0, 0.5] if clips else [1.0, 0.0, 1.0], rel=1e-5)
    assert scaler.get_scale() == 512.0


def test_a_new_scaler_notices_earlier_steps():
    """A new scaler warns about an optimizer that has counted steps, and not about counts of 0 or without a scale."""
    param, quiet = torch.nn.Parameter(torch.ones(1)), GradScaler("cpu")
    optimizer = torch.optim.Adagrad([param])  # it has a count of 0 before its first step
    take_step(quiet, optimizer, 1.0)
    with pytest.warns(CheckpointWarning, match="starts over"):
        take_step(GradScaler("cpu"), optimizer, 1.0)
    take_step(GradScaler("cpu", policy="none"), optimizer, 1.0)
    optimizer = torch.optim.SGD([param])
    optimizer.state[param]["step"] = 0  # a Python int, as bitsandbytes counts
    take_step(GradScaler("cpu"), optimizer, 1.0)

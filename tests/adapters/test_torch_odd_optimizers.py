"""Optimizers that are not torch's: odd states, little more than `step`, and wrappers."""

import warnings

import pytest
import torch

from lossscale_core.errors import CheckpointWarning
from lossscale_torch import GradScaler
from tests.adapters.odd_optimizers import Container, Delegating, Duck
from tests.adapters.torch_steps import INF, Legacy, one, take_step


class _FusedDuck(Duck):
    """The same with a kernel of its own, which needs no more than the flag and the factor."""

    __slots__ = ("found_inf", "grad_scale")
    _step_supports_amp_scaling = True

    def step(self):
        for param in self.param_groups[0]["params"]:
            grad = param.grad if self.grad_scale is None else param.grad / self.grad_scale
            param.data -= torch.where(self.found_inf == 0.0, grad, 0.0)


OPTIMIZERS = {
    "no more than step": Duck,
    "no more than a fused step": _FusedDuck,
    "delegates": lambda params: Delegating(torch.optim.SGD(params, lr=1.0)),
    "delegates to a fused one": lambda params: Delegating(torch.optim.SGD(params, lr=1.0, fused=True)),
    "holds a fused one": lambda params: Container([torch.optim.SGD(params, lr=1.0, fused=True)]),
    "of the old contract": lambda params: Legacy(params, lr=1.0),
}


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
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


STATES = {
    "counts by element": (True, lambda param: {param: {"step": torch.full((3,), 5)}}),
    "momentum without a count": (True, lambda param: {param: {"momentum_buffer": torch.ones(1)}}),
    "counts of zero": (False, lambda param: {param: {"step": 0}}),
    "none": (False, lambda param: None),
    "no mapping": (False, lambda param: []),
    "anything": (False, lambda param: {"name": "text", 3: None, "nested": {"step": "many"}, "empty": {}}),
}


@pytest.mark.parametrize(("has_stepped", "make"), STATES.values(), ids=STATES)
def test_what_shows_that_an_optimizer_has_stepped(has_stepped, make):
    """A new scaler warns once that it starts over with such an optimizer; no other content of `state` raises an error.

    A scaler that does not scale, or that has stepped a new optimizer before, does not warn.
    """
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.state, optimizer.step = make(param), lambda: None  # torch's own would read the state
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.step(optimizer)
    assert [warning.category for warning in caught] == [CheckpointWarning] * has_stepped
    assert scaler.update().applied
    quiet = GradScaler("cpu")
    take_step(quiet, one()[1], 1.0)
    for other in (GradScaler("cpu", policy="none"), quiet):  # a warning would be an error
        other.scale(param.sum())
        other.step(optimizer)

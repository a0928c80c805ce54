"""A page of code as users of PyTorch write it, which type checkers must understand: `nox -s typing`."""

from typing import Any, assert_type

import torch
from torch import Tensor

import lossscale_torch
from lossscale_core import DynamicScaling, ScaleState
from lossscale_torch import GradScaler, StepInfo


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> StepInfo:
    """Take one step with the drop-in."""
    scaler = GradScaler("cpu", policy=DynamicScaling(growth_interval=500))
    prediction: Tensor = model(x)
    prediction = assert_type(scaler.attach(prediction, prediction.square()), Tensor)
    loss = assert_type(scaler.scale((prediction - y).square().mean()), Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types here
    assert_type(scaler.unscale_and_clip_(optimizer, max_norm=1.0), Tensor)
    scaler.step(optimizer)
    info = assert_type(scaler.update(), StepInfo)
    assert_type(info.applied_of(optimizer), bool | Tensor)
    assert_type(scaler.get_scale(), float)
    assert_type(scaler.last_step, StepInfo | None)
    scaler.load_state_dict(scaler.state_dict())
    return info


def plan(model: torch.nn.Module, x: Tensor) -> tuple[str, ...]:
    """Find what must run in float32, and run it so."""
    found = lossscale_torch.float32_plan(model, [lambda: assert_type(model(x), Any).mean()], at_least=2.0)
    with lossscale_torch.keep_in_float32(model, found.modules):
        model(x)
    assert_type(found.after.init_scale, float | None)
    return found.modules


def by_hand(params: list[Tensor], loss: Tensor) -> list[Tensor]:
    """Take one step with the verbs."""
    state = assert_type(lossscale_torch.init_state("dynamic", device="cpu"), ScaleState)
    assert_type(lossscale_torch.scale(loss, state), Tensor)
    grads = assert_type(lossscale_torch.unscale([param.clone() for param in params], state), list[Tensor])
    finite = assert_type(lossscale_torch.all_finite(grads), Tensor)
    return assert_type(
        lossscale_torch.select(finite, [p - g for p, g in zip(params, grads, strict=True)], params), list[Tensor]
    )


def wrong(scaler: GradScaler) -> None:
    """Make the mistakes that a checker finds."""
    GradScaler("cpu", max_grad_norm=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    _ = scaler.update().aplied  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    scaler.unscale_and_clip_("optimizer", 1.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

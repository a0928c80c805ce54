"""A page of code as users of PyTorch write it, which type checkers must understand: `nox -s typing`."""

from collections.abc import Callable, Iterable
from typing import Any, assert_type

import torch
import torch.distributed as dist
from torch import Tensor

import lossscale_torch
from lossscale_core import ScaleState
from lossscale_torch import DynamicScaling, GradScaler, GuardedOptimizer, SpikeGuard, StepInfo, clip_and_check_, guarded
from lossscale_torch.testing import check_training_loop


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> StepInfo:
    """Take one step with the drop-in."""
    scaler = GradScaler("cpu", policy=DynamicScaling(growth_interval=500), guard=SpikeGuard())
    assert_type(scaler.last_step.applied, bool | Tensor)
    prediction: Tensor = model(x)
    prediction = assert_type(scaler.attach(prediction, prediction.square()), Tensor)
    loss = assert_type(scaler.scale((prediction - y).square().mean()), Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types here
    assert_type(scaler.unscale_and_clip_(optimizer, max_norm=1.0), Tensor)
    scaler.step(optimizer)
    info = assert_type(scaler.update(), StepInfo)
    assert_type(info.applied, bool | Tensor)
    assert_type(info.loss_scale_used, float | Tensor)
    assert_type(info.applied_of(optimizer), bool | Tensor)
    assert_type(scaler.get_scale(), float)
    assert_type(scaler.last_step, StepInfo)
    scaler.load_state_dict(scaler.state_dict())
    return info


def plan(model: torch.nn.Module, x: Tensor) -> tuple[str, ...]:
    """Find what must run in float32, and run it so."""
    found = lossscale_torch.float32_plan(model, [lambda: assert_type(model(x), Any).mean()], at_least=2.0)
    with lossscale_torch.keep_in_float32(model, found.modules):
        model(x)
    assert_type(found.after.init_scale, float | None)
    return found.modules


def scale_several(scaler: GradScaler, first: Tensor, second: Tensor) -> None:
    """Scale what torch's scaler takes, and nested structures."""
    assert_type(scaler.scale([first, second]), list[Tensor])
    assert_type(scaler.scale((first, second)), tuple[Tensor, Tensor])
    assert_type(scaler.scale({"first": first}), dict[str, Tensor])
    assert_type(scaler.scale(each for each in (first, second)), Iterable[Tensor])
    scaler.scale([[first], [second]])


def retry(scaler: GradScaler, model: torch.nn.Module) -> None:
    """Take a step again while it overflows."""
    for attempt in scaler.attempts(model, retries=16):
        if attempt.info:
            assert_type(attempt.info.applied, bool | Tensor)
        assert_type(attempt.scales, list[float])
    assert_type(scaler.last_step.applied, bool | Tensor)  # after the loop, as on the page of retries


def train_without_scaling(model: torch.nn.Module) -> None:
    """Make any optimizer atomic."""
    optimizer = guarded(torch.optim.AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    if optimizer.last_step:
        scheduler.step()
    assert_type(optimizer.last_step, StepInfo)
    assert_type(optimizer.last_step.applied, bool | Tensor)
    assert_type(optimizer.last_step.norm, Tensor | None)
    assert_type(optimizer.metrics(), dict[str, Any])
    assert_type(optimizer.param_groups, list[dict[str, Any]])
    wants_adamw(optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd = guarded(sgd, guard=SpikeGuard(warmup=2), names=model)
    assert_type(sgd.last_step, StepInfo)
    assert_type(clip_and_check_(model.parameters(), max_norm=1.0), tuple[Tensor, Tensor])


def wants_adamw(optimizer: torch.optim.AdamW) -> None:
    """Take an optimizer of one class, and of it a guarded one."""
    if isinstance(optimizer, GuardedOptimizer):
        assert_type(optimizer.last_step, StepInfo)


def report(model: torch.nn.Module, loop: Callable[[GradScaler], Any], loss: Tensor) -> list[str]:
    """Find the cause of skips."""
    print(lossscale_torch.overflow_report(model.named_parameters(), loss=loss).verdict)
    found = lossscale_torch.range_report(model, lambda: loss)
    GradScaler("cpu", init_scale=found.init_scale or 1.0, half_gradients=True, norm_group=dist.group.WORLD)
    return check_training_loop(loop)


def by_hand(params: list[Tensor], loss: Tensor) -> list[Tensor]:
    """Take one step with the verbs."""
    state = assert_type(lossscale_torch.init_state("dynamic", device="cpu"), ScaleState[Tensor])
    assert_type(lossscale_torch.scale(loss, state), Tensor)
    grads = assert_type(lossscale_torch.unscale([param.clone() for param in params], state), list[Tensor])
    finite = assert_type(lossscale_torch.all_finite(grads, process_group=dist.group.WORLD), Tensor)
    return assert_type(
        lossscale_torch.select(finite, [p - g for p, g in zip(params, grads, strict=True)], params), list[Tensor]
    )


def wrong(scaler: GradScaler) -> None:
    """Make the mistakes that a checker finds."""
    GradScaler("cpu", max_grad_norm=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    _ = scaler.update().aplied  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    scaler.unscale_and_clip_("optimizer", 1.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scaler.scale(1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    guarded("optimizer")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

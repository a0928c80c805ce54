"""A page of code as users of PyTorch write it, which type checkers must understand: `nox -s typing`.

It has each line of `docs/trainers.md` that uses a scaler; `tests/house/test_pages.py` compares the two.
"""

from collections.abc import Callable, Iterable
from typing import Any, assert_type

import torch
import torch.distributed as dist
from torch import Tensor

import lossscale_torch
from lossscale_core import ScaleState
from lossscale_torch import (
    DynamicScaling,
    GradScaler,
    GuardedOptimizer,
    SpikeGuard,
    StepInfo,
    all_finite,
    guarded,
    overflow_report,
    range_report,
)
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


def retry(
    scaler: GradScaler, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, loss_fn: Any
) -> None:
    """Take a step again while it overflows."""
    for attempt in scaler.attempts(model, retries=16):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model)).backward()
        _ = scaler.unscale_and_clip_(optimizer, 1.0)
        _ = scaler.step(optimizer)
        _ = scaler.update()
        if attempt.info:
            assert_type(attempt.info.applied, bool | Tensor)
            scheduler.step()
        assert_type(attempt.scales, list[float])


def train_without_scaling(model: torch.nn.Module, loss: Tensor) -> None:
    """Make any optimizer atomic."""
    optimizer = guarded(torch.optim.AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.step()
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
    if sgd.last_step:
        scheduler.step()


def wants_adamw(optimizer: torch.optim.AdamW) -> None:
    """Take an optimizer of one class, and of it a guarded one."""
    if isinstance(optimizer, GuardedOptimizer):
        assert_type(optimizer.last_step, StepInfo)


class HasScaler:
    """What the frameworks have in different places: an attribute that holds the scaler."""

    scaler: GradScaler
    loss_scaler: GradScaler
    _scaler: GradScaler
    _is_overflow: bool | Tensor
    sync_gradients: bool


class FollowAppliedSteps:
    """The callback of Trainer and TRL."""

    def on_optimizer_step(self, optimizer: HasScaler) -> None:
        """Tell the schedule."""
        optimizer._is_overflow = not optimizer.scaler.last_step.applied  # waits


class LightningModule:
    """A module under Lightning."""

    trainer: Any

    def lr_scheduler_step(self, scheduler: Any) -> None:
        """Follow applied steps."""
        if self.trainer.precision_plugin.scaler.last_step.applied:
            scheduler.step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip."""
        self.trainer.precision_plugin.scaler.unscale_and_clip_(optimizer, max_norm=1.0)

    def on_train_batch_end(self, plugin: HasScaler) -> dict[str, Any]:
        """Log."""
        scaler = plugin.scaler
        info, counts = scaler.last_step, scaler.metrics()
        return {"applied": info.applied, "share": counts["skipped_steps"] / max(counts["steps"], 1)}


def use_trainers(
    accelerator: HasScaler,
    trainer: Any,
    engine: HasScaler,
    wrapper: HasScaler,
    MixedPrecision: Callable[..., Any],  # noqa: N803
    NativeScaler: Callable[..., Any],  # noqa: N803
    create_supervised_trainer: Callable[..., Any],
    state: dict[str, Any],
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Put the scaler where a framework has its own."""
    trainer.accelerator.scaler = GradScaler("cuda", policy="dynamic")
    accelerator.scaler = scaler = GradScaler("cuda", policy="dynamic")  # before prepare
    if accelerator.sync_gradients and scaler.last_step.applied:
        scheduler.step()
    accelerator.scaler = GradScaler("cuda", half_gradients=True)
    plugin = MixedPrecision("16-mixed", "cuda", GradScaler("cuda", policy="dynamic"))
    scaler = GradScaler("cuda", policy="dynamic")
    create_supervised_trainer(
        plugin,
        scaler=scaler,
    )
    engine.scaler = scaler
    wrapper.loss_scaler = GradScaler("cuda", policy="dynamic")  # and pass it to the Runner
    state |= {"scheduler": scheduler, "scaler": scaler}


def use_timm(
    NativeScaler: Callable[..., Any],  # noqa: N803
    typed: HasScaler,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
) -> None:
    """Train with timm."""
    loss_scaler = NativeScaler(device="cuda")
    loss_scaler._scaler = GradScaler("cuda", policy="dynamic")
    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    if loss_scaler._scaler.last_step.applied:
        model.train()
    if typed._scaler.last_step.applied:
        model.train()


def use_fsdp(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, loss: Tensor) -> None:
    """Train with FSDP2."""
    scaler = GradScaler("cuda", growth_interval=400)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    norm = scaler.unscale_and_clip_(optimizer, max_norm=1.0)
    assert_type(norm, Tensor)
    scaler.step(optimizer)
    if scaler.update().applied:
        scheduler.step()


def train_two(
    scaler: GradScaler,
    generator: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    critic_optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    loss: Tensor,
) -> None:
    """Train two networks with one scaler."""
    scaler.step(critic_optimizer)
    scaler.scale(loss).backward(inputs=list(generator.parameters()))  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    info = scaler.update()
    for each, schedule in (critic_optimizer, scheduler), (optimizer, scheduler):
        if info.applied_of(each):
            schedule.step()


def use_a_pipeline(
    device: torch.device, loss_fn: Callable[[Tensor, Tensor], Tensor], out: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Train the stages of a pipeline, and average gradients by hand."""
    scaler = GradScaler(device.type, norm_group=dist.group.WORLD)
    scaler.place_on(device)
    scaled_loss = lambda out, y: scaler.scale(loss_fn(out, y))  # noqa: E731  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownVariableType]
    scaled_loss(out, out)  # type: ignore[no-untyped-call]
    scaler.unscale_and_clip_(optimizer, max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert_type(all_finite([out], process_group=dist.group.WORLD), Tensor)


class Float16Engine:
    """An engine of verl, and torchtitan's container of optimizers."""

    scaler: GradScaler
    optimizer: torch.optim.Optimizer

    def optimizer_step(self, max_norm: float) -> float:
        """Take a step."""
        grad_norm = self.scaler.unscale_and_clip_(self.optimizer, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return grad_norm.item()

    def lr_scheduler_step(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Follow applied steps."""
        if self.scaler.last_step.applied:
            scheduler.step()

    def step_container(self, optimizers: torch.optim.Optimizer) -> None:
        """Take a step with several optimizers in one."""
        scaler = GradScaler("cuda")
        grad_norm = scaler.unscale_and_clip_(optimizers, max_norm=1.0)
        assert_type(grad_norm, Tensor)
        scaler.step(optimizers)


class Trainer:
    """A trainer that takes any scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda") if scaler is None else scaler

    def step(self) -> Any:
        """Return whether the step was applied."""
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        info = self.scaler.update()
        if info is None:  # torch's scaler
            return self.scaler.get_scale() >= scale
        return info.applied


def report(model: torch.nn.Module, loop: Callable[[GradScaler], Any], loss: Tensor) -> list[str]:
    """Find the cause of skips."""
    print(overflow_report(model.named_parameters(), loss=loss).verdict)
    found = range_report(model, lambda: loss)
    GradScaler("cpu", init_scale=found.init_scale or 1.0)
    return check_training_loop(loop)


def by_hand(params: list[Tensor], loss: Tensor) -> list[Tensor]:
    """Take one step with the verbs."""
    state = assert_type(lossscale_torch.init_state("dynamic", device="cpu"), ScaleState[Tensor])
    assert_type(lossscale_torch.scale(loss, state), Tensor)
    grads = assert_type(lossscale_torch.unscale([param.clone() for param in params], state), list[Tensor])
    finite = assert_type(lossscale_torch.all_finite(grads), Tensor)
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

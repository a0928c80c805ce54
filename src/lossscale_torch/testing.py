"""A check for training loops: a step that is skipped must leave everything that follows the steps as it was."""

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lossscale_core import DynamicScaling, tree
from lossscale_core.testing.loops import (
    BAD_STEPS,
    CLOSE,
    SCALES,
    change,
    listed,
    not_from_the_loss,
    not_skipped,
    same,
    scales_differ,
)
from lossscale_torch._gradients import params_of, values_of
from lossscale_torch._members import READY
from lossscale_torch._rescue import protect_modules
from lossscale_torch._scaler import GradScaler
from lossscale_torch._step_info import StepInfo
from lossscale_torch._types import Tree
from lossscale_torch._versions import fsdp2_explained, not_compiled

__all__ = ["LoopError", "TrainingLoop", "check_training_loop"]

_STEPS = 8
_SAVED_AFTER = 5
_GROWTH_INTERVAL = 3
_FOLLOWERS = ("scheduler", "ema", "model", "optimizer")
_SETTINGS = "optimizer.param_groups."
_WITH_FUSED_KERNEL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class TrainingLoop(Protocol):
    """A loop to check. In addition to these two members it may have `model`, `scheduler` and `ema`.

    With `state_dict()` and `load_state_dict(saved)`, which save and load the whole run, it is checked across them, too.
    With `protect`, a list of modules, it runs with a scaler that protects them, as `GradScaler(protect=)` does.
    """

    optimizer: torch.optim.Optimizer
    """The optimizer, whose step `step` takes."""

    def step(self, batch: int) -> Any:
        """Take one step of the optimizer: scale, backward, `scaler.step`, `scaler.update` and what follows.

        `batch` is the number of the step, from 0 on; the loop chooses its data by it.
        """


class LoopError(AssertionError):
    """A training loop does not follow what its scaler decides; the message says at which step, and in what."""


def check_training_loop(build: Callable[[GradScaler], TrainingLoop]) -> list[str]:
    """Require that a loop skips as a whole, and continues after a skipped step as if there had been no such batch.

    The check runs the loop some times for eight steps, with a scaler that makes the loss of steps 0, 3 and 4 infinite:
    in each call of `scale` within the step, or only in the first (one micro-batch); in a process group, on the last
    rank alone. After each such step, parameters, buffers, the optimizer's state, schedule and average must be as
    before; after each other step these and the optimizer's settings, such as `lr`, must be bit for bit those of a run
    without the infinite losses. It also requires that the loss scale makes no difference to the gradients that the
    optimizer sees, that gradients are zero before they are unscaled if each loss is multiplied by zero (an attached
    one, too), and that a run which is saved and loaded continues as one that is not.

    ```python
    def build(scaler):
        return Loop(scaler)          # your own: makes model, optimizer and schedule, and keeps the scaler

    check_training_loop(build)
    ```

    Random numbers of torch start over before `build` and before each step. In a process group every rank must call.

    Args:
        build: Makes the loop, with a model of its own, around the scaler that it is given.

    Returns:
        What was checked, for loops that lack a part: a sentence for each.

    Raises:
        LoopError: The loop fails; the message says at which step, and what has moved.
        TypeError: `build` does not return a loop.
    """
    with fsdp2_explained():
        return list(_check(build))


def _check(build: Callable[[GradScaler], TrainingLoop]) -> Iterator[str]:
    """Yield what was checked."""
    for fused in (False, True):
        kind = "a fused optimizer" if fused else "its own optimizer"
        if fused and not _has_fused_kernel(_Run(build, fused=False).loop.optimizer):
            continue
        for where in ("each loss", "the first loss"):
            _check_skips(build, fused, where == "the first loss")
            yield f"with {kind}: a step is skipped as a whole where {where} of it is infinite"
        _check_scale(build, fused)
        yield f"with {kind}: the loss scale makes no difference to the gradients"
        if not fused:
            _check_source(build)
            yield "all gradients come from losses that are scaled or attached"
        if _check_resumes(build, fused):
            yield f"with {kind}: a run that is saved and loaded continues exactly"


class _PlantingScaler(GradScaler):
    """A scaler that makes losses infinite or zero, and counts the updates of a step."""

    is_armed = is_silent = False
    only_first = False
    updates = 0
    left: dict[Tensor, float]
    """The largest element of each gradient in a step whose losses are zero."""
    _scaled_after: Any = "nothing so far"

    @not_compiled
    def scale(self, outputs: Tree) -> Tree:
        """Scale, and multiply by zero, or by infinity where an overflow is planned: all losses, or those of one call.

        The first call is the first after an update, so that a loss that `minimize` runs again is infinite again.
        """
        is_first, self._scaled_after = self.last_step is not self._scaled_after, self.last_step
        scaled = super().scale(outputs)  # may call this method for each loss; infinite twice is no other than once
        if self.is_silent:
            return _times(0.0, scaled)
        return _times(torch.inf, scaled) if self.is_armed and (is_first or not self.only_first) else scaled

    def attach(self, x: Tensor, aux_loss: Tensor) -> Tensor:
        """Attach a loss, times zero where the others are."""
        return super().attach(x, aux_loss * 0.0 if self.is_silent else aux_loss)

    def _open(self, optimizer: Any, caller: str) -> Any:
        record = super()._open(optimizer, caller)
        if self.is_silent and record["stage"] is READY:
            for param in params_of(optimizer):
                if param.grad is not None and (values := values_of(param.grad)).numel():
                    self.left[param] = float(values.abs().max())
        return record

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update, and count it."""
        self.updates += 1
        return super().update(new_scale)

    @not_compiled
    def minimize(self, *args: Any, **settings: Any) -> StepInfo:
        """Minimize, which counts as one update however many tries it takes."""
        updates = self.updates
        info = super().minimize(*args, **settings)
        self.updates = updates + 1
        return info

    def protect(self, modules: Any) -> None:
        """Protect modules that were made after the scaler."""
        protect_modules(self, modules)


class _Run:
    """One run of the loop: its scaler, its steps, and what the optimizer saw."""

    def __init__(self, build: Callable[[Any], TrainingLoop], fused: bool, init_scale: float = SCALES[1]) -> None:
        torch.manual_seed(0)
        policy = DynamicScaling(init_scale=init_scale, growth_interval=_GROWTH_INTERVAL)
        self.scaler = _PlantingScaler(_device_type(), policy=policy)
        self.loop = build(self.scaler)
        self.norms: list[float] = []
        if not callable(getattr(self.loop, "step", None)) or not hasattr(self.loop, "optimizer"):
            raise TypeError(f"build returned {self.loop!r}; return an object with step(batch) and optimizer")
        self.scaler.protect(getattr(self.loop, "protect", ()))
        if fused:
            _make_fused(self.loop.optimizer)

    def step(self, number: int, plant: bool = False, only_first: bool = False) -> None:
        """Take a step, with an overflow if `plant`."""
        scaler = self.scaler
        scaler.is_armed, scaler.only_first = plant and _is_last_rank(), only_first
        updates = scaler.updates
        torch.manual_seed(number + 1)
        self.loop.step(number)
        scaler.is_armed = False
        updates = scaler.updates - updates
        if updates != 1:
            raise LoopError(
                f"step({number}) called scaler.update() {updates} times; take one step of the optimizer, with "
                "one update, in each step(batch)"
            )

    def set_scale(self, loss_scale: float) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": loss_scale, "loss_scale": loss_scale})

    def everything(self) -> dict[str, Any]:
        """Return all that follows the steps, as copies by name."""
        found: dict[str, Any] = {}
        for name in _FOLLOWERS:
            part = getattr(self.loop, name, None)
            if part is not None:
                found.update(_flat(name, part.state_dict()))
        return found


def _times(factor: float, scaled: Any) -> Any:
    """Return scaled losses times a factor, in the structure that holds them."""
    if isinstance(scaled, Tensor):
        return scaled * factor
    times = functools.partial(_times, factor)
    return map(times, scaled) if isinstance(scaled, Iterator) else tree.map_leaves(times, scaled)


def _check_skips(build: Callable[[Any], TrainingLoop], fused: bool, only_first: bool) -> None:
    """Require that skipped steps move nothing, and that the run ends as one that never saw them."""
    run, clean = _Run(build, fused), _Run(build, fused)
    for number in range(_STEPS):
        is_bad = number in BAD_STEPS
        before, scale = run.everything(), run.scaler.get_scale()
        run.step(number, is_bad, only_first)
        if is_bad:
            _require_skipped(number, run, before)
            continue
        clean.set_scale(scale)
        clean.step(number)
        how = "without the skipped steps; follow applied steps only (info.applied)"
        _require_equal(f"after step {number}", run.everything(), clean.everything(), how)


def _check_scale(build: Callable[[Any], TrainingLoop], fused: bool) -> None:
    """Require that the optimizer sees the same gradients whatever the loss scale is."""
    seen = []
    for init_scale in SCALES:
        run = _Run(build, fused, init_scale)
        norms: list[float] = []
        handle = run.loop.optimizer.register_step_pre_hook(lambda optimizer, *_, to=norms: to.append(_norm(optimizer)))
        for number in range(2):
            run.step(number)
        handle.remove()
        seen.append(norms)
    for number, (small, large) in enumerate(zip(*seen, strict=True)):
        if abs(small - large) > CLOSE * max(abs(small), abs(large)):
            norms_seen = f"the optimizer gradients of norm {small:g} and {large:g}"
            hint = "scale every loss, and unscale before you clip or change gradients (unscale_and_clip_ does both)"
            raise LoopError(scales_differ(number, norms_seen, hint))


def _check_source(build: Callable[[Any], TrainingLoop]) -> None:
    """Require that no gradient is left if all losses are multiplied by zero."""
    runs = [_Run(build, fused=False) for _ in SCALES]
    for run, loss_scale in zip(runs, SCALES, strict=True):
        run.set_scale(loss_scale)  # after `build`, which may have kept the first scale
    for number in range(2):
        small, large = (_left_at(run, number, by) for run, by in zip(runs, SCALES, strict=True))
        # Code of a user may multiply an inner loss by get_scale(), which is right; then it grows with the scale.
        names = [name for name, size in small.items() if size > 2.0 * large.get(name, 0.0)]
        if names:
            hint = "add a loss inside the graph with scaler.attach, and change gradients after they are unscaled"
            raise LoopError(not_from_the_loss(number, names, hint))


def _left_at(run: _Run, number: int, loss_scale: float) -> dict[str, float]:
    """Take a step of losses times zero; return the size of what is left of each gradient, unscaled, on any rank."""
    run.scaler.is_silent, run.scaler.left = True, {}
    run.step(number)
    names = _names_of(run.loop)
    everyone = [{names.get(param, "a parameter"): size / loss_scale for param, size in run.scaler.left.items()}]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        everyone *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, everyone[0])
    return {name: max(each.get(name, 0.0) for each in everyone) for own in everyone for name in own}


def _names_of(loop: Any) -> dict[Tensor, str]:
    """Return the names of parameters in the loop's model, or in its optimizer."""
    model, groups = getattr(loop, "model", None), loop.optimizer.param_groups
    names = {
        param: f"parameter {n} of group {g}"
        for g, group in enumerate(groups)
        for n, param in enumerate(group["params"])
    }
    if isinstance(model, torch.nn.Module):
        names.update((param, name) for name, param in model.named_parameters())
    return names


def _check_resumes(build: Callable[[Any], TrainingLoop], fused: bool) -> bool:
    """Require that a run continues exactly from what it saved; return False where the loop cannot save."""
    run = _Run(build, fused)
    if not (hasattr(run.loop, "state_dict") and hasattr(run.loop, "load_state_dict")):
        return False
    for number in range(_SAVED_AFTER):
        run.step(number, number in BAD_STEPS)
    file = io.BytesIO()
    torch.save(run.loop.state_dict(), file)
    file.seek(0)
    resumed = _Run(build, fused)
    resumed.loop.load_state_dict(torch.load(file, weights_only=False))  # type: ignore[attr-defined]
    loaded, saved = (_flat("scaler", each.scaler.state_dict()) for each in (resumed, run))
    _require_equal("after loading", loaded, saved, "what was saved; save and load the scaler, too")
    for number in range(_SAVED_AFTER, _STEPS):
        run.step(number)
        resumed.step(number)
        how = "without save and load; save and load whatever the steps change"
        _require_equal(f"after step {number}", resumed.everything(), run.everything(), how)
    return True


def _require_skipped(number: int, run: _Run, before: Mapping[str, Any]) -> None:
    """Require that all is as before, but for the optimizer's settings, which are compared with a run without this step.

    A loop may set them at the head of a step, from the applied steps so far: the step before did not count itself yet.
    """
    info: Any = run.scaler.last_step
    if info.applied or info.applied_of(run.loop.optimizer):
        raise LoopError(
            f"step {number} was applied although one of its losses was infinite; such a step must be skipped as a "
            "whole; look for gradients that are repaired (nan_to_num_), zero_grad between micro-batches, a loss that "
            "is not scaled (scale every loss), and optimizer.step() without the scaler"
        )
    after, moved = run.everything(), {}
    for name in {**before, **after}:
        if name.startswith(_SETTINGS):
            continue
        if name not in before:
            if not _is_zero(after[name]):
                moved[name] = f"{name} appeared"
        elif not same(before[name], after.get(name)):
            moved[name] = change(name, before[name], after.get(name))
    if moved:
        raise LoopError(not_skipped(number, list(moved.values()), _hint(run.loop, moved)))


def _hint(loop: Any, moved: Iterable[str]) -> str:
    """Say what keeps a step that the scaler has skipped from moving these: weights, buffers and what follows them."""
    model = getattr(loop, "model", None)
    buffers = {f"model.{name}" for name, _ in model.named_buffers()} if isinstance(model, torch.nn.Module) else set()
    others = set(moved) - buffers
    hints = []
    if any(name.startswith(("model.", "optimizer.")) for name in others):
        hints.append("call scaler.step(optimizer) and not optimizer.step()")
    if others:
        hints.append("follow applied steps only (info.applied)")
    if not buffers.isdisjoint(moved):
        hints.append("make the scaler with GradScaler(protect=[model]); in this check the loop says protect = [model]")
    return ", and ".join(hints)


def _require_equal(when: str, found: Mapping[str, Any], expected: Mapping[str, Any], how: str) -> None:
    """Require that two runs are the same; the message begins with settings, which change what follows them."""
    differing = [name for name in {**expected, **found} if not same(found.get(name), expected.get(name))]
    if differing:
        differing.sort(key=lambda name: not name.startswith(_SETTINGS))
        what = listed([_difference(name, found.get(name), expected.get(name)) for name in differing])
        raise LoopError(f"{when}, {what}, unlike {how}")


def _difference(name: str, found: Any, expected: Any) -> str:
    is_plain = not any(isinstance(value, Tensor) and value.dim() for value in (found, expected))
    return f"{name} is {found} and not {expected}" if is_plain else f"{name} differs"


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return the numbers and tensors in a state dict by their path."""
    return dict(_leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}".lstrip("."), each)
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _leaves(f"{name}.{key}", each)
    elif isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield name, local.detach().clone()
    elif isinstance(value, bool | int | float | str) or value is None:
        yield name, value


def _is_zero(value: Any) -> bool:
    """Return whether an entry is what an optimizer allocates in a first step that its kernel skips."""
    return not value.any() if isinstance(value, Tensor) else True


def _norm(optimizer: Any) -> float:
    """Return the norm of the gradients that an optimizer is about to apply, unscaled."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    factor = getattr(optimizer, "grad_scale", None)
    return float(norm) / (1.0 if factor is None else float(factor))


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_last_rank() -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def _has_fused_kernel(optimizer: Any) -> bool:
    return type(optimizer) in _WITH_FUSED_KERNEL and not optimizer.defaults.get("fused")


def _make_fused(optimizer: Any) -> None:
    """Let one of torch's optimizers step with its fused kernel, as if it had been made with `fused=True`."""
    # Its constructor sets this: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L107
    optimizer._step_supports_amp_scaling = True
    optimizer.defaults.update(fused=True, foreach=False)
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)

"""A check for training loops: a step that is skipped must leave everything that follows the steps as it was."""

import contextlib
import copy
import functools
import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lossscale_core import DynamicScaling
from lossscale_core.adapters import tree
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
_PARTED = 2.0
"""The ratio of norms that is too large in later steps, when rounding may have parted two runs at other loss scales."""
_NOISE = 1e-6
"""The norm, relative to the largest one, below which gradients in later steps may be rounding errors."""
P = ParamSpec("P")
_WITH_FUSED_KERNEL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class TrainingLoop(Protocol):
    """A loop to check. In addition to these two members it may have `model`, `scheduler` and `ema`.

    With `state_dict()` and `load_state_dict(saved)`, which save and load the whole run, it is checked across them, too.
    With `protect`, a list of modules, it runs with a scaler that protects them, as `GradScaler(protect=)` does.
    """

    optimizer: torch.optim.Optimizer
    """The optimizer that `step` steps."""

    def step(self, batch: int) -> Any:
        """Take one step of the optimizer: scale, backward, `scaler.step`, `scaler.update` and what follows.

        `batch` is the number of the step, from 0 on; the loop chooses its data by it.
        """


class LoopError(AssertionError):
    """A training loop does not follow the decisions of its scaler; the message names the step and the difference."""


def check_training_loop(build: Callable[[GradScaler], TrainingLoop]) -> list[str]:
    """Require that a loop skips a step as a whole, and then continues as if it had never seen that batch.

    The check runs the loop several times for eight steps, with a scaler that makes the loss of steps 0, 3 and 4
    infinite: in each call of `scale` within the step, or only in the first (one micro-batch); in a process group, on
    the last rank alone. After each such step, parameters, buffers, the optimizer's state, schedule and average must be
    as before. After each other step these and the optimizer's settings, such as `lr`, must be bit for bit those of a
    run without the infinite losses. It also requires three things. The optimizer receives the same gradients at each
    loss scale. If each loss is multiplied by zero, an attached one, too, the gradients are zero before they are
    unscaled. A run that is saved and loaded continues like one that is not.

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
        LoopError: The loop fails; the message names the step, and what has changed.
        TypeError: `build` does not return a loop.
    """
    checked = []
    with fsdp2_explained():
        for what, run in _checks(build):
            with contextlib.suppress(_NotTriedError):
                run()
                checked.append(what)
    return checked


class _NotTriedError(Exception):
    """A check was not tried on this loop; the message gives the reason."""


def _checks(build: Callable[[GradScaler], TrainingLoop]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the requirement and the function of each check of the parts that the loop has."""
    loop = _Run(build, fused=False).loop
    can_save = hasattr(loop, "state_dict") and hasattr(loop, "load_state_dict")
    on = f" on the last of {_ranks()} ranks" if _ranks() > 1 else ""
    for fused in (False, True) if _can_be_fused(loop) else (False,):
        kind = "a fused optimizer" if fused else "its own optimizer"
        for where in ("each loss", "the first loss"):
            what = f"with {kind}: a step is skipped as a whole where {where} of it is infinite{on}"
            yield what, functools.partial(_check_skips, build, fused, where == "the first loss")
        what = f"with {kind}: the loss scale makes no difference to the gradients"
        yield what, functools.partial(_check_scale, build, fused)
        if not fused:
            yield (
                "all gradients come from losses that are scaled or attached",
                functools.partial(_check_source, build),
            )
        if can_save:
            what = f"with {kind}: a run that is saved and loaded continues exactly"
            yield what, functools.partial(_check_resumes, build, fused)


class _PlantingScaler(GradScaler):
    """A scaler that makes losses infinite or zero, and counts the updates of a step."""

    is_armed = is_silent = False
    only_first = False
    updates = 0
    left: dict[Tensor, float]
    """The largest element of each gradient in a step with losses of zero."""
    seen: set[int]
    """The optimizers that the loop steps."""
    _scaled_after: Any = "nothing so far"

    @not_compiled
    def scale(self, outputs: Tree) -> Tree:
        """Scale, and multiply by zero, or by infinity where an overflow is planned: all losses, or those of one call.

        The first call is the first after an update, so that a loss that `minimize` runs again is infinite again.
        """
        is_first, self._scaled_after = self.last_step is not self._scaled_after, self.last_step
        scaled = super().scale(outputs)  # may call this method for each loss; that is harmless: inf * inf is inf
        if self.is_silent:
            return _times(0.0, scaled)
        return _times(torch.inf, scaled) if self.is_armed and (is_first or not self.only_first) else scaled

    def attach(self, x: Tensor, aux_loss: Tensor) -> Tensor:
        """Attach a loss, times zero where the others are."""
        return super().attach(x, aux_loss * 0.0 if self.is_silent else aux_loss)

    def _open(self, optimizer: Any, caller: str) -> Any:
        self.seen.add(id(optimizer))
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
    """One run of the loop: its scaler, its steps, and the gradients that the optimizer received."""

    def __init__(self, build: Callable[[Any], TrainingLoop], fused: bool, init_scale: float = SCALES[1]) -> None:
        torch.manual_seed(0)
        policy = DynamicScaling(init_scale=init_scale, growth_interval=_GROWTH_INTERVAL)
        self.scaler = _PlantingScaler(_device_type(), policy=policy)
        self.scaler.seen = set()
        self.loop = build(self.scaler)
        self.stepped: dict[int, torch.optim.Optimizer] = {}
        self.applied = 0
        if not callable(getattr(self.loop, "step", None)) or not hasattr(self.loop, "optimizer"):
            raise TypeError(f"build returned {self.loop!r}; return an object with step(batch) and optimizer")
        self.scaler.protect(getattr(self.loop, "protect", ()))
        if fused:
            _make_fused(self.loop.optimizer)
        self._begun = self._param_values()

    def step(self, number: int, plant: bool = False, only_first: bool = False) -> None:
        """Take a step, with an overflow if `plant`."""
        scaler = self.scaler
        scaler.is_armed, scaler.only_first = plant and _is_last_rank(), only_first
        updates = scaler.updates
        torch.manual_seed(number + 1)
        handle = register_optimizer_step_post_hook(
            lambda optimizer, *_: self.stepped.update({id(optimizer): optimizer})
        )
        try:
            self.loop.step(number)
        finally:
            handle.remove()
        scaler.is_armed = False
        updates = scaler.updates - updates
        if updates != 1:
            raise LoopError(
                f"step({number}) called scaler.update() {updates} times; take one step of the optimizer, with "
                "one update, in each step(batch)"
            )
        self.applied += bool(scaler.last_step.applied)  # type: ignore[union-attr]  # there was an update

    def standstill(self) -> str:
        """Return why this run shows nothing: no step was applied, or no parameter changed. Empty if it trains."""
        if not any(_gathered(self.applied)):
            return "none of its steps was applied; look for a loss that is not finite"
        now = self._param_values()
        if not any(_gathered(any(not same(now.get(name), each) for name, each in self._begun.items()))):
            return "no parameter changed, so that a skipped step looks like an applied one; look for scaler.step and lr"
        return ""

    def followers(self) -> dict[str, Any]:
        """Return the members that follow the steps and have a state, by name."""
        members = {name: getattr(self.loop, name, None) for name in _FOLLOWERS}
        return {name: each for name, each in members.items() if hasattr(each, "state_dict")}

    def _param_values(self) -> dict[str, Any]:
        return _flat("", {name: param for param, name in _names_of(self.loop).items()})

    def set_scale(self, loss_scale: float) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": loss_scale, "loss_scale": loss_scale})

    def everything(self) -> dict[str, Any]:
        """Return copies of all parts that follow the steps, by name."""
        found: dict[str, Any] = {}
        for name, part in self.followers().items():
            found.update(_flat(name, part.state_dict()))
        if "model" not in self.followers():
            found.update(_flat("optimizer", {name: param for param, name in _names_of(self.loop).items()}))
        return found


def _times(factor: float, scaled: Any) -> Any:
    """Return scaled losses times a factor, in the structure that holds them."""
    if isinstance(scaled, Tensor):
        return scaled * factor
    times = functools.partial(_times, factor)
    return map(times, scaled) if isinstance(scaled, Iterator) else tree.map_leaves(times, scaled)


def _check_skips(build: Callable[[Any], TrainingLoop], fused: bool, only_first: bool) -> None:
    """Require that skipped steps change nothing, and that the run ends like a run without them."""
    run, clean = _Run(build, fused), _Run(build, fused)
    for number in range(_STEPS):
        is_bad = number in BAD_STEPS
        before, scale = run.everything(), run.scaler.get_scale()
        run.step(number, is_bad, only_first)
        if only_first and (optimizers := len(run.scaler.seen)) > 1:
            raise _NotTriedError(f"a step has {optimizers} optimizers, each of which is skipped by its own gradients")
        if is_bad:
            _require_skipped(number, run, before)
            continue
        clean.set_scale(scale)
        clean.step(number)
        how = "without the skipped steps; follow applied steps only (info.applied)"
        _require_equal(f"after step {number}", run.everything(), clean.everything(), how)
    if standstill := clean.standstill():
        raise LoopError(f"without planted losses, {standstill}")


def _check_scale(build: Callable[[Any], TrainingLoop], fused: bool) -> None:
    """Require that each optimizer receives the same gradients at each loss scale."""
    runs = [_Run(build, fused, init_scale) for init_scale in SCALES]
    steps = [tuple(_norms_at(run, number) for run in runs) for number in range(_STEPS)]
    if not all(_gathered(all(steps[0]))):
        raise _NotTriedError("the optimizer was not asked to step")
    # After a step that only one of the runs skips, they differ.
    alike = [len(small) == len(large) and all(map(math.isfinite, small + large)) for small, large in steps]
    number_alike = min(_gathered([*alike, False].index(False)))
    if not number_alike:
        raise _NotTriedError("the gradients of a step were not finite by themselves")
    floor = _NOISE * max(max(small, default=0.0) for small, _ in steps[:number_alike])
    for number, norms in enumerate(steps[:number_alike]):
        for one, other in zip(*norms, strict=True):
            least, most = sorted((one, other))
            if most - least > CLOSE * most if number < 2 else most > max(_PARTED * least, floor):
                norms_seen = f"the optimizer gradients of norm {one:g} and {other:g}"
                hint = "scale every loss, and unscale before you clip or change gradients (unscale_and_clip_ does both)"
                raise LoopError(scales_differ(number, norms_seen, hint))


def _norms_at(run: "_Run", number: int) -> list[float]:
    """Take a step, and return the norms of the gradients that each optimizer of torch's is about to apply, in order."""
    norms: list[float] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: norms.append(_norm(optimizer)))
    try:
        run.step(number)
    finally:
        handle.remove()
    return norms


def _check_source(build: Callable[[Any], TrainingLoop]) -> None:
    """Require that no gradient is left if all losses are multiplied by zero."""
    runs = [_Run(build, fused=False) for _ in SCALES]
    for run, loss_scale in zip(runs, SCALES, strict=True):
        run.set_scale(loss_scale)  # after `build`, which may have kept the first scale
    for number in range(_STEPS):
        small, large = (_left_at(run, number, by) for run, by in zip(runs, SCALES, strict=True))
        if not small:
            raise _NotTriedError("the scaler was shown no gradients")
        if not all(map(math.isfinite, [*small.values(), *large.values()])):
            raise _NotTriedError("a loss was not finite by itself, so that it is not zero times zero")
        # Code of a user may multiply an inner loss by get_scale(), which is right; then it grows with the scale.
        names = [name for name, size in small.items() if size > 2.0 * large.get(name, 0.0)]
        if names:
            hint = "add a loss inside the graph with scaler.attach, and change gradients after they are unscaled"
            raise LoopError(not_from_the_loss(number, names, hint))


def _left_at(run: _Run, number: int, loss_scale: float) -> dict[str, float]:
    """Take a step with losses times zero; return the largest element of each unscaled gradient, over all ranks."""
    run.scaler.is_silent, run.scaler.left = True, {}
    run.step(number)
    names = _names_of(run.loop)
    everyone = _gathered(
        {names.get(param, "a parameter"): size / loss_scale for param, size in run.scaler.left.items()}
    )
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


def _check_resumes(build: Callable[[Any], Any], fused: bool) -> None:
    """Require that a run continues exactly from its saved state."""
    run = _Run(build, fused)
    loop: Any = run.loop
    for number in range(_SAVED_AFTER):
        run.step(number, number in BAD_STEPS)
    file = io.BytesIO()
    torch.save(loop.state_dict(), file)
    file.seek(0)
    resumed = _Run(build, fused)
    loop = resumed.loop
    loop.load_state_dict(torch.load(file, weights_only=False))
    loaded, saved = (_flat("scaler", each.scaler.state_dict()) for each in (resumed, run))
    _require_equal("after loading", loaded, saved, "what was saved; save and load the scaler, too")
    for number in range(_SAVED_AFTER, _STEPS):
        run.step(number)
        resumed.step(number)
        how = "without save and load; save and load whatever the steps change"
        _require_equal(f"after step {number}", resumed.everything(), run.everything(), how)


def _on_all_ranks(compare: Callable[P, None]) -> Callable[P, None]:
    """Let a comparison that fails on one rank fail on all, so that none waits for another that has raised its error."""

    @functools.wraps(compare)
    def compare_on_all(*args: P.args, **kwargs: P.kwargs) -> None:
        own = None
        try:
            compare(*args, **kwargs)
        except LoopError as error:
            own = error
        messages = _gathered(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, message in enumerate(messages):
            if message is not None:
                raise LoopError(f"rank {rank}: {message}")

    return compare_on_all


@_on_all_ranks
def _require_skipped(number: int, run: _Run, before: Mapping[str, Any]) -> None:
    """Require that a step changed nothing; the optimizer's settings are compared with a run without this step.

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
            if not (name.startswith("optimizer.") and _is_zero(after[name])):
                moved[name] = f"{name} appeared"
        elif not same(before[name], after.get(name)):
            moved[name] = change(name, before[name], after.get(name))
    if moved:
        raise LoopError(not_skipped(number, list(moved.values()), _hint(run.loop, moved)))
    for optimizer in run.stepped.values():
        for group in optimizer.param_groups:
            if not all(bool(torch.isfinite(values_of(param.detach())).all()) for param in group["params"]):
                raise LoopError(
                    f"step {number} was to be skipped, but parameters of {type(optimizer).__name__} are not finite "
                    "after it; call scaler.step(optimizer) for each optimizer"
                )


def _hint(loop: Any, moved: Iterable[str]) -> str:
    """Return the advice for parts that a skipped step has changed: weights, buffers and what follows the steps."""
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


@_on_all_ranks
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
    elif isinstance(value, list | tuple | deque):
        for key, each in enumerate(value):
            yield from _leaves(f"{name}.{key}", each)
    elif isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield name, local.detach().clone()
    elif isinstance(value, np.ndarray):
        yield name, value.copy()
    elif isinstance(value, bool | int | float | complex | str | bytes | set | frozenset | np.generic) or value is None:
        yield name, copy.copy(value)
    else:
        yield name, _Opaque()


class _Opaque:
    """A value in a state dict that cannot be compared; it is the same as any other."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque)

    __hash__ = None  # type: ignore[assignment]


def _is_zero(value: Any) -> bool:
    """Return whether an entry is a state that an optimizer allocates in a first step that its kernel skips: zeros."""
    return not value.any() if isinstance(value, Tensor) else True


def _norm(optimizer: Any) -> float:
    """Return the norm of the gradients that an optimizer is about to apply, unscaled."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    grads = [values_of(grad) if grad.is_sparse else grad for grad in grads]
    norm: Any = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    factor = getattr(optimizer, "grad_scale", None)
    return float(norm) / (1.0 if factor is None else float(factor))


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _ranks() -> int:
    """Return the number of ranks."""
    is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_group else 1


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [value] * _ranks()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def _is_last_rank() -> bool:
    return _ranks() == 1 or torch.distributed.get_rank() == _ranks() - 1


def _can_be_fused(loop: Any) -> bool:
    """Return whether a loop's optimizer can be run again with a fused kernel."""
    model = getattr(loop, "model", None)
    is_sparse = isinstance(model, torch.nn.Module) and any(
        getattr(each, "sparse", False) is True for each in model.modules()
    )
    # Fused kernels refuse sparse gradients and complex parameters.
    return (
        type(loop.optimizer) in _WITH_FUSED_KERNEL
        and not is_sparse
        and all(param.is_floating_point() for param in params_of(loop.optimizer))
        and not loop.optimizer.defaults.get("fused")
    )


def _make_fused(optimizer: Any) -> None:
    """Make one of torch's optimizers step with its fused kernel, as if it had been made with `fused=True`."""
    # Its constructor sets this: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L107
    optimizer._step_supports_amp_scaling = True
    optimizer.defaults.update(fused=True, foreach=False)
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)

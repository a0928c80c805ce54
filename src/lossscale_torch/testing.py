"""A check for training loops: skipped steps, the influence of the loss scale, and losses that are not scaled."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lossscale_core.adapters import join_names, tree
from lossscale_core.testing import loops
from lossscale_torch._gradients import params_of, values_of
from lossscale_torch._record import OptimizerStep
from lossscale_torch._scaler import GradScaler
from lossscale_torch._step_info import StepInfo
from lossscale_torch._verbs import all_finite
from lossscale_torch.hooks import Protect

__all__ = ["TrainingLoop", "check_training_loop"]

_STEPS = 8
_LATER_TOLERANCE = 0.5
"""The relative difference of norms in later steps that rounding may cause between runs at two loss scales."""
_NOISE = 1e-6
"""The norm, relative to the largest norm so far, below which gradients may be rounding errors."""
_FOLLOW = "follow applied steps only (info.applied)"
_COUNT = "count applied steps only (info.applied), or keep a counter of batches outside of the model, scheduler and ema"
_PROTECT = "protect buffers: GradScaler(protect=[model]), in a loop of this check protect = [model]"
_UNSCALE = "scale every loss, and unscale before you clip or change gradients (unscale_and_clip_ does both)"
_ATTACH = "add a loss inside the graph with scaler.attach, and change gradients after they are unscaled"


class TrainingLoop(Protocol):
    """A loop to check.

    In addition to these two members it may have `model`, `scheduler` and `ema`: objects with a `state_dict()`, or lists
    of them. If it has `protect`, a list of modules, the check protects their buffers.
    """

    optimizer: torch.optim.Optimizer
    """The optimizer that `step` steps, or the first of several."""

    def step(self, batch: int) -> Any:
        """Take one step: scale, backward, `scaler.step` of each optimizer, one `scaler.update` and what follows.

        `batch` is the number of the step, from 0 on; the loop chooses its data by this number.
        """


def check_training_loop(build: Callable[[GradScaler], TrainingLoop]) -> list[str]:
    """Require that a loop skips steps as a whole, does not depend on the loss scale, and scales every loss.

    The check runs the loop six times for eight steps each, and requires three things:

    1. **Skipped steps.** All losses of steps 0, 3 and 4 are infinite. Such a step must leave parameters, buffers, the
       optimizer's state, schedule and average unchanged. After every other step these, and the optimizer's settings
       such as `lr`, must equal the values of a run without such steps, to the bit.
    2. **The loss scale.** Each optimizer receives the same gradients at a loss scale of 1 and of 1024.
    3. **The source.** If all losses, also attached losses, are multiplied by zero, the gradients are zero before they
       are unscaled. Otherwise a loss was not scaled, or gradients were changed too early.

    ```python
    def build(scaler):
        return Loop(scaler)  # yours: makes model, optimizer, schedule; keeps the scaler

    check_training_loop(build)
    ```

    Random numbers of torch start over before `build` and before each step. Synchronises with the host.

    Args:
        build: Makes a loop with a new model. The loop uses the scaler that `build` receives.

    Returns:
        A sentence for each thing that was checked. The loss scale and the source are not checked if no optimizer of
        `torch.optim` steps, or if the scaler finds no gradients.

    Raises:
        AssertionError: The loop fails; the message names the step, what differs and the remedy.
        TypeError: `build` does not return a loop.
    """
    _check_skips(build)
    sentences = ["a step is skipped as a whole if its losses are infinite"]
    if _check_scale(build):
        sentences.append("the optimizer receives the same gradients at each loss scale")
    if _check_source(build):
        sentences.append("all gradients come from losses that are scaled or attached")
    return sentences


def _check_skips(build: Callable[[GradScaler], TrainingLoop]) -> None:
    """Require that skipped steps change nothing, and that the other steps equal the steps of a run without them."""
    run, clean = _Run(build), _Run(build)
    params = params_of(run.loop.optimizer)
    start = _flatten("", params)
    for number in range(_STEPS):
        if number in loops.BAD_STEPS:
            before = run.followers()
            run.take_step(number, math.inf)
            _require_skipped(number, run, before)
        else:
            clean.set_scale(run.get_scale())
            run.take_step(number)
            clean.take_step(number)
            if run.has_leftovers and not run.last_step.applied:
                raise AssertionError(
                    f"step {number} was skipped although its losses were finite, since the gradients of a skipped step "
                    "were still there; clear them in every step (optimizer.zero_grad()), not only after an applied one"
                )
            # A setting that differs comes first, since it is the cause of other differences.
            if names := sorted(
                _differences(run.followers(), clean.followers()), key=lambda name: not _is_setting(name)
            ):
                raise AssertionError(
                    f"after step {number}, unlike without the skipped steps, {join_names(names)}; {_FOLLOW}"
                )
    if not _differences(start, _flatten("", params)):
        raise AssertionError(
            "no parameter changed in eight steps; look for scaler.step, lr and losses that are not finite"
        )


class _NoResult:
    """The result of `step` in place of None: a condition on it raises an error."""

    def __bool__(self) -> bool:
        raise AssertionError(
            "the loop asks whether scaler.step(optimizer) is true, but it returns what the optimizer returned, None; "
            "ask for the outcome instead: if scaler.update(): ..."
        )


def _require_skipped(number: int, run: "_Run", before: dict[str, Any]) -> None:
    """Raise `AssertionError` for a step with infinite losses that was applied or changed something."""
    if run.last_step.applied or not all(map(math.isfinite, run.norms)):
        raise AssertionError(
            f"step {number} was applied although its losses were infinite; such a step must be skipped as a whole; "
            "look for gradients that are repaired (nan_to_num_), zero_grad between micro-batches, a loss that is not "
            "scaled, and optimizer.step() in place of scaler.step(optimizer)"
        )
    after = run.followers()
    # If a kernel skips the first step, the optimizer still allocates zeros.
    before = {name: torch.zeros_like(value) for name, value in after.items() if isinstance(value, Tensor)} | before
    # A loop may set the learning rate at the beginning of a step, after the step before.
    if changed := [name for name in _differences(before, after) if not _is_setting(name)]:
        changes = [loops.change(name, before.get(name), after.get(name)) for name in changed]
        hint = f"{_FOLLOW}, and {_PROTECT}" if any(name.startswith("model.") for name in changed) else _FOLLOW
        hint = _COUNT if all(_rose_by_one(before.get(name), after.get(name)) for name in changed) else hint
        raise AssertionError(loops.not_skipped(number, changes, hint))


def _check_scale(build: Callable[[GradScaler], TrainingLoop]) -> bool:
    """Require that optimizers receive the same gradients at two loss scales; return whether any is not 0."""
    takes_same_steps, largest = True, 0.0
    for number, small, large in _steps_at_two_scales(build, 1.0):
        # A step that only one of the runs skips changes all later steps.
        takes_same_steps = takes_same_steps and len(small.norms) == len(large.norms)
        largest = max(largest, *small.norms, 0.0)
        limits = {"rel_tol": loops.CLOSE if number < 2 else _LATER_TOLERANCE, "abs_tol": _NOISE * largest}
        pairs = zip(small.norms, large.norms, strict=True) if takes_same_steps else ()
        different = [f"gradients of norm {a:g} and {b:g}" for a, b in pairs if not math.isclose(a, b, **limits)]
        if different:
            raise AssertionError(loops.scales_differ(number, f"the optimizer {different[0]}", _UNSCALE))
    return largest > 0.0


def _check_source(build: Callable[[GradScaler], TrainingLoop]) -> bool:
    """Require that losses of zero leave no gradient; return whether the scaler saw parameters."""
    for number, small, large in _steps_at_two_scales(build, 0.0):
        # A loop may multiply an inner loss by get_scale(), which is right: then its gradient grows with the scale.
        growth = loops.SCALES[1] / loops.SCALES[0] / 2.0
        sizes = large.sizes()
        if names := [name for name, size in small.sizes().items() if size * growth > sizes.get(name, 0.0)]:
            raise AssertionError(loops.not_from_the_loss(number, names, _ATTACH))
    return bool(sizes)


def _steps_at_two_scales(
    build: Callable[[GradScaler], TrainingLoop], factor: float
) -> Iterator[tuple[int, "_Run", "_Run"]]:
    """Take the steps of two runs, at a small and a large loss scale, with losses times `factor`."""
    runs = _Run(build), _Run(build)
    for run, loss_scale in zip(runs, loops.SCALES, strict=True):
        run.set_scale(loss_scale)  # after `build`, which may have kept the first scale
    for number in range(_STEPS):
        for run in runs:
            run.take_step(number, factor)
        yield number, *runs


class _Run(GradScaler):
    """One run of a loop: the scaler of the loop, which multiplies the losses by a factor and notes the gradients."""

    factor = 1.0
    updates = 0
    has_leftovers: bool | None = None
    """Whether gradients that are not finite existed before the first loss of the last step was scaled."""
    sizes_by_param: dict[Tensor, float]
    """The largest element of each gradient in the last step before it was unscaled."""
    norms: list[float]
    """The norm of the unscaled gradients in each step of an optimizer that is applied."""

    def __init__(self, build: Callable[[GradScaler], TrainingLoop]) -> None:
        torch.manual_seed(0)
        super().__init__("cpu", init_scale=loops.SCALES[1], growth_interval=3)
        self.loop = build(self)
        if not hasattr(self.loop, "step") or not hasattr(self.loop, "optimizer"):
            raise TypeError(f"build returned {self.loop!r}; return an object with step(batch) and optimizer")
        if protect := getattr(self.loop, "protect", ()):
            self._undoing.append(Protect(protect))  # the modules exist only now

    def take_step(self, number: int, factor: float = 1.0) -> None:
        """Take a step of the loop with all losses times `factor`."""
        self.factor, self.updates, self.sizes_by_param, self.norms = factor, 0, {}, []
        self.has_leftovers = None
        torch.manual_seed(number + 1)
        with register_optimizer_step_pre_hook(self._note_norm):
            self.loop.step(number)
        if self.updates != 1:
            raise AssertionError(
                f"step({number}) called scaler.update() {self.updates} times; call it once in each step"
            )

    def _note_norm(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not getattr(optimizer, "found_inf", None):  # the flag by which a fused optimizer skips
            grads = [values_of(param.grad) for param in params_of(optimizer) if param.grad is not None]
            scale = getattr(optimizer, "grad_scale", None)
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)) / (1.0 if scale is None else float(scale)))

    def set_scale(self, loss_scale: float) -> None:
        """Set the loss scale, and leave the rest of the state."""
        self.load_state_dict({**self.state_dict(), "scale": loss_scale, "loss_scale": loss_scale})

    def followers(self) -> dict[str, Any]:
        """Return copies of everything that must follow applied steps only, by name."""
        parts = {name: getattr(self.loop, name, None) for name in ("scheduler", "ema", "model", "optimizer")}
        params = {} if parts["model"] is not None else {"parameters": params_of(self.loop.optimizer)}
        return _flatten("", {**params, **parts})

    def sizes(self) -> dict[str, float]:
        """Return the largest element of each gradient before it was unscaled, by the parameter's name or number."""
        model = getattr(self.loop, "model", None)
        named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
        names: dict[Tensor, str] = {param: name for name, param in named}
        sizes = enumerate(self.sizes_by_param.items())
        return {names.get(param, f"parameters.{place}"): size for place, (param, size) in sizes}

    # The methods that the loop calls.

    def scale(self, outputs: Any) -> Any:
        if self.has_leftovers is None:
            self.has_leftovers = not all_finite([param.grad for param in params_of(self.loop.optimizer)])
        scaled = super().scale(outputs)
        if isinstance(scaled, Iterator):  # the iterator calls this method for each loss
            return scaled
        return tree.map_leaves(lambda loss: loss * self.factor, scaled)

    @property
    def attach(self) -> Any:
        attach = super().attach
        return lambda x, aux_loss: attach(x, aux_loss * 0.0 if self.factor == 0.0 else aux_loss)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **settings: Any) -> Any:
        result = super().step(optimizer, *args, **settings)
        return _NoResult() if result is None else result

    def update(self, *args: Any, **settings: Any) -> StepInfo:  # type: ignore[override]  # torch's says None
        self.updates += 1
        return super().update(*args, **settings)

    def _open(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerStep:
        """Note the largest element of each gradient where it is seen first in a step, before it is unscaled."""
        step = super()._open(optimizer, caller)
        for param in params_of(optimizer):
            values = torch.zeros(()) if param.grad is None else values_of(param.grad)
            self.sizes_by_param.setdefault(param, float(values.abs().max()) if values.numel() else 0.0)
        return step


def _flatten(name: str, value: Any) -> dict[str, Any]:
    """Return copies of the numbers and tensors in a state dict, or in anything that has one, by their paths."""
    value = value.state_dict() if hasattr(value, "state_dict") else value
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [_flatten(f"{name}.{key}".lstrip("."), part) for key, part in items]
        return {path: leaf for part in parts for path, leaf in part.items()}
    if isinstance(value, Tensor):
        return {name: values_of(value.detach()).clone()}
    is_plain = hasattr(value, "dtype") or isinstance(value, int | float | complex | str | bytes)
    return {name: copy.copy(value)} if is_plain else {}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if not loops.same(a.get(name), b.get(name))]


def _rose_by_one(before: Any, after: Any) -> bool:
    """Return whether a number has risen by one."""
    are_numbers = all(
        isinstance(value, int | float) or getattr(value, "shape", None) == () for value in (before, after)
    )
    return are_numbers and bool(after - before == 1)


def _is_setting(name: str) -> bool:
    return name.startswith("optimizer.param_groups.")

"""`guarded` and `clip_and_check_`: steps that are taken as a whole or not at all, without a scaler."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lossscale_core import GuardState, SpikeGuard, state_to_dict
from lossscale_core.adapters import check_setting, describe, locate_fault, log_event
from lossscale_core.errors import CallOrderError, OverflowStreakError, PolicyError
from lossscale_torch._clip import clip
from lossscale_torch._gradients import names_of, params_of
from lossscale_torch._record import FUSED, LEGACY, kind_of
from lossscale_torch._report import bad_gradients, pairs
from lossscale_torch._scaler import GradScaler
from lossscale_torch._state import DeviceFields, is_capturing
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled
from lossscale_torch._watch import CHECK_EVERY, Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    # A type cannot say "an AdamW that is guarded". With `Any` as a base, checkers take the result where an AdamW is
    # asked for, also in `optimizer = guarded(optimizer)`: https://github.com/python/typing/issues/213.
    class _AnyOptimizer(torch.optim.Optimizer, Any): ...
else:
    _AnyOptimizer = object


_NOT_APPLIED = StepInfo(False, 1.0, 1.0, 0)
_NUMBERS = ("calls", "steps", "skipped_steps", "overflow_streak", *GuardState._fields)
"""The numbers that a run needs to continue. The first parameter group has them under `guarded_<name>`."""


class GuardedOptimizer(_AnyOptimizer):
    """An optimizer with atomic steps, as `guarded` returns it.

    Its class is also a subclass of the optimizer's former class: an `AdamW` becomes a `GuardedAdamW`.
    """

    _lossscale: "_Step"
    _former_class: type[torch.optim.Optimizer]

    @property
    def last_step(self) -> StepInfo:
        """The outcome of the last `step`, true if the step was applied.

        Before the first step, and after a step that raised an error, it is the outcome of a step that was not applied.
        """
        return self._lossscale.last_step

    def metrics(self) -> dict[str, Any]:
        """Return the counts of steps and skipped steps, and the numbers of the guard, as `GradScaler.metrics` does."""
        return self._lossscale.metrics()

    @not_compiled
    def step(
        self, closure: Callable[[], Any] | None = None, *, _inner: dict[str, Any] | None = None, **settings: Any
    ) -> Any:
        """Step if the gradients are good; return the result of the closure."""
        if _inner is not None:  # the scaler calls this method, for good gradients or for a kernel that skips
            return super().step(**_inner)
        if hasattr(self, "found_inf") and not hasattr(self.found_inf, "from_lossscale"):
            for name in ("found_inf", "grad_scale"):  # torch's scaler leaves them after an error
                self.__dict__.pop(name, None)
            raise CallOrderError(
                "a guarded optimizer was given to a scaler, which skips bad steps by itself; use one of the two"
            )
        self._opt_called = True  # schedulers read this attribute
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            settings["closure"] = lambda: loss
        self._lossscale.take(self, settings)
        return loss

    # Otherwise a scheduler would wrap this step, and torch would call hooks here and around the inner step.
    step._wrapped_by_lr_sched = step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's entries; the first parameter group has the guard's numbers."""
        _first(self.param_groups).update(self._lossscale.numbers())
        entries: dict[str, Any] = super().state_dict()
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the optimizer's entries, and with the guard's numbers if there are any."""
        before = self._lossscale.numbers()
        try:
            self._lossscale.load(_first(state_dict.get("param_groups", ())))
            super().load_state_dict(state_dict)
        except BaseException:
            self._lossscale.load(before)
            raise
        # torch.distributed.checkpoint reads a flat file by the names in the group.
        _first(self.param_groups).update(self._lossscale.numbers())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's copies of a fused optimizer lose its mark, and would clip with other roundings.
        mark = {"_step_supports_amp_scaling": True} if kind_of(self) is FUSED else {}
        return _new_guarded, (self._former_class,), {**super().__getstate__(), **mark, "_lossscale": self._lossscale}


@functools.cache
def _guarded_class(kind: Any) -> Any:
    """Return the guarded subclass of a class of optimizers. The layout of its objects is the same."""
    members = {"__doc__": kind.__doc__, "__module__": kind.__module__, "_former_class": kind}
    return type(f"Guarded{kind.__name__}", (GuardedOptimizer, kind), members)


def _new_guarded(kind: Any) -> Any:
    cls = _guarded_class(kind)
    return cls.__new__(cls)


def guarded(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    guard: SpikeGuard | None = None,
    max_streak: int | None = None,
    on_bad: Literal["skip", "raise"] = "skip",
    names: Module | Iterable[tuple[str, Tensor]] | None = None,
    process_group: "ProcessGroup | None" = None,
    norm_group: "ProcessGroup | None" = None,
) -> GuardedOptimizer:
    """Make the steps of an optimizer atomic, in any dtype: a step with a bad gradient changes nothing.

    ```python
    optimizer = guarded(torch.optim.AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
    loss_fn(model(batch)).backward()
    optimizer.step()
    if optimizer.last_step:
        scheduler.step()
    ```

    Gradients are bad if an element is NaN or infinite, or if the guard refuses their norm. `step` measures the
    gradients, clips them if there is a `max_norm`, and then calls the optimizer's own `step` or skips it. A closure
    runs once, before the gradients are measured. Use this function in bfloat16 or float32, without a loss scale; a
    `GradScaler` skips bad steps by itself.

    `optimizer.last_step` is a `StepInfo` with a scale of 1, which is true if the step was applied. Its `norm` is the
    norm of the gradients before clipping. `optimizer.metrics()` counts the steps and the skipped steps.

    An ordinary optimizer costs one host synchronisation for each step, and one more for the first bad step. A fused
    optimizer costs none: its kernel skips and clips, and `last_step` stays on the device. Hooks after a fused step also
    run for skipped steps.

    The first skipped step is logged as a warning on the logger `lossscale`, on one rank, with the place of the fault if
    the host knows the outcome. Another line follows if too many steps are skipped, as from a scaler. For a
    fused optimizer on a CUDA device the lines come a few steps later, since the host does not wait for the device.

    Args:
        optimizer: An optimizer of torch or of another package. It stays the same object with the same methods, and its
            class becomes a subclass: an `AdamW` becomes a `GuardedAdamW`. Copies and pickles are guarded, too.
        max_norm: The largest norm of all gradients after clipping.
        guard: A `SpikeGuard`. Its memory and the counts are numbers in the first parameter group, under names that
            begin with `guarded_`, so that every checkpoint of the optimizer has them.
        max_streak: The number of NaN or infinite steps in a row that raises an error. For a fused optimizer, the host
            reads the streak once in `max_streak` steps.
        on_bad: `"raise"` ends the run at the first bad step, by an `OverflowStreakError` before anything has changed.
            For a fused optimizer on a device, an assertion on the device ends the run; the process can then save
            nothing.
        names: The model, or pairs of a name and a parameter, for the line about the first skipped step. Without it, the
            line has the names that the optimizer knows, or places and shapes.
        process_group: The group of ranks that decide together. You do not need it for parameters that are sharded over
            a device mesh, or for gradients that all ranks share, as under DistributedDataParallel.
        norm_group: The group of ranks that hold different parameters, such as the stages of a pipeline. They use the
            norm of all parameters, and decide together.

    Returns:
        The optimizer itself.

    Raises:
        TypeError: The object is not an optimizer, or its step computes the gradients several times.
        PolicyError: `max_norm`, `guard`, `max_streak` or `on_bad` breaks its rule.
        CallOrderError: The optimizer is guarded already. `step` raises it if a scaler steps the optimizer, too. `step`
            notices torch's scaler only around a fused optimizer; around an ordinary optimizer, that scaler skips bad
            steps, and `last_step` does not show this.
        OverflowStreakError: `step` raises it at `max_streak`, at the guard's `max_streak`, and with `on_bad="raise"`.
    """
    if hasattr(optimizer, "_lossscale"):
        raise CallOrderError(f"this {type(optimizer).__name__} is guarded already; call guarded() once")
    if reason := _reason_to_refuse(optimizer):
        raise TypeError(f"guarded() was given {type(optimizer).__name__}, which {reason}")
    if on_bad not in ("skip", "raise"):
        raise PolicyError(f'on_bad={describe(on_bad)} must be "skip" or "raise"; leave it out to skip bad steps')
    scaler = _Step(
        "cpu", policy="none", guard=guard, half_gradients=True, process_group=process_group, norm_group=norm_group
    )
    for name in ("process_group", "norm_group"):
        scaler._ranks.require_member(name)
    scaler.max_norm = math.inf if max_norm is None else check_setting("max_norm", max_norm)
    limit = check_setting("max_overflow_streak", max_streak)
    scaler._watch = GuardedWatch(*_names_of(optimizer, names), on_bad == "raise", limit)
    result: Any = optimizer
    if "guarded_steps" in (group := _first(result.param_groups)):  # from a checkpoint that was loaded before this call
        scaler.load(group)
    group.update(scaler.numbers())
    vars(result).pop("step", None)  # a scheduler has set it to notice calls; our `step` tells the scheduler
    result._lossscale, result.__class__ = scaler, _guarded_class(result.__class__)
    return result


@not_compiled
def clip_and_check_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    process_group: "ProcessGroup | None" = None,
    norm_group: "ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]:
    """Clip the gradients of parameters by their 2-norm; return the norm, and whether all gradients are finite.

    Use it in engines that step parameters by themselves. Both results stay on the device of the first parameter, and
    the host does not wait for them. If the flag is False on one rank, it is False on all ranks that decide together. Do
    not use the gradients then: gradients that are not finite were not clipped.

    Args:
        parameters: A parameter, or an iterable of parameters; some may have no gradient.
        max_norm: The largest norm after clipping; `math.inf` only measures.
        process_group: The group of ranks that decide together, as for `guarded`.
        norm_group: The group of ranks that hold different parameters, as for `guarded`.

    Returns:
        The norm before clipping, float32, and the flag, bool; both have shape `()`.

    Raises:
        PolicyError: `max_norm` is not a number from 0.
    """
    holder: Any = _Parameters(parameters)
    scaler = _Step("cpu", policy="none", half_gradients=True, process_group=process_group, norm_group=norm_group)
    scaler.place_on(next((param.device for param in params_of(holder)), "cpu"))
    norm = clip(scaler, [holder], max_norm, 2.0).float()
    (step,) = scaler.optimizer_steps()
    if scaler._has_ranks():
        scaler._ranks.before_step(scaler, step)
    return norm, step.is_allowed(norm.device)


class _Parameters:
    """Parameters in the form of a fused optimizer, so that the clip never waits for a device."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Tensor | Iterable[Tensor]) -> None:
        params = [parameters] if isinstance(parameters, Tensor) else parameters
        self.param_groups = [{"params": [*dict.fromkeys(params)]}]

    def step(self) -> None: ...


class _Step(GradScaler):
    """The step of a guarded optimizer: the step of a scaler with a scale of 1."""

    max_norm: float
    _watch: "GuardedWatch"

    def take(self, optimizer: GuardedOptimizer, inner: dict[str, Any]) -> None:
        """Take a step or skip it, and set `last_step`. `inner` are the arguments of the optimizer's own `step`."""
        self.last_step = _NOT_APPLIED
        try:
            self._abandon()  # ends an interrupted step
            # The device of a parameter, even if it has no gradient: ranks must combine flags on devices of one type.
            self.place_on(next((param.device for param in params_of(optimizer)), "cpu"))
            norm = clip(self, [optimizer], self.max_norm, 2.0, is_guarded=True)
            if _may_be_dummy(optimizer) and self._ranks.process_group is None and norm == 0.0:
                optimizer.step(_inner=inner)  # it does not count; ranks of a process group may have other norms
                return
            self.step(optimizer, _inner=inner)
            self.last_step = self.update()._replace(norm=norm)  # type: ignore[misc]
        finally:
            self._abandon()

    def numbers(self) -> dict[str, Any]:
        """Return the counts and the guard's memory for a parameter group. Synchronises if they are on a device."""
        entries = self.state_dict()
        entries |= {"calls": self._watch.steps, **entries.get("guard", {})}
        return {f"guarded_{name}": entries[name] for name in _NUMBERS if name in entries}

    def load(self, group: Mapping[str, Any]) -> None:
        """Continue from the numbers in a parameter group; without them the counts and the guard start over."""
        numbers = {name: group[f"guarded_{name}"] for name in _NUMBERS if f"guarded_{name}" in group}
        guard = {"guard": numbers} if "mean" in numbers else {}
        self.load_state_dict({**state_to_dict(self.policy.init_state(), self.policy), **numbers, **guard})
        self._watch.steps = int(numbers.get("calls", 0))

    def __getstate__(self) -> dict[str, Any]:
        if self._ranks.process_group is not None or self._ranks.norm_group is not None:
            raise TypeError(
                "an optimizer that is guarded with a group of ranks cannot be copied; guard the copy instead"
            )
        return {**super().__getstate__(), "last_step": _NOT_APPLIED}


class GuardedWatch(Watch):
    """The watch of a guarded optimizer: it also logs the first skipped step, or raises an error there."""

    steps = 0
    """The calls of `step`."""
    has_logged = False
    """Whether a skipped step was logged."""

    def __init__(self, names: list[str], in_order: list[str], raises: bool, max_streak: int | None) -> None:
        super().__init__()
        self.names, self.in_order, self.raises, self.max_streak = names, in_order, raises, max_streak

    def after_update(self, scaler: GradScaler, info: StepInfo) -> None:
        """Log a skipped step, or raise `OverflowStreakError`. Reads the gradients if the host knows the outcome."""
        self.steps += 1
        (step,) = scaler.optimizer_steps()
        name, is_captured = type(step.optimizer).__name__, is_capturing()
        if isinstance(info.applied, Tensor):
            if self.raises:
                torch._assert_async(info.applied, f"a step of {name} had gradients that are not finite, or a spike")
        elif not info.applied and not is_captured and (self.raises or not self.has_logged):
            if info.spiked and step.norm is not None:
                cause = f"its gradient norm of {step.norm.item():g} is far above the norms before"
            else:
                cause = self._locate_fault(step.optimizer)
            if self.raises:
                raise OverflowStreakError(
                    f"step {self.steps} of {name} was not taken: {cause}. Parameters and the optimizer's state are as "
                    "they were; look at the loss, the learning rate and the data"
                )
            self._log_skip(scaler, f"step {self.steps} of {name} was skipped: {cause}")
        super().after_update(scaler, info)
        limit, streak = self.max_streak, info.overflow_streak
        if limit is None or is_captured or (isinstance(streak, Tensor) and self.steps % limit):
            return  # a streak on a device is read once in `limit` steps
        if int(streak) >= limit:
            raise OverflowStreakError(
                f"{int(streak)} steps in a row had gradients that are NaN or infinite, which reaches "
                f"max_streak={limit}; look at the loss, the learning rate and the data"
            )

    def _locate_fault(self, optimizer: torch.optim.Optimizer) -> str:
        names = itertools.chain(self.names, itertools.repeat("a parameter that was added later"))
        checked, bad = bad_gradients(zip(names, params_of(optimizer), strict=False))
        in_order = [name for name in self.in_order if name in {*checked}]
        return locate_fault([name for name, _ in bad] or ["another rank"], in_order)

    def _is_time(self) -> bool:
        return not self.has_logged or self.steps % CHECK_EVERY == 0

    def _late_tensors(self, scaler: GradScaler, fields: DeviceFields) -> list[Tensor]:
        guard = scaler._guard.first() if scaler._guard is not None else None
        return [fields.counts, *([guard.spikes] if guard is not None and isinstance(guard.spikes, Tensor) else [])]

    def _log_late(self, scaler: GradScaler, fields: DeviceFields, numbers: list[float]) -> None:
        state = fields.with_numbers(numbers)
        spikes = int(sum(numbers[len(fields.counts) :]))
        if self.has_logged:
            self.log(scaler.policy, state)
        elif skipped := int(state.skipped_steps) + spikes:
            (step,) = scaler.optimizer_steps()
            self._log_skip(
                scaler,
                f"{skipped} of the first {self.steps} steps of {type(step.optimizer).__name__} were skipped: gradients "
                "were not finite, or their norm was far above the norms before",
            )

    def _log_skip(self, scaler: GradScaler, text: str) -> None:
        self.has_logged = True
        if scaler._ranks.is_first(scaler.optimizer_steps()[0].optimizer):
            log_event("skipped_step", f"{text}; parameters and the optimizer's state stay as they were")


def _names_of(
    optimizer: torch.optim.Optimizer, names: Module | Iterable[tuple[str, Tensor]] | None
) -> tuple[list[str], list[str]]:
    """Return a name for each parameter, and the names in the order of the model, if that order is known.

    Raises `TypeError` if `names` is neither a module nor pairs of a name and a parameter.
    """
    named = names.named_parameters() if isinstance(names, Module) else () if names is None else names
    in_model = {id(param): name for name, param in pairs(named, "guarded(names=)")}
    own_names = zip(names_of(optimizer), params_of(optimizer), strict=True)
    result = [in_model.get(id(param), name) for name, param in own_names]
    # Several groups of an optimizer need not have the order of the model.
    return result, [*in_model.values()] or (result if len(optimizer.param_groups) == 1 else [])


def _first(groups: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return next(iter(groups), {})


def _may_be_dummy(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this may be the step by which `torch.distributed.checkpoint` creates an optimizer's state.

    Its gradients and rates are zero, and it does not count: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py
    If this returns True, the host reads the norm: in a first step at a rate of 0, and in each such step of a plain SGD.
    """
    if getattr(optimizer, "state", None) or is_capturing():
        return False
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return bool(rates) and all(getattr(rate, "is_cpu", True) and rate == 0.0 for rate in rates)


def _reason_to_refuse(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot be guarded, or an empty text."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        return "has no param_groups; pass a torch.optim.Optimizer"
    if kind_of(optimizer) is LEGACY:
        return "expects a scaler in its step; make an optimizer that does not"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if (closure is not None and closure.default is inspect.Parameter.empty) or hasattr(optimizer, "first_step"):
        return "computes gradients several times in a step, and moves parameters in between; use another optimizer"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "has a step that was set on the instance; call guarded() before other code wraps it"
    return ""

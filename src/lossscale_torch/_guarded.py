"""`guarded`: an optimizer whose step is taken as a whole or not at all, without a scaler."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossscale_core import SpikeGuard
from lossscale_core.adapters import check_guard, check_setting
from lossscale_core.errors import CallOrderError, OverflowStreakError
from lossscale_torch._gradients import HAVE_FLOAT64, Gradients
from lossscale_torch._optimizers import Fused, Legacy, kind_of, step_with_flag
from lossscale_torch._ranks import reduce_max, require_member
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled
from lossscale_torch.hooks import Guard, total_norm

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def guarded(
    optimizer: OptimizerT,
    *,
    max_norm: float | None = None,
    guard: SpikeGuard | None = None,
    max_streak: int | None = None,
    process_group: Any = None,
) -> OptimizerT:
    """Make the steps of an optimizer atomic, in any dtype, and return it: a step with a bad gradient changes nothing.

    ```python
    optimizer = guarded(torch.optim.AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
    loss_fn(model(batch)).backward()
    optimizer.step()
    if optimizer.last_step:
        scheduler.step()
    ```

    A bad gradient holds NaN or infinity, or its norm is refused by the guard. `step` measures the gradients, clips them
    if there is a `max_norm`, and calls the optimizer's own `step` or skips it. `optimizer.last_step` is the outcome, a
    `StepInfo` with a scale of 1, which is true if the step was applied. A closure runs once, before the gradients are
    measured. Use it without a loss scale, in bfloat16 or float32; a `GradScaler` does the same by itself.

    An ordinary optimizer costs one host synchronisation a step. A fused one costs none: its kernel skips and clips, and
    `last_step` stays on the device; hooks after its step run for skipped steps, too.

    Args:
        optimizer: An optimizer of torch or of another package. It keeps its identity and its methods, and gets a
            subclass of its class; copies and pickles are guarded, too.
        max_norm: The largest norm of all gradients after clipping.
        guard: A `SpikeGuard`, whose memory is in the `state_dict` of the optimizer.
        max_streak: The number of bad steps in a row, NaN or infinity, that raises an error. A fused optimizer is read
            once in as many steps.
        process_group: The group of ranks that decide together. For parameters sharded over a device mesh, and for
            gradients that all ranks share, as under DistributedDataParallel, this needs no group.

    Returns:
        The optimizer itself.

    Raises:
        TypeError: For what is not an optimizer, and one that computes the gradients several times in a step.
        PolicyError: For a `max_norm`, a `guard` or a `max_streak` that breaks its rule.
        CallOrderError: For an optimizer that is guarded already; from `step`, if it is also given to a scaler.
        OverflowStreakError: From `step`, at `max_streak`, and at the `max_streak` of the guard.
    """
    if hasattr(optimizer, "_lossscale_judge"):
        raise CallOrderError(f"this {type(optimizer).__name__} is guarded already; call guarded() once")
    if reason := _unfit(optimizer):
        raise TypeError(f"guarded() was given {type(optimizer).__name__}, which {reason}")
    check_guard(guard)
    require_member(process_group)
    judge = _Judge()
    judge.max_norm = None if max_norm is None else check_setting("max_norm", max_norm)
    judge.guard = None if guard is None else Guard(guard)
    judge.max_streak = check_setting("max_overflow_streak", max_streak)
    judge.process_group, judge.is_fused = process_group, kind_of(optimizer) is Fused
    vars(optimizer).pop("step", None)  # a scheduler's, which notes each call; so does ours
    made: Any = optimizer
    made._lossscale_judge, made.last_step = judge, None
    made.__class__ = _guarded_class(made.__class__)
    return optimizer


class _Judge:
    """The settings of a guarded optimizer, and the bad steps in a row."""

    max_norm: float | None
    guard: Guard | None
    max_streak: int | None
    process_group: Any
    is_fused: bool
    streak: Any = 0
    steps = 0

    def step(self, optimizer: Any, step: Callable[[], Any]) -> StepInfo:
        """Take a step or skip it; return the outcome."""
        gradients = Gradients([optimizer])
        device = next((bucket[0].device for bucket in gradients.buckets), torch.device("cpu"))
        norm = total_norm([optimizer], device) if gradients.are_sharded else gradients.norm(2.0, device)
        if self.is_fused and not norm.is_cpu:
            return self._step_on_device(optimizer, step, norm)
        value = norm.item()
        if not math.isfinite(value) and not gradients.are_sharded and device.type in HAVE_FLOAT64:
            value = gradients.wide_norm(2.0, device).item()  # squares of finite numbers may leave float32
        is_bad = not math.isfinite(value)
        spiked = self.guard is not None and not is_bad and bool(self.guard.veto(optimizer, norm, value))
        if self.process_group is not None:
            is_bad, spiked = map(bool, self._combined(torch.tensor([is_bad, spiked]).to(device)).tolist())
        factor = 1.0 if self.max_norm is None or is_bad else min(1.0, self.max_norm / (value + 1e-6))
        if self.is_fused:
            flag = torch.tensor(float(is_bad or spiked))
            step_with_flag(step, optimizer, flag, None if factor == 1.0 else torch.tensor(1.0 / factor))
        elif not (is_bad or spiked):
            if factor < 1.0:
                gradients.multiply_(factor)
            step()
        self.streak = self.streak + 1 if is_bad else self.streak if spiked else 0
        return StepInfo(not (is_bad or spiked), 1.0, 1.0, self.streak, is_bad, spiked)

    def _step_on_device(self, optimizer: Any, step: Callable[[], Any], norm: Tensor) -> StepInfo:
        """Let a fused optimizer's kernel skip and clip; nothing is read."""
        is_bad = ~torch.isfinite(norm)
        spiked = self.guard.veto(optimizer, norm, None).bool() & ~is_bad if self.guard is not None else is_bad & ~is_bad
        if self.process_group is not None:
            is_bad, spiked = self._combined(torch.stack([is_bad, spiked])).unbind()
        factor = None
        if self.max_norm is not None:
            factor = torch.where(is_bad, 1.0, ((norm + 1e-6) / self.max_norm).clamp(min=1.0)).float()
        step_with_flag(step, optimizer, (is_bad | spiked).float(), factor)
        streak = torch.as_tensor(self.streak, dtype=torch.int32, device=norm.device)
        self.streak = torch.where(is_bad, streak + 1, torch.where(spiked, streak, 0))
        return StepInfo(~(is_bad | spiked), 1.0, 1.0, self.streak, is_bad, spiked)

    def _combined(self, flags: Tensor) -> Tensor:
        found = flags.float()
        reduce_max(found, [self.process_group])
        return found.bool()

    def require_no_streak(self) -> None:
        """Raise an error at the limit of bad steps or spikes; a streak on a device is read once in as many steps."""
        self.steps += 1
        limit = self.max_streak
        is_due = limit is not None and (not isinstance(self.streak, Tensor) or self.steps % limit == 0)
        if limit is not None and is_due and int(self.streak) >= limit:
            raise OverflowStreakError(
                f"{int(self.streak)} steps in a row had gradients that are NaN or infinite, which reaches "
                f"max_streak={limit}; look at the loss, the learning rate and the data"
            )
        if self.guard is not None:
            self.guard.require_no_streak()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError("an optimizer that is guarded with process_group= has no copy; guard the copy")
        return vars(self)


@functools.cache
def _guarded_class(kind: Any) -> Any:
    """Return a subclass of a class of optimizers; an object of the one can become one of the other."""

    class Guarded(kind):
        __doc__, __module__ = kind.__doc__, kind.__module__

        @not_compiled
        def step(self, closure: Callable[[], Any] | None = None, **settings: Any) -> Any:
            """Step if the gradients are good; return what the closure returned."""
            if hasattr(self, "found_inf"):
                raise CallOrderError(
                    "a guarded optimizer was given to a scaler, which skips bad steps by itself; use one of the two"
                )
            self._opt_called = True  # schedulers ask for it
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                settings["closure"] = lambda: loss
            self.last_step = self._lossscale_judge.step(self, functools.partial(super().step, **settings))
            self._lossscale_judge.require_no_streak()
            return loss

        # A scheduler wraps a step without this mark, and torch one that does not call hooks: the inner step does.
        step._wrapped_by_lr_sched = step.hooked = True  # type: ignore[attr-defined]

        def state_dict(self) -> dict[str, Any]:
            """Return the optimizer's entries, and the guard's."""
            entries: dict[str, Any] = super().state_dict()
            guard = self._lossscale_judge.guard
            return entries if guard is None else {**entries, **guard.state_dict()}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            """Continue with the optimizer's entries, and the guard's if there are any."""
            super().load_state_dict({name: value for name, value in state_dict.items() if name != "guard"})
            if self._lossscale_judge.guard is not None:
                self._lossscale_judge.guard.load_state_dict(state_dict)

        def __getstate__(self) -> dict[str, Any]:
            return {**super().__getstate__(), "_lossscale_judge": self._lossscale_judge, "last_step": None}

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _new_guarded, (kind,), self.__getstate__()

    Guarded.__name__, Guarded.__qualname__ = kind.__name__, kind.__qualname__
    return Guarded


def _new_guarded(kind: Any) -> Any:
    cls = _guarded_class(kind)
    return cls.__new__(cls)


def _unfit(optimizer: Any) -> str:
    """Return why an optimizer's step cannot be judged before it, or an empty text."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        return "has no param_groups; pass a torch.optim.Optimizer"
    if kind_of(optimizer) is Legacy:
        return "takes a scaler in its step; make it without"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if (closure is not None and closure.default is inspect.Parameter.empty) or hasattr(optimizer, "first_step"):
        return "computes gradients several times in a step, and moves parameters in between; guard no such optimizer"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "has a step that was set on the instance; call guarded() before other code wraps it"
    return ""

"""`GradScaler`: torch's own, with any policy in the place of its rule, the outcome of each step, and hooks.

Three things are true, each in one place: torch's two tensors (`_scale`, `_growth_tracker`), torch's records of flags
(`_per_optimizer_states`), and the policy.
"""

import contextlib
import copy
import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale_core import (
    DynamicScaling,
    NoScaling,
    PolicyLike,
    SpikeGuard,
    diagnose,
    metrics,
)
from lossscale_core.adapters import BAD_LOSS, check_setting, shown, tree, warn_caller
from lossscale_core.errors import CallOrderError, PolicyError
from lossscale_torch import _state
from lossscale_torch._attach import Attach
from lossscale_torch._attempts import Attempt, attempts
from lossscale_torch._checkpoint import (
    checked_scale,
    policy_of,
    restored,
    saved,
)
from lossscale_torch._clip import clip
from lossscale_torch._gradients import Gradients, is_dtensor, lifted, moved, params_of
from lossscale_torch._optimizers import Plain, kind_of, require_optimizer
from lossscale_torch._placement import PlacedScaler
from lossscale_torch._state import READY, STEPPED, UNSCALED, OnDevice
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled
from lossscale_torch._watch import Watch
from lossscale_torch.hooks import Guard, Hook, Protect, SameOnRanks, require_hooks, total_norm

_MANY = 64
Losses = TypeVar("Losses", bound=Tensor | list[Any] | tuple[Any, ...] | dict[Any, Any])
Loss = TypeVar("Loss")


class GradScaler(PlacedScaler):
    """A drop-in for `torch.amp.GradScaler` that accepts any policy and reports the outcome of each step.

    ```python
    scaler = GradScaler("cuda", policy="dynamic")
    scaler.scale(loss).backward()
    scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # if you clip
    scaler.step(optimizer)
    info = scaler.update()
    if info.applied:
        scheduler.step()
    ```

    An ordinary optimizer costs one host synchronisation a step, in the clip or else in `step`, and one more after an
    overflow; a fused one costs none.

    Args:
        device: The device type of the loss scale, such as `"cuda"`; its device is that of the first scaled loss.
        init_scale: The first loss scale, between 2**-126 and 2**126; this and the next three are torch's dynamic rule.
        growth_factor: Multiplies the loss scale after `growth_interval` finite steps in a row.
        backoff_factor: Multiplies the loss scale after an overflow.
        growth_interval: The number of finite steps in a row before the scale grows; with 0 it never grows, as in torch.
        enabled: Whether the scaler does anything; if False, training runs as it would without a scaler.
        policy: Anything that `lossscale_core.as_policy` accepts, instead of the four settings.
        process_group: The group of ranks over which the decision is combined before a step. For parameters sharded
            over a device mesh this is automatic.
        norm_group: The group of ranks that hold other parameters, such as the stages of a pipeline: the norm is that of
            all of them, and they decide together, as those of `process_group` do.
        half_gradients: Whether to unscale float16 gradients in place, which may flush small values to zero; by default
            they are refused.
        guard: A `SpikeGuard`, which skips the step of an optimizer if its norm is far above its norms before; the loss
            scale and its counters stay.
        protect: The modules to protect: a skipped step leaves their buffers unchanged, such as BatchNorm's statistics.
        updates_per_step: How many calls of `update` end a step, for loops that make one after each of several
            optimizers that share a loss, as Accelerate does; until the last, scale and records stay.
        hooks: Objects of `lossscale_torch.hooks.Hook`, called at each step before those of the arguments above.

    Raises:
        PolicyError: For `policy` together with torch's settings, for settings that break a rule, and for two guards.
        TypeError: For a `device` that is not a device.
        ValueError: For the name of a device type that is unknown to torch.
    """

    last_step: StepInfo
    """The outcome of the last `update`, for code in which a framework calls `update`; before it, a step not applied."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: PolicyLike | None = None,
        process_group: Any = None,
        norm_group: Any = None,
        half_gradients: bool = False,
        guard: SpikeGuard | None = None,
        protect: torch.nn.Module | Iterable[torch.nn.Module] = (),
        updates_per_step: int = 1,
        hooks: Sequence[Hook] = (),
    ) -> None:
        options = {"policy": policy, "guard": guard, "protect": protect, "hooks": hooks}
        enabled = _can_be_enabled(device, enabled, [name for name, value in options.items() if value])
        torchs = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        with contextlib.suppress(TypeError):  # of a factor that is no number, which the policy names
            super().__init__(device, enabled=enabled, **(torchs if policy is None else {}))  # type: ignore[arg-type]
        self.policy = policy_of(policy, torchs) if enabled or policy is not None else DynamicScaling()
        self._follows_checkpoint = policy is None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._updates_per_step, self._updates = check_setting("updates_per_step", updates_per_step), 0
        self._losses: list[Tensor | None] = []  # those of this step, for the cause of an overflow
        self._new_scale: float | Tensor | None = None  # for the end of this step
        self._has_warned = False  # of a step without a loss
        self._half_gradients = half_gradients
        self._continue_at(self.policy.init_state())
        self.last_step = StepInfo(False, self._init_scale, self._init_scale, 0)
        given = [*require_hooks(hooks), *([Guard(guard)] if guard is not None else [])]
        self._needs_norm = any(each.needs_norm for each in given)
        guards = [each for each in given if isinstance(each, Guard)]  # they see the norm that all ranks have
        if len(guards) > 1:
            raise PolicyError(f"a scaler takes one guard, and {len(guards)} were given; pass one of them, as guard=")
        vetoing = [each for each in given if each not in guards]
        self._can_veto = bool(vetoing)
        self._watch = Watch()
        undoing = [Protect(protect)] if protect and enabled else []
        self._ranks = SameOnRanks(process_group, norm_group)
        self._hooks: list[Hook] = [*undoing, *vetoing, self._ranks, *guards, self._watch]

    # A step, in its order.

    @overload
    def scale(self, outputs: Losses) -> Losses: ...
    @overload
    def scale(self, outputs: Iterable[Loss]) -> Iterable[Loss]: ...
    @not_compiled
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        float16 and bfloat16 losses of any shape are converted to float32. Call `backward` before the next `update`.
        Does not synchronise.

        Raises:
            RuntimeError: From `backward` after an `update` that has changed the scale, or any while the state is on the
                device; torch's own scaler raises after every update.
            CallOrderError: A loss is what this scaler has returned.
            ValueError: `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            if hasattr(outputs, "_is_scaled"):
                raise CallOrderError("this loss is scaled already, and its gradients would be too large; scale it once")
            self._note_loss(outputs)
            loss = outputs if outputs.dtype.itemsize >= 4 else lifted(outputs)
            scaled: Any = loss * moved(self._scale, loss.device)
            scaled._is_scaled = True
            return scaled
        if isinstance(outputs, dict | list | tuple):  # a subclass's `scale` is called once for the whole structure
            return tree.map_leaves(lambda leaf: GradScaler.scale(self, leaf), outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)  # lazily, as torch's own scaler does
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors. It is {shown(outputs)}; pass the loss as a tensor, "
            "before .item()"
        )

    @not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and record whether they are finite.

        For an optimizer without gradients nothing happens. Does not synchronise.

        Raises:
            RuntimeError: When called twice for an optimizer between two updates, or after its `step`.
            ValueError: For float16 gradients without `half_gradients`.
            TypeError: For what is not an optimizer, and for gradients in a layout such as CSR.
        """
        if self._enabled:
            record, scale = self._open(optimizer, "unscale_"), self._scale
            if "was_applied" in record:
                return
            flag = torch.zeros_like(scale)
            found = self._unscale_grads_(optimizer, scale.reciprocal(), flag, self._half_gradients)
            groups = self._ranks.groups([optimizer], of_norm=True) if self._needs_norm else []
            record["has_divided"] = bool(found)
            if groups and not found:  # this rank takes part all the same
                found = {scale.device: flag}
            record["found_inf_per_device"], record["stage"] = found, UNSCALED if found else READY
            record.pop("given_up", None)
            if self._needs_norm and found:
                record["norm"] = total_norm([optimizer], self._one, groups, self._ranks.norm_group)

    @not_compiled
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer | list[Any] | tuple[Any, ...],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply.

        Call it instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The norm is that of all ranks, however the
        parameters lie on device meshes and beside them; every rank of a mesh must make this call. It takes a second
        read for a norm that is not finite or tiny, and where float64 does not hold the powers of all gradients. If
        `unscale_` was replaced it calls that and then clips; else an error leaves the gradients as they were.
        Synchronises with the host once for an ordinary optimizer, and once more for a second read; for a fused one on
        a CUDA device not at all. A disabled scaler only clips.

        Args:
            optimizer: An optimizer, or several to clip by the norm of all their gradients together; then an overflow in
                one of them skips all of them.
            max_norm: The largest norm after clipping, in units of the unscaled gradients.
            norm_type: The order of the norm, above 0, infinity included.

        Returns:
            The norm of the unscaled gradients before clipping: shape `()`, float32, or float64 if a gradient is. It is
            not finite if a gradient is not, and the step will be skipped; or if the powers of finite gradients leave
            float64, or float32 on a device without float64, and the gradients are then clipped to 0, as in torch.

        Raises:
            PolicyError: For a `max_norm` below 0, an order that is not above 0, and what is not a number.
            ValueError: For an empty list.
            TypeError: For what is not an optimizer.
        """
        return clip(self, list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer], max_norm, norm_type)

    @not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` if the gradients are finite on every rank, else skip the step.

        Unscales first if `unscale_` was not called. A fused optimizer is always called, with the flag, and its kernel
        skips the step. An optimizer without gradients steps, and nothing changes. Synchronises with the host once; for
        a fused optimizer not at all.

        Returns:
            The result of the optimizer; None if the step was skipped.

        Raises:
            RuntimeError: For a closure, and when called twice between two updates.
            TypeError: For what is not an optimizer.
        """
        if not self._enabled:
            self._per_optimizer_states[id(optimizer)]["optimizer"] = optimizer
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        record = self._open(optimizer, "step")
        if "was_applied" in record:
            return None
        kind = kind_of(optimizer)
        if record["stage"] is READY and kind.check:
            getattr(self, "unscale_" if self._needs_norm else kind.check)(optimizer)
        for hook in self._hooks:
            hook.before_step(self, optimizer, record)
            if self._can_veto:
                _require_flags(record["found_inf_per_device"], hook)
        record["kind"], self._is_fused = kind, self._is_fused or kind is not Plain
        result = kind.take(self, optimizer, record, args, kwargs)
        record["stage"] = STEPPED
        for hook in self._hooks:
            hook.after_step(self, optimizer, record)
        return result

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip an optimizer's step for your own reasons; call it instead of `step`.

        `update` then ends the step: the record of the gradients is dropped, and `applied` is False. If `unscale_` has
        checked the gradients, the loss scale follows this check; otherwise the step is not counted. Does not
        synchronise. Raises `RuntimeError` after `step`.
        """
        record = self._open(optimizer, "skip")
        if "was_applied" not in record:
            record["stage"], record["applied"] = STEPPED, False

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None, *, end_of_step: bool = False) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale after the steps since the last update, and return their outcome.

        After a fused optimizer on a device the fields of the result stay there until they are read, so this does not
        synchronise. With an ordinary optimizer it waits at most once, after an overflow, to read the losses.

        Args:
            new_scale: Set the loss scale to this instead: a positive number, or a float32 tensor of one element. One
                beyond the policy's bounds is moved to them, with a warning if the host knows it. A tensor on a device
                is not read; if it is NaN or not positive, the scale stays as it is.
            end_of_step: With `updates_per_step`, end the step at this update, since no optimizer will follow.

        Returns:
            A `StepInfo`: `applied` is True if every optimizer's step was applied; `applied_of(optimizer)` says it for
            one optimizer.

        Raises:
            AssertionError: If no flag was recorded since the last update, if no loss was scaled yet, and for a
                `new_scale` that is not a positive number.
            OverflowStreakError: When the policy's `max_overflow_streak` or the guard's `max_streak` is reached and this
                is known on the host.
        """
        if not self._enabled:
            return self._update_disabled(end_of_step)
        records, has_begun, has_read = self._per_optimizer_states, False, False
        for record in records.values():
            has_begun = has_begun or record["stage"] is not READY or bool(record["found_inf_per_device"])
            has_read = has_read or record.get("kind") is Plain
        if self._scale is None and (new_scale is not None or not has_begun):
            self._check_scale_growth_tracker("update")
        if new_scale is not None:
            new_scale = checked_scale(new_scale, self._device, self.policy)
        elif not has_begun:
            raise AssertionError("No inf checks were recorded prior to update.")
        is_whole = end_of_step or not has_begun or self._updates + 1 >= self._updates_per_step
        self._new_scale = self._new_scale if new_scale is None else new_scale
        new_scale = self._new_scale if is_whole else None  # until then the scale stays
        info = None
        try:
            info = self.last_step = self._decide(records, has_read, new_scale, is_whole)
            self._updates += 1
        finally:
            if is_whole or info is None:
                self._end_step(info)
        return info

    def attempts(self, *modules: torch.nn.Module, retries: int = 8, raise_at_end: bool = False) -> Iterator[Attempt]:
        """Return a loop around a step that takes it again, at the lower loss scale, while its gradients overflow.

        ```python
        for attempt in scaler.attempts(model, retries=8):
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
        if attempt.info:
            scheduler.step()
        ```

        The body is a whole step with all its micro-batches and one `update`; what follows an applied step stands after
        the loop. Before another try the buffers of the modules, the random states of Python, NumPy, the CPU and all
        used devices are what they were, and the gradients of the optimizers that were stepped are None. A parameter has
        not moved, since a skipped step changes nothing. Python attributes and generators of your own are not put back.

        The loop ends when a step was applied, or skipped for another reason than an overflow; if the loss is NaN or
        infinite (with several ranks only with `process_group=` or sharded parameters, since each must take the same
        tries); and if the policy does not adapt. If retries are used up, or at the smallest scale, it warns, and the
        loss scale is that after the first try. Leaving the body before `update` drops the step. Pass `process_group=`
        where ranks hold different parameters. Synchronises once a try after a fused optimizer.

        Args:
            modules: The modules whose buffers are put back, such as BatchNorm's statistics.
            retries: How often a step is taken again.
            raise_at_end: Whether used-up retries raise `RetriesExhaustedError`.

        Raises:
            CallOrderError: For a body that ends no step, or several, and for a loop within another of the same scaler.
            PolicyError: For `retries` that is not a whole number from 0.
            TypeError: For what is not a module.
        """
        return attempts(self, modules, retries, raise_at_end)

    # What belongs to a step.

    def _note_loss(self, loss: Tensor) -> None:
        """Note that a loss was scaled in this step, for the cause of an overflow, and which gradients were given up."""
        is_recorded = _state.is_being_recorded()
        self._has_warned = self._has_warned or is_recorded  # later steps may follow a replay
        if len(self._losses) < _MANY:
            kept = None
            if not (is_recorded or is_dtensor(loss) or _are_functorch_transforms_active()):
                # A view would keep the memory of its base.
                kept = loss.detach().clone() if loss._is_view() else loss.detach()
            self._losses.append(kept)
        for record in self._per_optimizer_states.values():
            is_unscaled = record["stage"] is UNSCALED and record.get("has_divided")
            if is_unscaled and all(param.grad is None for param in params_of(record["optimizer"])):
                record["given_up"] = True

    def _open(self, optimizer: Any, caller: str) -> dict[str, Any]:
        """Return the record of an optimizer's step; raise torch's errors if it was unscaled or stepped before."""
        require_optimizer(optimizer, caller)
        record = self._per_optimizer_states[id(optimizer)]
        record["optimizer"] = optimizer
        if "was_applied" in record:  # in an earlier try of `attempts`; it is left alone
            return record
        if caller == "skip":
            if self._enabled and record["stage"] is STEPPED:
                self._require_open(record, caller)
            return record
        if self._scale is None:
            self._check_scale_growth_tracker(caller)
        if not (self._losses or self._has_warned or self.last_step.by_optimizer is None):
            self._has_warned = True
            warn_caller(
                "no loss was scaled since the last update(), so that gradients may be divided by a scale that their "
                "loss was not multiplied by; pass each loss through scaler.scale(loss), or, if update() is called "
                "after each of several optimizers that share a loss, make the scaler with updates_per_step=2, their "
                "number",
            )
        if getattr(optimizer, "_lossscale", self) is not self:
            raise CallOrderError(
                f"{caller}() was given a guarded {type(optimizer).__name__}, whose step knows of no loss scale; use "
                "either the scaler or guarded(), which both skip bad steps"
            )
        if record["stage"] is not READY:
            self._require_open(record, caller)
        return record

    def _require_open(self, record: dict[str, Any], caller: str) -> None:
        """Raise an error if an optimizer cannot be unscaled or stepped any more."""
        unscales = caller.startswith("unscale_")
        if record["stage"] is UNSCALED and unscales:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if "given_up" in record:
            raise CallOrderError(
                f"{caller}() was given gradients that are still scaled: those that unscale_() divided were dropped, "
                "and another loss was scaled since; end the first step by scaler.skip(optimizer) and scaler.update()"
            )
        if record["stage"] is STEPPED:
            what = "step() has already been called since the last update()."
            what = "unscale_() is being called after step()." if unscales else what
            if self._updates:
                raise CallOrderError(
                    f"{what} Of updates_per_step={self._updates_per_step} calls of update(), {self._updates} came; "
                    "call it once for each optimizer, or end the step by update(end_of_step=True)"
                )
            raise RuntimeError(what)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        return Gradients([optimizer], allow_fp16).check_and_multiply_(inv_scale, found_inf)

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        """Check gradients that a kernel will divide."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        found = self._unscale_grads_(optimizer, self._one, torch.zeros_like(self._one), True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer unless a flag is set. Waits for the device, once in a step."""
        found = self._found([optimizer_state], may_read=True)
        optimizer_state["applied"] = applied = found is not None and not (found[1] or found[2])
        return optimizer.step(*args, **kwargs) if applied else None

    def _unscales_as_torch(self) -> bool:
        """Return whether no subclass and no assignment to this scaler has replaced the way to unscale."""
        names = "unscale_", "_unscale_grads_"
        return all(getattr(getattr(self, name), "__func__", None) is getattr(GradScaler, name) for name in names)

    def _decide(self, records: dict[int, Any], has_read: bool, new_scale: Any, is_whole: bool) -> StepInfo:
        """Let the policy move the scale by the flags of the step, and return the outcome.

        The flags are read if an ordinary optimizer `has_read` some. What is recorded with flags is left to the device.
        """
        every, found = records.values(), None
        is_recorded = not has_read and _state.is_being_recorded()
        if not is_recorded or not any(each["found_inf_per_device"] or "kind" in each for each in every):
            found = self._found(every, has_read)
        if found is not None:
            had_gradients = found[0]
        else:
            had_gradients = any(type(key) is not str for each in every for key in each["found_inf_per_device"])
        info = self._advance(every, found, had_gradients and is_whole and new_scale is None)
        by_optimizer: dict[int, Any] = {}
        if new_scale is not None:
            info = info._replace(loss_scale_after=self._set_scale(new_scale))
        for key, record in records.items():
            if record["stage"] is STEPPED:
                applied = record["applied"] if "applied" in record else self._applied_by_kernel(record, info)
            elif record["stage"] is UNSCALED and is_whole:
                applied = False
            else:
                continue
            by_optimizer[key] = applied
            if applied is False and info.applied is not False:
                info = info._replace(applied=False)
        info.by_optimizer, info.had_gradients = by_optimizer, had_gradients
        return info

    def _applied_by_kernel(self, record: dict[str, Any], info: StepInfo) -> Any:
        """Return whether a kernel, or a subclass, has stepped, which decide by the flags of a record."""
        found = None if _state.is_being_recorded() else self._found([record])
        if found is not None:
            return not (found[1] or found[2])
        if len(self._per_optimizer_states) == 1:
            return info.applied
        return _state.combined(record["found_inf_per_device"].values(), self._scale.device) == 0.0

    def _update_disabled(self, end_of_step: bool) -> StepInfo:
        """Return the outcome of a step that only `skip`, or a guarded optimizer by itself, can have left out."""
        applied = {}
        for key, record in self._per_optimizer_states.items():
            last: Any = getattr(record["optimizer"], "last_step", None)  # of a guarded optimizer
            applied[key] = record.get("applied", last.applied if isinstance(last, StepInfo) else True)
        self.last_step = info = StepInfo(functools.reduce(operator.and_, applied.values(), True), 1.0, 1.0, 0)
        info.by_optimizer, self._updates = applied, self._updates + 1
        if end_of_step or not applied or self._updates >= self._updates_per_step:
            self._updates, self._per_optimizer_states = 0, defaultdict(_refresh_per_optimizer_state)
        return info

    def _end_step(self, info: StepInfo | None) -> None:
        """End a step, of which nothing is known if `info` is None: undo, tell, drop it, and raise the first error."""
        errors = []
        try:
            for hook in self._hooks:  # those that undo come first
                try:
                    if info is not None:
                        hook.after_update(self, info)
                    else:
                        hook.abandon(self)
                except BaseException as error:
                    errors.append(error)
        finally:
            self._updates, self._new_scale, self._losses = 0, None, []
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if errors:
            raise errors[0]

    def _abandon(self) -> None:
        """End a step that was left before its `update`, if there is one; hooks undo what they can."""
        if self._per_optimizer_states or self._losses:
            self._end_step(None)

    def _are_losses_finite(self) -> bool:
        """Return whether the losses that were scaled in this step are finite. Synchronises with the host, once."""
        flags = [torch.isfinite(loss).all() for loss in self._losses if loss is not None]
        return all(_state.read(flags, self._scale.device)) if flags else True

    def place_on(self, device: torch.device | str) -> None:
        """Put the loss scale on a device without scaling a loss; otherwise the first `scale` does this.

        Call it where `scale` is never called: in a stage of a pipeline that receives its gradients from the last stage,
        or in a loop that multiplies its loss by `get_scale()` itself. The scaler then warns of no unscaled loss.
        """
        self._has_warned = True
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    # Between steps.

    @property
    def attach(self) -> Attach:
        """A function of `x` and `aux_loss` that returns `x`; its backward pass adds the scaled gradients of `aux_loss`.

        Use it for a loss that a layer computes inside the model, such as a router loss. The gradients are those of
        `scale(loss + aux_loss.sum())`. The loss scale is read when the backward pass runs. `attach` does not divide by
        the number of tokens, ranks or micro-batches: weight `aux_loss` as you weight the main loss. A layer needs no
        scaler: give it `attach=scaler.attach`; a copy of the layer shares the scaler. Does not synchronise; can be
        compiled, after `place_on` also with `fullgraph=True`.

        If the result is discarded or detached, the loss has no effect. The backward pass warns if this scaler has
        scaled no loss in this step, since the main loss may then have another scale; not in compiled code, in a
        replayed graph and if the scaler is disabled. Two backward passes through the result count the loss twice, and
        `torch.autograd.grad` for a penalty counts it, too. The result cannot be changed in place.

        `x` is a tensor of floats through which the main loss flows, of any shape and dtype; it comes back with the same
        values, shape and dtype. `aux_loss` is a tensor of floats of any shape, and means its sum. float16 and bfloat16
        are converted to float32 before the sum. Its gradient in float16 is infinite from a scale of 2**16 on, as that
        of a main loss is; compute it in float32. What is not a tensor of floats is a `TypeError`.
        """
        return Attach(self)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`.

        They are plain Python numbers if known on the host, else tensors of shape `()`. Does not synchronise.
        """
        guard = next((hook.first() for hook in self._hooks if isinstance(hook, Guard)), None)
        tracker, scale, state = self._growth_tracker, self._scale, self._state  # another thread may replace it
        if not self._enabled:
            state = NoScaling().init_state()
        elif isinstance(state, OnDevice):
            state = _state.copies(state.tensors(scale, tracker))
        elif tracker is None or (tracker.is_cpu and self._scale_on_host() is not None):
            state = self._state_on_host()
        else:
            state = state._make((scale.clone(), tracker.clone(), *state[2:]))
        return metrics(state, guard=guard)

    def diagnose(self) -> str:
        """Describe the condition of the run in one or two sentences; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        state = self._watch.log(self.policy, self._state_on_host())
        guards = [each for hook in self._hooks if isinstance(hook, Guard) for each in hook.states()]
        worst = max(guards, key=lambda guard: (guard.streak, guard.spikes), default=None)
        answer = diagnose(self.policy, state, guard=worst)
        if self._watch.has_bad_loss:
            answer += f" In the last step {BAD_LOSS}."
        if self._watch.without_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def check_sync(self) -> None:
        """Raise `SyncError` with the ranks that have another state than rank 0; every rank of the group must call it.

        The ranks are those of `process_group`, or all; the entries of hooks are a part of the state. Call it once after
        loading: a rank with another loss scale would take other steps. `SyncError` is also raised for a rank that is
        not in `process_group`. Synchronises with the host.
        """
        self._ranks.require_same(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain values: torch's five keys and those of `state_to_dict`.

        Loads into torch's own scaler and, through `lossscale_core.state_from_dict`, into every other framework. Under a
        policy of your own torch's keys are left out, since its scaler would continue by another rule. Empty when
        disabled. Synchronises with the host.
        """
        if not self._enabled:
            return {}
        state = self._state_on_host()
        self._watch.log(self.policy, state)
        entries = saved(self.policy, state)
        for hook in self._hooks:
            entries.update(hook.state_dict())
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`: this scaler's, torch's own (its five keys suffice), or another framework's state.

        A scaler without `policy=` takes over the checkpoint's factors and interval, as torch does. A scaler with
        `policy=` keeps its policy, and a `CheckpointWarning` names each difference. A state on a device is written in
        place, so that a recorded graph continues from it.

        Raises:
            RuntimeError: torch's, for an empty dict.
            CheckpointError: For a dict of something else, which is torch's `KeyError`, too, for a newer version, and
                for a value that no state can hold.
        """
        if not self._enabled:
            return
        policy, state = restored(state_dict, self.policy, self._follows_checkpoint)
        loaded: list[tuple[Hook, dict[str, Any]]] = []
        try:
            for hook in self._hooks:
                loaded.append((hook, hook.state_dict()))
                hook.load_state_dict(state_dict)
        except BaseException:
            for hook, before in loaded[:-1]:
                hook.load_state_dict(before)
            raise
        self.policy = policy
        self._continue_at(state)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # raises within a step
        own = copy.deepcopy({"_hooks": self._hooks, "_watch": self._watch, "_ranks": self._ranks})
        fresh: dict[str, Any] = {
            "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
            "_scale_tensor": None,
            "_kept_one": None,
            "_losses": [],
            "_new_scale": None,
            "_is_fused": False,
        }
        return {**state, **own, **fresh, "_state": self._state_on_host()}


def _require_flags(found: dict[Any, Any], hook: Hook) -> None:
    """Make tensors of the flags of a hook that are numbers; raise `TypeError` for what is neither."""
    for key, flag in found.items():
        if isinstance(flag, bool | int | float | np.number | np.bool_):
            found[key] = torch.tensor(float(flag), dtype=torch.float32)
        elif not isinstance(flag, Tensor) or flag.numel() != 1:
            raise TypeError(
                f"{type(hook).__name__}.before_step set the flag {key!r} to {shown(flag)}; a veto is 1.0, and 0.0 lets "
                "the step pass: a float32 tensor of shape (), or a number"
            )
        elif flag.dim():
            found[key] = flag.reshape(())


def _can_be_enabled(device: Any, enabled: bool, options: list[str]) -> bool:
    """Return whether a scaler for a device type is enabled; without CUDA torch disables one, and says what is off."""
    if not isinstance(device, str | torch.device):
        meant = f"init_scale={device!r}" if isinstance(device, int | float) else "policy=..."
        raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; write GradScaler('cuda', {meant})")
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a device type of torch; it takes the type of the device that computes the loss; "
            "pass 'cuda', 'cpu', 'mps' or 'xpu'"
        ) from error
    if enabled and str(device) == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
        turned_off = ", ".join(f"{name}=" for name in options)
        hint = f"  This turns {turned_off} off, too; pass the device that computes, as in GradScaler('cpu')"
        warn_caller(
            f"torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.{hint if options else ''}"
        )
        return False
    return enabled

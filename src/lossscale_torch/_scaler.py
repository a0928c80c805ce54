"""`GradScaler`: torch's scaler with any policy, the outcome of each step, and hooks.

Each fact has one owner. `ScalerState` has the loss scale, the growth tracker and the counters; the record of an
optimizer, an `OptimizerStep`, has its flags and its stage; `policy` is the rule.
"""

import contextlib
import copy
import functools
import operator
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.amp import GradScaler as TorchScaler
from torch.nn import Module
from torch.optim import Optimizer

from lossscale_core import DynamicScaling, NoScaling, PolicyLike, ScaleState, ScalingPolicy, SpikeGuard, metrics
from lossscale_core.adapters import BAD_LOSS, describe, tree, warn_caller
from lossscale_core.errors import CallOrderError
from lossscale_torch._checkpoint import DEFAULTS, checked_scale, policy_of, policy_setting, restored, saved
from lossscale_torch._clip import clip, total_norm
from lossscale_torch._gradients import (
    Gradients,
    at_least_float32,
    has_gradients,
    has_meshes,
    is_dtensor,
    params_of,
    to_device,
)
from lossscale_torch._record import (
    FUSED,
    LEGACY,
    PLAIN,
    READY,
    STEPPED,
    UNSCALED,
    Kind,
    OptimizerStep,
    OptimizerSteps,
    combine,
    flags_of,
    kind_of,
    read_numbers,
    require_optimizer,
)
from lossscale_torch._state import ScalerState, is_capturing
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled
from lossscale_torch._watch import FAULTS, Watch
from lossscale_torch.hooks import Hook, Protect, SameOnRanks, Waiting, require_hooks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lossscale_torch._extras._attach import Attach
    from lossscale_torch._extras._attempts import Attempt

_MAX_LOSSES = 64
_IF_INTERRUPTED = " If that step was interrupted, end it by scaler.update()."
_LEGACY_WARNING = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)
Losses = TypeVar("Losses", bound=Tensor | list[Any] | tuple[Any, ...] | dict[Any, Any])
Loss = TypeVar("Loss")


def _of_state(name: str) -> Any:
    """Return torch's attribute of a value that the scaler's state owns."""
    return property(operator.attrgetter(f"_state.{name}"), lambda self, value: setattr(self._state, name, value))


class GradScaler(torch.cuda.amp.GradScaler):  # a subclass of torch.amp's, which other code asks for
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
        optimizers: Optimizers whose gradients may wait over an `update`: they step at different batches, or each before
            an update of its own, as under Accelerate and Lightning. If the scale changes, these gradients follow it.
        hooks: Objects of `lossscale_torch.hooks.Hook`. Ranks that decide together must have the same hooks.

    Raises:
        PolicyError: For `policy` together with torch's settings, for settings that break a rule, and for two guards.
        TypeError: For a `device` that is not a device.
    """

    last_step: StepInfo
    """The outcome of the last `update`, for code in which a framework calls `update`; before it, a step not applied."""
    _policy: ScalingPolicy

    # torch's attributes, which other packages read and write.
    _per_optimizer_states = property(operator.attrgetter("_steps"), lambda self, records: self._use_records(records))
    _scale, _growth_tracker = _of_state("scale"), _of_state("tracker")
    _init_scale, _init_growth_tracker = _of_state("init_scale"), _of_state("init_tracker")
    _growth_factor = policy_setting("growth_factor")
    _backoff_factor = policy_setting("backoff_factor")
    _growth_interval = policy_setting("growth_interval")

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
        process_group: "ProcessGroup | None" = None,
        norm_group: "ProcessGroup | None" = None,
        half_gradients: bool = False,
        guard: SpikeGuard | None = None,
        protect: Module | Iterable[Module] = (),
        optimizers: Iterable[Optimizer] = (),
        hooks: Sequence[Hook] = (),
    ) -> None:
        protects = isinstance(protect, Module) or bool(protect)  # a module may have a length of 0
        options = {"policy": policy, "guard": guard, "protect": protects, "optimizers": optimizers, "hooks": hooks}
        enabled = _can_be_enabled(device, enabled, [name for name, value in options.items() if value])
        torchs = dict(zip(DEFAULTS, (init_scale, growth_factor, backoff_factor, growth_interval), strict=True))
        self._state = ScalerState(NoScaling().init_state())
        with contextlib.suppress(TypeError):  # of a factor that is not a number, which the policy names
            settings: dict[str, Any] = torchs if policy is None else {}
            TorchScaler.__init__(self, device, enabled=enabled, **settings)  # torch.cuda.amp's warns
        self._policy = policy_of(policy, torchs) if enabled or policy is not None else DynamicScaling()
        self._follows_checkpoint = policy is None
        self._state.load(self._policy.init_state(), self._policy)
        self._waiting = Waiting(optimizers if enabled else ())
        for optimizer in self._waiting.optimizers:
            require_optimizer(optimizer, "GradScaler")
        # True after the warning about a step without a loss, and where gradients wait or no loss is scaled.
        self._loss_is_optional = bool(self._waiting.optimizers)
        self._needs_new_loss = False  # True if a state was loaded since a loss was scaled
        self._half_gradients = half_gradients
        self._mark = uuid.uuid4().hex  # of losses that this scaler has scaled; a tensor with it can be saved
        self._hooks, self._guard = require_hooks(hooks, guard)
        self._needs_norm = self._guard is not None or any(hook.needs_norm for hook in self._hooks)
        self._undoing: list[Hook] = [self._waiting] if self._waiting.optimizers else []
        if protects and enabled:
            self._undoing.append(Protect(protect))
        self._ranks, self._watch = SameOnRanks(process_group, norm_group), Watch()
        self.last_step = StepInfo(False, self._init_scale, self._init_scale, 0)
        self._begin_step()

    def _begin_step(self) -> None:
        """Drop what belongs to the step before."""
        self._losses: list[Tensor | None] = []  # those of this step, for the cause of an overflow
        self._steps = OptimizerSteps(OptimizerStep)

    def _use_records(self, records: Mapping[int, dict[str, Any]]) -> None:
        """Continue with records that another package has made."""
        self._steps = OptimizerSteps(OptimizerStep)
        for key, record in records.items():
            self._steps[key] = record

    def _follow(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._state.follow(policy)

    policy: ScalingPolicy = property(operator.attrgetter("_policy"), _follow)  # type: ignore[assignment]
    """The scaling policy, frozen. Assign another one to replace it; torch's setters do so, too."""

    # A step, in the order of its calls.

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
            CallOrderError: This scaler has scaled the loss already.
            ValueError: `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            state = self._state
            if state._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            scaled_by = getattr(outputs, "_scaled_by", ())
            if self._mark in scaled_by:
                raise CallOrderError("this loss is scaled already, and its gradients would be too large; scale it once")
            self._note_loss(outputs)
            loss = outputs if outputs.dtype.itemsize >= 4 else at_least_float32(outputs)
            scaled: Any = loss * to_device(state._scale, loss.device)
            scaled._scaled_by = (*scaled_by, self._mark)
            return scaled
        if isinstance(outputs, dict | list | tuple):  # a subclass's `scale` is called once for the whole structure
            return tree.map_leaves(lambda leaf: GradScaler.scale(self, leaf), outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)  # lazily, as torch's own scaler does
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors. It is {describe(outputs)}; pass the loss as a "
            "tensor, before .item()"
        )

    @not_compiled
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and record whether they are finite.

        For an optimizer without gradients nothing happens. Does not synchronise.

        Raises:
            RuntimeError: When called twice for an optimizer between two updates, or after its `step`.
            ValueError: For float16 gradients without `half_gradients`.
            TypeError: For what is not an optimizer, and for gradients in a layout such as CSR.
        """
        if not self._enabled:
            return
        step = self._open(optimizer, "unscale_")
        if step.is_done:
            return
        if len(self._steps) > 1:
            self._steps.claim_gradients(step, self.policy)
        scale = self._state.scale
        flag = torch.zeros_like(scale)
        flags = self._unscale_grads_(optimizer, scale.reciprocal(), flag, self._half_gradients)
        groups = self._groups([optimizer], of_norm=True) if self._needs_norm else []
        step.has_divided, step.has_dropped = bool(flags), False
        if groups and not flags:  # this rank takes part nevertheless
            flags = {scale.device: flag}
        step["found_inf_per_device"], step["stage"] = flags, UNSCALED if flags else READY
        if self._needs_norm and flags:
            step.norm = total_norm(self, optimizer, groups)

    @not_compiled
    def unscale_and_clip_(
        self, optimizer: Optimizer | list[Any] | tuple[Any, ...], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply.

        Call it instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The norm is that of all ranks, however the
        parameters lie on device meshes and beside them; every rank of a mesh must make this call. It takes a second
        read for a norm that is not finite or tiny, and where float64 does not hold the powers of all gradients. An
        error leaves the gradients as they were, unless a subclass has replaced `unscale_`, which is then called first.
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
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
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
            step = self._steps[id(optimizer)]
            step.optimizer, result = optimizer, optimizer.step(*args, **kwargs)
            step.applied = True
            return result
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        step = self._open(optimizer, "step")
        if step.is_done:
            return None
        kind = kind_of(optimizer)
        self._check_gradients(step, kind)

        # Decide: this rank's hooks, then all ranks together, then the guard, which sees the norm of all ranks.
        for hook in self._hooks:
            step.store_veto(hook.before_step(self, step), hook)
        if self._has_ranks():
            self._ranks.before_step(self, step)
        if self._guard is not None:
            step.store_veto(self._guard.before_step(self, step), self._guard)
        if self._watch.is_new:
            self._watch.before_step(self, step)

        # Call the optimizer, or skip its step.
        step.kind = kind
        if kind is PLAIN:
            result = self._maybe_opt_step(optimizer, step, *args, **kwargs)
        else:
            self._state.is_fused = True
            if kind is FUSED:
                result = self._step_fused(optimizer, step, *args, **kwargs)
                step.has_divided = True
            else:
                warn_caller(_LEGACY_WARNING, FutureWarning)
                result = optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]
        step["stage"] = STEPPED
        for hook in [*self._hooks, self._guard] if self._guard is not None else self._hooks:
            hook.after_step(self, step)
        return result

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer unless a flag is set. Waits for the device, once in a step."""
        step = optimizer_state if isinstance(optimizer_state, OptimizerStep) else OptimizerStep(optimizer_state)
        decision = self._state.decision([step], may_read=True)
        step.applied = decision is not None and not (decision[1] or decision[2])
        return optimizer.step(*args, **kwargs) if step.applied else None

    def _step_fused(self, optimizer: Any, step: OptimizerStep, *args: Any, **kwargs: Any) -> Any:
        """Step a fused optimizer, with the factor and the flag as its attributes, as torch's own scaler does.

        Its kernel divides by the factor, and skips the step if the flag is 1.0. A factor that the user has set before
        is multiplied in.
        """
        factor = self._scale if step["stage"] is READY else step.divisor  # that of a clip, if it left one
        # An interrupted step leaves its flag set, and perhaps a factor, which is then not the user's.
        is_left_over = getattr(optimizer, "found_inf", None) is not None
        preset = None if is_left_over else getattr(optimizer, "grad_scale", None)
        if preset is not None:
            factor = preset if factor is None else factor * preset
        flag = combine(step.flags.values(), self._scale.device)
        found: Any = torch.ne(flag, 0.0, out=torch.empty_like(flag, dtype=torch.float32))  # NaN is not 0.0, either
        found.is_left_over = True  # marks a flag that an interrupted step has left
        known = len(getattr(optimizer, "state", ()))
        try:
            # Set first and deleted last: an interrupted step always leaves the flag. The kernel skips at 1.0 only.
            optimizer.found_inf, optimizer.grad_scale = found, factor
            result = optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
        if len(getattr(optimizer, "state", ())) > known:
            # torch's fused SGD allocates the momentum of a first step before its kernel decides to skip, and would then
            # use it uninitialised.
            for state in [*optimizer.state.values()][known:]:
                momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
                if momentum is not None:
                    momentum.copy_(torch.where(to_device(found, momentum.device) == 0.0, momentum, 0.0))
        return result

    def skip(self, optimizer: Optimizer) -> None:
        """Skip an optimizer's step for your own reasons; call it instead of `step`.

        `update` then ends the step: the record of the gradients is dropped, and `applied` is False. If `unscale_` has
        checked the gradients, this check still moves the loss scale; otherwise the step is not counted. Ranks that
        decide together check the gradients, and all skip the step, which counts if one of them overflowed; after a clip
        by the norm of all of them, each rank must call this. Does not synchronise. Raises `RuntimeError` after `step`.
        """
        step = self._open(optimizer, "skip")
        if step.is_done or (not self._enabled and step.applied):  # a disabled scaler takes every step
            return
        if self._enabled and self._groups([optimizer]):  # this rank makes the calls of those that step
            if self._state.scale is None:
                self._place_beside(optimizer)
            self._check_gradients(step, kind_of(optimizer))
            step.applied = False
            step.store_veto(True, self._ranks)
            self._ranks.before_step(self, step)
        step["stage"], step.applied = STEPPED, False

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale after the steps since the last update, and return their outcome.

        From the first step of a fused optimizer on a device on, the fields of the result stay there until they are
        read, so that this does not synchronise. With an ordinary optimizer it waits at most once, after an overflow, to
        read the losses.

        Args:
            new_scale: Set the loss scale to this instead: a positive number, or a float32 tensor of one element. One
                beyond the policy's bounds is moved to them, with a warning if the host knows it. A tensor on a device
                is not read; if it is NaN or not positive, the scale stays as it is.

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
            return self._update_disabled()
        records = self._waiting.leave_out(self._steps) if self._waiting.optimizers else self._steps
        state, steps, has_record, may_read = self._state, records.values(), False, False
        for step in steps:
            has_record = has_record or step["stage"] is not READY or bool(step["found_inf_per_device"])
            may_read = may_read or step.kind is PLAIN
        if state.scale is None and (new_scale is not None or not has_record):
            self._check_scale_growth_tracker("update")
        if new_scale is not None:
            new_scale = checked_scale(new_scale, self._device, self.policy)
        elif not has_record:
            raise AssertionError("No inf checks were recorded prior to update.")
        info = None
        try:
            # Let the policy move the scale by the flags. While a graph is captured, its flags are not read.
            decision = None
            if may_read or not is_capturing() or not any(step.flags or step.may_have_moved for step in steps):
                decision = state.decision(steps, may_read)
            had_gradients = bool(flags_of(steps, vetoes=False)) if decision is None else decision[0]
            outcome = state.advance(self._policy, steps, decision, had_gradients and new_scale is None)
            applied, used, after, streak, overflowed, spiked = outcome
            if new_scale is not None:
                after = state.change_scale(new_scale, self.policy)

            # Say for each optimizer, and for all of them, whether its step was applied.
            by_optimizer: dict[int, bool | Tensor] = {}
            for key, step in records.items():
                if step["stage"] is READY:
                    continue
                is_applied: bool | Tensor | None = step.applied if step["stage"] is STEPPED else False
                if is_applied is None:
                    is_applied = self._applied_by_flags(step, applied)
                by_optimizer[key] = is_applied
                if is_applied is False:
                    applied = False
            info = StepInfo(applied, used, after, streak, overflowed, spiked, by_optimizer, had_gradients)
            self.last_step = info
        finally:
            self._end_step(info)
        return info

    def attempts(self, *modules: Module, retries: int = 8, raise_at_end: bool = False) -> "Iterator[Attempt]":
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
        used devices are what they were, and the gradients of the optimizers that were stepped are None; those of
        `optimizers=` are what they were before the first try, at the present scale. A parameter has not moved, since a
        skipped step changes nothing. Python attributes and generators of your own are not put back.

        The loop ends when a step was applied, or skipped for another reason than an overflow; if the loss is NaN or
        infinite (with several ranks only with `process_group=` or sharded parameters, since each must take the same
        tries); and if the policy does not adapt. If retries are used up, or at the smallest scale, it warns, and the
        loss scale is that after the first try. Leaving the body before `update` drops the step. Pass `process_group=`
        where ranks hold different parameters. Synchronises once a try after a fused optimizer.

        Args:
            modules: The buffers of these modules are put back, such as BatchNorm's statistics.
            retries: How often a step is taken again.
            raise_at_end: Whether used-up retries raise `RetriesExhaustedError`.

        Raises:
            CallOrderError: For a body that ends no step, or several, and for a loop within another of the same scaler.
            PolicyError: For `retries` that is not a whole number from 0.
            TypeError: For what is not a module.
        """
        from lossscale_torch._extras._attempts import attempts

        return attempts(self, modules, retries, raise_at_end)

    def optimizer_steps(self) -> list[OptimizerStep]:
        """Return the records of the optimizers since the last update, in the order of their first calls.

        A hook reads here what is known of the other optimizers: their `optimizer` and their `flags`.
        """
        return list(self._steps.values())

    # Parts of a step.

    def _note_loss(self, loss: Tensor) -> None:
        """Keep a loss that was scaled in this step, for the cause of an overflow, and note dropped gradients."""
        self._needs_new_loss, is_captured = False, is_capturing()
        self._loss_is_optional = self._loss_is_optional or is_captured  # later steps may follow a replay
        if len(self._losses) < _MAX_LOSSES:
            kept = None
            if not (is_captured or is_dtensor(loss) or _are_functorch_transforms_active()):
                # A view would keep the memory of its base.
                kept = loss.detach().clone() if loss._is_view() else loss.detach()
            self._losses.append(kept)
        for step in self._steps.values():
            if step["stage"] is STEPPED:
                step.has_divided = False  # other gradients follow
            elif step.has_divided and not has_gradients(step.optimizer):
                step.has_divided, step.has_dropped = False, True

    def _open(self, optimizer: Optimizer, caller: str) -> OptimizerStep:
        """Return the record of an optimizer; raise torch's errors if it was unscaled or stepped before."""
        if not hasattr(optimizer, "param_groups"):
            require_optimizer(optimizer, caller)
        step = self._steps.get(id(optimizer))
        if step is None:
            step = self._steps.setdefault(id(optimizer), OptimizerStep())
        step.optimizer = optimizer
        if step.is_done:
            return step
        if caller == "skip":
            if self._enabled and step["stage"] is STEPPED:
                self._require_open(step, caller)
            return step
        if self._state._scale is None or not (self._losses or (self._loss_is_optional and not self._needs_new_loss)):
            self._require_loss(optimizer, caller)
        if getattr(optimizer, "_lossscale", self) is not self:
            raise CallOrderError(
                f"{caller}() was given a {type(optimizer).__name__}, whose step knows no loss scale; use either the "
                "scaler or guarded(), which both skip bad steps"
            )
        if step["stage"] is not READY:
            self._require_open(step, caller)
        return step

    def _require_loss(self, optimizer: Optimizer, caller: str) -> None:
        """Raise torch's error before the first loss, and later warn, unless the optimizer has no gradients."""
        if not has_gradients(optimizer):
            self._place_beside(optimizer)
        elif self._state.scale is None:
            self._check_scale_growth_tracker(caller)
        elif self._needs_new_loss:
            raise CallOrderError(
                f"{caller}() was given gradients of a step in which load_state_dict() has replaced the loss scale; "
                "scale another loss, and call backward, before this step"
            )
        elif self.last_step.by_optimizer is not None:
            self._loss_is_optional = True
            warn_caller(
                "no loss was scaled since the last update(), so that gradients may be divided by a scale that their "
                "loss was not multiplied by; pass each loss through scaler.scale(loss), or, if gradients wait over an "
                "update() for the step of their optimizer, make the scaler with optimizers=[first, second]"
            )

    def _require_open(self, step: OptimizerStep, caller: str) -> None:
        """Raise an error if an optimizer cannot be unscaled or stepped any more."""
        unscales = caller.startswith("unscale_")
        if step["stage"] is UNSCALED and unscales:
            called = "unscale_() has already been called on this optimizer since the last update()."
            raise RuntimeError(f"{called}{_IF_INTERRUPTED}")
        if step.has_dropped and has_gradients(step.optimizer):
            raise CallOrderError(
                f"{caller}() was given gradients that are still scaled: those that unscale_() divided were dropped, "
                "and another loss was scaled since; end the first step by scaler.skip(optimizer) and scaler.update()"
            )
        if step["stage"] is STEPPED:
            stepped = "step() has already been called since the last update()."
            what = "unscale_() is being called after step()." if unscales else stepped
            raise RuntimeError(f"{what}{_IF_INTERRUPTED}")

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        gradients = Gradients([optimizer], allow_fp16)
        return gradients.check_and_multiply_(inv_scale, found_inf, is_one=inv_scale is self._state.one)

    def _check_gradients(self, step: OptimizerStep, kind: Kind) -> None:
        """Check gradients that are still scaled; the kernel of a fused optimizer divides them itself."""
        if step["stage"] is not READY or (kind is LEGACY and not self._has_ranks()):
            return
        if kind is not FUSED or self._needs_norm:
            self.unscale_(step.optimizer)
        else:
            if len(self._steps) > 1:
                self._steps.claim_gradients(step, self.policy)
            self._check_inf_per_device(step.optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """Check gradients that a kernel will divide."""
        if self._state.scale is None:
            self._check_scale_growth_tracker("_check_inf_per_device")
        flags = self._unscale_grads_(optimizer, self._state.one, torch.zeros_like(self._state.one), True)
        self._steps[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _unscales_as_torch(self) -> bool:
        """Return whether no subclass and no assignment to this scaler has replaced the way to unscale."""
        unscale, multiply = getattr(self.unscale_, "__func__", None), getattr(self._unscale_grads_, "__func__", None)
        return unscale is GradScaler.unscale_ and multiply is GradScaler._unscale_grads_

    def _has_ranks(self) -> bool:
        """Return whether several ranks may decide together."""
        ranks = self._ranks
        return ranks.process_group is not None or ranks.norm_group is not None or has_meshes()

    def _groups(self, optimizers: Sequence[Optimizer], *, of_norm: bool = False) -> "list[ProcessGroup]":
        """Return the groups of ranks that decide together about optimizers, or that have a norm together."""
        return self._ranks.groups(optimizers, of_norm=of_norm) if self._has_ranks() else []

    def _applied_by_flags(self, step: OptimizerStep, applied_by_all: bool | Tensor) -> bool | Tensor:
        """Return whether a kernel or a subclass has stepped an optimizer; it decides by the flags."""
        decision = None if is_capturing() else self._state.decision([step], may_read=False)
        if decision is not None:
            return not (decision[1] or decision[2])
        if len(self._steps) == 1:
            return applied_by_all
        return step.is_allowed(self._scale.device)

    def _update_disabled(self) -> StepInfo:
        """Return the outcome of a step that only `skip`, or a guarded optimizer by itself, can have left out."""
        applied: dict[int, bool | Tensor] = {}
        for key, step in self._steps.items():
            last = getattr(step.optimizer, "last_step", None)  # of a guarded optimizer
            applied[key] = bool(step.applied) and (last.applied if isinstance(last, StepInfo) else True)
        all_applied = functools.reduce(operator.and_, applied.values(), True)
        self.last_step = StepInfo(all_applied, 1.0, 1.0, 0, by_optimizer=applied)
        self._begin_step()
        return self.last_step

    def _end_step(self, info: StepInfo | None) -> None:
        """End a step, of which nothing is known if `info` is None: undo, log, drop it, and raise the first error."""
        errors = []
        try:
            ranks = self._ranks if self._has_ranks() else None
            for hook in (*self._undoing, *self._hooks, self._guard, self._watch, ranks):
                try:
                    if hook is not None and info is not None:
                        hook.after_update(self, info)
                    elif hook is not None:
                        hook.abandon(self)
                except BaseException as error:
                    errors.append(error)
        finally:
            self._begin_step()
        if errors:
            raise errors[0]

    def _abandon(self) -> None:
        """End a step that was left before its `update`, if there is one; hooks undo what they can."""
        if self._steps or self._losses:
            self._end_step(None)

    def _are_losses_finite(self) -> bool:
        """Return whether the losses that were scaled in this step are finite. Synchronises with the host, once."""
        flags = [torch.isfinite(loss).all() for loss in self._losses if loss is not None]
        return all(read_numbers(flags, self._scale.device)) if flags else True

    # Between steps.

    def place_on(self, device: torch.device | str) -> None:
        """Put the loss scale on a device without scaling a loss; otherwise the first `scale` does this.

        Call it where `scale` is never called: in a stage of a pipeline that receives its gradients from the last stage,
        or in a loop that multiplies its loss by `get_scale()` itself. The scaler then warns of no unscaled loss.
        """
        self._loss_is_optional = True
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    @not_compiled
    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Make the scale on a device; later calls, as Accelerate's, do nothing."""
        if self._state.scale is None:
            self._state.place(dev)

    def _place_beside(self, optimizer: Optimizer) -> None:
        self._lazy_init_scale_growth_tracker(next((param.device for param in params_of(optimizer)), self._device))

    @property
    def attach(self) -> "Attach":
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
        from lossscale_torch._extras._attach import Attach

        return Attach(self)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`.

        They are plain Python numbers if known on the host, else tensors of shape `()`. Does not synchronise.
        """
        guard = self._guard.first() if self._guard is not None else None
        return metrics(self._state.copies() if self._enabled else NoScaling().init_state(), guard=guard)

    def diagnose(self) -> str:
        """Describe the condition of the run in one or two sentences; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        guards = self._guard.states() if self._guard is not None else []
        worst = max(guards, key=lambda guard: (guard.streak, guard.spikes), default=None)
        answer = self._watch.diagnose(self.policy, self._state.on_host(), worst)
        if self._watch.has_bad_loss:
            answer += f" In the last step {BAD_LOSS}."
        return answer + "".join(f" The last update {FAULTS[event]}." for event in self._watch.faults)

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
        state = self._state.on_host()
        self._watch.log(self.policy, state)
        entries = saved(self.policy, state)
        for hook in self._saved_hooks():
            entries.update(hook.state_dict())
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`: this scaler's, torch's own (its five keys suffice), or another framework's state.

        A scaler without `policy=` takes over the checkpoint's factors and interval, as torch does. A scaler with
        `policy=` keeps its policy, and a `CheckpointWarning` names each difference. A state on a device is written in
        place, so that a recorded graph continues from it. A step that has begun is dropped: the next `scale` begins
        another one, and `step` raises `CallOrderError` before it.

        Raises:
            RuntimeError: torch's, for an empty dict.
            CheckpointError: For a dict of something else, which is torch's `KeyError`, too, for a newer version, and
                for a value that no state can hold.
        """
        if not self._enabled:
            return
        policy, state = restored(state_dict, self.policy, self._follows_checkpoint)
        # Captured losses are None: each replay scales them again.
        self._needs_new_loss |= bool(self._losses) and self._losses[-1] is not None
        self._abandon()
        with self._loading(state_dict, self._saved_hooks()):
            self._load(state, policy)
            self.policy = policy

    def _load(self, state: ScaleState, policy: ScalingPolicy) -> None:
        """Continue from a state; the gradients that wait follow its scale."""
        before = self.get_scale() if self._waiting.optimizers and self._scale is not None else None
        self._state.load(state, policy)
        if before is not None:
            self._waiting.rescale(self, state[0].item() / before)

    def _saved_hooks(self) -> list[Hook]:
        return [*self._hooks, *([self._guard] if self._guard is not None else []), self._watch]

    @contextlib.contextmanager
    def _loading(self, state_dict: Mapping[str, Any], hooks: Iterable[Hook]) -> Iterator[None]:
        """Load hooks; take that back if this, or what is done within the context, raises an error."""
        loaded: list[tuple[Hook, dict[str, Any]]] = []
        try:
            for hook in hooks:
                before = hook.state_dict()
                hook.load_state_dict(state_dict)
                loaded.append((hook, before))
            yield
        except BaseException:
            for hook, before in loaded:
                hook.load_state_dict(before)
            raise

    def __repr__(self) -> str:
        known = None if self._state.is_on_device() else self._state.scale_on_host()
        scale = f"on {self._scale.device}" if known is None else known
        return f"GradScaler(policy={self.policy!r}, loss_scale={scale}, enabled={self._enabled})"

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # raises within a step
        for name in ("_scale", "_growth_tracker", "_init_scale", "_init_growth_tracker"):
            state.pop(name, None)
        names = ("_state", "_hooks", "_guard", "_undoing", "_waiting", "_watch", "_ranks")
        if self._undoing:
            warn_caller(
                "a copy or a pickle of a scaler protects no modules and rescales no gradients; make a scaler with "
                "protect= or optimizers=, and pass it the state_dict() of this one"
            )
        own = copy.deepcopy({name: getattr(self, name) for name in names})
        return {**state, **own, "_mark": uuid.uuid4().hex, "_steps": OptimizerSteps(OptimizerStep), "_losses": []}


def _can_be_enabled(device: Any, enabled: bool, options: list[str]) -> bool:
    """Return whether a scaler for a device type is enabled; without CUDA torch disables one, and says what is off."""
    if not isinstance(device, str | torch.device):
        meant = f"init_scale={device!r}" if isinstance(device, int | float) else "policy=..."
        raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; write GradScaler('cuda', {meant})")
    if enabled and str(device) == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
        turned_off = ", ".join(f"{name}=" for name in options)
        hint = f"  This turns {turned_off} off, too; pass the device that computes, as in GradScaler('cpu')"
        warn_caller(
            f"torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.{hint if options else ''}"
        )
        return False
    return enabled

"""`GradScaler`: torch's scaler with any policy, the outcome of each step, and hooks.

Each fact has one owner. A `ScalerState` holds the loss scale, the growth tracker and the counters. An `OptimizerStep`,
the record of an optimizer, holds its flags and its stage. `policy` is the rule that changes the loss scale.
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
from lossscale_torch._checkpoint import (
    DEFAULTS,
    check_new_scale,
    checkpoint_entries,
    choose_policy,
    policy_setting,
    read_checkpoint,
)
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
"""The largest number of losses per step that the scaler keeps, to find the cause of an overflow."""
_IF_INTERRUPTED = " If that step was interrupted, end it by scaler.update()."
_LEGACY_WARNING = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)
Losses = TypeVar("Losses", bound=Tensor | list[Any] | tuple[Any, ...] | dict[Any, Any])
Loss = TypeVar("Loss")


def _state_property(name: str) -> Any:
    """Return a property that reads and writes an attribute of the scaler's state under torch's name."""
    return property(operator.attrgetter(f"_state.{name}"), lambda self, value: setattr(self._state, name, value))


class GradScaler(torch.cuda.amp.GradScaler):  # other packages test for this subclass of torch.amp.GradScaler, too
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

    An ordinary optimizer costs one host synchronisation per step, in the clip or in `step`, and a second one after an
    overflow. A fused optimizer (`fused=True`), which unscales and checks the flag in its own kernel, costs none.

    Args:
        device: The device type of the loss scale, such as `"cuda"`. The first scaled loss determines the device.
        init_scale: The first loss scale, between 2**-126 and 2**126. This argument and the next three are torch's.
        growth_factor: The factor that multiplies the loss scale after `growth_interval` finite steps in a row.
        backoff_factor: The factor that multiplies the loss scale after an overflow.
        growth_interval: The number of finite steps in a row before the scale grows. With 0 the scale does not grow, as
            in torch.
        enabled: Whether the scaler is active. If False, training runs as without a scaler.
        policy: A value that `lossscale_core.as_policy` accepts, instead of torch's four arguments.
        process_group: The group of ranks that decide together: if a gradient overflows on one rank, all of them skip
            the step. Parameters that are sharded over a device mesh do not need this argument.
        norm_group: A group of ranks with different parameters, such as the stages of a pipeline. These ranks decide
            together, and the gradient norm includes the gradients of all of them.
        half_gradients: Whether to accept float16 gradients. Unscaling them in place may flush small values to zero; by
            default `unscale_` raises `ValueError`.
        guard: A `SpikeGuard`. It skips the step of an optimizer if the gradient norm is far above the earlier norms.
            The loss scale and its counters do not change.
        protect: A module or several. A skipped step restores their buffers, such as BatchNorm's statistics.
        optimizers: Optimizers that may keep their gradients over an `update`, because they step at different batches,
            or because an `update` follows the step of each optimizer, as under Accelerate and Lightning. If the loss
            scale changes, the scaler multiplies these gradients to match it.
        hooks: Objects of `lossscale_torch.hooks.Hook`. Ranks that decide together must have the same hooks.

    Raises:
        PolicyError: For `policy` together with torch's arguments, for a setting that breaks a rule, and for two guards.
        TypeError: For a `device` that does not name a device.
    """

    last_step: StepInfo
    """The outcome of the last `update`, for programs in which a framework calls `update`.

    Before the first `update`, it describes a step that was not applied.
    """
    _policy: ScalingPolicy

    # torch's attributes. Other packages read and write them.
    _per_optimizer_states = property(operator.attrgetter("_steps"), lambda self, records: self._use_records(records))
    _scale, _growth_tracker = _state_property("scale"), _state_property("tracker")
    _init_scale, _init_growth_tracker = _state_property("init_scale"), _state_property("init_tracker")
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
        protects = isinstance(protect, Module) or bool(protect)  # a module such as Sequential() may be falsy
        options = {"policy": policy, "guard": guard, "protect": protects, "optimizers": optimizers, "hooks": hooks}
        enabled = _can_be_enabled(device, enabled, [name for name, value in options.items() if value])
        torch_args = dict(zip(DEFAULTS, (init_scale, growth_factor, backoff_factor, growth_interval), strict=True))
        self._state = ScalerState(NoScaling().init_state())
        with contextlib.suppress(TypeError):  # for a factor that is not a number; `choose_policy` raises a clear error
            settings: dict[str, Any] = torch_args if policy is None else {}
            TorchScaler.__init__(self, device, enabled=enabled, **settings)  # torch.cuda.amp's would warn
        self._policy = choose_policy(policy, torch_args) if enabled or policy is not None else DynamicScaling()
        self._follows_checkpoint = policy is None
        self._state.load(self._policy.init_state(), self._policy)
        self._waiting = Waiting(optimizers if enabled else ())
        for optimizer in self._waiting.optimizers:
            require_optimizer(optimizer, "GradScaler")
        # True if a step needs no scaled loss: with `optimizers=`; after `place_on`, a warning or a captured loss.
        self._loss_is_optional = bool(self._waiting.optimizers)
        self._needs_new_loss = False  # True between `load_state_dict` in the middle of a step and the next loss
        self._half_gradients = half_gradients
        self._mark = uuid.uuid4().hex  # marks the losses of this scaler; a string, so that a marked tensor can be saved
        self._hooks, self._guard = require_hooks(hooks, guard)
        self._needs_norm = self._guard is not None or any(hook.needs_norm for hook in self._hooks)
        self._undoing: list[Hook] = [self._waiting] if self._waiting.optimizers else []
        if protects and enabled:
            self._undoing.append(Protect(protect))
        self._ranks, self._watch = SameOnRanks(process_group, norm_group), Watch()
        self.last_step = StepInfo(False, self._init_scale, self._init_scale, 0)
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget the losses and the records of the last step."""
        self._is_dropped = False  # True if `load_state_dict` has dropped a step that `update` must still end
        self._losses: list[Tensor | None] = []
        self._steps = OptimizerSteps(OptimizerStep)

    def _use_records(self, records: Mapping[int, dict[str, Any]]) -> None:
        """Replace the records, as other packages do. `records` may hold torch's plain dicts."""
        self._steps = OptimizerSteps(OptimizerStep)
        for key, record in records.items():
            self._steps[key] = record

    def _follow(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._state.follow(policy)

    policy: ScalingPolicy = property(operator.attrgetter("_policy"), _follow)  # type: ignore[assignment]
    """The scaling policy, which is immutable. Assign another policy to replace it, as torch's setters do."""

    # The methods of a step, in the order of their calls.

    @overload
    def scale(self, outputs: Losses) -> Losses: ...
    @overload
    def scale(self, outputs: Iterable[Loss]) -> Iterable[Loss]: ...
    @not_compiled
    def scale(self, outputs: Any) -> Any:
        """Multiply one or more losses by the loss scale, and return the products.

        Call `backward` on the result before the next `update`. After an `update` that changes the scale, `backward`
        raises `RuntimeError`; if a fused optimizer has stepped on a device, `backward` raises it after every
        `update`. Does not synchronise.

        Args:
            outputs: A tensor of any shape, or a nested structure or an iterable of tensors.

        Returns:
            The same structure. float16 and bfloat16 tensors become float32; other dtypes stay.

        Raises:
            CallOrderError: This scaler has already scaled the loss.
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
        if isinstance(outputs, dict | list | tuple):  # not by `self.scale`: a subclass expects one call
            return tree.map_leaves(lambda leaf: GradScaler.scale(self, leaf), outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)  # an iterator, as torch's scaler returns
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors. It is {describe(outputs)}; pass the loss as a "
            "tensor, before .item()"
        )

    @not_compiled
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and record whether they are finite.

        If no parameter has a gradient, the call has no effect. Does not synchronise.

        Raises:
            RuntimeError: For a second call for an optimizer between two updates, and for a call after its `step`.
            ValueError: For float16 gradients without `half_gradients`.
            TypeError: For an argument that is not an optimizer, and for gradients in a layout such as CSR.
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
        groups = self._ranks.groups([optimizer], of_norm=True) if self._needs_norm else []
        step.has_divided, step.has_dropped = bool(flags), False
        if groups and not flags:  # `total_norm` is a collective call, also for a rank without gradients
            flags = {scale.device: flag}
        step["found_inf_per_device"], step["stage"] = flags, UNSCALED if flags else READY
        if self._needs_norm and flags:
            step.norm = total_norm(self, optimizer, groups)

    @not_compiled
    def unscale_and_clip_(
        self, optimizer: Optimizer | list[Any] | tuple[Any, ...], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale the gradients of an optimizer and clip their total norm, with one read and one multiplication.

        Call it instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`. If parameters are sharded over a device
        mesh, the norm includes the shards of all ranks, and every rank of the mesh must make this call. If the call
        raises an error, the gradients are unchanged, unless a subclass has overridden `unscale_`. A disabled scaler
        only clips.

        Synchronises with the host once for an ordinary optimizer, and a second time if the norm is tiny or not finite,
        to compute it in float64. Does not synchronise for a fused optimizer on a CUDA device.

        Args:
            optimizer: An optimizer, or a list of optimizers to clip by the norm of all their gradients together. An
                overflow in one of them then skips all their steps.
            max_norm: The largest norm after clipping, in units of the unscaled gradients.
            norm_type: The order of the norm: above 0, `math.inf` included.

        Returns:
            The norm of the unscaled gradients before clipping: shape `()`, float32, or float64 if a gradient is
            float64. If a gradient is not finite, neither is the norm, and `step` skips the step. The norm is also
            infinite if the powers of finite gradients overflow float64 (float32 on a device without float64); the
            gradients are then clipped to 0, as by torch.

        Raises:
            PolicyError: For a `max_norm` or a `norm_type` that is not a number, or that is out of range.
            ValueError: For an empty list.
            TypeError: For an argument that is not an optimizer.
        """
        return clip(self, list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer], max_norm, norm_type)

    @not_compiled
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` if the gradients are finite on every rank, else skip the step.

        Unscales the gradients first if `unscale_` was not called. The step of a fused optimizer is always called, and
        its kernel skips the update of the parameters if the flag is set. The step of an optimizer without gradients is
        called, too. Synchronises with the host once; for a fused optimizer, does not synchronise.

        Returns:
            The return value of the optimizer's `step`; None if the scaler skipped it.

        Raises:
            RuntimeError: For a closure, and for a second call for an optimizer between two updates.
            TypeError: For an argument that is not an optimizer.
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

        # Decide about the step. The guard comes last, since it needs the norm over all ranks.
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
        """Step an ordinary optimizer if no flag is set. Waits for the flags, unless the host knows them."""
        step = optimizer_state if isinstance(optimizer_state, OptimizerStep) else OptimizerStep(optimizer_state)
        decision = self._state.decision([step], may_read=True)
        step.applied = decision is not None and not (decision[1] or decision[2])
        return optimizer.step(*args, **kwargs) if step.applied else None

    def _step_fused(self, optimizer: Any, step: OptimizerStep, *args: Any, **kwargs: Any) -> Any:
        """Step a fused optimizer, which reads the attributes `grad_scale` and `found_inf`, as under torch's scaler.

        Its kernel divides the gradients by `grad_scale`, and skips the step if `found_inf` is 1.0. If the user has set
        a `grad_scale` before, the kernel divides by the product.
        """
        factor = self._scale if step["stage"] is READY else step.divisor
        # After an interrupted step, the optimizer still has `found_inf`, and `grad_scale` may come from that step.
        is_left_over = getattr(optimizer, "found_inf", None) is not None
        preset = None if is_left_over else getattr(optimizer, "grad_scale", None)
        if preset is not None:
            factor = preset if factor is None else factor * preset
        flag = combine(step.flags.values(), self._scale.device)
        # The kernel skips at 1.0 only. `ne` is true for NaN, too.
        found_inf: Any = torch.ne(flag, 0.0, out=torch.empty_like(flag, dtype=torch.float32))
        found_inf.from_lossscale = True  # for a guarded optimizer, if an interrupted step leaves this flag
        old_states = len(getattr(optimizer, "state", ()))
        try:
            # `found_inf` is set first and deleted last, so that an interrupted step cannot leave `grad_scale` alone.
            optimizer.found_inf, optimizer.grad_scale = found_inf, factor
            result = optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
        if len(getattr(optimizer, "state", ())) > old_states:
            # torch's fused SGD allocates the momentum of its first step without initialising it. If the kernel skips
            # that step, the momentum must be 0.
            for state in [*optimizer.state.values()][old_states:]:
                momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
                if momentum is not None:
                    momentum.copy_(torch.where(to_device(found_inf, momentum.device) == 0.0, momentum, 0.0))
        return result

    def skip(self, optimizer: Optimizer) -> None:
        """Skip the step of an optimizer for a reason of your own. Call it instead of `step`, and then call `update`.

        `update` then returns an outcome with `applied` False. If the gradients were unscaled, `update` counts the step,
        and an overflow lowers the loss scale; otherwise it does not count the step. If ranks decide together, all of
        them skip the step when one of them calls `skip`; after `unscale_and_clip_`, every rank must call `skip`. Does
        not synchronise. Raises `RuntimeError` after `step`.
        """
        step = self._open(optimizer, "skip")
        if step.is_done or (not self._enabled and step.applied):  # the optimizer has stepped already
            return
        if self._enabled and self._ranks.groups([optimizer]):  # make the same collective calls as the ranks that step
            if self._state.scale is None:
                self._place_on_device_of(optimizer)
            self._check_gradients(step, kind_of(optimizer))
            step.applied = False
            step.store_veto(True, self._ranks)
            self._ranks.before_step(self, step)
        step["stage"], step.applied = STEPPED, False

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale after the steps since the last update, and return their outcome.

        Does not synchronise after the step of a fused optimizer on a device: the fields of the result stay on the
        device until you read them. With an ordinary optimizer, synchronises only after an overflow, to read the losses.

        Args:
            new_scale: A new loss scale, instead of the update by the policy: a positive number, or a float32 tensor of
                one element. A value beyond the policy's bounds becomes the nearest bound, with a warning if the host
                knows the value. A tensor on a device is not read; if it is NaN or not positive, the scale stays.

        Returns:
            A `StepInfo`. `applied` is True if the steps of all optimizers were applied; `applied_of(optimizer)` is the
            outcome for one optimizer.

        Raises:
            AssertionError: If no optimizer was unscaled, stepped or skipped since the last update, if no loss was
                scaled yet, and for a `new_scale` that is not a positive number.
            OverflowStreakError: If the host knows that the streak has reached the policy's `max_overflow_streak` or the
                guard's `max_streak`.
        """
        if not self._enabled:
            return self._update_disabled()
        records = self._waiting.leave_out(self._steps) if self._waiting.optimizers else self._steps
        state, steps, has_record, may_read = self._state, records.values(), False, False
        for step in steps:
            has_record = has_record or step.has_begun
            may_read = may_read or step.kind is PLAIN
        if state.scale is None and (new_scale is not None or not has_record):
            self._check_scale_growth_tracker("update")
        if new_scale is not None:
            new_scale = check_new_scale(new_scale, self._device, self.policy)
        elif not (has_record or self._is_dropped):
            raise AssertionError("No inf checks were recorded prior to update.")
        info = None
        try:
            # Update the scale by the flags. Do not read flags that a graph is capturing.
            decision = None
            if may_read or not is_capturing() or not any(step.flags or step.may_have_stepped for step in steps):
                decision = state.decision(steps, may_read)
            had_gradients = bool(flags_of(steps, vetoes=False)) if decision is None else decision[0]
            outcome = state.advance(self._policy, steps, decision, had_gradients and new_scale is None)
            applied, used, after, streak, overflowed, spiked = outcome
            applied = applied if has_record else False
            if new_scale is not None:
                after = state.change_scale(new_scale, self.policy)

            # Find out for each optimizer whether its step was applied.
            by_optimizer: dict[int, bool | Tensor] = {}
            for key, step in records.items():
                if not step.has_begun:
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
        """Return a loop that repeats a step at the lower loss scale while its gradients overflow.

        ```python
        for attempt in scaler.attempts(model, retries=8):
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
        if attempt.info:
            scheduler.step()
        ```

        The body is a whole step: all its micro-batches and one `update`. Put code for applied steps, such as a
        schedule, after the loop. Before another try, the loop restores the buffers of `modules` and the random states
        of Python, NumPy, the CPU and all devices in use. It sets the gradients of the optimizers that took part to
        None. It restores the gradients of `optimizers=`, multiplied to match the current scale. It does not restore
        Python attributes and generators of your own. Parameters need no restoring, since a skipped step does not change
        them.

        The loop ends
        - if the step was applied, or skipped for another reason than an overflow,
        - if the loss is NaN or infinite (with several ranks only if they decide together, by `process_group=` or
          sharded parameters, since all ranks must take the same tries),
        - if the policy does not adapt the scale, or if the scale is at its minimum, and after `retries` retries. If the
          step still overflows, the loop warns, and the loss scale becomes the scale after the first try.

        If the program leaves the body before `update`, the step is dropped. If ranks hold different parameters, pass
        `process_group=`. Synchronises once per try after the step of a fused optimizer.

        Args:
            modules: The modules with buffers to restore, such as BatchNorm's statistics.
            retries: The largest number of repetitions.
            raise_at_end: Whether to raise `RetriesExhaustedError` instead of warning if all tries overflowed.

        Raises:
            CallOrderError: For a body that does not call `update` once, and for a loop within another loop of the same
                scaler.
            PolicyError: For `retries` that is not a whole number of at least 0.
            TypeError: For an argument that is not a module.
        """
        from lossscale_torch._extras._attempts import attempts

        return attempts(self, modules, retries, raise_at_end)

    def optimizer_steps(self) -> list[OptimizerStep]:
        """Return the records of the optimizers since the last update, in the order of their first calls.

        A hook can read the attributes `optimizer` and `flags` of the records.
        """
        return list(self._steps.values())

    # Parts of a step.

    def _note_loss(self, loss: Tensor) -> None:
        """Store a loss of this step, and update the records for the gradients that its backward pass will add."""
        self._needs_new_loss, is_captured = False, is_capturing()
        self._loss_is_optional = self._loss_is_optional or is_captured  # a replay scales losses without this call
        if len(self._losses) < _MAX_LOSSES:
            value = None
            if not (is_captured or is_dtensor(loss) or _are_functorch_transforms_active()):
                # A view would keep the memory of its base.
                value = loss.detach().clone() if loss._is_view() else loss.detach()
            self._losses.append(value)
        for step in self._steps.values():
            if step["stage"] is STEPPED:
                step.has_divided = False  # the new gradients will be scaled
            elif step.has_divided and not has_gradients(step.optimizer):
                step.has_divided, step.has_dropped = False, True

    def _open(self, optimizer: Optimizer, caller: str) -> OptimizerStep:
        """Return the record of an optimizer, or make it. Raises torch's errors for a call in the wrong order."""
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
                f"{caller}() was given a {type(optimizer).__name__}, which does not use a loss scale; use either the "
                "scaler or guarded(), since both skip bad steps"
            )
        if step["stage"] is not READY:
            self._require_open(step, caller)
        return step

    def _require_loss(self, optimizer: Optimizer, caller: str) -> None:
        """Raise or warn if no loss was scaled since the last update. An optimizer without gradients may step."""
        if not has_gradients(optimizer):
            self._place_on_device_of(optimizer)
        elif self._state.scale is None:
            self._check_scale_growth_tracker(caller)
        elif self._needs_new_loss and not self._waiting.has(optimizer):
            raise CallOrderError(
                f"{caller}() was given gradients of a step in which load_state_dict() has replaced the loss scale; "
                "scale another loss, and call backward, before this step"
            )
        elif not self._loss_is_optional and self.last_step.by_optimizer is not None:
            self._loss_is_optional = True
            warn_caller(
                "no loss was scaled since the last update(), so that gradients may be divided by a scale that their "
                "loss was not multiplied by; pass each loss through scaler.scale(loss), or, if gradients wait over an "
                "update() for the step of their optimizer, make the scaler with optimizers=[first, second]"
            )

    def _require_open(self, step: OptimizerStep, caller: str) -> None:
        """Raise an error if the stage of a record does not allow this call."""
        unscales = caller.startswith("unscale_")
        if step["stage"] is UNSCALED and unscales:
            called = "unscale_() has already been called on this optimizer since the last update()."
            raise RuntimeError(f"{called}{_IF_INTERRUPTED}")
        if step.has_dropped and has_gradients(step.optimizer):
            raise CallOrderError(
                f"{caller}() was given gradients that are still scaled: the program dropped the gradients that "
                "unscale_() had divided, and scaled another loss; end the first step by scaler.skip(optimizer) and "
                "scaler.update()"
            )
        if step["stage"] is STEPPED:
            stepped = "step() has already been called since the last update()."
            what = "unscale_() is being called after step()." if unscales else stepped
            raise RuntimeError(f"{what}{_IF_INTERRUPTED}")

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        gradients = Gradients([optimizer], allow_fp16)
        return gradients.check_and_multiply_(inv_scale, found_inf, is_one=inv_scale is self._state.unit)

    def _check_gradients(self, step: OptimizerStep, kind: Kind) -> None:
        """Unscale and check the gradients, unless this was done. For a fused optimizer, only check them."""
        if step["stage"] is not READY or (kind is LEGACY and not self._has_ranks()):
            return
        if kind is not FUSED or self._needs_norm:
            self.unscale_(step.optimizer)
        else:
            if len(self._steps) > 1:
                self._steps.claim_gradients(step, self.policy)
            self._check_inf_per_device(step.optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """Check the gradients of an optimizer without unscaling them, and return the flags by device."""
        if self._state.scale is None:
            self._check_scale_growth_tracker("_check_inf_per_device")
        flags = self._unscale_grads_(optimizer, self._state.unit, torch.zeros_like(self._state.unit), True)
        self._steps[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _has_original_unscale(self) -> bool:
        """Return whether neither a subclass nor an assignment has replaced `unscale_` or `_unscale_grads_`."""
        unscale, multiply = getattr(self.unscale_, "__func__", None), getattr(self._unscale_grads_, "__func__", None)
        return unscale is GradScaler.unscale_ and multiply is GradScaler._unscale_grads_

    def _has_ranks(self) -> bool:
        """Return whether several ranks may decide together. False is certain; True may also mean a single rank."""
        ranks = self._ranks
        return ranks.process_group is not None or ranks.norm_group is not None or has_meshes()

    def _applied_by_flags(self, step: OptimizerStep, applied_by_all: bool | Tensor) -> bool | Tensor:
        """Return whether the step of an optimizer was applied, if its kernel or a subclass decided by the flags."""
        decision = None if is_capturing() else self._state.decision([step], may_read=False)
        if decision is not None:
            return not (decision[1] or decision[2])
        if len(self._steps) == 1:
            return applied_by_all
        return step.is_allowed(self._scale.device)

    def _update_disabled(self) -> StepInfo:
        """Return the outcome of a step of a disabled scaler. Only `skip` and guarded optimizers skip such a step."""
        applied: dict[int, bool | Tensor] = {}
        for key, step in self._steps.items():
            last = getattr(step.optimizer, "last_step", None)  # a `StepInfo` if the optimizer is guarded
            applied[key] = bool(step.applied) and (last.applied if isinstance(last, StepInfo) else True)
        all_applied = functools.reduce(operator.and_, applied.values(), True)
        self.last_step = StepInfo(all_applied, 1.0, 1.0, 0, by_optimizer=applied)
        self._begin_step()
        return self.last_step

    def _end_step(self, info: StepInfo | None) -> None:
        """Call all hooks at the end of a step, and begin the next step. Then raise the first error of a hook.

        `info` is the outcome of the step, or None if the step was abandoned.
        """
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
        """End a step that the program has left before its `update`. Without such a step, do nothing."""
        if self._steps or self._losses:
            self._end_step(None)

    def _are_losses_finite(self) -> bool:
        """Return whether the losses of this step are finite. Synchronises with the host once."""
        flags = [torch.isfinite(loss).all() for loss in self._losses if loss is not None]
        return all(read_numbers(flags, self._scale.device)) if flags else True

    # Between steps.

    def place_on(self, device: torch.device | str) -> None:
        """Make the tensor of the loss scale on a device before a loss is scaled.

        Call it if the program does not call `scale`: in a stage of a pipeline that receives its gradients from another
        stage, or in a loop that multiplies the loss by `get_scale()`. The scaler then does not warn of steps without a
        scaled loss.
        """
        self._loss_is_optional = True
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    @not_compiled
    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Make the tensor of the loss scale, unless it exists. Packages such as Accelerate call this method again."""
        if self._state.scale is None:
            self._state.place(dev)

    def _place_on_device_of(self, optimizer: Optimizer) -> None:
        self._lazy_init_scale_growth_tracker(next((param.device for param in params_of(optimizer)), self._device))

    @property
    def attach(self) -> "Attach":
        """A function that attaches an auxiliary loss, such as a router loss, to an activation of the model.

        `attach(x, aux_loss)` returns `x`, and its backward pass adds the gradients of `aux_loss.sum()` times the loss
        scale. The total gradients are the gradients of `scale(loss + aux_loss.sum())`. Pass `attach=scaler.attach` to
        the layer that computes the loss; a copy of the layer shares the scaler.

        - `x` is a floating-point tensor of any shape and dtype on the path from the parameters to the main loss. The
          result has the same values, shape and dtype, and cannot be changed in place.
        - `aux_loss` is a floating-point tensor of any shape. Weight it as you weight the main loss, since `attach` does
          not divide by the number of tokens, ranks or micro-batches. Compute it in float32: float16 gradients are
          infinite at a scale of 2**16 or more. Its sum is computed in float32 or float64.
        - Other arguments raise `TypeError`.

        The backward pass reads the loss scale when it runs. Each backward pass through the result counts the loss, so
        that two passes count it twice, and so does `torch.autograd.grad` for a penalty. If the result is discarded or
        detached, the loss has no effect. The backward pass warns if this scaler has not scaled a loss in this step,
        since the main loss may then have another scale. Compiled code, replayed graphs and disabled scalers do not
        warn.

        Does not synchronise. Can be compiled; with `fullgraph=True`, call `place_on` before.
        """
        from lossscale_torch._extras._attach import Attach

        return Attach(self)

    def metrics(self) -> dict[str, Any]:
        """Return the numbers of the state by stable names; see `lossscale_core.metrics`.

        The values are Python numbers if the host knows them, else tensors of shape `()`. Does not synchronise.
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
        """Raise `SyncError` if the state of a rank differs from rank 0's. The error names these ranks.

        The state includes the entries of hooks. Every rank of `process_group`, or without it every rank, must make this
        call. Call it once after loading: a rank with another loss scale would skip other steps. A rank that is not in
        `process_group` gets a `SyncError`, too. Synchronises with the host.
        """
        self._ranks.require_same(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler as plain values: torch's five keys and the keys of `state_to_dict`.

        Torch's scaler can load the dict. Other frameworks load it by `lossscale_core.state_from_dict`. With a policy
        class of your own, the dict does not have torch's keys, since torch's scaler has no such rule. The dict of a
        disabled scaler is empty. Synchronises with the host.
        """
        if not self._enabled:
            return {}
        state = self._state.on_host()
        self._watch.log(self.policy, state)
        entries = checkpoint_entries(self.policy, state)
        for hook in self._hooks_with_state():
            entries.update(hook.state_dict())
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict of this class, of torch's scaler, or of another framework.

        A scaler without `policy=` adopts the factors and the interval of the checkpoint, as torch's scaler does. A
        scaler with `policy=` keeps its policy, and a `CheckpointWarning` names each difference. A state on a device is
        changed in place, so that captured graphs use it. A step that has begun is dropped: its `update` changes
        nothing, and `step` raises `CallOrderError` until you scale another loss, except for `optimizers=`.

        Raises:
            RuntimeError: For an empty dict, as torch's scaler raises it.
            CheckpointError: For a dict that is not a checkpoint of a scaler (the error is then a `KeyError`, too, as
                torch's is), for a newer version, and for a value that a state cannot hold.
        """
        if not self._enabled:
            return
        policy, state = read_checkpoint(state_dict, self.policy, self._follows_checkpoint)
        # A loss of a captured graph is None here, and each replay scales it again.
        self._needs_new_loss |= bool(self._losses) and self._losses[-1] is not None
        is_dropped = self._is_dropped or any(step.has_begun for step in self._steps.values())
        self._abandon()
        self._is_dropped = is_dropped
        loaded: list[tuple[Hook, dict[str, Any]]] = []
        try:
            for hook in self._hooks_with_state():
                before = hook.state_dict()
                hook.load_state_dict(state_dict)
                loaded.append((hook, before))
            self._load(state, policy)
            self.policy = policy
        except BaseException:  # a state is loaded as a whole or not at all
            for hook, before in loaded:
                hook.load_state_dict(before)
            raise

    def _load(self, state: ScaleState, policy: ScalingPolicy) -> None:
        """Continue from a state, and multiply waiting gradients to match its scale."""
        before = self.get_scale() if self._waiting.optimizers and self._scale is not None else None
        self._state.load(state, policy)
        if before is not None:
            self._waiting.rescale(self, state[0].item() / before)

    def _hooks_with_state(self) -> list[Hook]:
        return [*self._hooks, *([self._guard] if self._guard is not None else []), self._watch]

    def __repr__(self) -> str:
        number = None if self._state.is_on_device() else self._state.scale_on_host()
        scale = f"on {self._scale.device}" if number is None else number
        return f"GradScaler(policy={self.policy!r}, loss_scale={scale}, enabled={self._enabled})"

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # raises between `step` and `update`
        for name in ("_scale", "_growth_tracker", "_init_scale", "_init_growth_tracker"):
            state.pop(name, None)
        names = ("_state", "_hooks", "_guard", "_undoing", "_waiting", "_watch", "_ranks")
        if self._undoing:
            warn_caller(
                "a copy or a pickle of a scaler protects no modules and rescales no gradients; make a scaler with "
                "protect= or optimizers=, and load the state_dict() of this scaler into it"
            )
        own = copy.deepcopy({name: getattr(self, name) for name in names})
        return {**state, **own, "_mark": uuid.uuid4().hex, "_steps": OptimizerSteps(OptimizerStep), "_losses": []}


def _can_be_enabled(device: Any, enabled: bool, options: list[str]) -> bool:
    """Return `enabled`; or warn and return False if CUDA is missing. The warning names `options`, the arguments."""
    if not isinstance(device, str | torch.device):
        argument = f"init_scale={device!r}" if isinstance(device, int | float) else "policy=..."
        raise TypeError(
            f"device={device!r} must name a device type, such as 'cuda'; write GradScaler('cuda', {argument})"
        )
    if enabled and str(device) == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
        unused = ", ".join(f"{name}=" for name in options)
        hint = f"  This turns {unused} off, too; pass the device that computes, as in GradScaler('cpu')"
        warn_caller(
            f"torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.{hint if options else ''}"
        )
        return False
    return enabled

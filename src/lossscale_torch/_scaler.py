"""`GradScaler`: torch's own interface around a policy, applying or skipping each optimizer's step as a whole."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lossscale_core import (
    OnFloor,
    PolicyLike,
    SpikeGuard,
    as_policy,
    check_overflow_streak,
    diagnose,
    metrics,
    state_to_dict,
    tree,
)
from lossscale_core.errors import PolicyError
from lossscale_torch import _clip
from lossscale_torch._checkpoint import given_interval, require_same_on_ranks, torch_policy, warn_if_resumed
from lossscale_torch._compiling import not_compiled
from lossscale_torch._decision import READY, STEPPED, OptimizerRecord, Ranks, known_on_host, outcome, require_member
from lossscale_torch._gradients import Gradients
from lossscale_torch._guard import Guards
from lossscale_torch._minimize import Minimization
from lossscale_torch._optimizers import is_fused, takes_factor, takes_scaler
from lossscale_torch._protect import protection_of
from lossscale_torch._records import OptimizerRecords
from lossscale_torch._state import ScalerState, plain
from lossscale_torch._step_info import StepInfo, with_optimizers
from lossscale_torch._stepping import step_by_itself, step_fused
from lossscale_torch._torch_names import TorchNames
from lossscale_torch._types import Tree
from lossscale_torch._unscaling import check, unscale
from lossscale_torch._voice import Voice

_TORCH_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)
_HOOKS = frozenset(("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step"))


class GradScaler(TorchNames):
    """A drop-in for `torch.amp.GradScaler` that takes any policy and says what each step did.

    ```python
    scaler = GradScaler("cuda", policy="dynamic")
    scaler.scale(loss).backward()
    scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # if you clip
    scaler.step(optimizer)
    info = scaler.update()
    if info.applied:
        scheduler.step()
    ```

    An ordinary optimizer costs one host synchronisation a step, in `step`; a fused one costs none.

    Args:
        device: The device type of the loss scale, such as `"cuda"`; it is placed where the first scaled loss lives.
        init_scale: torch's dynamic rule without `policy`: the first loss scale, kept between 2**-126 and 2**126.
        growth_factor: Multiplies the loss scale after `growth_interval` finite steps in a row.
        backoff_factor: Multiplies it after an overflow.
        growth_interval: The finite steps in a row before it grows; 0 never grows, as in torch.
        enabled: False makes every call do what it would do without a scaler.
        policy: Anything `lossscale_core.as_policy` takes, in the place of the four settings.
        process_group: Combines the decision over its ranks before anyone acts on it. Parameters sharded over a device
            mesh do so by themselves.
        joint_skip: An overflow in one optimizer skips all of them; call `unscale_` on each before the first `step`.
        half_gradients: Unscale float16 gradients in place, which may flush small ones to zero; otherwise they are
            refused.
        guard: A `SpikeGuard` that skips the step of an optimizer whose norm is far above its norms before, which the
            clip, or `unscale_` or `step` without one, measures. A spike leaves the loss scale and its counters alone.
        on_floor: What an overflow does that brings the loss scale down to the policy's `min_scale`: `"warn"` logs a
            warning, `"raise"` makes `update` raise a `ScaleFloorError` (after a fused optimizer, whose flag stays on
            its device, `get_scale`), and `"ignore"` says nothing while the scale is there.
        protect: Modules whose buffers a skipped step leaves as they were, such as BatchNorm's statistics. For a
            `torch.optim.swa_utils.AveragedModel`, `update_parameters` does nothing after a skipped step. The hooks end
            with the scaler; a copy or a pickle of it protects nothing.

    Raises:
        PolicyError: For `policy` beside torch's settings, and for settings that no policy takes.
        TypeError: For a `device` that is not one.

    """

    _replaced: frozenset[str] = frozenset()
    """The methods among `_HOOKS` that a subclass has replaced."""

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
        joint_skip: bool = False,
        half_gradients: bool = False,
        guard: SpikeGuard | None = None,
        on_floor: OnFloor = "warn",
        protect: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._device = device
        self._enabled = enabled and _is_available(device)
        self._follows_checkpoint = policy is None
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device={device!r} must name a device type, such as 'cuda'; a policy goes to policy=")
        if policy is not None and (init_scale, growth_factor, backoff_factor, growth_interval) != _TORCH_DEFAULTS:
            raise PolicyError(
                "pass either policy= or init_scale, growth_factor, backoff_factor and growth_interval, not both"
            )
        if policy is None:
            policy = torch_policy(init_scale, growth_factor, backoff_factor, growth_interval, self._enabled)
            self._interval_as_given = given_interval(growth_interval, policy)
        self._state = ScalerState(as_policy(policy))
        self._voice = Voice(on_floor)
        self._begun_with = (self._state.read_loss_scale(), 0)
        self._records = OptimizerRecords(self._state, Ranks(process_group), joint_skip, Guards(guard))
        self._half_gradients = half_gradients
        self._has_begun = False  # whether a step was taken, or a state loaded
        self._had_no_gradients = False
        self._skipped: set[int] = set()  # while disabled: the optimizers that `skip` named since the last update
        self._last_step: StepInfo | None = None
        self._protection = protection_of(protect if self._enabled else ())

    @not_compiled
    def scale(self, outputs: Tree) -> Tree:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        float16 and bfloat16 losses of any shape are lifted to float32. Call `backward` before the next `update`.
        Does not synchronise.

        Raises:
            RuntimeError: From `backward` after the next `update`, as with torch's own scaler.
            ValueError: For what is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._state.loss_scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return self._records.losses.scale(outputs)  # type: ignore[return-value]  # cast() costs a call
        if isinstance(outputs, dict | list | tuple):
            return cast(Tree, tree.map_leaves(self.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return cast(Tree, map(self.scale, outputs))
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and note whether they are finite.

        An optimizer without gradients stays as it is. Does not synchronise.

        Raises:
            RuntimeError: When called twice for an optimizer between two updates, or after its `step`.
            ValueError: For float16 gradients without `half_gradients`, expanded and float8 gradients.

        """
        if self._enabled:
            self._unscale_and_judge(optimizer, self._record_to_unscale(optimizer, "unscale_"), self._hooks())

    @not_compiled
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer | list[Any] | tuple[Any, ...],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply.

        In place of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The read that yields the norm proves the gradients
        finite; where they are not, neither is the norm, the gradients stay as they are and the step will be skipped.
        Synchronises with the host once for an ordinary optimizer, for a fused one on a CUDA device only if
        `error_if_nonfinite`. The norm of parameters on device meshes is that of all ranks; norm and decision take one
        collective for each mesh, and every rank of it must call. Disabled, it clips.

        Args:
            optimizer: One, or several to clip by the norm of all their gradients together; then an overflow in one of
                them skips all of them.
            max_norm: The largest norm to leave, in units of the unscaled gradients.
            norm_type: The order of the norm.
            error_if_nonfinite: Raise `RuntimeError` for a norm that is not finite.

        Returns:
            The norm of the unscaled gradients before clipping: shape `()`, float32, or float64 where a gradient is.

        Raises:
            ValueError: For a `max_norm` that is not a number from 0, and for an empty list.

        """
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
        return self._clip(optimizers, _clip.clipping(max_norm, norm_type, error_if_nonfinite), "unscale_and_clip_")

    @not_compiled
    def clip_and_step(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Unscale an optimizer's gradients, clip their total norm and step; return the norm before clipping.

        As `unscale_and_clip_` and `step`, and cheaper for a fused optimizer: its kernel multiplies the gradients while
        it reads them. Call `update` afterwards. Synchronises with the host once for an ordinary optimizer, for a fused
        one on a CUDA device not at all.
        """
        how = _clip.clipping(max_norm, norm_type)
        norm = self._clip([optimizer], how, "clip_and_step", may_defer=True)
        self.step(optimizer)
        return norm

    @not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` where the gradients are finite on every rank; else skip it.

        Unscales first if `unscale_` was not called. A fused optimizer is always called, with the flag, and skips by
        itself; an optimizer without gradients has nothing to skip. Synchronises with the host once, for a fused
        optimizer not at all.

        Returns:
            What the optimizer returned; None where the step was skipped.

        Raises:
            RuntimeError: For a closure, and when called twice between two updates.
            CallOrderError: Where nothing tells which loss scale the gradients were made with.

        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._require_scale("step")
        record, fused, hooks = self._records.to_step(optimizer), is_fused(optimizer), self._hooks()
        if fused and takes_scaler(type(optimizer).step):
            result = step_by_itself(self, optimizer, record, args, kwargs)
        else:
            if record["stage"] is READY:
                record = self._prepare(optimizer, record, fused, hooks)
            if not self._has_begun and not record.is_rehearsal:
                self._note_first_step(optimizer)
            if fused:
                result = step_fused(self._records, optimizer, record, args, kwargs)
            else:
                result = self._step_plain(optimizer, record, hooks, args, kwargs)
        record["stage"] = STEPPED
        return result

    @not_compiled
    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer's step out, for reasons of your own, in the place of `step`.

        `update` then ends the step: the gradients are forgotten, and `applied` is False. The loss scale follows what
        was found of them: a check that `unscale_` made counts as ever; without one nothing is counted. Does not
        synchronise. Raises `RuntimeError` after `step`.
        """
        if not self._enabled:
            self._skipped.add(id(optimizer))
            return
        self._require_scale("skip")
        record = self._records.to_step(optimizer)
        record.flag = False
        record["stage"] = STEPPED

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale by what the steps since the last update found, and return what happened.

        Optimizers that are updated one by one after one loss count as one step. After a fused optimizer the fields of
        the result stay on their device until they are read, so this does not synchronise.

        Args:
            new_scale: Set the loss scale to this instead: a positive number, or a float32 tensor of one element.

        Returns:
            A `StepInfo`: `applied` is True where every optimizer's step was applied; `applied_of(optimizer)` tells
            them apart.

        Raises:
            AssertionError: Where no step came first.
            OverflowStreakError: When the policy's `max_overflow_streak` is reached and the host knows.
            SpikeStreakError: When the guard's `max_streak` is reached and the host knows.
            ScaleFloorError: With `on_floor="raise"`, when an overflow leaves the scale at its floor and the host knows.

        """
        info = self._update(new_scale)
        self._require_no_streak(info)
        return info

    @not_compiled
    def minimize(
        self,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor] | Sequence[Callable[[], Tensor]],
        *,
        retries: int = 0,
        max_norm: float | None = None,
    ) -> StepInfo:
        """Take a whole step: scale the loss, differentiate, unscale, clip, step and update; retry an overflow.

        An overflow lowers the loss scale by the policy and runs `loss_fn` again, with the random state of torch and the
        buffers of modules as they were, so that what is applied is what a run at that scale would have applied. Each
        try is one update of the policy. A policy that does not adapt never retries. Where the step is not applied,
        parameters, optimizer and buffers are as before. Synchronises with the host as `step` does, and with `retries`
        once for each try, a fused optimizer's too.

        Args:
            optimizer: Any optimizer; one whose `step` needs a closure, such as LBFGS, is handed the unscaled loss. The
                gradients of its parameters are made anew: those from before the call are dropped.
            loss_fn: Returns the loss, a tensor with one element, without scaling it. Or a list of such functions, one
                for each micro-batch, whose gradients are added up; one that overflows is retried alone.
            retries: How often at most to run a loss again.
            max_norm: The largest norm of the unscaled gradients, as in `unscale_and_clip_`; None does not clip.

        Returns:
            A `StepInfo` of the last try, as from `update`.

        Raises:
            CallOrderError: Where the optimizer was unscaled or stepped since the last update.
            SyncError: For a retry under `no_sync()` without `process_group`.
            OverflowStreakError: When the last try reaches the policy's `max_overflow_streak` and the host knows.
            ScaleFloorError: With `on_floor="raise"`, as from `update`.
            TypeError: For a `loss_fn` that is not a function or a list of them, or does not return a tensor.
            ValueError: For negative `retries`, and for a `max_norm` that is not a number from 0.

        """
        info = Minimization(self, optimizer, loss_fn, retries, max_norm).run()
        self._require_no_streak(info)
        return info

    @property
    def last_step(self) -> StepInfo | None:
        """The `StepInfo` that the last `update` returned, for code whose framework called it; None before the first."""
        return self._last_step

    def place_on(self, device: torch.device | str) -> None:
        """Put the loss scale on a device without scaling a loss; the first `scale` does it otherwise.

        For a process that steps and updates but never scales a loss, such as a stage of a pipeline whose gradients come
        from the last one's loss.
        """
        if self._enabled and self._state.loss_scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`.

        Plain Python numbers where the host knows them, else tensors of shape `()`. Does not synchronise.
        """
        return {
            name: plain(number)
            for name, number in metrics(self._state.snapshot(), guard=self._records.guards.first()).items()
        }

    def diagnose(self) -> str:
        """Say in a sentence or two how loss scaling is doing; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        state = self._state.read()
        self._voice.was_read(self.policy, state)
        answer = diagnose(self.policy, state, guard=self._records.guards.worst())
        if self._had_no_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def check_sync(self) -> None:
        """Raise `SyncError` naming the ranks whose state differs from rank 0's; every rank of the group must call.

        Compares over `process_group`, or over all ranks. Call it once after loading: a rank that kept another loss
        scale takes other steps from then on. `SyncError`, too, for a rank that is not in `process_group`. Synchronises
        with the host.
        """
        group = self._records.ranks.process_group
        if group is not None:
            require_member(group)
        state = self._state.read()
        guards = self._records.guards.saved(state) if group is None else {}  # ranks of a group have norms of their own
        require_same_on_ranks({**state_to_dict(state, self.policy), **guards}, group)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._replaced = frozenset(name for name in _HOOKS if getattr(cls, name) is not getattr(GradScaler, name))

    def _hooks(self) -> frozenset[str]:
        """Return the methods among `_HOOKS` that a subclass, or an assignment to this scaler, has replaced."""
        if _HOOKS.isdisjoint(self.__dict__):
            return self._replaced
        return self._replaced | (_HOOKS & self.__dict__.keys())

    def _record_to_unscale(self, optimizer: Any, caller: str) -> OptimizerRecord:
        self._require_scale(caller)
        return self._records.to_unscale(optimizer, caller)

    def _unscale_and_judge(
        self, optimizer: Any, record: OptimizerRecord, hooks: frozenset[str], may_defer: bool = False
    ) -> None:
        """Unscale, or leave that to a fused optimizer, and let the guard judge the norm if there is one."""
        if self._records.guards.guard is None:
            self._unscale(optimizer, record, hooks)
        elif self._clip_in_one_read([optimizer], [record], _clip.MEASURING, hooks, may_defer) is None:
            self._unscale(optimizer, record, hooks)
            _clip.clip_after_unscaling(self._records, [optimizer], _clip.MEASURING)

    def _unscale(self, optimizer: Any, record: OptimizerRecord, hooks: frozenset[str]) -> None:
        is_replaced = "_unscale_grads_" in hooks
        unscale(self._records, optimizer, record, self._unscale_grads_, self._half_gradients, is_replaced)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        return Gradients.to_unscale([optimizer], allow_fp16).unscale_(inv_scale, found_inf)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        self._require_scale("_check_inf_per_device")
        record = self._records.of(optimizer, "_check_inf_per_device")
        stage = record["stage"]
        check(self._records, optimizer, record)
        record["stage"] = stage
        self._records.are_flags_shared = True
        return record["found_inf_per_device"]

    def _clip_in_one_read(
        self,
        optimizers: list[Any],
        records: list[OptimizerRecord],
        how: _clip.Clipping,
        hooks: frozenset[str],
        may_defer: bool,
    ) -> Tensor | None:
        if "_unscale_grads_" in hooks or any(record.is_carried for record in records):
            return None
        is_deferred = may_defer and takes_factor(optimizers[0])
        return _clip.unscale_and_clip(self._records, optimizers, how, self._half_gradients, is_deferred)

    def _clip(self, optimizers: list[Any], how: _clip.Clipping, caller: str, may_defer: bool = False) -> Tensor:
        if not self._enabled:
            return how.apply_torchs(optimizers)
        records = [self._record_to_unscale(each, caller) for each in optimizers]
        hooks = self._hooks()
        if (
            "unscale_" not in hooks
            and (norm := self._clip_in_one_read(optimizers, records, how, hooks, may_defer)) is not None
        ):
            return norm
        for optimizer, record in zip(optimizers, records, strict=True):
            if "unscale_" in hooks and not record.is_carried:
                self.unscale_(optimizer)
            else:
                self._unscale(optimizer, record, hooks)
        return _clip.clip_after_unscaling(self._records, optimizers, how)

    def _prepare(self, optimizer: Any, record: OptimizerRecord, fused: bool, hooks: frozenset[str]) -> OptimizerRecord:
        """Unscale and check, or only check for a fused optimizer, by the methods that a subclass may have replaced."""
        method = "_check_inf_per_device" if fused else "unscale_"
        if method in hooks:
            getattr(self, method)(optimizer)
            self._records.are_flags_shared = True
            return self._records.of(optimizer, "step")
        if fused and self._records.guards.guard is None:
            check(self._records, optimizer, record)
        else:
            self._unscale_and_judge(optimizer, record, hooks, may_defer=fused)
        return record

    def _step_plain(
        self, optimizer: Any, record: OptimizerRecord, hooks: frozenset[str], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self._records.are_flags_shared:
            record.finite = None  # other code may have raised a flag since it was read
        if "_maybe_opt_step" not in hooks:
            return self._maybe_opt_step(optimizer, record, *args, **kwargs)
        self._records.are_flags_shared, record.flag = True, None
        result = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        if record.flag is None:
            record.flag = known_on_host(record)
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if self._records.joint_skip:
            optimizer_state.flag = all(map(known_on_host, self._records.deciding(optimizer_state)))
        else:
            optimizer_state.flag = known_on_host(optimizer_state)
        return optimizer.step(*args, **kwargs) if optimizer_state.flag else None

    def _note_first_step(self, optimizer: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            warn_if_resumed(optimizer, self._state)

    def _require_no_streak(self, info: StepInfo) -> None:
        self._records.guards.check()
        if self._state.limits_streaks and self._state.is_on_host and self._enabled:
            check_overflow_streak(self.policy, self._state.read())
        if self._enabled:
            self._voice.updated(self._state, info.overflowed)

    def _update(self, new_scale: float | Tensor | None = None) -> StepInfo:
        """Update as `update` does, without an error for a streak."""
        if not self._enabled:
            skipped, self._skipped = self._skipped, set()
            self._last_step = with_optimizers(StepInfo(True, 1.0, 1.0, 0), dict.fromkeys(skipped, False), True)
            return self._last_step
        loss_scale, records = self._require_scale("update"), self._records
        found = records.checked()
        if not found and new_scale is None and records.are_untouched():
            raise AssertionError("No inf checks were recorded prior to update.")
        records.ranks.end_step()
        self._had_no_gradients, is_same_step = not found, self._state.is_mid_step()
        checked = [record for record in found if not record.is_rehearsal]
        if records.are_flags_shared:
            for record in checked:
                record.read_again()
        finite, spiked = outcome(checked, loss_scale)
        if new_scale is not None:
            info = self._state.update_to(new_scale, finite, self._device)
        elif checked:
            info = self._state.update(finite, spiked)
        else:
            info = self._state.stay()
        stepped = None if self._protection is None else records.stepped_params()
        self._last_step = with_optimizers(info, records.end())
        if self._protection is not None:
            self._protection.end_step(self._last_step, stepped, is_same_step)
        return self._last_step


def _is_available(device: str) -> bool:
    if device != "cuda" or torch.cuda.is_available() or not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning, stacklevel=3
    )
    return False

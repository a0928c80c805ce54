"""`GradScaler`: torch's own interface around a policy, applying or skipping each optimizer's step as a whole."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core import (
    BaseScaling,
    as_policy,
    check_overflow_streak,
    diagnose,
    metrics,
    state_to_dict,
    step_info,
    tree,
)
from lossscale_core import StepInfo as CoreStepInfo
from lossscale_core.errors import CallOrderError, CheckpointWarning, PolicyError
from lossscale_torch import _checkpoint, _clip
from lossscale_torch._captured import ScaledLosses
from lossscale_torch._checkpoint import torch_policy
from lossscale_torch._decision import (
    READY,
    STEPPED,
    UNSCALED,
    OptimizerRecord,
    Order,
    all_finite,
    found_inf,
    known_on_host,
    mesh_groups,
    require_member,
)
from lossscale_torch._gradients import Gradients, grads_of, half_gradients_message, moved
from lossscale_torch._join import JoinedScaler
from lossscale_torch._norm import can_stay_on_device
from lossscale_torch._optimizers import (
    call_fused_step,
    has_zero_rates,
    is_being_recorded,
    is_fused,
    takes_factor,
    takes_scaler,
)
from lossscale_torch._state import ScalerState
from lossscale_torch._step_info import StepInfo, plain, with_optimizers
from lossscale_torch._torch_names import TorchNames, given_interval, new_records, within_bounds
from lossscale_torch._verbs import scaled

_TORCH_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)
_HOOKS = ("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step")
_LEGACY = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
    "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the optimizer "
    "use them directly."
)
_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)


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

    Without `policy` it is torch's dynamic rule under torch's arguments, with the scale kept between 2**-126 and
    2**126. `policy` is anything `lossscale_core.as_policy` takes. `process_group` combines the decision over its ranks
    before anyone acts on it; parameters sharded over a device mesh do so by themselves. With `joint_skip` an overflow
    in one optimizer skips all of them; call `unscale_` on each before the first `step`. With `half_gradients` float16
    gradients are unscaled in place, which may flush small ones to zero; otherwise they are refused.

    An ordinary optimizer costs one host synchronisation a step, in `step`; a fused one costs none.
    """

    _replaced: frozenset[str] = frozenset()
    """The methods among `_HOOKS` that a subclass has replaced."""
    _joined: JoinedScaler | None = None
    _join_config: Any  # set by Join

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Any = None,
        process_group: Any = None,
        joint_skip: bool = False,
        half_gradients: bool = False,
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
            self._interval_as_given = given_interval(growth_interval)
        self._state = ScalerState(as_policy(policy))
        self._begun_with = (self._state.read_loss_scale(), 0)
        self._process_group = process_group
        self._joint_skip = joint_skip
        self._half_gradients = half_gradients
        self._has_begun = False
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Forget what is known between two updates."""
        self._records: defaultdict[int, Any] = new_records()
        self._losses = ScaledLosses()
        self._order = Order()
        self._are_flags_shared = False
        self._joint: list[OptimizerRecord] = []
        self._had_no_gradients = False
        self._skipped: set[int] = set()
        self._last_step: StepInfo | None = None

    @torch.compiler.disable
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        Half losses of any shape are lifted to float32. Call `backward` before the next `update`; it raises
        `RuntimeError` afterwards, as with torch's own scaler. Does not synchronise.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scale_tensor(outputs)
        if isinstance(outputs, dict | list | tuple):
            return tree.map_leaves(self.scale, outputs)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @torch.compiler.disable
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and note whether they are finite.

        At most once an optimizer between two updates, else `RuntimeError`; an optimizer without gradients stays as it
        is. Does not synchronise.
        """
        if self._enabled:
            self._unscale_once(optimizer, self._record_to_unscale(optimizer, "unscale_"))

    @torch.compiler.disable
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer | list[Any] | tuple[Any, ...],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply; return the norm.

        In place of `unscale_` and `torch.nn.utils.clip_grad_norm_`. Several optimizers are clipped by the norm of all
        their gradients together, and an overflow in one of them skips all of them. The norm, of shape `()`, is that of
        the unscaled gradients before clipping: float32, or float64 where a gradient is. The read that yields it proves
        them finite; where they are not, neither is the norm, the gradients stay as they are and the step will be
        skipped (with `error_if_nonfinite`: `RuntimeError`). Disabled, it clips. Raises `ValueError` for a `max_norm`
        that is not a number from 0. Synchronises with the host once for an ordinary optimizer, for a fused one on a
        CUDA device only if `error_if_nonfinite`.
        """
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
        how = _clip.clipping(max_norm, norm_type, error_if_nonfinite)
        if not self._enabled:
            return how.apply_torchs(optimizers)
        records = [self._record_to_unscale(each, "unscale_and_clip_") for each in optimizers]
        return self._clip_all(optimizers, records, how)

    @torch.compiler.disable
    def clip_and_step(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Unscale an optimizer's gradients, clip their total norm and step; return the norm before clipping.

        As `unscale_and_clip_` and `step`, and cheaper for a fused optimizer: its kernel multiplies the gradients while
        it reads them. Call `update` afterwards. Disabled, it clips and steps. Synchronises with the host once for an
        ordinary optimizer, for a fused one on a CUDA device not at all.
        """
        how = _clip.clipping(max_norm, norm_type)
        if not self._enabled:
            norm = how.apply_torchs([optimizer])
        else:
            record = self._record_to_unscale(optimizer, "clip_and_step")
            norm = self._clip_all([optimizer], [record], how, is_deferred=takes_factor(optimizer))
        self.step(optimizer)
        return norm

    @torch.compiler.disable
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` where the gradients are finite on every rank; else skip it.

        Unscales first where nobody has. Returns what the optimizer returned, or None. A fused optimizer is always
        called, with the flag, and skips by itself; an optimizer without gradients has nothing to skip. Synchronises
        with the host once, for a fused optimizer not at all. Raises `RuntimeError` for a closure, or when called twice
        between two updates, and `CallOrderError` where nothing tells which loss scale the gradients were made with.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        record = self._record_of(optimizer, "step")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        fused = is_fused(optimizer)
        if fused and takes_scaler(type(optimizer).step):
            result = self._step_by_itself(optimizer, record, *args, **kwargs)
        else:
            if record["stage"] is READY:
                record = self._prepare(optimizer, record, fused)
            if not self._has_begun and not record.is_rehearsal:
                self._warn_if_resumed(optimizer)
            step = self._step_fused if fused else self._step_plain
            result = step(optimizer, record, *args, **kwargs)
        record["stage"] = STEPPED
        return result

    @torch.compiler.disable
    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer's step out, for reasons of your own, in the place of `step`.

        `update` then ends the step: the gradients are forgotten, and `applied` is False. The loss scale follows what
        was found of them: a check that `unscale_` made counts as ever; without one nothing is counted. Does not
        synchronise.
        """
        if not self._enabled:
            self._skipped.add(id(optimizer))
            return
        record = self._record_of(optimizer, "skip")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        record.flag = False
        record["stage"] = STEPPED

    @torch.compiler.disable
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:
        """Update the loss scale by what the steps since the last update found, and return what happened.

        `applied` is True where every optimizer's step was applied, fused or not; `applied_of(optimizer)` tells them
        apart. After a fused optimizer the fields stay on their device until they are read, so this does not
        synchronise. Optimizers that are updated one by one after one loss count as one step. `new_scale` sets the scale
        instead. Raises `AssertionError` where no step came first, and `OverflowStreakError` when the policy's
        `max_overflow_streak` is reached and the host knows.
        """
        if self._enabled:
            self._last_step = self._update(new_scale)
            if self._state.is_on_host and BaseScaling.of(self.policy).max_overflow_streak is not None:
                check_overflow_streak(self.policy, self._state.read())
        else:
            skipped, self._skipped = self._skipped, set()
            self._last_step = with_optimizers(CoreStepInfo(True, 1.0, 1.0, 0), dict.fromkeys(skipped, False), True)
        return self._last_step

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
        return {name: plain(number) for name, number in metrics(self._state.snapshot()).items()}

    def diagnose(self) -> str:
        """Say in a sentence or two how loss scaling is doing; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        answer = diagnose(self.policy, self._state.read())
        if self._had_no_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def join_hook(self, **kwargs: Any) -> JoinedScaler:
        """Take part in `torch.distributed.algorithms.join.Join([model, scaler])`, for ranks with uneven inputs.

        A rank without inputs answers the others where they combine flags over `process_group`; then each forward pass
        of the model needs exactly one `update`. At the end every rank goes on from the state of the last that had some.
        """
        self._joined = JoinedScaler(self, self._enabled and self._process_group is not None)
        return self._joined

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for `Join`."""
        return torch.device(self._device) if self._scale is None else self._scale.device

    @property
    def join_process_group(self) -> Any:
        """The process group whose ranks decide alike, for `Join`; all ranks where none was given."""
        return torch.distributed.group.WORLD if self._process_group is None else self._process_group

    def check_sync(self) -> None:
        """Raise `SyncError` naming the ranks whose state differs from rank 0's; every rank of the group must call.

        Compares over `process_group`, or over all ranks. Synchronises with the host. Also for a rank that is not in
        `process_group`. Call it once after loading: a rank that kept another loss scale takes other steps from then on.
        """
        if self._process_group is not None:
            require_member(self._process_group)
        _checkpoint.require_same_on_ranks(state_to_dict(self._state.read(), self.policy), self._process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state as plain values: torch's five keys, and beside them those of `state_to_dict`.

        Loads into torch's own scaler and, through `lossscale_core.state_from_dict`, into every other framework. Empty
        when disabled. Synchronises with the host.
        """
        if not self._enabled:
            return {}
        state = self._state.read()
        return {
            "scale": float(state.loss_scale),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": int(state.growth_tracker),
            **state_to_dict(state, self.policy),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`: this scaler's, torch's own (its five keys suffice), or another framework's state.

        A scaler made without `policy` takes over the checkpoint's factors and interval, as torch does; one made with a
        policy keeps it, and a `CheckpointWarning` names each difference. Raises torch's `RuntimeError` for an empty
        dict, `KeyError` for a missing key and `CheckpointError` for a newer version or a value no state can hold.
        """
        if not self._enabled:
            return
        _checkpoint.require_saved_state(state_dict)
        saved, policy = _checkpoint.torchs_part(state_dict), self.policy
        if self._follows_checkpoint:
            policy = _checkpoint.saved_policy(saved, policy)
        self._state.restore(policy, _checkpoint.saved_state(saved, policy))
        if self._follows_checkpoint:
            interval = saved.get("growth_interval")
            self._interval_as_given = None if interval is None else given_interval(interval)
        self._begun_with = (self.get_scale(), self._get_growth_tracker())
        self._has_begun = True

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        fresh = {"_records": new_records(), "_losses": ScaledLosses(), "_order": Order()}
        fresh.update(_are_flags_shared=False, _joint=[])
        own_state = ScalerState(self.policy, self._state.read())
        alone = {"_process_group": None, "_joined": None}
        return {**self.__dict__, **fresh, **alone, "_state": own_state, "_last_step": None}

    def __copy__(self) -> "GradScaler":
        copy = type(self).__new__(type(self))
        copy.__setstate__(self.__getstate__())
        copy._process_group = self._process_group  # a group is shared, not copied
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradScaler":
        return self.__copy__()

    def _scale_tensor(self, outputs: Tensor) -> Tensor:
        if self._state.loss_scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        if self._losses.present is None:
            self._state.begin_step()
        captured = self._losses.begin()
        result = scaled(outputs, captured.take(self._require_scale("scale"), self._state.may_be_below_one()))
        if result.requires_grad:
            result.register_hook(captured.note_backward)
        return result

    def _record_of(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerRecord:
        """Return an optimizer's record; the first time since an update, ask where its gradients come from."""
        present_scale = self._require_scale(caller)
        key = id(optimizer)
        record = self._records[key] = OptimizerRecord.of(self._records[key])
        if not record.is_admitted:
            origin = self._losses.origin(optimizer, present_scale)
            if origin is None:
                return record
            if origin.record is not None:
                record = self._records[key] = origin.record
                record.is_carried = True
            record.captured, record.is_admitted = origin.captured, True
            if not origin.is_same_step and self._losses.present is None:
                self._state.begin_step()
        if record.had_none and record["stage"] is UNSCALED and any(each.numel() for each in grads_of(optimizer)):
            raise CallOrderError(
                "this rank had no gradients when it decided with the others, and has some now; "
                f"call {caller}() on an optimizer after backward()"
            )
        return record

    def _record_to_unscale(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerRecord:
        record = self._record_of(optimizer, caller)
        if record["stage"] is UNSCALED and not record.is_carried:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if record["stage"] is STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        return record

    def _scale_of(self, record: OptimizerRecord) -> tuple[Tensor, bool]:
        """Return the loss scale that a record's gradients were made with, and whether it may be below 1.

        The persistent tensor itself wherever it still holds that scale, so that a graph that records this reads at each
        replay what the tensor then holds.
        """
        persistent = self._require_scale("step")
        captured, losses = record.captured, self._losses
        if captured is None and losses.present is not None and not losses.is_recorded:
            captured = None if losses.present.is_held_by(persistent) else losses.present
        if captured is None:
            return persistent, self._state.may_be_below_one()
        return moved(captured.scale, persistent.device), captured.may_be_below_one

    def _gradients(self, optimizers: list[Any], allow_half: bool) -> Gradients:
        gradients = Gradients(optimizers)
        if not allow_half and torch.float16 in gradients.dtypes:
            raise ValueError(half_gradients_message(optimizers))
        return gradients

    def _unscale_once(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        """Unscale, unless that was done before an `update` that was another optimizer's."""
        if record.is_carried:
            record.is_carried = False
        else:
            self._unscale(optimizer, record)

    def _unscale(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        scale, may_be_below_one = self._scale_of(record)
        found = self._unscale_grads_(optimizer, scale.reciprocal(), torch.zeros_like(scale), self._half_gradients)
        if may_be_below_one:  # there a finite gradient may overflow by being unscaled
            Gradients([optimizer]).check_again(found)
        self._note(optimizer, record, found)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        return self._gradients([optimizer], allow_fp16).unscale_(inv_scale, found_inf)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Note whether the gradients are finite and will be when a fused optimizer unscales them; leave them alone."""
        record = self._record_of(optimizer, "_check_inf_per_device")
        stage = record["stage"]
        self._check(optimizer, record)
        record["stage"] = stage
        self._are_flags_shared = True
        return record["found_inf_per_device"]

    def _check(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        scale, may_be_below_one = self._scale_of(record)
        found = Gradients([optimizer]).found_inf(scale.reciprocal() if may_be_below_one else None)
        self._note(optimizer, record, found)
        record.grad_scale = scale

    def _note(
        self, optimizer: torch.optim.Optimizer, record: OptimizerRecord, found: dict[Any, Tensor], known: Any = None
    ) -> None:
        """Record what a check found, combined over the ranks that must decide alike; nothing found leaves it ready."""
        groups = self._groups(optimizer)
        record.had_none, record.moment, record.is_combined = not found, self._losses.moment(), bool(groups)
        may_rehearse = bool(found or groups) and has_zero_rates(optimizer) and not is_being_recorded()
        counts = not (may_rehearse and Gradients([optimizer]).are_zero())
        if groups:
            device = self._require_scale("step").device
            flag, any_counts = self._order.combine(optimizer, found, counts, groups, device)
            found, known, counts = {device: flag}, None, counts or bool(any_counts)
        record.is_rehearsal = not counts
        if found:
            record.note(found, known)
        if groups and device.type == "cpu":
            known_on_host(record)  # nobody waits, so ranks that differ are told at once

    def _groups(self, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        groups = mesh_groups(optimizer)
        if self._process_group is None:
            return groups
        require_member(self._process_group)
        return (*groups, self._process_group if self._active_join() is None else self._joined)

    def _active_join(self) -> JoinedScaler | None:
        return self._joined if self._joined is not None and self._joined.is_enabled() else None

    def _clip_all(
        self, optimizers: list[Any], records: list[OptimizerRecord], how: _clip.Clipping, is_deferred: bool = False
    ) -> Tensor:
        is_replaced = self._is_replaced("_unscale_grads_") or self._is_replaced("unscale_")
        if is_replaced or any(record.is_carried for record in records):
            return self._clip_as_torch(optimizers, records, how)
        scale, may_be_below_one = self._scale_of(records[0])
        on_host = scale.is_cpu or not all(map(is_fused, optimizers))
        gradients = self._gradients(optimizers, self._half_gradients)
        if (
            how.needs_torchs(gradients)
            or any(record.captured is not records[0].captured for record in records)
            or any(map(mesh_groups, optimizers))
            or not (on_host or (not may_be_below_one and can_stay_on_device(gradients, how.norm_type, scale.device)))
        ):
            return self._clip_as_torch(optimizers, records, how)
        clip = _clip.unscale_and_clip_on_host if on_host else _clip.unscale_and_clip_on_device
        clipped = clip(gradients, scale, how, is_deferred)
        for optimizer, record in zip(optimizers, records, strict=True):
            found = {scale.device: clipped.found_inf.clone()} if gradients.buckets else {}
            self._note(optimizer, record, found, clipped.finite)
            record.grad_scale = clipped.grad_scale
        if how.error_if_nonfinite and bool(clipped.found_inf):
            how.raise_nonfinite()
        return clipped.norm

    def _clip_as_torch(self, optimizers: list[Any], records: list[OptimizerRecord], how: _clip.Clipping) -> Tensor:
        """Unscale, then clip in a second pass: for gradients whose norm one read cannot both take and trust."""
        for optimizer, record in zip(optimizers, records, strict=True):
            if self._is_replaced("unscale_") and not record.is_carried:
                self.unscale_(optimizer)
            else:
                self._unscale_once(optimizer, record)
        if len(records) > 1:
            flag = found_inf(records, self._require_scale("step").device)
            for record in records:
                record.note({flag.device: flag.clone()})
        return how.apply_torchs(optimizers)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._replaced = frozenset(name for name in _HOOKS if getattr(cls, name) is not getattr(GradScaler, name))

    def _is_replaced(self, method: str) -> bool:
        return method in self._replaced or method in self.__dict__

    def _deciding(self, record: OptimizerRecord) -> list[OptimizerRecord]:
        """Return the records whose flags decide on this optimizer's step: its own, or with `joint_skip` all."""
        if not self._joint_skip:
            return [record]
        if self._joint and not any(each is record for each in self._joint):
            raise CallOrderError(
                "with joint_skip another optimizer has stepped before this one was unscaled; "
                "call unscale_() on every optimizer before the first step()"
            )
        self._joint = [each for each in self._records.values() if isinstance(each, OptimizerRecord)]
        return self._joint

    def _prepare(self, optimizer: Any, record: OptimizerRecord, fused: bool) -> OptimizerRecord:
        """Unscale and check, or only check for a fused optimizer, by the methods that a subclass may have replaced."""
        method = "_check_inf_per_device" if fused else "unscale_"
        if self._is_replaced(method):
            getattr(self, method)(optimizer)
            self._are_flags_shared = True
            return self._record_of(optimizer, "step")
        if fused:
            self._check(optimizer, record)
        else:
            self._unscale(optimizer, record)
        return record

    def _step_plain(self, optimizer: Any, record: OptimizerRecord, *args: Any, **kwargs: Any) -> Any:
        if self._are_flags_shared:
            record.finite = None  # somebody may have raised a flag since it was read
        if not self._is_replaced("_maybe_opt_step"):
            return self._maybe_opt_step(optimizer, record, *args, **kwargs)
        self._are_flags_shared, record.flag = True, None
        result = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        if record.flag is None:
            record.flag = known_on_host(record)
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer_state.flag = all(map(known_on_host, self._deciding(optimizer_state)))
        return optimizer.step(*args, **kwargs) if optimizer_state.flag else None

    def _step_fused(self, optimizer: Any, record: OptimizerRecord, *args: Any, **kwargs: Any) -> Any:
        record.flag = found_inf(self._deciding(record), self._require_scale("step").device)
        return call_fused_step(optimizer, record.grad_scale, record.flag, args, kwargs)

    def _step_by_itself(self, optimizer: Any, record: OptimizerRecord, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer of torch's older contract, which is handed the scaler and calls its methods."""
        warnings.warn(_LEGACY, FutureWarning, stacklevel=4)  # past this method, `step` and its wrapper
        record.flag = True
        return optimizer.step(*args, **kwargs, grad_scaler=self)

    def _warn_if_resumed(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn where an optimizer goes on and its scaler does not; called before the first step of a fresh scaler."""
        self._has_begun = True
        if self._state.is_on_host and self._state.read().steps == 0 and _checkpoint.has_stepped(optimizer):
            warnings.warn(
                "the optimizer has taken steps before, but its scaler begins anew with a loss scale of "
                f"{self.get_scale():g}; to go on from a checkpoint, save scaler.state_dict() in it and pass it to "
                "scaler.load_state_dict()",
                CheckpointWarning,
                stacklevel=4,  # past this method, `step` and the wrapper of `torch.compiler.disable`
            )

    def _update(self, new_scale: float | Tensor | None) -> StepInfo:
        device = self._require_scale("update").device
        records: dict[int, OptimizerRecord] = {}
        found, flags = [], {}
        for key, each in self._records.items():
            record = records[key] = OptimizerRecord.of(each)
            if record["found_inf_per_device"]:
                found.append(record)
            if record["stage"] is STEPPED:
                flags[key] = record.flag
        if not found and new_scale is None and all(record["stage"] is READY for record in records.values()):
            raise AssertionError("No inf checks were recorded prior to update.")
        if (joined := self._active_join()) is not None:
            joined.end_step()
        self._had_no_gradients = not found
        checked = [record for record in found if not record.is_rehearsal]
        if self._are_flags_shared:
            for record in checked:
                record.read_again()
        finite = all_finite(checked, device)
        if new_scale is not None:
            info = self._set_scale(new_scale, finite)
        elif checked:
            info = self._state.update(finite)
        else:
            now = self._state.snapshot()
            info = step_info(now, now)
        self._records, self._joint, self._are_flags_shared = new_records(), [], False
        self._losses.end(records)
        return with_optimizers(info, flags)

    def _set_scale(self, new_scale: Any, finite: bool | Tensor) -> CoreStepInfo:
        before = self._state.snapshot()
        if isinstance(new_scale, Tensor):
            if new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(_NEW_SCALE)
            self._state.set_loss_scale(new_scale)
        elif isinstance(new_scale, bool) or not isinstance(new_scale, int | float) or not new_scale > 0:
            raise AssertionError(_NEW_SCALE)
        else:
            self._state.set(loss_scale=within_bounds(new_scale, self.policy))
        after = self._state.snapshot()
        return CoreStepInfo(finite, before.loss_scale, after.loss_scale, after.overflow_streak)


def _is_available(device: str) -> bool:
    if device != "cuda" or torch.cuda.is_available() or not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning, stacklevel=3
    )
    return False

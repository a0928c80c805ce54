"""What a scaler does with its optimizers between two updates, and at the update."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from lossscale_core import check_overflow_streak
from lossscale_torch import _clip
from lossscale_torch._checkpoint import warn_if_resumed
from lossscale_torch._decision import READY, STEPPED, OptimizerRecord, known_on_host, outcome
from lossscale_torch._optimizers import is_fused, takes_factor, takes_scaler
from lossscale_torch._protect import Protection
from lossscale_torch._records import OptimizerRecords
from lossscale_torch._step_info import StepInfo, with_optimizers
from lossscale_torch._stepping import step_by_itself, step_fused
from lossscale_torch._unscaling import check, unscale
from lossscale_torch._voice import Voice

HOOKS = frozenset(("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step"))
"""The methods of torch's scaler that take part in a step, and that a subclass may replace."""


class Steps:
    """The steps of a scaler's optimizers, from unscaling to the update.

    Whatever torch's own scaler does by a method among `HOOKS` is done by that method of the scaler. `replaced` holds
    the names of those that are not the library's: what they return may be anything, so that nothing is merged with
    them, and the flags are read again after them.
    """

    def __init__(
        self,
        records: OptimizerRecords,
        is_enabled: bool,
        half_gradients: bool,
        voice: Voice,
        protection: Protection | None,
    ) -> None:
        self.records, self.state = records, records.state
        self.voice, self.protection = voice, protection
        self.updates = 0
        """How many updates there were."""
        self.has_begun = False
        """Whether a step was taken, or a state loaded."""
        self.had_no_gradients = False
        """Whether the last update found no gradients to check."""
        self.last: StepInfo | None = None
        """What the last update returned."""
        self._is_enabled, self._allow_half = is_enabled, half_gradients
        self._skipped: set[int] = set()  # while disabled: the optimizers that `skip` named since the last update

    def unscale(
        self, scaler: Any, optimizer: Any, record: OptimizerRecord, replaced: frozenset[str], may_defer: bool = False
    ) -> None:
        """Unscale, or leave that to a fused optimizer, and let the guard judge the norm if there is one."""
        if self.records.guards.guard is None:
            unscale(self.records, optimizer, record, scaler, self._allow_half, replaced)
        elif self._clip_in_one_read([optimizer], [record], _clip.MEASURING, replaced, may_defer) is None:
            unscale(self.records, optimizer, record, scaler, self._allow_half, replaced)
            _clip.clip_after_unscaling(self.records, [optimizer], _clip.MEASURING)

    def clip(
        self,
        scaler: Any,
        optimizers: list[Any],
        how: _clip.Clipping,
        caller: str,
        replaced: frozenset[str],
        may_defer: bool = False,
    ) -> Tensor:
        """Unscale and clip by the norm of all gradients together, in one read where that is possible; return it."""
        self.state.require_placed(caller)
        records = [self.records.to_unscale(each, caller) for each in optimizers]
        if "unscale_" not in replaced:
            norm = self._clip_in_one_read(optimizers, records, how, replaced, may_defer)
            if norm is not None:
                return norm
        for optimizer, record in zip(optimizers, records, strict=True):
            if "unscale_" in replaced and not record.is_carried:
                scaler.unscale_(optimizer)
            else:
                unscale(self.records, optimizer, record, scaler, self._allow_half, replaced)
        return _clip.clip_after_unscaling(self.records, optimizers, how)

    def step(
        self, scaler: Any, optimizer: Any, replaced: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Check the gradients unless that was done, and step the optimizer or leave it; return what it returned."""
        self.state.require_placed("step")
        record, fused = self.records.to_step(optimizer), is_fused(optimizer)
        if fused and takes_scaler(type(optimizer).step):
            result = step_by_itself(scaler, optimizer, record, args, kwargs)
        else:
            if record["stage"] is READY:
                record = self._prepare(scaler, optimizer, record, replaced, fused)
            if not self.has_begun and not record.is_rehearsal:
                self.note_first_step(optimizer)
            if fused:
                result = step_fused(self.records, optimizer, record, args, kwargs)
            else:
                result = self._step_plain(scaler, optimizer, record, replaced, args, kwargs)
        record["stage"] = STEPPED
        return result

    def skip(self, optimizer: Any) -> None:
        """Leave an optimizer's step out."""
        if not self._is_enabled:
            self._skipped.add(id(optimizer))
            return
        self.state.require_placed("skip")
        record = self.records.to_step(optimizer)
        record.flag = False
        record["stage"] = STEPPED

    def end(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped by itself where its gradients are finite; waits for the device."""
        record = self.records.of(optimizer, "minimize")
        record.flag = known_on_host(record)
        record["stage"] = STEPPED

    def note_first_step(self, optimizer: Any) -> None:
        """Look at the first optimizer that is stepped, which may go on from a checkpoint."""
        if not self.has_begun:
            self.has_begun = True
            warn_if_resumed(optimizer, self.state)

    def update(self, new_scale: float | Tensor | None = None, device_type: str = "") -> StepInfo:
        """Update the state by what was found since the last update, or set the loss scale; return what happened."""
        self.updates += 1
        if not self._is_enabled:
            skipped, self._skipped = self._skipped, set()
            self.last = with_optimizers(StepInfo(True, 1.0, 1.0, 0), dict.fromkeys(skipped, False), True)
            return self.last
        loss_scale, records, state = self.state.require_placed("update"), self.records, self.state
        counted = records.counted()
        if not counted and new_scale is None and records.are_untouched():
            raise AssertionError("No inf checks were recorded prior to update.")
        records.ranks.end_step()
        is_same_step = state.is_mid_step()
        self.had_no_gradients = not counted and records.found_none()
        finite, spiked = outcome(counted, loss_scale)
        if new_scale is not None:
            info = state.update_to(new_scale, finite, device_type)
        elif counted:
            info = state.update(finite, spiked)
        else:
            info = state.stay()
        stepped = set() if self.protection is None else records.stepped_params()
        self.last = info = with_optimizers(info, records.end())
        if self.protection is not None:
            self.protection.end_step(info, stepped, is_same_step)
        return info

    def require_no_streak(self, info: StepInfo) -> None:
        """Raise where steps in a row were skipped as often as the policy, the guard or `on_floor` allows."""
        if not self._is_enabled:
            return
        state = self.state
        self.records.guards.check()
        if state.limits_streaks and state.is_on_host:
            check_overflow_streak(state.policy, state.read())
        self.voice.updated(state, info.overflowed)

    def copied(self) -> "Steps":
        """Return a copy for another scaler, which knows no optimizer yet and protects no modules."""
        copy = Steps(self.records.copied(), self._is_enabled, self._allow_half, deepcopy(self.voice), None)
        copy.has_begun, copy.had_no_gradients = self.has_begun, self.had_no_gradients
        return copy

    def _clip_in_one_read(
        self,
        optimizers: list[Any],
        records: list[OptimizerRecord],
        how: _clip.Clipping,
        replaced: frozenset[str],
        may_defer: bool,
    ) -> Tensor | None:
        if "_unscale_grads_" in replaced or any(record.is_carried for record in records):
            return None
        is_deferred = may_defer and takes_factor(optimizers[0])
        return _clip.unscale_and_clip(self.records, optimizers, how, self._allow_half, is_deferred)

    def _prepare(
        self, scaler: Any, optimizer: Any, record: OptimizerRecord, replaced: frozenset[str], fused: bool
    ) -> OptimizerRecord:
        """Unscale and check, or only check for a fused optimizer."""
        method = "_check_inf_per_device" if fused else "unscale_"
        if method in replaced:
            getattr(scaler, method)(optimizer)
            self.records.are_flags_shared = True
            return self.records.of(optimizer, "step")
        if fused and self.records.guards.guard is None:
            check(self.records, optimizer, record)
        else:
            self.unscale(scaler, optimizer, record, replaced, may_defer=fused)
        return record

    def _step_plain(
        self,
        scaler: Any,
        optimizer: Any,
        record: OptimizerRecord,
        replaced: frozenset[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.records.are_flags_shared:
            record.finite = None  # other code may have raised a flag since it was read
        if "_maybe_opt_step" not in replaced:
            return scaler._maybe_opt_step(optimizer, record, *args, **kwargs)
        self.records.are_flags_shared, record.flag = True, None
        result = scaler._maybe_opt_step(optimizer, record, *args, **kwargs)
        if record.flag is None:  # a subclass that did not call ours has decided by the flags, as torch's own does
            record.flag = known_on_host(record)
        return result

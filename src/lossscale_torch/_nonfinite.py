"""Steps with an update or a loss that is NaN or infinite although all gradients are finite: checks and counters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossscale_core import (
    NonfiniteState,
    OnNonfiniteLoss,
    OnNonfiniteUpdate,
    check_nonfinite_streak,
    count_nonfinite,
    init_nonfinite_state,
    nonfinite_state_from_dict,
    nonfinite_update,
    state_to_dict,
)
from lossscale_core.adapters import check_setting
from lossscale_core.errors import CallOrderError, SyncError
from lossscale_torch._checked_tensors import CheckedTensors
from lossscale_torch._members import SPIKE, Record, found_inf
from lossscale_torch._random import RandomState
from lossscale_torch._ranks import meshes_of
from lossscale_torch._state import as_flag, as_tensors, is_being_recorded, is_readable, write
from lossscale_torch._step_info import StepInfo
from lossscale_torch._weights import WeightsAndState


class Nonfinite:
    """The check of each update, the reaction to a lost loss, and the counters of both.

    The counters are on the host until the first outcome that is only on the device; then in tensors, written in place.
    """

    def __init__(self, on_update: OnNonfiniteUpdate, on_loss: OnNonfiniteLoss) -> None:
        self.on_update: OnNonfiniteUpdate = check_setting("on_nonfinite_update", on_update)
        self.on_loss: OnNonfiniteLoss = check_setting("on_nonfinite_loss", on_loss)
        self.has_lost_loss = False
        """Whether a loss of the present step was NaN or infinite before it was scaled."""
        self._state: NonfiniteState[Any] = init_nonfinite_state()
        self._checked: dict[int, CheckedTensors] = {}  # by the id of the optimizer
        self._undone: dict[int, _Undone] = {}  # since the last update
        self._failing: set[int] = set()  # the optimizers of the present streak, known on the host
        self._losing: set[int] = set()  # those of the present streak of losses

    @classmethod
    def of(cls, on_update: OnNonfiniteUpdate, on_loss: OnNonfiniteLoss) -> "Nonfinite | None":
        """Return None for settings that check nothing; raise `PolicyError` for values that are not allowed."""
        made = cls(on_update, on_loss)
        return None if (made.on_update, made.on_loss) == ("ignore", "back_off") else made

    def step(self, scaler: Any, optimizer: Any, take: Callable[[], Any]) -> Any:
        """Return the result of `take`, which takes the step; raise or undo if it makes a value NaN or infinite.

        Waits for the device once more, unless a fused optimizer is to be undone.
        """
        if self.on_update == "ignore":
            return take()
        checked = self._checked.setdefault(id(optimizer), CheckedTensors())
        before = random = None
        if self.on_update == "raise":
            checked.look(optimizer)
        else:
            before = WeightsAndState(optimizer, checked.memory)
            random = None if is_being_recorded() else RandomState()  # CUDA cannot read it while it captures
            checked.memory = before.memory if all(each.is_cpu for each in before.memory) else None
        result = take()
        record = scaler._records[id(optimizer)]
        if record.applied is False or not record.flags:  # skipped, or without gradients on every rank
            return result
        home = scaler._state.tensors.loss_scale.device
        bad = found_inf(scaler._ranks.combine(optimizer, checked.found(optimizer, before), home).values(), home)
        is_on_device = isinstance(record.applied, Tensor) and (is_being_recorded() or not is_readable(record.applied))
        if before is None:
            _require_unrecorded(is_on_device)
            if bad.item() != 0.0:
                self._checked.pop(id(optimizer))
                scaler._records.pop(id(optimizer))  # so that the next step begins with nothing known
                raise nonfinite_update(checked.first_name(optimizer))
            checked.take()
        elif is_on_device and not before.has_other_parts():
            before.restore_where(bad)
            self._undo_on_device(optimizer, record, bad)
        else:
            _require_unrecorded(is_on_device)
            if bad.item() != 0.0:
                before.restore()
                if random is not None:
                    random.restore()
                self._undo(optimizer, record)
                return None
        return result

    def _undo(self, optimizer: Any, record: Any) -> None:
        """Note on the host that a step was undone; the scale then stays as after a spike."""
        found = record["found_inf_per_device"]
        one = torch.ones_like(next(iter(found.values())))
        self._undone[id(optimizer)] = _Undone(True, False)
        record["found_inf_per_device"] = {**found, SPIKE: one}
        record.applied, record.finite, record.spiked = False, False, True

    def _undo_on_device(self, optimizer: Any, record: Any, bad: Tensor) -> None:
        """Note the same with a flag on the device, 1.0 or 0.0."""
        found = record["found_inf_per_device"]
        spike = found.get(SPIKE)
        bad = torch.where(record.applied == 0.0, bad, 0.0)
        self._undone[id(optimizer)] = _Undone(bad, False if spike is None else spike)
        record["found_inf_per_device"] = {**found, SPIKE: bad if spike is None else torch.maximum(bad, spike)}
        record.applied = torch.maximum(record.applied, bad)
        record.discard_decision()

    def count(self, scaler: Any, info: StepInfo) -> StepInfo:
        """Count a step at its update, before its records are forgotten; return its outcome with the causes."""
        lost, self.has_lost_loss = self.has_lost_loss, False
        undone, self._undone = self._undone, {}
        for key in self._checked.keys() - scaler._members.keys():  # of deleted optimizers
            del self._checked[key]
        if isinstance(info.applied, Tensor):
            return self._count_on_device(scaler, info, undone, lost)
        bad = {key for key, each in undone.items() if as_flag(each.bad, _CPU).item() != 0.0}
        if bad or lost:
            spiked = any(Record.of(record).spiked for key, record in scaler._records.items() if key not in bad)
            info = info._replace(applied=False, spiked=bool(info.spiked) and spiked)
        # Of two optimizers that are updated in turns, the steps of one do not end a streak of the other.
        ends = bool(info.applied) and (not self._failing or not self._failing.isdisjoint(scaler._records))
        self._failing = self._failing | bad if bad else set() if ends else self._failing
        counted = count_nonfinite(self._state, loss_finite=not lost, stepped=bool(bad) or ends, update_finite=not bad)
        if lost:
            self._losing.update(scaler._records)
        elif self._losing and self._losing.isdisjoint(scaler._records):
            counted = counted._replace(loss_streak=self.read().loss_streak)
        else:
            self._losing = set()
        self._set(counted)
        return info._replace(nonfinite_update=bool(bad), nonfinite_loss=lost)

    def _count_on_device(self, scaler: Any, info: StepInfo, undone: dict[int, "_Undone"], lost: bool) -> StepInfo:
        applied: Any = info.applied
        home = applied.device
        bad = found_inf([as_flag(each.bad, home) for each in undone.values()], home) != 0.0
        spikes = [as_flag(each.spike, home) for each in undone.values()]
        spikes += [each["found_inf_per_device"][SPIKE] for key, each in scaler._records.items()
                   if key not in undone and SPIKE in each["found_inf_per_device"]]  # fmt: skip
        spiked = False if scaler._guards.guard is None else info.spiked & (found_inf(spikes, home) != 0.0)
        applied = applied & (not lost)
        if not isinstance(self._state.updates, Tensor):
            self._state = as_tensors(self._state, home)
        self._set(count_nonfinite(
            self._state, loss_finite=not lost, stepped=applied | bad, update_finite=~bad, xp=torch
        ))  # fmt: skip
        return info._replace(applied=applied, spiked=spiked, nonfinite_update=bad, nonfinite_loss=lost)

    def check(self, policy: Any) -> None:
        """Raise `NonfiniteStreakError` if a streak has reached its limit and the host knows the counters."""
        is_on_host = not isinstance(self._state.updates, Tensor)
        if is_on_host or (is_readable(self._state.updates) and not is_being_recorded()):
            check_nonfinite_streak(policy, _read(self._state))

    def snapshot(self) -> NonfiniteState[Any]:
        """Return the counters where they are. Does not synchronise."""
        if not isinstance(self._state.updates, Tensor):
            return self._state
        return NonfiniteState(*(each.clone() for each in self._state))

    def read(self) -> NonfiniteState[Any]:
        """Return the counters on the host. Synchronises if they are on a device."""
        return _read(self._state)

    def saved(self, state: Any) -> dict[str, Any]:
        """Return the entry of a state dict. Synchronises if the counters are on a device."""
        return {"nonfinite": state_to_dict(state, nonfinite=self.read())["nonfinite"]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the entry of a state dict, and look at all tensors again."""
        self._checked, self._failing, self._losing = {}, set(), set()
        self._set(nonfinite_state_from_dict(saved))

    def copied(self) -> "Nonfinite":
        """Return a copy with counters on the host."""
        copy = Nonfinite(self.on_update, self.on_loss)
        copy._state = self.read()
        return copy

    def _set(self, state: NonfiniteState[Any]) -> None:
        if not isinstance(self._state.updates, Tensor):
            self._state = state
            return
        for tensor, value in zip(self._state, state, strict=True):  # a graph may hold these tensors
            if isinstance(value, Tensor):
                tensor.copy_(value)
            else:
                write(tensor, value.item())


class _Undone(NamedTuple):
    """A step that was undone."""

    bad: bool | Tensor
    """Whether it was, or a tensor that is not 0 if it was."""
    spike: bool | Tensor
    """The same for a spike that had forbidden the step before."""


def holds_lost_losses(scaler: Any, optimizer: Any) -> bool:
    """Return whether `on_nonfinite_loss` is "hold"; raise `SyncError` if ranks would hold the scale alone."""
    if scaler._nonfinite.on_loss != "hold":
        return False
    distributed = torch.distributed
    is_alone = scaler._ranks.process_group is None and distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if is_alone else 1
    if world > 1 and not any(mesh.size() == world for mesh in meshes_of([optimizer])):
        raise SyncError(
            "on_nonfinite_loss='hold' was given on several ranks, each of which has a loss of its own, and their "
            "loss scales would drift apart; make the scaler with process_group=, or with 'back_off'"
        )
    return True


def is_lost(scaler: Any, optimizer: Any, loss: Tensor) -> bool:
    """Return whether a loss is NaN or infinite on any rank. Synchronises."""
    finite = torch.isfinite(loss.detach()).all()
    lost = (~finite).float()
    return any(
        each.item() != 0.0 for each in scaler._ranks.combine(optimizer, {lost.device: lost}, lost.device).values()
    )


_CPU = torch.device("cpu")


def _require_unrecorded(is_on_device: bool) -> None:
    if is_on_device and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CallOrderError(
            "the step is being captured, and this one must be read on the host, since on_nonfinite_update is 'raise' "
            "or the optimizer has created state; capture with 'skip', after one step with this optimizer"
        )


def _read(state: NonfiniteState[Any]) -> NonfiniteState[Any]:
    if not isinstance(state.updates, Tensor):
        return state
    return NonfiniteState(
        *(type(zero)(value.item()) for zero, value in zip(init_nonfinite_state(), state, strict=True))
    )

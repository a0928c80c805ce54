"""What is known of each optimizer since the last update: whose gradients it holds, and what was found of them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core.errors import CallOrderError
from lossscale_torch._captured import ScaledLosses
from lossscale_torch._decision import READY, STEPPED, UNSCALED, Flags, OptimizerRecord, Ranks, known_on_host, reduce_max
from lossscale_torch._gradients import Gradients, grads_of, moved, params_of
from lossscale_torch._guard import Guards
from lossscale_torch._optimizers import has_zero_rates, is_being_recorded
from lossscale_torch._sharded_norm import Agreed, agree
from lossscale_torch._state import ScalerState


class OptimizerRecords:
    """The records of the optimizers that a scaler has met since the last update, and how their flags are combined."""

    def __init__(self, state: ScalerState, ranks: Ranks, joint_skip: bool, guards: Guards) -> None:
        self.state, self.ranks, self.joint_skip, self.guards = state, ranks, joint_skip, guards
        self.losses = ScaledLosses(state)
        self.by_id: defaultdict[int, Any] = new_records()
        """torch's own dict of records, by the id of their optimizer."""
        self.flags = Flags()
        self.are_flags_shared = False
        """Whether others may raise a flag after it was read."""
        self._joint: list[OptimizerRecord] = []

    @property
    def device(self) -> torch.device:
        """The device of the loss scale."""
        return self.state.device

    def of(self, optimizer: Any, caller: str) -> OptimizerRecord:
        """Return an optimizer's record; the first time since an update, ask where its gradients come from."""
        key = id(optimizer)
        record = self.by_id[key]
        if type(record) is not OptimizerRecord:
            record = self.by_id[key] = OptimizerRecord.of(record)
        if not record.is_admitted:
            record = self._admitted(optimizer, record)
        if record.had_none and record["stage"] is UNSCALED and any(each.numel() for each in grads_of(optimizer)):
            raise CallOrderError(
                "this rank had no gradients when it decided with the others, and has some now; "
                f"call {caller}() on an optimizer after backward()"
            )
        return record

    def to_unscale(self, optimizer: Any, caller: str) -> OptimizerRecord:
        """Return an optimizer's record, or raise torch's error where it was unscaled or stepped."""
        record = self.of(optimizer, caller)
        if record["stage"] is UNSCALED and not record.is_carried:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if record["stage"] is STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        return record

    def to_step(self, optimizer: Any) -> OptimizerRecord:
        """Return an optimizer's record, or raise torch's error where it was stepped."""
        record = self.of(optimizer, "step")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        return record

    def note(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        found: dict[Any, Tensor],
        known: bool | None = None,
        spiked: bool = False,
    ) -> None:
        """Record what a check found, combined over the ranks that must decide alike; nothing found leaves it ready.

        `known` is what the host knows of it already: True if every gradient is finite and no spike; `spiked` is why
        they are refused.
        """
        groups = self.ranks.groups_of(optimizer)
        if groups:
            flags = [moved(flag, self.device) for flag in found.values()]
            flag = torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=self.device)
            self._note_message(optimizer, record, self._message(optimizer, flag), groups, had_none=not found)
            return
        record.had_none, record.moment, record.is_combined = not found, self.losses.moment(), False
        record.is_rehearsal = bool(found) and _is_rehearsal(optimizer)
        if found:
            record.note(found, known, spiked)

    def agreed(self, optimizers: list[Any], meshes: list[Any], norms: list[Tensor], norm_type: float) -> Agreed:
        """Return what the ranks of the meshes know together; `norms` is what this rank adds to the norm on each mesh.

        The norm is NaN where ranks clip different optimizers at once: `note_agreed` tells.
        """
        no_flag = torch.zeros((), dtype=torch.float32, device=self.device)
        messages = torch.stack([self._message(optimizer, no_flag) for optimizer in optimizers])
        agreed = agree(norms, messages, meshes, norm_type)
        flags = [self.ranks.combine(*each, groups=())[0] for each in zip(optimizers, agreed.messages, strict=True)]
        return agreed._replace(norm=torch.where(torch.isinf(torch.stack(flags)).any(), torch.nan, agreed.norm))

    def note_agreed(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        agreed: Agreed,
        place: int,
        flag: Tensor,
        has_none: bool,
        known: bool | None,
        spiked: bool,
    ) -> None:
        """Record what the ranks of an optimizer's meshes found together; its message is the one at `place`."""
        message = agreed.messages[place].clone()
        message[0] = flag
        groups = [group for group in self.ranks.own_groups() if group not in agreed.groups]
        if groups or not (known or spiked):
            known = None  # the flag tells of an overflow elsewhere, or of ranks that differ
        self._note_message(optimizer, record, message, groups, has_none, known, spiked and known is False)

    def _message(self, optimizer: Any, flag: Tensor) -> Tensor:
        """Return what this rank tells the others of a check; see `Order.message`."""
        return self.ranks.message(optimizer, flag, counts=not _is_rehearsal(optimizer))

    def _note_message(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        message: Tensor,
        groups: Iterable[Any],
        had_none: bool,
        known: bool | None = None,
        spiked: bool = False,
    ) -> None:
        """Record what ranks found together, once their messages are combined over the groups, too; see `note`."""
        record.had_none, record.moment, record.is_combined = had_none, self.losses.moment(), True
        flag, counts = self.ranks.combine(optimizer, message, groups)
        record.is_rehearsal = _may_rehearse(optimizer) and not bool(counts)
        record.note({self.device: flag}, known, spiked)
        if known is None and self.device.type == "cpu":
            known_on_host(record)  # reading costs no wait here, so ranks that differ are told at once

    def judge(self, optimizers: list[Any], norm: Tensor) -> None:
        """Raise the flags of optimizers that were checked before, where the guard refuses the norm of all of them."""
        records = [self.by_id[id(optimizer)] for optimizer in optimizers]
        if self.guards.guard is None or all(record.is_judged for record in records):
            return
        spiked = self.guards.judge(optimizers[0], norm)
        # The squares of finite gradients may overflow, and torch's clip then makes zeros of them: refused as a spike,
        # also while the guard accepts any norm to begin with. The guard counts norms that were measured, so not this.
        spiked = spiked | (bool(torch.isinf(norm)) if isinstance(spiked, bool) else torch.isinf(norm))
        for optimizer, record in zip(optimizers, records, strict=True):
            if groups := self.ranks.groups_of(optimizer):
                flag = torch.as_tensor(spiked, device=self.device).float()
                reduce_max(flag, groups)
                spiked = bool(flag) if flag.is_cpu else flag != 0.0
            record.raise_spike(spiked)

    def deciding(self, record: OptimizerRecord) -> list[OptimizerRecord]:
        """Return the records whose flags decide on this optimizer's step: its own, or with `joint_skip` all."""
        if not self.joint_skip:
            return [record]
        if self._joint and not any(each is record for each in self._joint):
            raise CallOrderError(
                "with joint_skip another optimizer has stepped before this one was unscaled; "
                "call unscale_() on every optimizer before the first step()"
            )
        self._joint = [each for each in self.by_id.values() if isinstance(each, OptimizerRecord)]
        return self._joint

    def may_step(self, record: OptimizerRecord) -> bool:
        """Return whether a step may be applied, and note it; waits for the device unless that was done before."""
        record.flag = all(map(known_on_host, self.deciding(record)))
        return record.flag

    def counted(self) -> list[OptimizerRecord]:
        """Return the records in which something was found that counts for the loss scale."""
        counted = []
        for each in self.by_id.values():
            record = OptimizerRecord.of(each)
            if record["found_inf_per_device"] and not record.is_rehearsal:
                if self.are_flags_shared:
                    record.read_again()
                counted.append(record)
        return counted

    def found_none(self) -> bool:
        """Return whether nothing was found in any record."""
        return not any(record["found_inf_per_device"] for record in self.by_id.values())

    def are_untouched(self) -> bool:
        """Return whether no optimizer was unscaled, stepped or skipped since the last update."""
        return all(record["stage"] is READY for record in self.by_id.values())

    def stepped_params(self) -> set[int]:
        """Return the parameters, by their ids, of the optimizers that were stepped or skipped since the last update."""
        keys = [key for key, record in self.by_id.items() if record["stage"] is STEPPED]
        optimizers = [optimizer for key in keys if (optimizer := self.losses.optimizer(key)) is not None]
        return {id(param) for optimizer in optimizers for param in params_of(optimizer)}

    def end(self) -> dict[int, Any]:
        """Forget the records at an update; return the flags of the optimizers that were stepped, by their id."""
        flags, unscaled, done, used_present = {}, {}, [], False
        for key, each in self.by_id.items():
            record = OptimizerRecord.of(each)
            used_present = used_present or record.captured is None
            if record["stage"] is STEPPED:
                flags[key] = record.flag
                if record.finite and not self.are_flags_shared:
                    done.append(record)
            elif record["stage"] is UNSCALED:
                unscaled[key] = record
        self.losses.end(set(flags), unscaled, used_present)
        if self.are_flags_shared:
            self.by_id, self.are_flags_shared = new_records(), False  # torch leaves the old dict to those who hold it
        else:
            self.by_id.clear()
        self._joint = []
        self.flags.give_back(done)
        return flags

    def copied(self) -> "OptimizerRecords":
        """Return a copy for another scaler, with its state on the host, which knows no optimizer and no group yet."""
        state = ScalerState(self.state.policy, self.state.read())
        return OptimizerRecords(state, Ranks(), self.joint_skip, self.guards.copied())

    def _admitted(self, optimizer: Any, record: OptimizerRecord) -> OptimizerRecord:
        origin = self.losses.origin(optimizer)
        if origin is None:
            return record
        if origin.record is not None:
            record = self.by_id[id(optimizer)] = origin.record
            record.is_carried = True
        record.captured, record.is_admitted = origin.captured, True
        if not origin.is_same_step and self.losses.captured is None:
            self.state.begin_step()
        return record


def new_records() -> defaultdict[int, Any]:
    """Return the records of no optimizer yet."""
    return defaultdict(OptimizerRecord.fresh)


def _may_rehearse(optimizer: Any) -> bool:
    return has_zero_rates(optimizer) and not is_being_recorded()


def _is_rehearsal(optimizer: Any) -> bool:
    """Return whether a step would move nothing on this rank, and so may only make the optimizer allocate its state."""
    return _may_rehearse(optimizer) and Gradients([optimizer]).are_zero()

"""One answer for all: flags of devices, ranks, mesh axes and joint optimizers become one decision on a step."""

import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from lossscale_core.errors import SyncError
from lossscale_torch._gradients import moved, params_of
from lossscale_torch._join import JoinedScaler
from lossscale_torch._meshes import groups_over, meshes_of
from lossscale_torch._optimizers import weak_reference

READY, UNSCALED, STEPPED = OptState  # an enum's members are slow to reach by name

SPIKE = 2.0**-24
"""The flag of finite gradients whose norm a spike guard refuses.

It is not 0.0, so that whoever reads the flag skips the step; and combined over ranks, an overflow outweighs it.
"""


class OptimizerRecord(dict[str, Any]):
    """The record of one optimizer since the last update: torch's two keys, and what was decided.

    torch's keys are `stage` and `found_inf_per_device`; other packages read and write them.
    """

    finite: bool | None = None
    """Whether its step may be applied, once the host knows: no flag is raised on any rank."""
    spiked: bool = False
    """Whether the host knows that only a spike has raised its flags."""
    is_judged: bool = False
    """Whether a guard has judged the norm of its gradients."""
    grad_scale: Tensor | None = None
    """The factor by which a fused optimizer must still divide its gradients."""
    captured: Any = None
    """The `CapturedScale` its gradients were made with, where that is not the present loss scale."""
    is_admitted: bool = False
    """Whether it has been asked where its gradients come from."""
    flag: Any = False
    """Once stepped: True where the step was applied, or a tensor that holds 0.0 there, still unread."""
    is_carried: bool = False
    """Whether its gradients were unscaled before the last update, which was another optimizer's."""
    moment: Any = None
    """The time of their check: a mark of `ScaledLosses.moment`."""
    is_doubtful: bool = False
    """Whether a backward may have run between their check and the update."""
    is_rehearsal: bool = False
    """Whether the step only makes the optimizer allocate its state."""
    is_combined: bool = False
    """Whether its flag was combined over ranks."""
    had_none: bool = False
    """Whether there were no gradients to check."""
    borrowed: Tensor | None = None
    """The one of its flags that came from `Flags`."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "OptimizerRecord":
        """Return `record`, or one of this class with its keys if torch's own factory made it."""
        return record if isinstance(record, cls) else cls(record)

    @classmethod
    def fresh(cls) -> "OptimizerRecord":
        """Return the record of an optimizer that was not touched since the last update."""
        return cls(stage=READY, found_inf_per_device={})

    def note(self, found: dict[Any, Tensor], finite: bool | None = None, spiked: bool = False) -> None:
        """Take over the flags of a check, and forget what an earlier one has found."""
        self["found_inf_per_device"] = found
        self["stage"] = UNSCALED
        self.finite, self.spiked, self.is_judged, self.grad_scale = finite, spiked, False, None

    def raise_spike(self, spiked: bool | Tensor) -> None:
        """Raise the flags of gradients that are finite where a guard, which has judged them, refuses their norm."""
        self.is_judged = True
        if spiked is False:
            return
        found = self["found_inf_per_device"]
        self["found_inf_per_device"] = {device: with_spike(flag, spiked) for device, flag in found.items()}
        self.finite, self.spiked = None, False

    def read_again(self) -> None:
        """Read known flags again where that waits for no device; otherwise forget what was known."""
        if self.finite is not None:
            self.finite = None
            if all(flag.is_cpu for flag in self.flags):
                known_on_host(self)

    @property
    def flags(self) -> list[Tensor]:
        """The flags, one for each device: 0.0 where every gradient is finite."""
        return list(self["found_inf_per_device"].values())


class Flags:
    """Flags that are not raised: making one takes as long as the check of a small model, so each serves many steps."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, device: torch.device) -> Tensor:
        """Return a flag: 0.0, float32, shape `()`."""
        if self._spare:
            flag = self._spare.pop()
            if flag.device == device:
                return flag
        with torch.inference_mode(False):  # the flag outlives a validation loop that may be running
            return torch.zeros((), dtype=torch.float32, device=device)

    def give_back(self, records: Iterable[OptimizerRecord]) -> None:
        """Take back the flags of records that are done with: not raised, and held by nobody else."""
        for record in records:
            flag, record.borrowed = record.borrowed, None
            if flag is not None and any(flag is each for each in record.flags):  # and no later check has replaced it
                self._spare.append(flag)


def known_on_host(record: OptimizerRecord) -> bool:
    """Return whether a record's step may be applied; waits for the device the first time it is asked."""
    if record.finite is None:
        found = [flag.item() for flag in record["found_inf_per_device"].values()]  # Ctrl-C may interrupt the wait
        record.finite = found.count(0.0) == len(found)
        record.spiked = not record.finite and found.count(0.0) + found.count(SPIKE) == len(found)
        if record.is_combined and math.inf in found:
            raise SyncError(
                "ranks unscale or step different optimizers at the same time, so that one's overflow would skip "
                "another's step; call unscale_() and step() on the optimizers in the same order on every rank"
            )
    return record.finite


def outcome(records: list[OptimizerRecord], loss_scale: Tensor) -> tuple[bool | Tensor, bool | Tensor]:
    """Return whether all gradients are finite, and whether some were refused as a spike.

    Bools where the host knows, else tensors on the device of the loss scale.
    """
    for record in records:
        if not record.finite:
            break
    else:
        return True, False
    if all(record.finite is not None for record in records):
        spiked = any(record.spiked for record in records)
        return all(record.finite or record.spiked for record in records), spiked
    flags = torch.stack([moved(flag, loss_scale.device).reshape(()) for record in records for flag in record.flags])
    is_spike = flags == SPIKE
    return ((flags == 0.0) | is_spike).all(), is_spike.any()


def found_inf(records: Iterable[OptimizerRecord], device: torch.device) -> Tensor:
    """Return 1.0 where a flag is raised, else 0.0: float32, shape `()`, on `device`.

    Any value but 0.0 counts, NaN included; a fused kernel takes 1.0 alone for an overflow.
    """
    flags = [moved(flag, device) for record in records for flag in record.flags]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return (torch.stack([flag.reshape(()) for flag in flags]) != 0.0).any().float()


def with_spike(flag: Tensor, spiked: bool | Tensor) -> Tensor:
    """Return the flag of gradients, raised to `SPIKE` where they are finite and a guard refuses their norm."""
    if isinstance(spiked, Tensor):
        spiked = moved(spiked, flag.device)
    return torch.where((flag == 0.0) & spiked, SPIKE, flag)


class Order:
    """The order in which a scaler's optimizers are checked, so that ranks notice where theirs differ.

    Each flag is reduced together with the number of its optimizer, a number made of its parameters' shapes, and whether
    its step counts. Ranks whose numbers differ check different optimizers at once, and would decide crosswise. The
    shapes alone may differ, as between stages of a pipeline: only two optimizers that meet each other both ways are
    crossed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Tensor]] = {}
        self._met: dict[int, Tensor] = {}
        self._count = 0

    def message(self, optimizer: Any, flag: Tensor, counts: bool) -> Tensor:
        """Return what this rank tells others of a check, on the device of its flag: the largest of each number counts.

        float32, of the shape `(6,)`.
        """
        message = self._message_of(optimizer, flag.device).clone()
        message[0] = flag
        if not counts:
            message[1] = 0.0
        return message

    def combine(self, optimizer: Any, message: Tensor, groups: Iterable[Any]) -> tuple[Tensor, Tensor]:
        """Return the flag of a message, and whether its step counts, combined in place over the ranks of each group.

        All ranks of a group must call. The flag is infinite where ranks check different optimizers. Does not
        synchronise.
        """
        for group in groups:
            reduce_max(message[0] if isinstance(group, JoinedScaler) else message, [group])
        differs, pair = message[2] != -message[3], message[4:]
        for key, met in self._met.items():
            if key != id(optimizer):
                differs = differs | ((met == pair).all() & (pair[0] != -pair[1]))
        self._met[id(optimizer)] = pair
        return torch.where(differs, torch.inf, message[0]), message[1]

    def _message_of(self, optimizer: Any, device: torch.device) -> Tensor:
        reference, message = self._known.get(id(optimizer), (None, None))
        if message is None or reference is None or reference() is not optimizer:
            number, shapes = float(self._count), _number_of_shapes(optimizer)
            self._count += 1
            message = torch.tensor([0.0, 1.0, number, -number, shapes, -shapes], dtype=torch.float32).to(device)
            self._known[id(optimizer)] = (weak_reference(optimizer), message)
            self._met.pop(id(optimizer), None)
        return message


class Ranks:
    """The ranks that decide alike: those of a process group and of the meshes over which parameters are sharded."""

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self.joined: JoinedScaler | None = None
        """The scaler's part in `Join`, while that is active."""
        self._order = Order()

    def groups_of(self, optimizer: Any) -> tuple[Any, ...]:
        """Return what an optimizer's flags are combined over: process groups, or the scaler's part in `Join`."""
        meshes = meshes_of([optimizer])
        if not meshes and self.process_group is None:
            return ()
        return tuple(dict.fromkeys([*(group for mesh in meshes for group in groups_over(mesh)), *self.own_groups()]))

    def own_groups(self) -> tuple[Any, ...]:
        """Return what all flags are combined over besides meshes: `process_group`, or the scaler's part in `Join`."""
        if self.process_group is None:
            return ()
        require_member(self.process_group)
        is_joined = self.joined is not None and self.joined.is_enabled()
        return (self.joined if is_joined else self.process_group,)

    def end_step(self) -> None:
        """Tell ranks that have run out of inputs that no more flags come in this step."""
        if self.joined is not None and self.joined.is_enabled():
            self.joined.end_step()

    def message(self, optimizer: Any, flag: Tensor, counts: bool) -> Tensor:
        """Return what this rank tells others of a check; see `Order.message`."""
        return self._order.message(optimizer, flag, counts)

    def combine(self, optimizer: Any, message: Tensor, groups: Iterable[Any]) -> tuple[Tensor, Tensor]:
        """Return a message's flag, and whether its step counts, combined over the groups; see `Order.combine`."""
        return self._order.combine(optimizer, message, groups)


def require_member(group: Any) -> None:
    """Raise `SyncError` in a process that the group does not contain: its messages would go unanswered."""
    if torch.distributed.get_rank(group) < 0:
        raise SyncError(
            f"rank {torch.distributed.get_rank()} is not in the process_group of its scaler, so it would decide alone; "
            "make the scaler of each rank with a group that contains it, or without one"
        )


def reduce_max(flag: Tensor, groups: Iterable[Any]) -> None:
    """Combine a flag over the ranks of each group, in place; every rank of a group must call."""
    for group in groups:
        if isinstance(group, JoinedScaler):
            group.reduce_max(flag)
        else:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)


def _number_of_shapes(optimizer: Any) -> float:
    """Return a number made of the class of an optimizer and its parameters' shapes, which float32 holds exactly."""
    text = repr((type(optimizer).__name__, [tuple(param.shape) for param in params_of(optimizer)]))
    return float(zlib.crc32(text.encode()) & 0xFFFFFF)

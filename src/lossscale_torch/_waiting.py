"""The loss scale of an optimizer's gradients: the present one, or that of a loss before the last update.

An optimizer *waits* if a loss was scaled after its last step, but none since the last update: then its gradients are
older than that update. This happens under Accelerate, which updates after each optimizer. Only code that has read the
present scale can have computed other gradients with it. So the scaler records the waiting gradients when it returns
the scale to other code.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lossscale_core.adapters import shown_number
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import grads_of
from lossscale_torch._members import READY, STEPPED, UNSCALED, Member, Record, RecordedGradients
from lossscale_torch._state import LossScale


class Waiting:
    """The count of scaled losses, and the scale of the last ones."""

    def __init__(self) -> None:
        self.has_loss = False
        """Whether a loss was scaled since the last update."""
        self.has_graph = False
        """Whether a loss that needs gradients was scaled since the last update."""
        self.is_over = False
        """Whether waiting is off: the scaler was recorded in a graph, and is replayed without Python."""
        self.continued = False
        """Whether the last update belonged to the same step as the one before it."""
        self._losses = 0
        self._over_at = 0  # the number of losses with gradients that can no longer wait
        self._previous: float | Tensor = 1.0
        self._is_recorded = self._stays_recorded = False

    def count_loss(self, needs_gradients: bool, members: dict[int, Member], records: dict[int, Any]) -> None:
        """Count a scaled loss; its backward pass may change gradients that are unscaled already."""
        if not self.has_loss:  # a new step: no gradients wait any more
            self.has_loss = True
            for member in list(members.values()):
                member.kept = member.recorded_gradients = None
        if needs_gradients:
            self.has_graph = True
            self._losses += 1
        if records:
            self._note_unscaled(members, records)

    def record_gradients(self, members: dict[int, Member], records: dict[int, Any], for_good: bool = False) -> None:
        """Record all gradients that wait or are unscaled, before other code receives the present scale.

        `for_good` says that this code can read the scale at any later time without a call.
        """
        self._is_recorded, self._stays_recorded = True, self._stays_recorded or for_good
        self._note_unscaled(members, records)
        for member in list(members.values()):
            optimizer = member.optimizer()
            if member.recorded_gradients is None and optimizer is not None and self.waits(member):
                member.recorded_gradients = RecordedGradients(optimizer)

    def waits(self, member: Member) -> bool:
        """Return whether an optimizer's gradients may be those of a loss before the last update."""
        return not self.has_loss and max(member.losses, self._over_at) < self._losses and not self.is_over

    def open(self, member: Member, optimizer: Any, record: Record, present: LossScale) -> Record:
        """Return the record of an optimizer with the scale of its gradients.

        Raises `CallOrderError` if this is unknown and the two scales differ; reading them waits for their device.
        """
        is_recorded = self._is_recorded and member.recorded_gradients is not None
        if not self.waits(member) or (is_recorded and not member.recorded_gradients.is_unchanged(optimizer)):  # type: ignore[union-attr]
            record.scale = present
            return record
        if self._is_recorded and not is_recorded:  # a new member: its gradients were not recorded
            self._require_same(present)
        if member.kept is None or not grads_of(optimizer):
            record.scale = self._previous_like(present)
        else:
            record = member.kept
            record.is_kept = True
            record.scale = LossScale(torch.ones_like(present.tensor), 1.0)
        record.waited = True
        return record

    def continues(self, records: Iterable[Record]) -> bool:
        """Return whether an update belongs to the same step as the last one, and otherwise end all waiting."""
        self.continued = False
        if not self.has_loss:
            self.continued = all(record.waited for record in records)
            self._over_at = self._over_at if self.continued else self._losses
        return self.continued

    def end(self, members: dict[int, Member], records: dict[int, Any], scale_used: float | Tensor) -> None:
        """Record an update and the scale that was used; keep gradients that are unscaled and not stepped."""
        if self.has_loss:
            self._previous = scale_used
        for key, record in records.items():
            member = members.get(key)
            if member is None or record["stage"] is READY:
                continue
            member.kept = member.recorded_gradients = None
            if record["stage"] is STEPPED:
                member.losses = self._losses
            elif type(record) is Record and not record.is_left_scaled and not record.has_changed(member.optimizer()):
                member.kept = record
        self.has_loss = self.has_graph = False
        self._is_recorded = self._stays_recorded
        if self._is_recorded:
            self.record_gradients(members, {})

    def scale_changes(self, members: dict[int, Member], records: dict[int, Any], scale_used: float | Tensor) -> None:
        """Record that the present scale is replaced; existing gradients keep their scale."""
        if self.has_loss:
            self._previous, self.has_loss = scale_used, False
        self._is_recorded = self._stays_recorded
        if self._is_recorded:
            self.record_gradients(members, records)

    def _note_unscaled(self, members: dict[int, Member], records: dict[int, Any]) -> None:
        for key, record in records.items():
            if (
                type(record) is Record
                and record["stage"] is UNSCALED
                and record.recorded_gradients is None
                and key in members
            ):
                record.recorded_gradients = RecordedGradients(members[key].optimizer())

    def _previous_like(self, present: LossScale) -> LossScale:
        previous = self._previous
        if isinstance(previous, Tensor):
            return LossScale(previous)
        return LossScale(torch.full_like(present.tensor, previous), previous)

    def _require_same(self, present: LossScale) -> None:
        before, now = shown_number(float(self._previous)), shown_number(float(present.tensor))
        if float(self._previous) != float(present.tensor):
            raise CallOrderError(
                f"an optimizer's gradients may come from a loss that scale() multiplied by {before}, before the last "
                f"update(), or from a later one at {now}, and it is unknown which; step every optimizer before "
                "update(), or call scale() on each loss after it"
            )

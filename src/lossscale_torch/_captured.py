"""Which loss scale an optimizer's gradients were made with: the present one, or the one of a `scale` before an update.

Gradients are divided by what their loss was multiplied by. Without a `scale` since the last update they belong to the
present loss scale, whether a replayed graph made them or a loss that was multiplied by `get_scale()`. The one exception
are gradients that were there before the update: an optimizer that is stepped only after `update` was called for another
one, as Accelerate does. Those are told apart by when backward ran: by a hook on the scaled loss, by the identity and
version of the gradients, and by whether a graph was built since. Where that cannot be told, a `CallOrderError` is
raised.
"""

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lossscale_core.errors import CallOrderError
from lossscale_torch._decision import STEPPED, UNSCALED, OptimizerRecord
from lossscale_torch._gradients import grads_of
from lossscale_torch._optimizers import weak_reference

_LATE = (
    "backward() of a loss that scale() multiplied before the last update() cannot be told from one of the present loss "
    "scale. Call backward() before update(), or call scale() on the loss again after it."
)


class CapturedScale:
    """The loss scale that `scale` multiplied losses by between two updates.

    `scale` is a copy that a recorded graph writes anew at each replay; `version` is that of the persistent tensor at
    the time of the copy.
    """

    def __init__(self) -> None:
        self.scale: Any = None
        self.version = 0
        self.may_be_below_one = False
        self.last_backward: int | None = None
        self.is_past = False
        self.graph_count = 0

    def take(self, persistent: Tensor, may_be_below_one: bool) -> Tensor:
        """Copy the persistent loss scale, and return the copy: backward may keep it, since nobody writes to it."""
        self.scale = persistent.clone()
        self.version = persistent._version
        self.may_be_below_one = may_be_below_one
        return self.scale

    @torch.compiler.disable  # else Dynamo breaks its graph at it where a compiled function calls backward
    def note_backward(self, _: Tensor) -> None:
        """Note that backward of a scaled loss begins; after an update it is an error, as with torch's own scaler."""
        if self.is_past:
            raise RuntimeError(_LATE)
        self.last_backward = _this_backward()

    def end(self) -> None:
        """Note that `update` was called."""
        self.is_past = True
        self.graph_count = _graphs_built()

    def is_latest_backward(self) -> bool:
        """Return whether no backward ran since the latest one of these losses."""
        if _graphs_built() != self.graph_count and _next_backward() - 1 == self.last_backward:
            self.graph_count = _graphs_built()
        return _graphs_built() == self.graph_count


class GradientsSeen(NamedTuple):
    """The identity and version of an optimizer's gradients at one time."""

    references: list[Any]
    versions: list[int]

    @classmethod
    def of(cls, optimizer: Any) -> "GradientsSeen":
        """Look at the gradients now, without keeping them alive."""
        grads = grads_of(optimizer)
        return cls([ref(grad) for grad in grads], [grad._version for grad in grads])

    def writes_since(self, optimizer: Any) -> int | None:
        """Return how often the most written of them was written to; None where they are others now, or gone."""
        grads = grads_of(optimizer)
        if len(grads) != len(self.references):
            return None
        if any(reference() is not grad for reference, grad in zip(self.references, grads, strict=True)):
            return None
        return max((grad._version - old for grad, old in zip(grads, self.versions, strict=True)), default=0)


class _Waiting(NamedTuple):
    """Gradients that were there when `update` was called for another optimizer."""

    captured: CapturedScale
    seen: GradientsSeen
    record: OptimizerRecord | None
    """What was known of them, where they are unscaled already."""
    is_doubtful: bool
    """Whether a backward may have run after they were unscaled."""

    def is_unused(self, optimizer: Any, present_scale: Tensor) -> bool:
        """Return whether the gradients still are those; raise `CallOrderError` where new ones were added to them."""
        writes = self.seen.writes_since(optimizer)
        if writes is None:
            return False
        if writes == 0 or self.captured.is_latest_backward():
            if self.is_doubtful:
                _require_same(1.0, self.captured.scale)
            return True
        if writes == 1:  # by a backward that added to them; more writes begin with one that zeroed them
            _require_same(1.0 if self.record else self.captured.scale, present_scale)
        return False


class Origin(NamedTuple):
    """Where an optimizer's gradients come from."""

    captured: CapturedScale | None
    """The scale they were made with, if it was captured before the last update; None for the present loss scale."""
    record: OptimizerRecord | None
    """What was known of them, where they are unscaled already."""
    is_same_step: bool
    """Whether they are of the same losses as those that the last update counted."""


_PRESENT = Origin(None, None, is_same_step=False)


class ScaledLosses:
    """Which optimizers have used up the gradients of which scaled losses."""

    def __init__(self) -> None:
        self.present: CapturedScale | None = None
        """The scale of the losses scaled since the last update."""
        self._past: CapturedScale | None = None
        self._known: dict[int, Any] = {}
        self._used_up: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}

    def begin(self) -> CapturedScale:
        """Return the captured scale of the losses since the last update, a new one after it."""
        if self.present is None:
            self.present = CapturedScale()
            self._used_up.clear()
        return self.present

    def end(self, records: dict[int, OptimizerRecord], is_scale_unchanged: bool) -> None:
        """Note an update, with which these records end; gradients that no step has used wait for a later one.

        What is known of gradients that are unscaled already is kept only if some optimizer was stepped: else the user
        has skipped, and new gradients may come from a replayed graph, which leaves no trace.
        """
        stepped = {key for key, record in records.items() if record["stage"] is STEPPED}
        unscaled = {key: record for key, record in records.items() if record["stage"] is UNSCALED}
        self._used_up |= stepped or set(unscaled)
        if self.present is None:
            return
        if self.present.last_backward is not None:
            self._keep_what_waits(self.present, unscaled if stepped else {}, is_scale_unchanged)
        self.present.end()
        self._past, self.present = self.present, None

    def moment(self) -> tuple[int, int | None]:
        """Return a mark that stays the same while no operation is recorded and no scaled loss runs backward."""
        return _graphs_built(), None if self.present is None else self.present.last_backward

    def origin(self, optimizer: Any, present_scale: Tensor) -> Origin:
        """Return where an optimizer's gradients come from; raise `CallOrderError` where nothing tells.

        Waits for the device only where it might settle a doubt that the loss scale is unchanged.
        """
        key = id(optimizer)
        was_known = _is(self._known.get(key), optimizer)
        self._known[key] = weak_reference(optimizer)
        waiting = self._waiting.pop(key, None)
        if waiting is not None and was_known:
            if waiting.is_unused(optimizer, present_scale):
                return Origin(waiting.captured, waiting.record, is_same_step=self.present is None)
            self._used_up.add(key)
        past = self._past
        if self.present is not None or past is None or past.last_backward is None or key in self._used_up:
            return _PRESENT
        if past.is_latest_backward():
            return Origin(past, None, is_same_step=True)
        if not was_known:
            _require_same(past.scale, present_scale)
        return _PRESENT

    def _keep_what_waits(
        self, captured: CapturedScale, unscaled: dict[int, OptimizerRecord], is_scale_unchanged: bool
    ) -> None:
        for key, reference in list(self._known.items()):
            optimizer = reference()
            if optimizer is None:
                del self._known[key]
                continue
            if key in self._used_up or (is_scale_unchanged and key not in unscaled):
                continue
            earlier = self._waiting.get(key)
            if earlier is None or earlier.seen.writes_since(optimizer) != 0:
                seen = GradientsSeen.of(optimizer)
                record = unscaled.get(key)
                if seen.references:
                    is_doubtful = record is not None and record.moment != self.moment()
                    self._waiting[key] = _Waiting(captured, seen, record, is_doubtful)
                else:
                    self._used_up.add(key)


def _require_same(scale: float | Tensor, present_scale: Tensor) -> None:
    """Raise `CallOrderError` where gradients may belong to either of two loss scales that differ."""
    before, now = float(scale), float(present_scale)
    if before != now:
        raise CallOrderError(
            f"an optimizer's gradients may come from a loss that scale() multiplied by {before:g}, before the last "
            f"update(), or from a later one at {now:g}, and nothing tells which; step every optimizer before update(), "
            "or call scale() on each loss after it"
        )


def _is(reference: Any, optimizer: Any) -> bool:
    return reference is not None and reference() is optimizer


def _graphs_built() -> int:
    """Return a number that grows whenever this thread records an operation for backward."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


_probes = 0


def _this_backward() -> int:
    """Return the number of the backward that is running: the engine counts them up, and our probes do not count."""
    return torch._C._current_graph_task_id() - _probes


def _next_backward() -> int:
    """Return the number that the next backward will have."""
    global _probes
    numbers: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros((), requires_grad=True).clone()
        probe.register_hook(lambda _: numbers.append(_this_backward()))
        probe.backward()
    _probes += 1
    return numbers[0]

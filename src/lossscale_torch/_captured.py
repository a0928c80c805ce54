"""The loss scale that an optimizer's gradients were made with: the present one, or the one before the last update.

Gradients are divided by what their loss was multiplied by. That is the present loss scale, with one exception: an
optimizer that is stepped only after `update` was called for another one, as Accelerate does, still holds gradients of
the scale before. So the question arises only where no loss was scaled since the last update, but one before it whose
backward ran, and the optimizer has not been stepped since. Then:

| a backward ran since the update | the gradients since the update | they belong to |
|---|---|---|
| no  | unchanged, or never seen before | the scale before the update |
| no  | written to or replaced          | nobody can tell: `CallOrderError`, unless the two scales are equal |
| yes | unchanged                       | the scale before the update |
| yes | written to or replaced          | the present scale |
| yes | never seen before               | nobody can tell: `CallOrderError`, unless the two scales are equal |

A scaler whose calls were recorded (a CUDA graph) always takes the present scale: a replay leaves no trace here.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lossscale_core.errors import CallOrderError
from lossscale_torch._compiling import not_compiled
from lossscale_torch._decision import OptimizerRecord
from lossscale_torch._gradients import grads_of
from lossscale_torch._optimizers import is_being_recorded, weak_reference
from lossscale_torch._state import CapturedScale, ScalerState
from lossscale_torch._verbs import scaled

_LATE = (
    "backward() of a loss that scale() multiplied before the last update() cannot be told from one of the present loss "
    "scale. Call backward() before update(), or call scale() on the loss again after it."
)


class Backwards:
    """The backward passes of the losses that were scaled between two updates, by their numbers in autograd's engine."""

    def __init__(self) -> None:
        self.last: int | None = None
        """The number of the latest backward of such a loss; None before the first."""
        self._next: int | None = None  # the number of the first backward after the update; None before the update

    @not_compiled  # else Dynamo breaks its graph at it where a compiled function calls backward
    def note(self, _: Tensor) -> None:
        """Note that backward of a scaled loss begins; after an update it is an error, as with torch's own scaler."""
        if self._next is not None:
            raise RuntimeError(_LATE)
        self.last = _this_backward()

    def end(self, may_wait: bool) -> None:
        """Note that `update` was called, and exactly how many backwards ran before it if a gradient may wait."""
        last = -1 if self.last is None else self.last
        self._next = _number_of_next_backward() if may_wait else last + 1

    def ran_since(self) -> bool:
        """Return whether any backward ran in this process since the update."""
        return _number_of_next_backward() != self._next


class GradientsSeen(NamedTuple):
    """The identity and version of an optimizer's gradients at one time."""

    versions: dict[int, tuple[Any, int]]

    @classmethod
    def of(cls, optimizer: Any) -> "GradientsSeen":
        """Look at the gradients now, without keeping them alive."""
        return cls({id(grad): (ref(grad), grad._version) for grad in grads_of(optimizer)})

    def are_unchanged(self, optimizer: Any) -> bool:
        """Return whether each gradient that is there now was there then and has not been written to since."""
        for grad in grads_of(optimizer):
            reference, version = self.versions.get(id(grad), (None, 0))
            if reference is None or reference() is not grad or grad._version != version:
                return False
        return True


class Origin(NamedTuple):
    """The source of an optimizer's gradients."""

    captured: CapturedScale | None
    """The scale they were made with, if it was captured before the last update; None for the present loss scale."""
    record: OptimizerRecord | None
    """The record of gradients that are unscaled already."""
    is_same_step: bool
    """Whether they are of the same losses as those that the last update counted."""


_PRESENT = Origin(None, None, is_same_step=False)


class ScaledLosses:
    """The losses that were scaled before the last update, and the optimizers that have used up their gradients."""

    def __init__(self, state: ScalerState) -> None:
        self._state = state
        self.captured: CapturedScale | None = None
        """The scale of the losses scaled since the last update; None where none was."""
        self._is_recorded = False  # whether a call of the scaler was recorded, and may be replayed without any Python
        self._backwards = Backwards()
        self._past: CapturedScale | None = None
        self._known: dict[int, Any] = {}
        self._used_up: set[int] = set()
        self._seen: dict[int, GradientsSeen] = {}
        self._unscaled: dict[int, OptimizerRecord] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the present loss scale, and watch for its backward."""
        if self.captured is None:
            self._state.begin_step()
            self._backwards = Backwards()
        self.captured = self._state.capture(is_recorded=self.is_recorded())
        result = scaled(loss, self.captured.scale)
        if result.requires_grad:
            _call_in_backward(result, self._backwards.note)
        return result

    def is_recorded(self) -> bool:
        """Return whether this call, or one before it, was recorded, and may be replayed without any Python."""
        if not self._is_recorded:
            self._is_recorded = is_being_recorded()
        return self._is_recorded

    def scale_of(self, record: OptimizerRecord) -> CapturedScale:
        """Return the loss scale that a record's gradients were made with, on the device of the present one.

        It is the persistent tensor itself for a graph that records this, which reads at each replay what the tensor
        then holds, and where no loss was scaled since the last update.
        """
        captured, state = record.captured, self._state
        if captured is None:
            captured = self.captured
            # A step that is recorded, or counted by a dispatch mode, does not make the scaler a recorded one.
            if captured is None or self._is_recorded or is_being_recorded():
                return state.present()
        return captured.moved_to(state.device)

    def end(self, stepped: set[int], unscaled: dict[int, OptimizerRecord], used_present: bool) -> None:
        """Note an update, which these optimizers were stepped or only unscaled before, by their ids.

        Gradients that no step has used may wait for a later one. The record of gradients that are unscaled already is
        kept only if some optimizer was stepped: else the user has skipped. `used_present` says whether some gradients
        belonged to the present scale.
        """
        is_recorded = self.is_recorded()
        if self.captured is None:
            if used_present:
                self._forget()
            self._used_up |= stepped
            return
        self._used_up = stepped or set(unscaled)
        may_wait = self._backwards.last is not None and not is_recorded
        waiting = self._look_at_what_waits() if may_wait and not self._used_up.issuperset(self._known) else {}
        self._unscaled = {key: record for key, record in unscaled.items() if key in waiting} if unscaled else {}
        for record in self._unscaled.values():
            record.is_doubtful = record.moment != self.moment()
        self._seen = waiting
        self._backwards.end(may_wait=bool(waiting))
        self._past, self.captured = (self.captured if may_wait else None), None

    def origin(self, optimizer: Any) -> Origin | None:
        """Return the source of an optimizer's gradients, or None while it has none that the question is about.

        Raises `CallOrderError` where nothing tells. Waits for the device only where an unchanged loss scale would
        settle the doubt.
        """
        key, past = id(optimizer), self._past
        reference = self._known.get(key)
        was_known = reference is not None and reference() is optimizer
        if self.captured is not None or past is None or self._is_recorded or key in self._used_up:
            origin: Origin | None = _PRESENT
        else:
            origin = self._origin(optimizer, past, was_known)
        if not was_known:
            self._known[key] = weak_reference(optimizer)  # not where it raises: a second try must not be answered
        return origin

    def _origin(self, optimizer: Any, past: CapturedScale, was_known: bool) -> Origin | None:
        if not grads_of(optimizer):
            return None
        key = id(optimizer)
        seen = self._seen.get(key) if was_known else None
        if was_known and seen is None:  # it had no gradients at the update
            return _PRESENT
        is_unchanged = seen is None or seen.are_unchanged(optimizer)
        record = self._unscaled.get(key)
        if self._backwards.ran_since():
            if seen is None:
                _require_same(past.scale, self._state.loss_scale)
            if seen is None or not is_unchanged:
                return _PRESENT
        elif not is_unchanged:
            _require_same(1.0 if record else past.scale, self._state.loss_scale)
        if record is not None and record.is_doubtful:
            _require_same(1.0, past.scale)
        return Origin(past, record, is_same_step=True)

    def optimizer(self, key: int) -> Any:
        """Return the optimizer with this id, if it is known and alive."""
        reference = self._known.get(key)
        return None if reference is None else reference()

    def moment(self) -> tuple[int, int | None]:
        """Return a mark that stays the same while no operation is recorded and no scaled loss runs backward."""
        return torch.autograd._get_sequence_nr(), self._backwards.last  # type: ignore[attr-defined]

    def _look_at_what_waits(self) -> dict[int, GradientsSeen]:
        """Return the gradients of the known optimizers that have not used them up."""
        waiting = {}
        for key, reference in list(self._known.items()):
            optimizer = reference()
            if optimizer is None:
                del self._known[key]
            elif key not in self._used_up and (seen := GradientsSeen.of(optimizer)).versions:
                waiting[key] = seen
        return waiting

    def _forget(self) -> None:
        self._past, self._used_up, self._seen, self._unscaled = None, set(), {}, {}


def _call_in_backward(result: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have backward call a hook when it reaches the result of an operation, as `register_hook` does.

    `register_hook` also makes a handle to remove the hook by, which is not needed here and takes most of its time: in a
    training loop 22 µs, and 4 without it.
    """
    if type(result) is not Tensor:
        result.register_hook(hook)  # as its `__torch_function__` says
        return
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_tensor.py#L694
    result._backward_hooks = OrderedDict({-1: hook})  # the handles of further hooks count from 0
    result.grad_fn._register_hook_dict(result)  # type: ignore[union-attr]


def _require_same(scale: float | Tensor, present_scale: Any) -> None:
    """Raise `CallOrderError` where gradients may belong to either of two loss scales that differ."""
    before, now = float(scale), float(present_scale)
    if before != now:
        raise CallOrderError(
            f"an optimizer's gradients may come from a loss that scale() multiplied by {before:g}, before the last "
            f"update(), or from a later one at {now:g}, and nothing tells which; step every optimizer before update(), "
            "or call scale() on each loss after it"
        )


_probes = 0


def _this_backward() -> int:
    """Return the number of the backward that is running: the engine counts them up, and our probes do not count."""
    return torch._C._current_graph_task_id() - _probes


def _number_of_next_backward() -> int:
    """Return the number that the next backward will have, by running a small one that does not count."""
    global _probes
    numbers: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros((), requires_grad=True).clone()
        probe.register_hook(lambda _: numbers.append(_this_backward()))
        probe.backward()
    _probes += 1
    return numbers[0]

"""The state of a scaler: torch's two tensors, and the other fields of the policy's state, on the host or a device.

The state moves to the device when a fused optimizer has stepped there, since the host then does not know the flags.
"""

import contextlib
import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from lossscale_core import BaseScaling, DynamicScaling, ScaleState, ScalingPolicy
from lossscale_core.adapters import describe
from lossscale_core.errors import CallOrderError
from lossscale_torch._gradients import to_device
from lossscale_torch._record import SPIKE, Decision, OptimizerStep, combine, decision_on_host, flags_of, read_numbers
from lossscale_torch._step_info import Flag, Number

_LARGEST_COUNT = 2**31 - 1
_WITH_UPDATE_KERNEL = ("cpu", "cuda", "mps", "xpu")
Outcome = tuple[Flag, Number, Number, Number, Flag, Flag]
"""The first six fields of a `StepInfo`."""
_HAS_CUDA = torch.backends.cuda.is_built()


class ScalerState:
    """The state of one scaler. torch's tensors are float32 and int32, of shape `()`, and None before the first loss."""

    init_scale: float = 1.0
    """The loss scale before the first loss."""
    one: Any = None
    """1.0 on the device of the scale; it is only read."""
    is_fused = False
    """Whether a kernel has decided about a step, or may do so in a captured graph."""
    _scale: Any = None
    _tracker: Any = None
    """torch's growth tracker; None until other code or a device needs it."""
    _known_scale: tuple[int, float] | None = None
    """The version of the scale's tensor that the host knows, and its number."""

    def __init__(self, state: ScaleState) -> None:
        self.init_scale = state[0].item()
        self.fields: ScaleState | DeviceFields = state
        """The policy's state on the host, in which torch's tensors replace two fields; or the fields on a device."""

    def _replace_scale(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            tensor = tensor.detach().float().reshape(())
            self.one, self._known_scale = torch.ones_like(tensor), None
        self._scale = tensor  # last, since Ctrl-C may come before

    def _get_tracker(self) -> Tensor | None:
        if self._tracker is None and self._scale is not None:
            with torch.inference_mode(False):
                self._tracker = torch.full((), self.init_tracker, dtype=torch.int32)
        return self._tracker

    def _set_init_tracker(self, count: int) -> None:
        if not isinstance(self.fields, DeviceFields):
            self.fields = type(self.fields)(self.fields[0], np.int32(count), *self.fields[2:])

    scale = property(operator.attrgetter("_scale"), _replace_scale)
    tracker = property(_get_tracker, lambda self, tensor: setattr(self, "_tracker", tensor))
    init_tracker = property(lambda self: 0 if self.is_on_device() else int(self.fields[1]), _set_init_tracker)
    """The count of the policy's state, of which torch's tensor is made."""

    def place(self, device: torch.device | str) -> None:
        """Make the loss scale on a device."""
        with torch.inference_mode(False):  # the tensors outlive a validation loop that may be running
            self.scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        self._remember_scale(self.init_scale)

    def follow(self, policy: ScalingPolicy) -> None:
        """Continue with another policy."""
        if isinstance(self.fields, DeviceFields):
            self.fields.follow(policy, self.tracker)

    def load(self, state: ScaleState, policy: ScalingPolicy) -> None:
        """Continue with other numbers, in the tensors that exist. A graph that is being captured does not repeat it."""
        self.init_scale = scale = state[0].item()
        if self.scale is not None:
            with outside_graph(self.scale.device):
                self.scale.fill_(scale)
                if self._tracker is not None:
                    self._tracker.fill_(state[1].item())
            self._remember_scale(scale)
        if isinstance(self.fields, DeviceFields):
            self.fields.load(state, policy, self.tracker)
        else:
            self.fields = state

    # Read the state.

    def is_on_device(self) -> bool:
        """Return whether a device has the state, so that the host does not know what a replay of a graph writes."""
        return isinstance(self.fields, DeviceFields)

    def scale_on_host(self) -> float | None:
        """Return the loss scale, or None if the host does not know it."""
        scale, known = self._scale, self._known_scale
        if scale is None:
            return self.init_scale
        if scale.is_cpu:
            number: float = scale.item()
            return number
        return known[1] if known is not None and known[0] == scale._version else None

    def on_host(self) -> ScaleState:
        """Return the policy's state as host scalars. Waits for a device if the host does not know its numbers."""
        fields, tracker, scale = self.fields, self._tracker, self._scale  # another thread may replace them
        if isinstance(fields, DeviceFields):
            return fields.on_host(scale, tracker)
        known = self.scale_on_host()
        number = scale.item() if known is None else known
        count = fields[1] if tracker is None else np.int32(tracker.item())
        return type(fields)(np.float32(number), count, *fields[2:])

    def copies(self) -> ScaleState:
        """Return the policy's state as host scalars if the host knows it, else as copies. Does not synchronise."""
        fields, tracker, scale = self.fields, self._tracker, self._scale
        if isinstance(fields, DeviceFields):
            return fields.copies(scale, tracker)
        if self.scale_on_host() is not None and (tracker is None or tracker.is_cpu):
            return self.on_host()
        return type(fields)(scale.clone(), fields[1] if tracker is None else tracker.clone(), *fields[2:])

    def read(self, steps: Collection[OptimizerStep], *numbers: Tensor) -> list[float]:
        """Wait once for the flags of steps, for the scale and for other numbers, and return these numbers.

        The flags in the steps are then tensors on the CPU. If no fused optimizer has stepped, a state on the device
        comes back to the host.
        """
        tensors = [*numbers, self.scale]
        for step in steps:
            tensors += step["found_inf_per_device"].values()
        values = read_numbers(tensors, self.scale.device)
        numbers_of_flags = iter(values[len(numbers) + 1 :])
        for step in steps:
            for key in step["found_inf_per_device"]:
                step["found_inf_per_device"][key] = torch.tensor(next(numbers_of_flags), dtype=torch.float32)
        self._remember_scale(values[len(numbers)])
        if isinstance(self.fields, DeviceFields) and not self.is_fused:
            self.fields = self.on_host()
        return values[: len(numbers)]

    def decision(self, steps: Collection[OptimizerStep], may_read: bool) -> Decision | None:
        """Return what the flags of the steps say; None if the host does not know a flag and must not read it."""
        decision = decision_on_host(steps)
        if decision is None and may_read:
            self.read(steps)  # Ctrl-C may come while this waits
            decision = decision_on_host(steps)
        return decision

    # Change the state.

    def advance(
        self, policy: ScalingPolicy, steps: Collection[OptimizerStep], decision: Decision | None, is_counted: bool
    ) -> Outcome:
        """Let the policy move the state by the flags of a step, and return the outcome.

        This happens on the host if it knows the flags and the scale, else on the device. An overflow or an applied step
        counts if `is_counted`; a vetoed step does not count.
        """
        before, tracker = self.fields, self._tracker
        if tracker is not None and not isinstance(tracker, Tensor):
            raise TypeError(
                f"_growth_tracker={describe(tracker)} must be a tensor; write scaler._growth_tracker.fill_(0)"
            )
        if isinstance(before, DeviceFields):
            if decision is None or self.is_fused or not self._scale.is_cpu:
                return self._advance_on_device(policy, steps, is_counted)
            before = self.on_host()
        scale = None if decision is None else self.scale_on_host()
        if decision is None or scale is None:
            return self._advance_on_device(policy, steps, is_counted)
        _, overflowed, vetoed, spiked = decision
        if tracker is not None:
            if not tracker.is_cpu:
                self._tracker = tracker = tracker.cpu()  # from now on the host counts
            if (count := tracker.item()) != before[1]:
                before = before._replace(growth_tracker=np.int32(count))
        if before[0] != scale:  # other code has written to torch's tensor
            before = before._replace(loss_scale=np.float32(scale))
        after = policy.update(before, not overflowed) if is_counted and (overflowed or not vetoed) else before
        self.fields, after_scale = after, float(after[0])
        if tracker is not None and after[1] is not before[1]:
            tracker.fill_(after[1].item())
        if after_scale != scale:
            self._write_scale(after_scale)
        return not (overflowed or vetoed), scale, after_scale, int(after.overflow_streak), overflowed, spiked

    def _advance_on_device(self, policy: ScalingPolicy, steps: Collection[OptimizerStep], is_counted: bool) -> Outcome:
        if not isinstance(self.fields, DeviceFields):
            with outside_graph(self.scale.device):
                self.tracker = to_device(self.tracker, self.scale.device)
            self.fields = DeviceFields(self.fields, policy, self.tracker)
        self.fields.is_captured |= self.is_fused and is_capturing()
        return self.fields.advance(policy, self.scale, self.tracker, steps, is_counted)

    def change_scale(self, new_scale: float | Tensor, policy: ScalingPolicy) -> float | Tensor:
        """Set the loss scale within the policy's bounds, and return it where it is."""
        scale = self.scale
        if isinstance(new_scale, Tensor):
            new, members = new_scale.detach().reshape(()).float(), BaseScaling.of(policy)
            scale.copy_(torch.where(new > 0.0, new.clamp(members.min_scale, members.max_scale), scale))
        else:
            self._write_scale(new_scale)
        known = None if isinstance(self.fields, DeviceFields) else self.scale_on_host()
        return scale.clone() if known is None else known

    def _write_scale(self, number: float) -> None:
        self.scale.fill_(number)  # autograd then refuses a late backward pass
        self._remember_scale(number)

    def _remember_scale(self, number: float) -> None:
        self._known_scale = self.scale._version, number

    def __reduce__(self) -> Any:
        return ScalerState, (self.on_host(),)


class DeviceFields:
    """The fields of a policy's state beside torch's two tensors, in memory on a device that graphs read and write.

    Making this object, loading numbers and following another policy are not part of a graph that is being captured.
    """

    is_captured = False
    """Whether a replay of a graph may write to these tensors, which does not count as a new version."""

    def __init__(self, state: ScaleState, policy: ScalingPolicy, tracker: Tensor) -> None:
        self._like, self.device = state, tracker.device
        """A state on the host with the same fields."""
        self._fields: list[Tensor] = []
        self._table: Tensor | None = None
        """What an overflow, a finite step and a vetoed step add to the counts, and multiply them by."""
        with outside_graph(self.device):
            self._true_false = torch.tensor([True, False]).to(self.device)
        self.load(state, policy, tracker)

    def load(self, state: ScaleState, policy: ScalingPolicy, tracker: Tensor) -> None:
        """Write the numbers of another state."""
        rest = state[2:]
        with outside_graph(self.device):
            if not (self.is_captured and self._fields) or self._like._fields != state._fields:
                # New memory, since the outcome of the last step may share the old one.
                is_count = [value.dtype.kind != "f" for value in rest]
                self.counts = torch.zeros(sum(is_count), dtype=torch.int64, device=self.device)
                floats = torch.zeros(len(rest), dtype=torch.float32, device=self.device).unbind()
                counts = iter(self.counts.unbind())
                self._fields = [next(counts) if each else floats[i] for i, each in enumerate(is_count)]
            for field, value in zip(self._fields, rest, strict=True):
                field.fill_(value.item())
        self._like, self._streak = state, state._fields.index("overflow_streak") - 2
        # A state that tolerates more overflows, or a full counter, is not moved by a sum and a product.
        self._is_usual = state.hysteresis_tracker <= 1 and all(value < _LARGEST_COUNT // 2 for value in rest)
        self.follow(policy, tracker)

    def follow(self, policy: ScalingPolicy, tracker: Tensor) -> None:
        """Make the table by which a policy moves the counts, if torch's kernel can move the scale."""
        self._after: tuple[Tensor, int] | None = None
        """A copy of the loss scale after the last step, and the version of torch's tensor at that time."""
        self._rule = _torchs_rule(policy, self.device) if self._is_usual else None
        self._is_usual = self._rule is not None  # another policy may leave a state that is not
        if self._rule is not None:
            with outside_graph(self.device):
                tracker.clamp_(max=self._rule.growth_interval - 1)  # the kernel compares the two with ==
                table = torch.from_numpy(_moves(self._rule))
                if self._table is not None and self._table.shape == table.shape:
                    self._table.copy_(table)  # a graph may read this memory
                else:
                    self._table = table.to(self.device)

    def on_host(self, scale: Tensor, tracker: Tensor) -> ScaleState:
        """Return the state as host scalars. Waits for the device, once for floats and once for counts."""
        fields = [field for field in self._fields if field.dtype is torch.float32]
        floats = torch.stack([scale, *fields]).cpu().tolist()
        counts = torch.cat([tracker.long().reshape(1), self.counts]).clamp(max=_LARGEST_COUNT).cpu().tolist()
        return self.with_numbers(counts[1:], floats[0], counts[0], floats[1:])

    def with_numbers(
        self, counts: Sequence[float], scale: float = 1.0, tracker: float = 0.0, floats: Sequence[float] = ()
    ) -> ScaleState:
        """Return the state as host scalars, with numbers that were copied to the host."""
        numbers, others = iter(counts), iter(floats)
        rest = [type(like)(next(others, like) if like.dtype.kind == "f" else next(numbers)) for like in self._like[2:]]
        return type(self._like)(np.float32(scale), np.int32(tracker), *rest)

    def copies(self, scale: Tensor, tracker: Tensor) -> ScaleState:
        """Return the state in new tensors, float32 and int32. Does not synchronise."""
        counts = iter(self.counts.clamp(max=_LARGEST_COUNT).to(torch.int32).unbind())
        rest = [field.clone() if field.dtype is torch.float32 else next(counts) for field in self._fields]
        return type(self._like)(scale.clone(), tracker.clone(), *rest)

    def advance(
        self, policy: ScalingPolicy, scale: Tensor, tracker: Tensor, steps: Collection[OptimizerStep], is_counted: bool
    ) -> Outcome:
        """Update the state in place, and return the outcome. Does not synchronise."""
        overflow = combine(flags_of(steps, vetoes=False), self.device)
        # NaN is not 0.0, so that it counts as an overflow, too.
        is_good, is_bad = torch.logical_xor(overflow, self._true_false).unbind()
        vetoes = flags_of(steps, vetoes=True)
        vetoed = torch.logical_and(is_good, combine(vetoes, self.device)) if vetoes else None
        used = self._after[0] if self._after is not None and self._after[1] == scale._version else scale.clone()
        if is_counted and (rule := self._rule) is not None and self._table is not None:
            overflow_moves, finite_moves, vetoed_moves = self._table.unbind()
            moves = torch.where(is_bad, overflow_moves, finite_moves)
            if vetoed is not None:
                moves = torch.where(vetoed, vetoed_moves, moves)
                tracker.add_(vetoed, alpha=-1)  # the kernel adds 1, which is then below the interval
            # The kernel would multiply in float64 by factors that are not rounded.
            factors = float(np.float32(rule.growth_factor)), float(np.float32(rule.backoff_factor))
            torch._amp_update_scale_(scale, tracker, overflow, *factors, rule.growth_interval)
            scale.clamp_(rule.min_scale, rule.max_scale)
            plus, times = moves.unbind()
            if self.is_captured:  # a replay writes to the same memory
                torch.addcmul(plus, self.counts, times, out=self.counts)
            else:
                self.counts = torch.addcmul(plus, self.counts, times)
                self._fields = [*self.counts.unbind()]
        elif is_counted:
            before = type(self._like)(scale, tracker, *self._fields)
            after = [*policy.update(before, is_good, xp=torch)]
            if vetoed is not None:
                after = [*map(functools.partial(torch.where, vetoed), before, after)]
            torch._foreach_copy_([*before], after)
        scale_after = scale.clone() if is_counted else used
        self._after = None if self.is_captured else (scale_after, scale._version)
        is_new = is_counted and self._rule is not None and not self.is_captured
        streak = self._fields[self._streak] if is_new else self._fields[self._streak].clone()
        if vetoed is None:
            return is_good, used, scale_after, streak, is_bad, False
        spikes = [step.flags[SPIKE] for step in steps if SPIKE in step.flags]
        is_spike = vetoed if len(spikes) == len(vetoes) else torch.logical_and(vetoed, combine(spikes, self.device))
        return is_good ^ vetoed, used, scale_after, streak, is_bad, is_spike


def _torchs_rule(policy: ScalingPolicy, device: torch.device) -> DynamicScaling | None:
    """Return the policy if torch's kernel and a clamp move the scale so, and sums and products the counts."""
    if type(policy) is not DynamicScaling:
        return None
    is_followed = (
        (policy.hysteresis, policy.cooldown) == (1, 0)
        and (policy.refill_on_finite or policy.refill_on_backoff)
        and policy.max_scale * policy.growth_factor <= torch.finfo(torch.float32).max
        and device.type in _WITH_UPDATE_KERNEL
    )
    return policy if is_followed else None


def _moves(policy: DynamicScaling) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return what an overflow, a finite step and a vetoed step add to the counts, and multiply them by.

    int64, shape (3, 2, counts), from the policy's own update.
    """
    scale, tracker, *counts = policy.init_state()
    of_zeros, of_ones = (
        [policy.update(ScaleState(scale, tracker, *[np.int32(n)] * len(counts)), flag)[2:] for flag in (False, True)]
        for n in (0, 1)
    )
    plus = np.array([*of_zeros, [0] * len(counts)], np.int64)
    return np.stack([plus, np.array([*of_ones, [1] * len(counts)]) - plus], 1)


# Graphs that are being captured.


def is_capturing() -> bool:
    """Return whether the running code may be replayed without Python: in a CUDA graph, or under a dispatch mode."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def outside_graph(device: torch.device) -> Iterator[None]:
    """Keep the operations within the context out of a graph that is being captured; each replay would repeat them.

    Raises `CallOrderError` while CUDA captures a graph, since CUDA cannot leave operations out.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CallOrderError(
            "the state of the scaler is still on the host, and a graph that is being captured would write it again at "
            "each replay; take one step with this optimizer before capturing one"
        )
    # The tensors made within the context outlive a validation loop that may be running.
    with torch.inference_mode(False), _disable_current_modes():
        yield

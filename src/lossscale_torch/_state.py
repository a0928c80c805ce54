"""The state of a scaler: torch's two tensors, and the other fields of the policy's state, on the host or a device.

The state is on the host while the host knows the flags of each step. It moves to the device after the step of a fused
optimizer, since only the kernel of this optimizer reads the flags.
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
    """The state of one scaler.

    `scale` and `tracker` are torch's tensors, float32 and int32, of shape `()`. They are None before the first loss.
    """

    init_scale: float = 1.0
    """The loss scale before the first loss."""
    unit: Any = None
    """1.0 on the device of the scale. No code writes to it."""
    is_fused = False
    """Whether a fused optimizer has stepped, so that its kernel decides, perhaps in a captured graph."""
    _scale: Any = None
    _tracker: Any = None
    """torch's growth tracker; None until other code or a device needs it."""
    _host_scale: tuple[int, float] | None = None
    """A version of the scale's tensor, and the value that the tensor has in this version."""

    def __init__(self, state: ScaleState) -> None:
        self.init_scale = state[0].item()
        self.fields: ScaleState | DeviceFields = state
        """The fields of the policy's state. On the host, torch's tensors take precedence over the first two fields."""

    def _replace_scale(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            tensor = tensor.detach().float().reshape(())
            self.unit, self._host_scale = torch.ones_like(tensor), None
        self._scale = tensor  # as the last step, so that Ctrl-C cannot leave a scale without `unit`

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
    """The value with which torch's growth tracker will be made."""

    def place(self, device: torch.device | str) -> None:
        """Make the tensor of the loss scale on a device."""
        with torch.inference_mode(False):  # the first loss may be scaled in a validation loop
            self.scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        self._remember_scale(self.init_scale)

    def follow(self, policy: ScalingPolicy) -> None:
        """Continue with the rule of another policy."""
        if isinstance(self.fields, DeviceFields):
            self.fields.follow(policy, self.tracker)

    def load(self, state: ScaleState, policy: ScalingPolicy) -> None:
        """Write another state into the existing tensors. A graph that is being captured does not repeat the writes."""
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
        """Return whether the fields are on a device."""
        return isinstance(self.fields, DeviceFields)

    def scale_on_host(self) -> float | None:
        """Return the loss scale, or None if the host does not know it."""
        scale, host_scale = self._scale, self._host_scale
        if scale is None:
            return self.init_scale
        if scale.is_cpu:
            number: float = scale.item()
            return number
        return host_scale[1] if host_scale is not None and host_scale[0] == scale._version else None

    def on_host(self) -> ScaleState:
        """Return the policy's state as host scalars. Waits for a device if the host does not know the numbers."""
        fields, tracker, scale = self.fields, self._tracker, self._scale  # since another thread may replace them
        if isinstance(fields, DeviceFields):
            return fields.on_host(scale, tracker)
        number = self.scale_on_host()
        number = scale.item() if number is None else number
        count = fields[1] if tracker is None else np.int32(tracker.item())
        return type(fields)(np.float32(number), count, *fields[2:])

    def copies(self) -> ScaleState:
        """Return the policy's state as host scalars, or as new tensors on the device. Does not synchronise."""
        fields, tracker, scale = self.fields, self._tracker, self._scale
        if isinstance(fields, DeviceFields):
            return fields.copies(scale, tracker)
        if self.scale_on_host() is not None and (tracker is None or tracker.is_cpu):
            return self.on_host()
        return type(fields)(scale.clone(), fields[1] if tracker is None else tracker.clone(), *fields[2:])

    def read(self, steps: Collection[OptimizerStep], *numbers: Tensor) -> list[float]:
        """Read the flags of records, the scale, and `numbers`, tensors of shape `()`. Waits once for all.

        Moves the flags in the records to the CPU. Moves the state to the host, unless a fused optimizer has stepped.
        Returns the values of `numbers`.
        """
        tensors = [*numbers, self.scale]
        for step in steps:
            tensors += step["found_inf_per_device"].values()
        values = read_numbers(tensors, self.scale.device)
        flag_values = iter(values[len(numbers) + 1 :])
        for step in steps:
            for key in step["found_inf_per_device"]:
                step["found_inf_per_device"][key] = torch.tensor(next(flag_values), dtype=torch.float32)
        self._remember_scale(values[len(numbers)])
        if isinstance(self.fields, DeviceFields) and not self.is_fused:
            self.fields = self.on_host()
        return values[: len(numbers)]

    def decision(self, steps: Collection[OptimizerStep], may_read: bool) -> Decision | None:
        """Return the decision by the flags of records, or None if the host does not know a flag and must not wait."""
        decision = decision_on_host(steps)
        if decision is None and may_read:
            self.read(steps)
            decision = decision_on_host(steps)
        return decision

    # Change the state.

    def advance(
        self, policy: ScalingPolicy, steps: Collection[OptimizerStep], decision: Decision | None, is_counted: bool
    ) -> Outcome:
        """Update the state by the rule of the policy, and return the outcome of the step.

        The update runs on the host if the host knows the flags and the scale, else on the device. The
        state does not change after a veto of a finite step, or if `is_counted` is False.
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
                self._tracker = tracker = tracker.cpu()  # so that the host can count without waiting
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
        """Set the loss scale within the policy's bounds, and return it, as a number if the host knows it."""
        scale = self.scale
        if isinstance(new_scale, Tensor):
            new, members = new_scale.detach().reshape(()).float(), BaseScaling.of(policy)
            scale.copy_(torch.where(new > 0.0, new.clamp(members.min_scale, members.max_scale), scale))
        else:
            self._write_scale(new_scale)
        number = None if isinstance(self.fields, DeviceFields) else self.scale_on_host()
        return scale.clone() if number is None else number

    def _write_scale(self, number: float) -> None:
        self.scale.fill_(number)  # in place, so that autograd refuses a backward pass of an earlier loss
        self._remember_scale(number)

    def _remember_scale(self, number: float) -> None:
        self._host_scale = self.scale._version, number

    def __reduce__(self) -> Any:
        return ScalerState, (self.on_host(),)


class DeviceFields:
    """The fields of a policy's state other than torch's two tensors, as tensors on a device.

    A captured graph may read and write these tensors at each replay. A graph that is being captured does not record
    `__init__`, `load` and `follow`.
    """

    is_captured = False
    """Whether a captured graph may write to these tensors. A replay does not change their version counters."""

    def __init__(self, state: ScaleState, policy: ScalingPolicy, tracker: Tensor) -> None:
        self._like, self.device = state, tracker.device
        """A state on the host with the same names and types of fields."""
        self._fields: list[Tensor] = []
        self._table: Tensor | None = None
        """The result of `_count_changes`, if torch's kernel can update the scale."""
        with outside_graph(self.device):
            self._true_false = torch.tensor([True, False]).to(self.device)
        self.load(state, policy, tracker)

    def load(self, state: ScaleState, policy: ScalingPolicy, tracker: Tensor) -> None:
        """Write the numbers of another state into the tensors."""
        rest = state[2:]
        with outside_graph(self.device):
            if not (self.is_captured and self._fields) or self._like._fields != state._fields:
                # New memory, since the outcome of the last step may share the memory of the old tensors.
                is_count = [value.dtype.kind != "f" for value in rest]
                self.counts = torch.zeros(sum(is_count), dtype=torch.int64, device=self.device)
                floats = torch.zeros(len(rest), dtype=torch.float32, device=self.device).unbind()
                counts = iter(self.counts.unbind())
                self._fields = [next(counts) if flag else floats[i] for i, flag in enumerate(is_count)]
            for field, value in zip(self._fields, rest, strict=True):
                field.fill_(value.item())
        self._like, self._streak = state, state._fields.index("overflow_streak") - 2
        # The table does not describe counters that saturate or overflows that hysteresis tolerates.
        self._fits_table = state.hysteresis_tracker <= 1 and all(value < _LARGEST_COUNT // 2 for value in rest)
        self.follow(policy, tracker)

    def follow(self, policy: ScalingPolicy, tracker: Tensor) -> None:
        """Follow another policy. Makes the table of changes if torch's kernel can update the scale by its rule."""
        self._after: tuple[Tensor, int] | None = None
        """A copy of the loss scale after the last step, and the version of torch's tensor at that time."""
        self._rule = _kernel_rule(policy, self.device) if self._fits_table else None
        self._fits_table = self._rule is not None  # the host does not know the counts that another policy leaves
        if self._rule is not None:
            with outside_graph(self.device):
                tracker.clamp_(max=self._rule.growth_interval - 1)  # the kernel compares with ==, not with >=
                table = torch.from_numpy(_count_changes(self._rule))
                if self._table is not None and self._table.shape == table.shape:
                    self._table.copy_(table)  # in place, since a captured graph may read this memory
                else:
                    self._table = table.to(self.device)

    def on_host(self, scale: Tensor, tracker: Tensor) -> ScaleState:
        """Return the state as host scalars. Waits for the device twice: for the floats and for the counts."""
        fields = [field for field in self._fields if field.dtype is torch.float32]
        floats = torch.stack([scale, *fields]).cpu().tolist()
        counts = torch.cat([tracker.long().reshape(1), self.counts]).clamp(max=_LARGEST_COUNT).cpu().tolist()
        return self.with_numbers(counts[1:], floats[0], counts[0], floats[1:])

    def with_numbers(
        self, counts: Sequence[float], scale: float = 1.0, tracker: float = 0.0, floats: Sequence[float] = ()
    ) -> ScaleState:
        """Return a state as host scalars, made from Python numbers that were read from the device."""
        numbers, others = iter(counts), iter(floats)
        rest = [type(like)(next(others, like) if like.dtype.kind == "f" else next(numbers)) for like in self._like[2:]]
        return type(self._like)(np.float32(scale), np.int32(tracker), *rest)

    def copies(self, scale: Tensor, tracker: Tensor) -> ScaleState:
        """Return the state as new tensors, float32 and int32, of shape `()`. Does not synchronise."""
        counts = iter(self.counts.clamp(max=_LARGEST_COUNT).to(torch.int32).unbind())
        rest = [field.clone() if field.dtype is torch.float32 else next(counts) for field in self._fields]
        return type(self._like)(scale.clone(), tracker.clone(), *rest)

    def advance(
        self, policy: ScalingPolicy, scale: Tensor, tracker: Tensor, steps: Collection[OptimizerStep], is_counted: bool
    ) -> Outcome:
        """Update the state in place, and return the outcome. Does not synchronise."""
        overflow = combine(flags_of(steps, vetoes=False), self.device)
        # `logical_xor` takes NaN for True, so that NaN counts as an overflow.
        is_finite, overflowed = torch.logical_xor(overflow, self._true_false).unbind()
        vetoes = flags_of(steps, vetoes=True)
        vetoed = torch.logical_and(is_finite, combine(vetoes, self.device)) if vetoes else None
        used = self._after[0] if self._after is not None and self._after[1] == scale._version else scale.clone()
        if is_counted and (rule := self._rule) is not None and self._table is not None:
            after_overflow, after_finite, after_veto = self._table.unbind()
            changes = torch.where(overflowed, after_overflow, after_finite)
            if vetoed is not None:
                changes = torch.where(vetoed, after_veto, changes)
                tracker.add_(vetoed, alpha=-1)  # the kernel adds 1 again, so that a vetoed step does not count
            # float32 factors, since the kernel multiplies in float64 and the policy in float32.
            factors = float(np.float32(rule.growth_factor)), float(np.float32(rule.backoff_factor))
            torch._amp_update_scale_(scale, tracker, overflow, *factors, rule.growth_interval)
            scale.clamp_(rule.min_scale, rule.max_scale)
            summands, factors_of_counts = changes.unbind()
            if self.is_captured:  # each replay must write to the same memory
                torch.addcmul(summands, self.counts, factors_of_counts, out=self.counts)
            else:
                self.counts = torch.addcmul(summands, self.counts, factors_of_counts)
                self._fields = [*self.counts.unbind()]
        elif is_counted:
            before = type(self._like)(scale, tracker, *self._fields)
            after = [*policy.update(before, is_finite, xp=torch)]
            if vetoed is not None:
                after = [*map(functools.partial(torch.where, vetoed), before, after)]
            torch._foreach_copy_([*before], after)
        scale_after = scale.clone() if is_counted else used
        self._after = None if self.is_captured else (scale_after, scale._version)
        is_new = is_counted and self._rule is not None and not self.is_captured
        streak = self._fields[self._streak] if is_new else self._fields[self._streak].clone()
        if vetoed is None:
            return is_finite, used, scale_after, streak, overflowed, False
        spikes = [step.flags[SPIKE] for step in steps if SPIKE in step.flags]
        is_spike = vetoed if len(spikes) == len(vetoes) else torch.logical_and(vetoed, combine(spikes, self.device))
        return is_finite ^ vetoed, used, scale_after, streak, overflowed, is_spike


def _kernel_rule(policy: ScalingPolicy, device: torch.device) -> DynamicScaling | None:
    """Return the policy if torch's kernel and a clamp update the scale by its rule, else None."""
    if type(policy) is not DynamicScaling:
        return None
    is_supported = (
        (policy.hysteresis, policy.cooldown) == (1, 0)
        and (policy.refill_on_finite or policy.refill_on_backoff)
        and policy.max_scale * policy.growth_factor <= torch.finfo(torch.float32).max
        and device.type in _WITH_UPDATE_KERNEL
    )
    return policy if is_supported else None


def _count_changes(policy: DynamicScaling) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return how an overflow, a finite step and a vetoed step change the counts: int64, shape (3, 2, counts).

    In each of the three cases, the new counts are the old counts times the second row, plus the first row. The rows are
    computed by `policy.update`, from counts of 0 and counts of 1.
    """
    scale, tracker, *counts = policy.init_state()
    from_zeros, from_ones = (
        [policy.update(ScaleState(scale, tracker, *[np.int32(n)] * len(counts)), flag)[2:] for flag in (False, True)]
        for n in (0, 1)
    )
    summands = np.array([*from_zeros, [0] * len(counts)], np.int64)
    return np.stack([summands, np.array([*from_ones, [1] * len(counts)]) - summands], 1)


# Capturing of graphs.


def is_capturing() -> bool:
    """Return whether a CUDA graph or a dispatch mode records the running code, to repeat it without Python."""
    if _len_torch_dispatch_stack() > 0:
        return True
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def outside_graph(device: torch.device) -> Iterator[None]:
    """Return a context of operations that a graph must not record, since each replay would repeat them.

    Raises `CallOrderError` while CUDA captures a graph, since CUDA records all operations.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CallOrderError(
            "the state of the scaler is still on the host, and a graph that is being captured would write it again at "
            "each replay; take one step with this optimizer before capturing one"
        )
    # Code in this context may make tensors in a validation loop, and training uses these tensors later.
    with torch.inference_mode(False), _disable_current_modes():
        yield

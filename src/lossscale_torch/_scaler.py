"""`GradScaler`: scaling, unscaling, checking, clipping, stepping and updating, in the order of a step.

`scale` multiplies a loss by one persistent tensor. `unscale_` divides an optimizer's gradients by the scale of their
loss and stores the flag of their check; `unscale_and_clip_` does both in the read and the multiplication of the clip.
`step` checks unchecked gradients, and steps the optimizer or skips it. `update` changes the scale by all flags.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lossscale_core import PolicyLike, SpikeGuard, diagnose, metrics, state_to_dict
from lossscale_core.adapters import explain_arguments, shown, tree
from lossscale_core.errors import CallOrderError
from lossscale_torch._attach import attach
from lossscale_torch._checkpoint import given_interval, policy_of, require_scale, warn_if_resumed
from lossscale_torch._clip import MEASURING, Clipping, clipping, unscale_and_clip
from lossscale_torch._gradients import Gradients, grads_of, is_dtensor, lifted, moved
from lossscale_torch._guard import Guards
from lossscale_torch._members import (
    READY,
    SPIKE,
    STEPPED,
    UNSCALED,
    Member,
    Record,
    found_inf,
    kind_of,
    takes_factor,
)
from lossscale_torch._ranks import Ranks, require_same_on_ranks
from lossscale_torch._state import HostState, as_flag, is_being_recorded, is_readable, number
from lossscale_torch._step_info import StepInfo, with_optimizers
from lossscale_torch._torch_names import TorchNames, device_type_of
from lossscale_torch._types import Tree
from lossscale_torch._versions import not_compiled
from lossscale_torch._waiting import Waiting
from lossscale_torch._watch import Watch


class GradScaler(TorchNames):
    """A drop-in for `torch.amp.GradScaler` that accepts any policy and reports the outcome of each step.

    ```python
    scaler = GradScaler("cuda", policy="dynamic")
    scaler.scale(loss).backward()
    scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # if you clip
    scaler.step(optimizer)
    info = scaler.update()
    if info.applied:
        scheduler.step()
    ```

    An ordinary optimizer costs one host synchronisation a step, in the clip or else in `step`; a fused one costs none.

    Args:
        device: The device type of the loss scale, such as `"cuda"`; its device is that of the first scaled loss.
        init_scale: The first loss scale, between 2**-126 and 2**126; this and the next three are torch's dynamic rule.
        growth_factor: Multiplies the loss scale after `growth_interval` finite steps in a row.
        backoff_factor: Multiplies the loss scale after an overflow.
        growth_interval: The number of finite steps in a row before the scale grows; with 0 it never grows, as in torch.
        enabled: Whether the scaler does anything; if False, training runs as it would without a scaler.
        policy: Anything that `lossscale_core.as_policy` accepts, instead of the four settings.
        process_group: The group of ranks over which the decision is combined before a step. For parameters sharded
            over a device mesh this is automatic.
        half_gradients: Whether to unscale float16 gradients in place, which may flush small values to zero; by default
            they are refused.
        guard: A `SpikeGuard`, which skips the step of an optimizer if its norm is far above its norms before. The clip
            measures the norm, or `unscale_` or `step` without a clip. A spike leaves the loss scale and its counters
            unchanged.
        protect: The modules to protect: a skipped step leaves their buffers unchanged, such as BatchNorm's statistics.
            For a `torch.optim.swa_utils.AveragedModel`, `update_parameters` does nothing after a skipped step. The
            hooks end with the scaler; a copy or a pickle of it protects nothing.

    Raises:
        PolicyError: For `policy` together with torch's settings, and for settings that break a rule.
        TypeError: For a `device` that is not a device.
        ValueError: For the name of a device type that is unknown to torch.

    """

    @explain_arguments
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: PolicyLike | None = None,
        process_group: Any = None,
        half_gradients: bool = False,
        guard: SpikeGuard | None = None,
        protect: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._device, self._enabled = device_type_of(device, enabled)
        self._follows_checkpoint = policy is None
        torchs = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._state: Any = HostState(policy_of(policy, torchs, self._enabled))
        if policy is None:
            self._interval_as_given = given_interval(growth_interval, self.policy)
        self._begun_with = (number(self._state.read().loss_scale), 0)
        self._members: dict[int, Member] = {}
        self._records: Any = defaultdict(Record.fresh)
        self._flags_are_shared = False  # whether other code has access to the flags, and may set one at any time
        self._waiting, self._ranks = Waiting(), Ranks(process_group)
        self._guards = Guards(guard, self._members)
        self._half_gradients = half_gradients
        self._has_begun = self._had_no_gradients = False
        self._last: StepInfo | None = None
        self._watch = Watch()
        self._observers: list[Callable[[Any, StepInfo], None]] = []
        if protect and self._enabled:
            from lossscale_torch._rescue import protect_modules

            protect_modules(self, protect)

    @not_compiled
    def scale(self, outputs: Tree) -> Tree:
        """Return `outputs` times the loss scale: a tensor, or a nested structure or iterable of them.

        float16 and bfloat16 losses of any shape are converted to float32. Call `backward` before the next `update`.
        Does not synchronise.

        Raises:
            RuntimeError: From `backward` after an `update` that has changed the scale, or any while the state is on the
                device; torch's own scaler raises after every update.
            ValueError: `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._state.tensors is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            self._waiting.count_loss(outputs.requires_grad, self._members, self._records)
            if is_being_recorded():
                self._waiting.is_over = True
            # autograd saves this tensor, and refuses a backward pass after the scale was written.
            scale = self._state.tensors.loss_scale
            loss = outputs if outputs.dtype.itemsize >= 4 else lifted(outputs)
            return loss * (scale if scale.is_cpu and loss.is_cpu else moved(scale, loss.device))  # type: ignore[return-value]
        if isinstance(outputs, dict | list | tuple):
            return cast(Tree, tree.map_leaves(self._scale_leaf, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return cast(Tree, map(self.scale, outputs))  # lazily, as torch's own scaler does
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors. It is {shown(outputs)}; pass the loss as a tensor, "
            "before .item()"
        )

    def _scale_leaf(self, leaf: Any) -> Any:
        return GradScaler.scale(self, leaf)  # a subclass's `scale` is called once for the whole structure

    def attach(self, x: Tensor, aux_loss: Tensor) -> Tensor:
        """Return `x`; its backward pass adds the gradients of `aux_loss` times the loss scale.

        Use it for a loss that a layer computes inside the model, such as a router loss. The gradients are those of
        `scale(loss + aux_loss.sum())`. The loss scale is read when the backward pass runs. `attach` does not divide by
        the number of tokens, ranks or micro-batches: weight `aux_loss` as you weight the main loss. A layer needs no
        scaler: give it `attach=scaler.attach`. Does not synchronise; can be compiled, after `place_on` also with
        `fullgraph=True`.

        `update` warns if the graph of an attached loss was freed without a backward pass, because the result was not
        used or was detached. It does not notice this in compiled code, in a replayed graph, in a reentrant checkpoint
        and if the scaler is disabled. Two backward passes through the result count the loss twice, and
        `torch.autograd.grad` for a penalty counts it, too. If the main loss is not scaled, the gradients of `aux_loss`
        are too large. The result cannot be changed in place.

        Args:
            x: A tensor of floats through which the main loss flows, of any shape and dtype.
            aux_loss: A tensor of floats of any shape; it means its sum. float16 and bfloat16 are converted to float32
                before the sum. Its gradient in float16 is infinite from a scale of 2**16 on, as that of a main loss is;
                compute it in float32.

        Returns:
            `x`, with the same values, shape and dtype.

        Raises:
            TypeError: For what is not a tensor of floats.
        """
        return attach(self, x, aux_loss)

    @not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place, and note whether they are finite.

        For an optimizer without gradients nothing happens. Does not synchronise, unless a guard measures the norm of an
        ordinary optimizer's gradients.

        Raises:
            RuntimeError: When called twice for an optimizer between two updates, or after its `step`.
            ValueError: For float16 gradients without `half_gradients`.

        """
        if self._enabled:
            record = self._open_to_unscale(optimizer, "unscale_")
            if self._guards.guard is None:
                self._unscale(optimizer, record)
            else:
                self._unscale_and_check_spike(optimizer, record)

    def _unscale(self, optimizer: Any, record: Record) -> None:
        scale: Any = record.scale
        flag = torch.zeros_like(scale.tensor)
        # A subclass may write to the factor, which other steps share.
        inverse = scale.inverse() if self._is_ours("_unscale_grads_") else scale.inverse().clone()
        found = self._unscale_grads_(optimizer, inverse, flag, self._half_gradients)
        record.take(self._ranks.combine(optimizer, found, flag.device))
        if not found:
            record.had_none = True

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = False
    ) -> dict[torch.device, Tensor]:
        return Gradients([optimizer], allow_fp16).unscale_(inv_scale, found_inf)

    def _unscale_and_check_spike(self, optimizer: Any, record: Record) -> None:
        """Unscale, and let the guard check the norm, which comes from the same read if possible."""
        if self._clip_in_one_read([optimizer], [record], MEASURING) is None:
            self._unscale(optimizer, record)
            self._check_spike([optimizer], MEASURING.apply_torchs([optimizer]))

    @not_compiled
    def unscale_and_clip_(
        self,
        optimizer: torch.optim.Optimizer | list[Any] | tuple[Any, ...],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Unscale an optimizer's gradients and clip their total norm, with one read and one multiply.

        Call it instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The norm is finite if and only if the
        gradients are; if it is not, the gradients stay unchanged and the step will be skipped. Norms of other orders
        than 2 and infinity use torch's own functions after `unscale_`. Synchronises with the host once for an ordinary
        optimizer; for a fused one on a CUDA device not at all. The norm of parameters on device
        meshes is that of all ranks; norm and decision take one collective for each mesh, and every rank of the mesh
        must make this call. A disabled scaler only clips.

        Args:
            optimizer: An optimizer, or several to clip by the norm of all their gradients together; then an overflow in
                one of them skips all of them.
            max_norm: The largest norm after clipping, in units of the unscaled gradients.
            norm_type: The order of the norm.

        Returns:
            The norm of the unscaled gradients before clipping: shape `()`, float32, or float64 if a gradient is.

        Raises:
            PolicyError: For a `max_norm` that is not a number from 0, infinity included.
            ValueError: For an empty list.
            TypeError: For what is not an optimizer.

        """
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("an empty list of optimizers has no gradients to clip; pass an optimizer, or several")
        return self._clip(optimizers, clipping(max_norm, norm_type))

    def _clip(self, optimizers: list[Any], how: Clipping) -> Tensor:
        if not self._enabled:
            return how.apply_torchs(optimizers)
        records = [self._open_to_unscale(each, "unscale_and_clip_") for each in optimizers]
        if self._is_ours("unscale_"):
            norm = self._clip_in_one_read(optimizers, records, how)
            if norm is not None:
                return norm
        if self._is_ours("_unscale_grads_"):
            Gradients(optimizers, self._half_gradients)  # raises errors before a gradient is unscaled
        for optimizer, record in zip(optimizers, records, strict=True):
            if self._is_ours("unscale_") or record.is_kept:
                self._unscale(optimizer, record)
            else:
                self.unscale_(optimizer)
        if len(optimizers) > 1:  # one norm of all of them, and so one decision
            device = self._state.tensors.loss_scale.device
            overflow = found_inf([flag for each in records for flag in each.overflow_flags], device)
            for record in (each for each in records if each.flags):
                spike = {SPIKE: found[SPIKE]} if SPIKE in (found := record["found_inf_per_device"]) else {}
                record["found_inf_per_device"] = {device: overflow.clone(), **spike}
                record.discard_decision()
        norm = how.apply_torchs(optimizers)
        self._check_spike(optimizers, norm)
        return lifted(norm)

    def _clip_in_one_read(self, optimizers: list[Any], records: list[Record], how: Clipping) -> Tensor | None:
        """Unscale and clip by the norm from the check; return None if one read is not enough."""
        scale: Any = records[0].scale
        if not self._is_ours("_unscale_grads_") or any(each.scale.tensor is not scale.tensor for each in records[1:]):  # type: ignore[union-attr]
            return None
        is_replayed = self._guards.guard is not None and is_being_recorded()  # a guard checks again at each replay
        on_host = (scale.tensor.is_cpu and not is_replayed) or not all(map(takes_factor, optimizers))
        clipped = unscale_and_clip(optimizers, scale, how, self._half_gradients, on_host)
        if clipped is None:
            return None
        member = self._members[id(optimizers[0])]
        spiked = self._guards.is_spike(member, clipped.norm if clipped.value is None else clipped.value)
        for optimizer, record in zip(optimizers, records, strict=True):
            # Of several optimizers, one without gradients has nothing to count; on a mesh other ranks may have some.
            is_empty = len(optimizers) > 1 and not clipped.known_to and not grads_of(optimizer)
            found = {} if is_empty else {key: flag.clone() for key, flag in clipped.found.items()}
            if self._guards.guard is not None and found:
                found[SPIKE] = as_flag(spiked, clipped.norm.device)
            combined = self._ranks.combine(optimizer, found, scale.tensor.device, clipped.known_to)
            is_known = combined is found and clipped.value is not None and isinstance(spiked, bool)
            finite = math.isfinite(clipped.value) and not spiked if is_known else None  # type: ignore[arg-type]
            record.take(combined, finite)
            record.had_none = not clipped.has_gradients or is_empty
            record.is_left_scaled = clipped.value is not None and not math.isfinite(clipped.value)
            record.spiked = is_known and spiked is True
            record.has_checked_norm = True
        return clipped.norm

    def _check_spike(self, optimizers: list[Any], norm: Tensor) -> None:
        """Let the guard check the norm of gradients that were checked for overflow, unless it has done so."""
        records = [self._records[id(optimizer)] for optimizer in optimizers]
        if self._guards.guard is None or all(record.has_checked_norm for record in records):
            return
        norm = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
        spiked = self._guards.is_spike(self._members[id(optimizers[0])], norm)
        # Finite gradients can have an infinite norm, and torch's clip would turn them into zeros. Such a norm is a
        # spike even during the guard's warm-up. The guard does not count it among its norms.
        spiked = spiked | (bool(torch.isinf(norm)) if isinstance(spiked, bool) else torch.isinf(norm))
        device = self._state.tensors.loss_scale.device
        for optimizer, record in zip(optimizers, records, strict=True):
            if not record.flags:  # it has no gradients
                continue
            found = {**record["found_inf_per_device"], SPIKE: as_flag(spiked, device)}
            record["found_inf_per_device"] = self._ranks.combine(optimizer, found, device)
            record.discard_decision()
            record.has_checked_norm = True

    @not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` if the gradients are finite on every rank, else skip the step.

        Unscales first if `unscale_` was not called. A fused optimizer is always called, with the flag, and its kernel
        skips the step. An optimizer without gradients steps, and nothing changes. Synchronises with the host once; for
        a fused optimizer not at all.

        Returns:
            The result of the optimizer; None if the step was skipped.

        Raises:
            RuntimeError: For a closure, and when called twice between two updates.
            CallOrderError: If it is unknown which loss scale multiplied the loss of the gradients.
            TypeError: For what is not an optimizer.

        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and args[0] is not None):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        record = self._open(optimizer, "step")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        kind = kind_of(optimizer)
        if record["stage"] is READY and kind.check:
            getattr(self, kind.check)(optimizer)
            record = self._records[id(optimizer)]
        if record.had_none and record["stage"] is UNSCALED and any(grad.numel() for grad in grads_of(optimizer)):
            raise CallOrderError(
                "this rank had no gradients when it decided with the others, and has some now; call unscale_() on an "
                "optimizer after backward()"
            )
        if not self._has_begun:
            warn_if_resumed(optimizer, self._state)
        if not self._is_ours("_maybe_opt_step"):
            self._flags_are_shared = True
        result = kind.apply(self, optimizer, record, args, kwargs)
        if record.applied is None:  # a subclass has replaced `_maybe_opt_step`, and has decided by the flags
            record.discard_decision()
            record.applied = record.may_step()
        record["stage"] = STEPPED
        self._has_begun = self._has_begun or self._waiting.has_graph
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer unless a flag is set. Waits for the device, once in a step."""
        record = optimizer_state
        if self._flags_are_shared:
            record.discard_decision()
        record.applied = record.may_step()
        if self._state.is_handed_out:
            self._state.refresh()  # the step, or its clip, has waited for the device
        return optimizer.step(*args, **kwargs) if record.applied else None

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Record whether the gradients are finite, also after a fused optimizer unscales them; do not change them."""
        record = self._open(optimizer, "_check_inf_per_device")
        scale = cast(Any, record.scale)
        found = Gradients([optimizer]).found_inf()
        record["found_inf_per_device"] = self._ranks.combine(optimizer, found, scale.tensor.device)
        record.discard_decision()
        self._flags_are_shared = True
        return record["found_inf_per_device"]

    def _check_fused(self, optimizer: Any) -> None:
        """Check the gradients of a fused optimizer, which will unscale them; a guard also checks their norm."""
        if self._guards.guard is None:
            was_shared = self._flags_are_shared
            self._check_inf_per_device(optimizer)
            self._flags_are_shared = was_shared or not self._is_ours("_check_inf_per_device")
        elif self._is_ours("unscale_"):
            self._unscale_and_check_spike(optimizer, self._records[id(optimizer)])
        else:
            self.unscale_(optimizer)

    def _flag_for_kernel(self, record: Record) -> Tensor:
        """Return the flag for a fused optimizer's kernel: 1.0 or 0.0."""
        flag = self._exact_flag([record])
        if flag is None:
            flag = found_inf(record.flags, self._state.tensors.loss_scale.device)
        return flag

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip an optimizer's step for your own reasons; call it instead of `step`.

        `update` then ends the step: the record of the gradients is dropped, and `applied` is False. If `unscale_` has
        checked the gradients, the loss scale follows this check; otherwise the step is not counted. Does not
        synchronise. Raises `RuntimeError` after `step`.
        """
        if not self._enabled:
            self._records[id(optimizer)].applied = False
            return
        record = self._open(optimizer, "skip")
        if record["stage"] is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        record.applied, record["stage"] = False, STEPPED

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> StepInfo:  # type: ignore[override]  # torch's says None
        """Update the loss scale after the steps since the last update, and return their outcome.

        Optimizers that are updated one by one after one loss count as one step. After a fused optimizer on a device
        the fields of the result stay there until they are read, so this does not synchronise; a `new_scale` on a device
        is waited for if the state is on the host.

        Args:
            new_scale: Set the loss scale to this instead: a positive number, or a float32 tensor of one element.

        Returns:
            A `StepInfo`: `applied` is True if every optimizer's step was applied; `applied_of(optimizer)` says it for
            one optimizer.

        Raises:
            AssertionError: If no flag was recorded since the last update, if no loss was scaled yet, and for a
                `new_scale` that is not a positive number.
            OverflowStreakError: When the policy's `max_overflow_streak` is reached and this is known on the host.
            SpikeStreakError: When the guard's `max_streak` is reached and this is known on the host.

        """
        if not self._enabled:
            flags, self._records = dict.fromkeys(self._records, False), defaultdict(Record.fresh)
            self._last = with_optimizers(StepInfo(True, 1.0, 1.0, 0), flags, True)
            return self._last
        if self._state.tensors is None:
            self._require_placed("update")
        if new_scale is not None:
            require_scale(new_scale, self._device)
        counted = self._counted()
        if not counted and new_scale is None and not any(each["stage"] is not READY for each in self._records.values()):
            raise AssertionError("No inf checks were recorded prior to update.")
        self._has_begun = self._has_begun or bool(counted)
        self._had_no_gradients = not counted and any(
            each["stage"] is STEPPED and not each["found_inf_per_device"] and Record.of(each).applied is not False
            for each in self._records.values()
        )
        overflowed, spiked = self._outcome(counted)
        if not self._waiting.continues(counted):
            self._state.begin_step()
        if new_scale is not None:
            info = self._state.update_to(new_scale, overflowed, spiked)
        else:
            info = self._state.update(overflowed, spiked) if counted else self._state.stay()
        self._last = info = with_optimizers(info, self._end(info))
        for observe in self._observers:
            observe(self, info)
        self._watch(self, info)
        return info

    def _counted(self) -> list[Record]:
        """Return the records with flags that count for the loss scale."""
        return [Record.of(each) for each in self._records.values() if each["found_inf_per_device"]]

    def _outcome(self, records: list[Record]) -> tuple[bool | Tensor, bool | Tensor]:
        """Return whether a gradient was not finite, and whether finite ones were refused as a spike.

        Bools if they are known on the host or can be read on a CPU; else flags on the device, to which the state moves.
        """
        is_recorded = is_being_recorded()
        if self._state.is_known():
            overflowed = spiked = False
            for record in records:
                if self._flags_are_shared:
                    record.discard_decision()
                if record.finite is None:
                    if is_recorded or not all(map(is_readable, record.flags)):
                        break
                    record.may_step()
                if not record.finite:
                    overflowed, spiked = overflowed or not record.spiked, spiked or record.spiked
            else:
                return overflowed, spiked
        self._waiting.is_over = self._waiting.is_over or is_recorded
        self._state = self._state.on_device(has_spikes=self._guards.guard is not None)
        if (flag := self._exact_flag(records)) is not None:
            return flag, False
        device = self._state.tensors.loss_scale.device
        overflow = found_inf([flag for record in records for flag in record.overflow_flags], device)
        spikes = [found[SPIKE] for record in records if SPIKE in (found := record["found_inf_per_device"])]
        return overflow, found_inf(spikes, device) if spikes else False

    def _exact_flag(self, records: list[Record]) -> Tensor | None:
        """Return the only flag of some records if it is on the device of the loss scale, and 0.0 or 1.0."""
        flags = [flag for record in records for flag in record.flags]
        if len(flags) != 1 or self._flags_are_shared or not self._is_ours("_unscale_grads_"):
            return None
        return flags[0] if flags[0].device == self._state.tensors.loss_scale.device else None

    def _end(self, info: StepInfo) -> dict[int, Any]:
        """Forget the records at an update; return for each optimizer that was stepped whether its step was applied."""
        self._waiting.end(self._members, self._records, info.loss_scale_used)
        applied = {}
        for key, record in self._records.items():
            if record["stage"] is STEPPED and key in self._members:
                applied[key] = Record.of(record).outcome()
        if self._flags_are_shared:
            self._records, self._flags_are_shared = defaultdict(Record.fresh), False  # others may use the old dict
        else:
            self._records.clear()
        return applied

    def _open(self, optimizer: Any, caller: str) -> Record:
        """Return the record of an optimizer's step; while it is ready, with the present scale of its gradients."""
        key = id(optimizer)
        record = self._records.get(key)
        if type(record) is not Record or key not in self._members:
            record = self._records[key] = self._admit(optimizer, record, caller)
        if record["stage"] is READY:
            if self._waiting.has_loss:  # then no optimizer waits
                record.scale = self._state.present()
            else:
                record = self._waiting.open(self._members[key], optimizer, record, self._state.present())
                self._records[key] = record
        return record

    def _admit(self, optimizer: Any, record: Any, caller: str) -> Record:
        """Return a record for an optimizer that is used for the first time, or first since an update."""
        if self._state.tensors is None:
            self._require_placed(caller)
        key = id(optimizer)
        if key not in self._members:
            require_optimizer(optimizer, caller)
            self._members[key] = Member(optimizer, self)
            # The record of a deleted optimizer with the same id: its flags still count at the next update, under a key
            # of no optimizer.
            if type(record) is Record and record.scale is not None:
                self._records[-key], record = record, None
        return Record.fresh() if record is None else Record.of(record)

    def _open_to_unscale(self, optimizer: Any, caller: str) -> Record:
        """Return the record of an optimizer, or raise torch's error if it was unscaled or stepped."""
        record = self._open(optimizer, caller)
        if record["stage"] is UNSCALED and not record.is_kept:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if record["stage"] is STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        return record

    def _is_ours(self, name: str) -> bool:
        """Return whether a method is that of this class, not of a subclass, and not assigned to this scaler."""
        return getattr(type(self), name) is getattr(GradScaler, name) and name not in self.__dict__

    @not_compiled
    def minimize(
        self,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor] | Sequence[Callable[[], Tensor]],
        *,
        retries: int = 0,
        max_norm: float | None = None,
    ) -> StepInfo:
        """Take a whole step: scale the loss, differentiate, unscale, clip, step and update; retry an overflow.

        After an overflow the policy lowers the loss scale, the random state of torch and the buffers of modules are
        restored, and `loss_fn` runs again. So the applied step is that of a run at the lower scale. Each try is one
        update of the policy. A policy that does not adapt never retries. If the step is not applied, parameters,
        optimizer and buffers are unchanged. Synchronises with the host as `step` does, and with `retries` once for each
        try, also for a fused optimizer.

        Args:
            optimizer: Any optimizer. If its `step` needs a closure, as for LBFGS, it receives the unscaled loss. The
                gradients of its parameters are computed again; those from before the call are dropped.
            loss_fn: Returns the loss, a tensor with one element, without scaling it. Or a list of such functions, one
                for each micro-batch: their gradients are added up, and a micro-batch that overflows is retried alone.
            retries: The largest number of times to run a loss again.
            max_norm: The largest norm of the unscaled gradients, as in `unscale_and_clip_`; None does not clip.

        Returns:
            A `StepInfo` of the last try, as from `update`.

        Raises:
            CallOrderError: If the optimizer was unscaled or stepped since the last update.
            SyncError: For a retry under `no_sync()` without `process_group`.
            OverflowStreakError: When the last try reaches the policy's `max_overflow_streak` and the host knows.
            TypeError: For a `loss_fn` that is not a function or a list of them, or does not return a tensor.
            PolicyError: For `retries` that are not a whole number from 0, and for a `max_norm` that is not a number
                from 0, infinity included.

        """
        from lossscale_torch._rescue import minimize

        require_optimizer(optimizer, "minimize")
        return minimize(self, optimizer, loss_fn, retries, max_norm)

    @property
    def last_step(self) -> StepInfo | None:
        """The `StepInfo` of the last `update`, for code in which a framework calls `update`; None before the first."""
        return self._last

    def place_on(self, device: torch.device | str) -> None:
        """Put the loss scale on a device without scaling a loss; otherwise the first `scale` does this.

        Call it in a process that steps and updates but never scales a loss, such as a stage of a pipeline that receives
        its gradients from the last stage.
        """
        if self._enabled and self._state.tensors is None:
            self._lazy_init_scale_growth_tracker(device)

    def metrics(self) -> dict[str, Any]:
        """Return the state's numbers under stable names; see `lossscale_core.metrics`.

        They are plain Python numbers if known on the host, else tensors of shape `()`. Does not synchronise.
        """
        numbers = metrics(self._state.snapshot(), guard=self._guards.first())
        return {name: number(value) for name, value in numbers.items()}

    def diagnose(self) -> str:
        """Describe the condition of the run in one or two sentences; see `lossscale_core.diagnose`. Synchronises."""
        if not self._enabled:
            return "disabled: losses and gradients are left alone."
        state = self._state.read()
        self._watch.after_read(self)
        answer = diagnose(self.policy, state, guard=self._guards.worst())
        if self._had_no_gradients:
            answer += (
                " The last step had no gradients to check: parameters are frozen or unused, or the loss was detached."
            )
        return answer

    def check_sync(self) -> None:
        """Raise `SyncError` with the ranks that have another state than rank 0; every rank of the group must call it.

        The ranks are those of `process_group`, or all. Call it once after loading: a rank with another loss scale would
        take other steps. `SyncError` is also raised for a rank that is not in `process_group`. Synchronises with the
        host.
        """
        self._ranks.check_member()
        state, group = self._state.read(), self._ranks.process_group
        guards = self._guards.saved(state) if group is None else {}  # the ranks of a group have different norms
        require_same_on_ranks({**state_to_dict(state, self.policy), **guards}, group)


def require_optimizer(optimizer: Any, caller: str) -> None:
    """Raise `TypeError` for an object without parameter groups."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{caller}() was given a {type(optimizer).__name__}, which has no param_groups; it takes an optimizer; "
            "pass the torch.optim.Optimizer of these parameters"
        )

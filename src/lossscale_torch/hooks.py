"""Hooks: objects that see each step of an optimizer, can refuse it, and see the outcome.

`GradScaler(hooks=[...])` takes hooks of your own. `guard=`, `protect=` and `process_group=` use those of this module.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lossscale_core import GuardState, SpikeGuard, check_limits
from lossscale_core.adapters import check_guard, describe, format_number, guard_state_from_dict
from lossscale_core.errors import PolicyError, SyncError
from lossscale_torch._gradients import Gradients, has_meshes, is_dtensor, params_of, reduce_max, to_device
from lossscale_torch._record import PLAIN, READY, SPIKE, UNSCALED, VETO, OptimizerStep, combine, flags_of, kind_of
from lossscale_torch._snapshots import Buffers
from lossscale_torch._state import is_capturing, outside_graph
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lossscale_torch._scaler import GradScaler

__all__ = ["Guard", "Hook", "OptimizerStep", "Protect", "SameOnRanks"]

_MISMATCH = "mismatch"
"""The name of a flag that is 1.0 if ranks have combined the flags of different steps."""
_LARGEST = torch.finfo(torch.float32).max


class Hook:
    """The base of hooks; each method does nothing.

    A hook receives the record of one optimizer, an `OptimizerStep`: `step.optimizer`, and `step.flags`, which has a
    flag for each device, float32 of shape `()`, that is 0.0 if the gradients there are finite.
    `scaler.optimizer_steps()` lists the records of all optimizers since the last update.
    """

    name: str = VETO
    """The name of the flag in `step.flags` that stores a refusal; hooks with one name share a flag."""
    needs_norm = False
    """Whether `step.norm` must hold the norm of the unscaled gradients: shape `()`, where the loss scale is.

    It is the 2-norm, or after a clip the norm that was used: of its order, and of all optimizers together.

    A fused optimizer's gradients are then unscaled before its step.
    """

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> bool | Tensor | None:
        """See gradients that are checked, before the optimizer is stepped or skipped, and return whether to refuse.

        Returns:
            True, or a tensor of one element that is not 0.0, skips the step; the loss scale stays. None, False and a
            tensor of 0.0 allow it. A tensor that is computed on the device needs no synchronisation.
        """
        return None

    def after_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """See an optimizer after `step` has stepped or skipped it."""

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """See the outcome of a whole step, whatever another hook raises."""

    def abandon(self, scaler: "GradScaler") -> None:
        """Undo what belongs to a step that ends before its outcome is known, by an error; make no collective call."""

    def state_dict(self) -> dict[str, Any]:
        """Return entries for the scaler's state dict, plain values under names of your own."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a scaler's state dict, which may lack the entries."""


class Guard(Hook):
    """Skips a step with a gradient norm far above the norms before; each optimizer has norms of its own.

    The norm is that of the unscaled gradients before they are clipped. A state stays on the host while the norms are
    known there; the first norm that is not known moves it to the device.
    """

    name = SPIKE
    needs_norm = True

    def __init__(self, rule: SpikeGuard, loaded: Iterable[GuardState] = ()) -> None:
        check_guard(rule)
        self.rule, self._loaded = rule, list(loaded)
        self._states: weakref.WeakKeyDictionary[Optimizer, GuardState] = weakref.WeakKeyDictionary()
        self._proposed: dict[Optimizer, GuardState] = {}
        """The norm of each optimizer in this step, and its state if the norm is to be remembered."""

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> Tensor | None:
        """Refuse the step if its norm is a spike. Synchronises for an ordinary optimizer."""
        key, norm = step.optimizer, step.norm
        if norm is None:  # there are no gradients
            return None
        if key not in self._states:
            self._states[key] = self._loaded.pop(0) if self._loaded else self.rule.init_state()
        state = self._states[key]
        is_on_device = isinstance(state.mean, Tensor)  # where it stays
        if not norm.is_cpu and not is_on_device and kind_of(step.optimizer) is PLAIN:
            (value,) = scaler._state.read([step], norm)  # the one wait of this step
            norm = torch.tensor(value)
        overflow = combine(flags_of([step], vetoes=False), norm.device)
        if is_on_device or not norm.is_cpu or is_capturing():
            if not is_on_device:
                with outside_graph(norm.device):
                    state = GuardState(*(torch.tensor(value).to(norm.device) for value in state))
                self._states[key] = state
            device = state.mean.device
            flag, after = self._check_on_device(state, to_device(norm, device), to_device(overflow, device) == 0.0)
        else:
            value = norm.item()
            is_known = value < math.inf and not overflow
            # A norm beyond float32 is a spike, and not an overflow.
            accepted, after = self.rule.check(state, min(value, _LARGEST) if is_known else math.inf)
            flag = torch.tensor(float(not accepted), dtype=torch.float32)
        self._proposed[key] = after
        return flag

    def _check_on_device(self, state: GuardState, norm: Tensor, is_known: Tensor) -> tuple[Tensor, GuardState]:
        """Return the flag and the state after the step."""
        if norm.dtype is torch.float64:  # a norm beyond float32 is a spike, and not an overflow
            is_known, norm = is_known & (norm < math.inf), norm.clamp(max=_LARGEST).float()
        accepted, after = self.rule.check(state, torch.where(is_known, norm, math.inf), xp=torch)
        return torch.where(accepted, 0.0, 1.0), after

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Remember the norms of steps that were applied, or that only this guard refused.

        Raises `OverflowStreakError` if a state on the host has reached the guard's `max_streak`.
        """
        proposed, self._proposed = self._proposed, {}
        on_host = []
        for key, after in proposed.items():
            state, flags = self._states[key], scaler._steps[id(key)].flags
            if SPIKE not in flags:  # the record was replaced
                continue
            # After an overflow there is nothing to remember: the norm was not finite.
            others = [flag for name, flag in flags.items() if isinstance(name, str) and name != SPIKE]
            if not isinstance(state.mean, Tensor):
                if not combine(others, flags[SPIKE].device):
                    self._states[key] = after
                    on_host.append(after)
                continue
            if others:
                is_vetoed = combine(others, state.mean.device) != 0.0
                after = GuardState(*(torch.where(is_vetoed, *pair) for pair in zip(state, after, strict=True)))
            torch._foreach_copy_(list(state), list(after))
        unread: Any = scaler._state.fields  # "none" has no limit
        for after in on_host:
            check_limits("none", unread, guard=self.rule, guard_state=after)

    def abandon(self, scaler: "GradScaler") -> None:
        """Remember nothing of a step that was not decided."""
        self._proposed = {}

    def first(self) -> GuardState | None:
        """Return the state of the first optimizer, where it is. Does not synchronise."""
        return next(iter([*self._states.values(), *self._loaded]), None)

    def states(self) -> list[GuardState]:
        """Return the state of each optimizer on the host. Synchronises if on a device."""
        start = self.rule.init_state()
        return [
            GuardState(*(type(first)(float(value)) for first, value in zip(start, state, strict=True)))
            for state in [*self._states.values(), *self._loaded]
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return one state, or a list with one for each optimizer. Synchronises if on a device."""
        states = self.states() or [self.rule.init_state()]
        entries = [{name: value.item() for name, value in each._asdict().items()} for each in states]
        return {"guard": entries[0] if len(entries) == 1 else entries}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the saved states, in the order of the optimizers' first steps."""
        entry, version = state_dict.get("guard"), state_dict.get("version", 1)
        entries = entry if isinstance(entry, list | tuple) else [entry]
        loaded = [guard_state_from_dict({"version": version, "guard": each}) for each in entries]
        for key, state in self._states.items():
            after = loaded.pop(0) if loaded else self.rule.init_state()
            if not isinstance(state.mean, Tensor):
                self._states[key] = after
                continue
            with outside_graph(state.mean.device):  # a graph may hold these tensors
                for tensor, value in zip(state, after, strict=True):
                    tensor.fill_(value.item())
        self._loaded = loaded

    def __reduce__(self) -> Any:
        return Guard, (self.rule, self.states())


class Protect(Hook):
    """Leaves the buffers of modules as they were if a step is skipped, such as BatchNorm's statistics.

    The buffers that exist when the first forward pass in training mode since the last update begins come back, by their
    names, also if the forward pass has put other tensors there. On a device this does not synchronise. The modules get
    forward hooks; those in copies and pickles of a module do nothing.
    """

    def __init__(self, modules: Module | Iterable[Module]) -> None:
        roots = [modules] if isinstance(modules, Module) or not isinstance(modules, Iterable) else list(modules)
        self._saved: dict[Module, Buffers] = {}
        """The buffers of this step."""
        undo = contextlib.ExitStack()
        weakref.finalize(self, undo.close).atexit = False  # the hooks end with the scaler
        for root in roots:
            if not isinstance(root, Module):
                raise TypeError(f"protect= takes modules, and {root!r} is not one; pass protect=[model]")
            for module in root.modules():  # a program may call only the inner ones, as Lightning's training_step does
                if module is root or module._buffers:
                    save, forget = (_Callback(self, name, root, module is not root) for name in ("_save", "_forget"))
                    undo.callback(module.register_forward_pre_hook(save, prepend=True).remove)
                    undo.callback(module.register_load_state_dict_post_hook(forget).remove)

    def _save(self, root: Module, module: Module) -> None:
        """Copy the buffers under `root`, in which a module is about to run, unless that was done in this step."""
        if module.training and root not in self._saved:
            self._saved[root] = Buffers(root)

    def _forget(self, root: Module, module: Module) -> None:
        """Drop the copies under `root`, since a state was loaded."""
        self._saved.pop(root, None)

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Write the copies back if the step was not applied."""
        saved, self._saved = self._saved, {}
        for buffers in saved.values():
            buffers.put_back(info.applied, with_caches=False)

    def abandon(self, scaler: "GradScaler") -> None:
        """Write the copies back unless an optimizer may have stepped."""
        saved, self._saved = self._saved, {}
        if not any(step.may_have_moved for step in scaler.optimizer_steps()):
            for buffers in saved.values():
                buffers.put_back(with_caches=False)

    def __reduce__(self) -> Any:
        return Protect, ((),)


class Waiting(Hook):
    """Keeps gradients that wait for a later step of their optimizer at the present loss scale."""

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]

    def leave_out(self, records: Mapping[int, OptimizerStep]) -> Mapping[int, OptimizerStep]:
        """Return the records of an update: all but those of unscaled gradients that wait, if others took part."""
        return {
            key: step
            for key, step in records.items()
            if (step.flags or step["stage"] is not READY) and not self._is_unscaled(step)
        } or records

    def _is_unscaled(self, step: OptimizerStep) -> bool:
        return step["stage"] is UNSCALED and _is_among(step.optimizer, self.optimizers)

    @torch.no_grad()
    def rescale(self, scaler: "GradScaler", factor: float | Tensor) -> None:
        """Multiply scaled gradients that wait by a factor. Does not synchronise."""
        if isinstance(factor, Tensor) or factor != 1.0:
            divided = [step.optimizer for step in scaler.optimizer_steps() if step.has_divided]
            Gradients([each for each in self.optimizers if not _is_among(each, divided)]).multiply_(factor)

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Give all gradients that wait the new scale. Does not synchronise."""
        self.rescale(scaler, info.loss_scale_after / info.loss_scale_used)
        self.abandon(scaler)

    @torch.no_grad()
    def abandon(self, scaler: "GradScaler") -> None:
        """Scale unscaled gradients again; an overflow that a joint clip has found will be found again."""
        steps = [step for step in scaler.optimizer_steps() if self._is_unscaled(step)]
        divided = [step for step in steps if step.has_divided]
        Gradients([step.optimizer for step in divided]).multiply_(scaler._scale)
        for step in divided:
            is_finite = step.is_allowed(scaler._scale.device)
            Gradients([step.optimizer]).multiply_(torch.where(is_finite, 1.0, math.inf))
        if self.leave_out(scaler._steps) is not scaler._steps:  # else the watch reports a step that was not finished
            for step in steps:
                step["stage"] = READY

    def __reduce__(self) -> Any:
        return Waiting, ()


def _is_among(optimizer: Optimizer | None, others: Iterable[Optimizer | None]) -> bool:
    """Return whether an optimizer is one of others, which may be wrappers; those share the list of groups."""
    groups = getattr(optimizer, "param_groups", None)  # a record of another package may have no optimizer
    return any(other is optimizer or getattr(other, "param_groups", ()) is groups for other in others)


class _Callback:
    """A callback of a module within a protected one. It keeps neither alive, and a copy of it does nothing."""

    def __init__(self, protect: Protect, method: str, root: Module, is_inner: bool) -> None:
        self.protect, self.root = weakref.ref(protect), weakref.ref(root)
        self.method, self.is_inner = method, is_inner

    def __call__(self, module: Module, _: Any) -> None:
        if not (self.is_inner and torch.compiler.is_compiling()):
            self.call(module)

    # A compiled function that calls the module breaks its graph here; a traced call would not copy at each run.
    @not_compiled
    def call(self, module: Module) -> None:
        protect, root = self.protect(), self.root()
        if protect is not None and root is not None:
            getattr(protect, self.method)(root, module)

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """Stand in for a callback in a copy of a module."""


class SameOnRanks(Hook):
    """Combines the flags of a step over the ranks of a group and of the parameters' meshes, also without gradients.

    The ranks must step their optimizers in the same order.
    """

    _updates = 0
    """The updates so far, which are the same on all ranks in each step."""
    left_out = False
    """Whether this rank has skipped a step after a clip had combined the flags, which the next collective compares."""

    def __init__(self, process_group: "ProcessGroup | None" = None, norm_group: "ProcessGroup | None" = None) -> None:
        self.process_group, self.norm_group = process_group, norm_group

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """Replace the flags by their maximum over the ranks. Does not synchronise with the host."""
        # A clip has combined the flags of gradients, and not the vetoes of hooks.
        known = () if scaler._hooks else step.combined_over
        groups = [group for group in self.groups([step.optimizer]) if group not in known]
        if not groups:
            self.left_out |= step.applied is False
            return
        flags, device = step.flags, scaler._scale.device
        overflow, veto = ((combine(flags_of([step], vetoes=vetoes), device) != 0.0).float() for vetoes in (False, True))
        norm = torch.zeros_like(overflow) if step.norm is None else to_device(step.norm, device).float()
        number, self.left_out = torch.full_like(overflow, self._updates + self.left_out / 2), False
        row = torch.stack([overflow, veto, torch.where(overflow == 0.0, norm, math.inf), number, -number])
        overflow, veto, norm, highest, lowest = reduce_max(row, groups).unbind()
        flags.clear()
        flags.update({device: overflow, VETO: veto, _MISMATCH: (highest != -lowest).float()})
        if scaler._needs_norm:
            step.norm = norm

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Raise `SyncError` if the host knows that ranks have taken different steps."""
        self._updates = (self._updates + 1) % 2**22  # float32 holds its halves
        for step in scaler.optimizer_steps() if not is_capturing() else ():
            marks = [step.flags.get(_MISMATCH), None if step.norm is None else -step.norm]
            if any(mark is not None and mark.is_cpu and mark > 0.0 for mark in marks):
                raise SyncError(
                    "ranks that decide together have called step() or skip() at different updates, or one of them "
                    "skip() after a clip, and their parameters may differ; make the same calls on every rank"
                )

    def any_of(self, mine: bool, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
        """Return whether something holds on a rank, for ranks that share a decision; else False with several ranks."""
        if groups := self.groups(optimizers):
            return bool(reduce_max(torch.tensor(float(mine)).to(device), groups))
        return mine and not _has_ranks()

    def is_first(self, optimizer: Optimizer) -> bool:
        """Return whether this is the first rank of those that decide together, or of all."""
        if not _has_ranks():
            return True
        groups: list[ProcessGroup | None] = [*self.groups([optimizer])] or [None]
        return all(torch.distributed.get_rank(group) == 0 for group in groups)

    def groups(self, optimizers: "Sequence[Optimizer]", *, of_norm: bool = False) -> "list[ProcessGroup]":
        """Return the groups of the parameters' meshes, `norm_group`, and if it is not about a norm, `process_group`.

        Each group is in the list once. Raises `SyncError` on a rank that is not in a group.
        """
        groups = _groups_of_meshes(optimizers)
        for name in ("norm_group",) if of_norm else ("norm_group", "process_group"):
            group = getattr(self, name)
            if group is not None and group not in groups:
                self.require_member(name)
                groups.append(group)
        return groups

    def require_member(self, name: str) -> None:
        """Raise `SyncError` in a process that is not in the group of this name, since collectives would not work."""
        group = getattr(self, name)
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise SyncError(
                f"rank {torch.distributed.get_rank()} is not in the {name} of its scaler, so it would decide "
                "alone; make the scaler of each rank with a group that contains it, or without one"
            )

    def require_same(self, mine: dict[str, Any]) -> None:
        """Raise `SyncError` with the ranks that have another state than rank 0; every rank must call this."""
        self.require_member("process_group")
        theirs: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(theirs, mine, group=self.process_group)
        different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
        if different:
            texts = [format_number(state["loss_scale"]) if state else "disabled" for state in theirs]
            scales = ", ".join(f"rank {rank}: {texts[rank]}" for rank in [0, *different])
            entries = dict.fromkeys(name for state in theirs for name in state)  # one without a guard lacks its entry
            names = [name for name in entries if any(state.get(name) != theirs[0].get(name) for state in theirs)]
            raise SyncError(
                f"the scalers of ranks {different} differ from rank 0's in {', '.join(names)} (loss scales: {scales}); "
                "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SameOnRanks":
        return self  # a group is shared, not copied

    def __reduce__(self) -> Any:
        return SameOnRanks, ()


def _groups_of_meshes(optimizers: Iterable[Optimizer]) -> "list[ProcessGroup]":
    """Return the process groups over the meshes of the optimizers' parameters, with gradients or without."""
    if not has_meshes():
        return []
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    here = sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in here for dim in range(mesh.ndim) if mesh.size(dim) > 1))


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def require_hooks(hooks: Sequence[Hook], guard: SpikeGuard | None) -> tuple[list[Hook], Guard | None]:
    """Return the hooks of a scaler, and its guard; raise an error for what is not a hook, and for two guards."""
    for each in hooks if isinstance(hooks, Iterable) else [hooks]:
        if not isinstance(each, Hook) or not isinstance(hooks, Iterable):
            raise TypeError(
                f"hooks= was given {describe(each)}; it takes objects of lossscale_torch.hooks.Hook; derive a class "
                "from it, and pass [YourHook()]"
            )
    guards = [hook for hook in hooks if isinstance(hook, Guard)] + ([Guard(guard)] if guard is not None else [])
    if len(guards) > 1:
        raise PolicyError(f"a scaler takes one guard, and {len(guards)} were given; pass one of them, as guard=")
    return [hook for hook in hooks if not isinstance(hook, Guard)], guards[0] if guards else None

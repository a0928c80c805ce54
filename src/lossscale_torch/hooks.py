"""Hooks: objects that `GradScaler` calls at each step and each update, and that can veto a step.

A veto skips the step of an optimizer and leaves the loss scale unchanged. Pass your own hooks as
`GradScaler(hooks=[...])`. The arguments `guard=`, `protect=`, `process_group=` and `optimizers=` use hooks of this
module.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
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
"""The name of a flag that is 1.0 if the ranks have combined the flags of different steps."""
_LARGEST = torch.finfo(torch.float32).max


class Hook:
    """The base class of hooks. Its methods do nothing.

    A hook receives the record of an optimizer, an `OptimizerStep`. `step.optimizer` is the optimizer. `step.flags` has
    a flag for each device: a float32 tensor of shape `()`, which is 0.0 if the gradients on this device are finite.
    `scaler.optimizer_steps()` returns the records of all optimizers since the last update.
    """

    name: str = VETO
    """The key of the veto in `step.flags`. Hooks with the same name share a flag."""
    needs_norm = False
    """Whether the hook reads `step.norm`, the norm of the unscaled gradients: shape `()`, on the loss scale's device.

    It is the 2-norm of the gradients of this optimizer. After a clip it is the norm that the clip used: of the order
    `norm_type`, of all optimizers that were clipped together. With this setting, the gradients of a fused optimizer
    are unscaled before its step.
    """

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> bool | Tensor | None:
        """Decide about a step after the gradients were checked, before the scaler calls the optimizer.

        Returns:
            True, or a tensor of one element other than 0.0, skips the step; the loss scale stays. None, False and a
            tensor of 0.0 allow the step. The scaler does not read a tensor on a device for a fused optimizer.
        """
        return None

    def after_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """Act after `GradScaler.step` has stepped or skipped an optimizer."""

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Act on the outcome of an update. The scaler calls all hooks, even if one of them raises an error."""

    def abandon(self, scaler: "GradScaler") -> None:
        """Undo the changes of a step that ends without an outcome, after an error. Do not make collective calls."""

    def state_dict(self) -> dict[str, Any]:
        """Return entries for the state dict of the scaler: plain values under names of your own."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state dict of a scaler, in which your entries may be missing."""


class Guard(Hook):
    """Skips a step if its gradient norm is far above the earlier norms of the same optimizer (a spike).

    The norm is the norm of the unscaled gradients before a clip. The state of the guard is on the host while the host
    knows all norms. The first norm that only a device knows moves the state to this device.
    """

    name = SPIKE
    needs_norm = True

    def __init__(self, rule: SpikeGuard, loaded: Iterable[GuardState] = ()) -> None:
        check_guard(rule)
        self.rule, self._checkpoint_states = rule, list(loaded)
        """`_checkpoint_states` are the states of a checkpoint that are still without an optimizer."""
        self._states: weakref.WeakKeyDictionary[Optimizer, GuardState] = weakref.WeakKeyDictionary()
        self._next_states: dict[Optimizer, GuardState] = {}
        """For each optimizer of this step, the state that includes its norm; `after_update` may accept it."""

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> Tensor | None:
        """Veto the step if its norm is a spike. For an ordinary optimizer, waits for the norm on a device."""
        key, norm = step.optimizer, step.norm
        if norm is None:  # the optimizer has no gradients
            return None
        if key not in self._states:
            self._states[key] = self._checkpoint_states.pop(0) if self._checkpoint_states else self.rule.init_state()
        state = self._states[key]
        is_on_device = isinstance(state.mean, Tensor)  # a state does not return to the host
        if not norm.is_cpu and not is_on_device and kind_of(step.optimizer) is PLAIN:
            (value,) = scaler._state.read([step], norm)  # also reads the flags, so that `step` does not wait again
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
            is_finite = value < math.inf and not overflow
            # A float64 norm that overflows float32 is a spike. It is not an overflow.
            accepted, after = self.rule.check(state, min(value, _LARGEST) if is_finite else math.inf)
            flag = torch.tensor(float(not accepted), dtype=torch.float32)
        self._next_states[key] = after
        return flag

    def _check_on_device(self, state: GuardState, norm: Tensor, is_finite: Tensor) -> tuple[Tensor, GuardState]:
        """Return the flag and the state after the step."""
        if norm.dtype is torch.float64:  # as on the host, a norm that overflows float32 is a spike
            is_finite, norm = is_finite & (norm < math.inf), norm.clamp(max=_LARGEST).float()
        accepted, after = self.rule.check(state, torch.where(is_finite, norm, math.inf), xp=torch)
        return torch.where(accepted, 0.0, 1.0), after

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Accept the new state of each optimizer, unless another hook has vetoed its step.

        Raises `OverflowStreakError` if a state on the host has reached the guard's `max_streak`.
        """
        next_states, self._next_states = self._next_states, {}
        on_host = []
        for key, after in next_states.items():
            state, flags = self._states[key], scaler._steps[id(key)].flags
            if SPIKE not in flags:  # other code has replaced the record
                continue
            # An overflow needs no test: `check` does not count a norm that is not finite.
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
        unused: Any = scaler._state.fields  # the policy "none" has no limit for a scale state
        for after in on_host:
            check_limits("none", unused, guard=self.rule, guard_state=after)

    def abandon(self, scaler: "GradScaler") -> None:
        """Forget the norms of a step that ended without an outcome."""
        self._next_states = {}

    def first(self) -> GuardState | None:
        """Return the state of the first optimizer, or None before the first step. Does not synchronise."""
        return next(iter([*self._states.values(), *self._checkpoint_states]), None)

    def states(self) -> list[GuardState]:
        """Return the state of each optimizer as host scalars. Waits for states on a device."""
        start = self.rule.init_state()
        return [
            GuardState(*(type(first)(float(value)) for first, value in zip(start, state, strict=True)))
            for state in [*self._states.values(), *self._checkpoint_states]
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the entry `"guard"`: a state, or a list of states for several optimizers. Waits for a device."""
        states = self.states() or [self.rule.init_state()]
        entries = [{name: value.item() for name, value in state._asdict().items()} for state in states]
        return {"guard": entries[0] if len(entries) == 1 else entries}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the states of a checkpoint, in the order in which the optimizers took their first steps."""
        entry, version = state_dict.get("guard"), state_dict.get("version", 1)
        entries = entry if isinstance(entry, list | tuple) else [entry]
        loaded = [guard_state_from_dict({"version": version, "guard": guard}) for guard in entries]
        for key, state in self._states.items():
            after = loaded.pop(0) if loaded else self.rule.init_state()
            if not isinstance(state.mean, Tensor):
                self._states[key] = after
                continue
            with outside_graph(state.mean.device):  # a graph may hold these tensors
                for tensor, value in zip(state, after, strict=True):
                    tensor.fill_(value.item())
        self._checkpoint_states = loaded

    def __reduce__(self) -> Any:
        return Guard, (self.rule, self.states())


class Protect(Hook):
    """Restores the buffers of modules, such as BatchNorm's statistics, if a step is skipped.

    The first forward pass in training mode after an update copies the buffers. A skipped step restores the values, and
    also the tensors, if the forward pass has assigned other tensors. Does not synchronise. The modules get forward
    hooks; in copies and pickles of a module, these hooks do nothing.
    """

    def __init__(self, modules: Module | Iterable[Module]) -> None:
        # A `ModuleList` is a list, too: its own `forward` never runs, and the caller may keep only its elements.
        is_single_module = isinstance(modules, Module) and not isinstance(modules, ModuleList)
        roots = [modules] if is_single_module or not isinstance(modules, Iterable) else list(modules)
        self._copies: dict[Module, Buffers] = {}
        """The copies of this step, by the modules that `protect=` received."""
        undo = contextlib.ExitStack()
        weakref.finalize(self, undo.close).atexit = False  # removes the forward hooks when the scaler is deleted
        for root in roots:
            if not isinstance(root, Module):
                raise TypeError(f"protect= takes modules, and {root!r} is not one; pass protect=[model]")
            for module in root.modules():  # a program may call submodules only, as Lightning's training_step does
                if module is root or module._buffers:
                    copy, forget = (_Callback(self, name, root, module is not root) for name in ("_copy", "_forget"))
                    undo.callback(module.register_forward_pre_hook(copy, prepend=True).remove)
                    undo.callback(module.register_load_state_dict_post_hook(forget).remove)

    def _copy(self, root: Module, module: Module) -> None:
        """Copy the buffers of `root` before the first forward pass of the step, in which `module` runs."""
        if module.training and root not in self._copies:
            self._copies[root] = Buffers(root)

    def _forget(self, root: Module, module: Module) -> None:
        """Drop the copies of `root` after a state was loaded into it."""
        self._copies.pop(root, None)

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Restore the buffers if the step was not applied."""
        copies, self._copies = self._copies, {}
        for buffers in copies.values():
            buffers.restore(info.applied, with_caches=False)

    def abandon(self, scaler: "GradScaler") -> None:
        """Restore the buffers unless an optimizer may have stepped."""
        copies, self._copies = self._copies, {}
        if not any(step.may_have_stepped for step in scaler.optimizer_steps()):
            for buffers in copies.values():
                buffers.restore(with_caches=False)

    def __reduce__(self) -> Any:
        return Protect, ((),)


class Waiting(Hook):
    """Multiplies waiting gradients when the loss scale changes, so that they always have the current scale.

    Gradients wait if an update ends the step of another optimizer before their own optimizer steps.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]

    def leave_out(self, records: Mapping[int, OptimizerStep]) -> Mapping[int, OptimizerStep]:
        """Return the records for an update, without the records of waiting gradients that were unscaled.

        If only such records exist, returns all records.
        """
        return {key: step for key, step in records.items() if step.has_begun and not self._is_unscaled(step)} or records

    def _is_unscaled(self, step: OptimizerStep) -> bool:
        return step["stage"] is UNSCALED and self.has(step.optimizer)

    def has(self, optimizer: Optimizer | None) -> bool:
        """Return whether the gradients of an optimizer may wait."""
        return _is_among(optimizer, self.optimizers)

    @torch.no_grad()
    def rescale(self, scaler: "GradScaler", factor: float | Tensor) -> None:
        """Multiply the waiting gradients that are still scaled by a factor. Does not synchronise."""
        if isinstance(factor, Tensor) or factor != 1.0:
            divided = [step.optimizer for step in scaler.optimizer_steps() if step.has_divided]
            scaled = [optimizer for optimizer in self.optimizers if not _is_among(optimizer, divided)]
            Gradients(scaled).multiply_(factor)

    def after_update(self, scaler: "GradScaler", info: StepInfo) -> None:
        """Bring all waiting gradients to the new scale. Does not synchronise."""
        self.rescale(scaler, info.loss_scale_after / info.loss_scale_used)
        self.abandon(scaler)

    @torch.no_grad()
    def abandon(self, scaler: "GradScaler") -> None:
        """Scale waiting gradients again if they were unscaled. An overflow makes all of them non-finite."""
        steps = [step for step in scaler.optimizer_steps() if self._is_unscaled(step)]
        divided = [step for step in steps if step.has_divided]
        Gradients([step.optimizer for step in divided]).multiply_(scaler._scale)
        for step in divided:
            is_finite = step.is_allowed(scaler._scale.device)
            Gradients([step.optimizer]).multiply_(torch.where(is_finite, 1.0, math.inf))
        if self.leave_out(scaler._steps) is not scaler._steps:  # otherwise the watch reports an unfinished step
            for step in steps:
                step["stage"] = READY

    def __reduce__(self) -> Any:
        return Waiting, ()


def _is_among(optimizer: Optimizer | None, others: Iterable[Optimizer | None]) -> bool:
    """Return whether `others` has the optimizer, its wrapper or its inner optimizer: all share `param_groups`."""
    groups = getattr(optimizer, "param_groups", None)  # the optimizer is None in a record of another package
    return any(other is optimizer or getattr(other, "param_groups", ()) is groups for other in others)


class _Callback:
    """A forward hook of a protected module. It has weak references only, and a copy of the hook does nothing."""

    def __init__(self, protect: Protect, method: str, root: Module, is_inner: bool) -> None:
        self.protect, self.root = weakref.ref(protect), weakref.ref(root)
        self.method, self.is_inner = method, is_inner

    def __call__(self, module: Module, _: Any) -> None:
        if not (self.is_inner and torch.compiler.is_compiling()):
            self.call(module)

    # A compiled caller breaks its graph here. A traced call would not copy the buffers at each run.
    @not_compiled
    def call(self, module: Module) -> None:
        protect, root = self.protect(), self.root()
        if protect is not None and root is not None:
            getattr(protect, self.method)(root, module)

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """Replace a `_Callback` in a copy of a module."""


class SameOnRanks(Hook):
    """Combines the flags of a step over the ranks of the process groups and of the parameters' device meshes.

    A rank without gradients takes part. All ranks must step their optimizers in the same order.
    """

    _updates = 0
    """The number of updates, which all ranks compare at each step."""
    left_out = False
    """Whether this rank has skipped a step after a clip combined the flags. The next collective compares this value."""

    def __init__(self, process_group: "ProcessGroup | None" = None, norm_group: "ProcessGroup | None" = None) -> None:
        self.process_group, self.norm_group = process_group, norm_group

    def before_step(self, scaler: "GradScaler", step: OptimizerStep) -> None:
        """Replace the flags by their maximum over the ranks. Does not synchronise with the host."""
        # A clip combines the flags of gradients only, so that the vetoes of hooks are still to combine.
        combined = () if scaler._hooks else step.combined_over
        groups = [group for group in self.groups([step.optimizer]) if group not in combined]
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
        """Raise `SyncError` if the host knows that ranks have combined the flags of different steps."""
        self._updates = (self._updates + 1) % 2**22  # float32 is exact for multiples of 0.5 below 2**23
        for step in scaler.optimizer_steps() if not is_capturing() else ():
            marks = [step.flags.get(_MISMATCH), None if step.norm is None else -step.norm]
            if any(mark is not None and mark.is_cpu and mark > 0.0 for mark in marks):
                raise SyncError(
                    "ranks that decide together have called step() or skip() at different updates, or one of them has "
                    "called skip() after a clip, and their parameters may differ; make the same calls on every rank"
                )

    def any_of(self, mine: bool, optimizers: Sequence[Optimizer], device: torch.device) -> bool:
        """Return whether `mine` is true on a rank that decides with this rank.

        Returns False if several ranks exist but do not decide together.
        """
        if groups := self.groups(optimizers):
            return bool(reduce_max(torch.tensor(float(mine)).to(device), groups))
        return mine and not _has_ranks()

    def is_first(self, optimizer: Optimizer) -> bool:
        """Return whether this is the first of the ranks that decide together, or the first of all ranks."""
        if not _has_ranks():
            return True
        groups: list[ProcessGroup | None] = [*self.groups([optimizer])] or [None]
        return all(torch.distributed.get_rank(group) == 0 for group in groups)

    def groups(self, optimizers: "Sequence[Optimizer]", *, of_norm: bool = False) -> "list[ProcessGroup]":
        """Return the groups over which ranks combine the flags, or the norm, of optimizers; each group once.

        These are the groups of the parameters' meshes, `norm_group`, and for flags also `process_group`. Raises
        `SyncError` on a rank that is not in `norm_group` or `process_group`.
        """
        groups = _groups_of_meshes(optimizers)
        for name in ("norm_group",) if of_norm else ("norm_group", "process_group"):
            group = getattr(self, name)
            if group is not None and group not in groups:
                self.require_member(name)
                groups.append(group)
        return groups

    def require_member(self, name: str) -> None:
        """Raise `SyncError` if this process is not in the group of this name; its collective calls would do nothing."""
        group = getattr(self, name)
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise SyncError(
                f"rank {torch.distributed.get_rank()} is not in the {name} of its scaler, so it would decide "
                "alone; make the scaler of each rank with a group that contains the rank, or without a group"
            )

    def require_same(self, mine: dict[str, Any]) -> None:
        """Raise `SyncError` if the state of a rank differs from rank 0's. Every rank must make this call."""
        self.require_member("process_group")
        theirs: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(theirs, mine, group=self.process_group)
        different = [rank for rank, state in enumerate(theirs) if state != theirs[0]]
        if different:
            texts = [format_number(state["loss_scale"]) if state else "disabled" for state in theirs]
            scales = ", ".join(f"rank {rank}: {texts[rank]}" for rank in [0, *different])
            entries = dict.fromkeys(name for state in theirs for name in state)  # ranks may have different entries
            names = [name for name in entries if any(state.get(name) != theirs[0].get(name) for state in theirs)]
            raise SyncError(
                f"the scalers of ranks {different} differ from rank 0's in {', '.join(names)} (loss scales: {scales}); "
                "pass process_group= so that ranks decide together, and load the same checkpoint everywhere"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SameOnRanks":
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        return SameOnRanks, ()


def _groups_of_meshes(optimizers: Iterable[Optimizer]) -> "list[ProcessGroup]":
    """Return the process groups of the device meshes of the optimizers' parameters, also without gradients."""
    if not has_meshes():
        return []
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))
    own = sorted((mesh for mesh in meshes if mesh.get_coordinate() is not None), key=lambda mesh: mesh.size())
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in own for dim in range(mesh.ndim) if mesh.size(dim) > 1))


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def require_hooks(hooks: Sequence[Hook], guard: SpikeGuard | None) -> tuple[list[Hook], Guard | None]:
    """Return the hooks of a scaler without its guard, and the guard.

    Raises `TypeError` for an object that is not a hook, and `PolicyError` for two guards.
    """
    for hook in hooks if isinstance(hooks, Iterable) else [hooks]:
        if not isinstance(hook, Hook) or not isinstance(hooks, Iterable):
            raise TypeError(
                f"hooks= was given {describe(hook)}; it takes objects of lossscale_torch.hooks.Hook; derive a class "
                "from it, and pass [YourHook()]"
            )
    guards = [hook for hook in hooks if isinstance(hook, Guard)] + ([Guard(guard)] if guard is not None else [])
    if len(guards) > 1:
        raise PolicyError(f"a scaler takes one guard, and {len(guards)} were given; pass one of them, as guard=")
    return [hook for hook in hooks if not isinstance(hook, Guard)], guards[0] if guards else None

"""What hangs on a step: objects that can veto it before it is taken, and that see its outcome.

`GradScaler(hooks=[...])` takes hooks of your own; `guard=`, `protect=` and `process_group=` each add one of these.
"""

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lossscale_core import GuardState, SpikeGuard
from lossscale_core.adapters import check_guard, check_spike_streak, guard_state_from_dict, shown, warn_caller
from lossscale_torch._gradients import Gradients, moved
from lossscale_torch._optimizers import Plain, kind_of
from lossscale_torch._ranks import groups_of, reduce_max, require_group, require_member, require_same_on_ranks
from lossscale_torch._snapshots import Buffers
from lossscale_torch._state import (
    SPIKE,
    assign,
    combined,
    is_being_recorded,
    may_have_moved,
    read,
    unrecorded,
)
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled

__all__ = ["Guard", "Hook", "Protect", "SameOnRanks"]

_LARGEST = torch.finfo(torch.float32).max


class Hook:
    """The base of hooks; each method does nothing.

    A record is torch's: `record["found_inf_per_device"]` holds a flag for each device, float32 of shape `()`, that is
    0.0 if the gradients there are finite. A hook vetoes a step by a flag of its own under a text instead of a device:
    1.0 skips the step, and the loss scale stays. It needs no synchronisation if it computes the flag on the device.
    """

    needs_norm = False
    """Whether `record["norm"]` must hold the norm of the unscaled gradients: shape `()`, where the loss scale is.

    It is the 2-norm, or after a clip the norm by which was clipped: of its order, and of all optimizers together.

    A fused optimizer's gradients are then unscaled before its step.
    """

    def before_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """See gradients that are checked, before the optimizer is stepped or skipped."""

    def after_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """See an optimizer that was stepped or skipped."""

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """See the outcome of a whole step, whatever another hook raises."""

    def abandon(self, scaler: Any) -> None:
        """Undo what belongs to a step that ends before its outcome is known, by an error; make no collective call."""

    def state_dict(self) -> dict[str, Any]:
        """Return entries for the scaler's state dict, plain values under names of your own."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a scaler's state dict, which may lack the entries."""


class Guard(Hook):
    """Skips a step with a gradient norm far above the norms before; each optimizer has norms of its own.

    The norm is that of the unscaled gradients before they are clipped. A state stays on the host
    while the norms are known there; the first that is not moves it to the device.
    """

    needs_norm = True

    def __init__(self, rule: SpikeGuard) -> None:
        check_guard(rule)
        self.rule = rule
        self._states: dict[int, Any] = {}  # by the ids of optimizers
        self._owners: dict[int, Any] = {}  # references to them: the id of a dead one may come again
        self._proposed: dict[int, tuple[Any, Any]] = {}
        """The norm of this step, and the state if the norm is to be remembered."""
        self._loaded: list[Any] = []

    def before_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Veto the step if its norm is a spike. Synchronises for an ordinary optimizer."""
        if "norm" not in record:  # there are no gradients
            return
        key, norm, found = id(optimizer), record["norm"], record["found_inf_per_device"]
        self._forget_dead()
        if key not in self._states:
            self._owners[key] = _reference(optimizer)
            self._states[key] = self._loaded.pop(0) if self._loaded else self.rule.init_state()
        state = self._states[key]
        is_on_device = isinstance(state.mean, Tensor)  # where it stays
        if not norm.is_cpu and not is_on_device and kind_of(optimizer) is Plain:
            (value,) = scaler._read([record], norm)  # the one wait of this step
            norm = torch.tensor(value)
        overflows = [flag for name, flag in found.items() if type(name) is not str]
        if is_on_device or not norm.is_cpu or is_being_recorded():
            flag, after = self._check_on_device(key, state, norm, combined(overflows, norm.device))
        else:
            # A norm beyond float32 is a spike, and not an overflow.
            value = norm.item()
            is_known = value < math.inf and not any(read(overflows, norm.device))
            norm = min(value, _LARGEST) if is_known else math.inf
            accepted, after = self.rule.check(state, norm)
            flag = torch.tensor(float(not accepted), dtype=torch.float32)
        self._proposed[key], found[SPIKE] = (norm, after), flag

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """Remember the norms of steps that were applied, or that only this guard refused.

        Raises `OverflowStreakError` if a state on the host has reached the guard's `max_streak`.
        """
        proposed, self._proposed = self._proposed, {}
        on_host = {}
        for key, (norm, after) in proposed.items():
            state, found = self._states[key], scaler._per_optimizer_states[key]["found_inf_per_device"]
            if SPIKE not in found:  # the record was replaced
                continue
            device = found[SPIKE].device
            # After an overflow there is nothing to remember: the norm was not finite.
            others = [flag for name, flag in found.items() if type(name) is str and name != SPIKE]
            if not isinstance(state.mean, Tensor):
                if not any(read(others, device)):
                    self._states[key], on_host[key] = after, norm
                continue
            if others:
                is_vetoed = combined(others, device) != 0.0
                after = [torch.where(is_vetoed, *pair) for pair in zip(state, after, strict=True)]
            torch._foreach_copy_(list(state), list(after))
        for key, norm in on_host.items():
            check_spike_streak(self.rule, self._states[key], norm)

    def abandon(self, scaler: Any) -> None:
        """Remember nothing of a step that was not decided."""
        self._proposed = {}

    def _forget_dead(self) -> None:
        """Drop the states of optimizers that are gone."""
        for key in [key for key, owner in self._owners.items() if owner() is None]:
            del self._owners[key], self._states[key]

    def first(self) -> GuardState | None:
        """Return the state of the first optimizer, where it is. Does not synchronise."""
        self._forget_dead()
        return next(iter([*self._states.values(), *self._loaded]), None)

    def states(self) -> list[Any]:
        """Return the state of each optimizer on the host. Synchronises if on a device."""
        self._forget_dead()
        start = self.rule.init_state()
        return [
            state._make(type(first)(float(value)) for first, value in zip(start, state, strict=True))
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
        loaded: list[Any] = [guard_state_from_dict({"version": version, "guard": each}) for each in entries]
        self._forget_dead()
        for key, state in list(self._states.items()):
            after = loaded.pop(0) if loaded else self.rule.init_state()
            if isinstance(state.mean, Tensor):  # a graph may hold these tensors
                for tensor, value in zip(state, after, strict=True):
                    assign(tensor, value.item())
            else:
                self._states[key] = after
        self._loaded = loaded

    def _check_on_device(self, key: int, state: Any, norm: Tensor, overflow: Tensor) -> tuple[Tensor, Any]:
        """Return the flag and the state after the step; a state that is still on the host is put there."""
        if not isinstance(state.mean, Tensor):
            with unrecorded(norm.device):
                self._states[key] = state = state._make(torch.tensor(value).to(norm.device) for value in state)
        device = state.mean.device
        norm = moved(norm, device)
        is_known = moved(overflow, device) == 0.0
        if norm.dtype is torch.float64:  # one beyond float32 is a spike, and not an overflow
            is_known, norm = is_known & (norm < math.inf), norm.clamp(max=_LARGEST).float()
        accepted, after = self.rule.check(state, torch.where(is_known, norm, math.inf), xp=torch)
        return torch.where(accepted, 0.0, 1.0), after

    def __reduce__(self) -> Any:
        return _guard_with, (self.rule, self.states())


def _guard_with(rule: SpikeGuard, states: list[Any]) -> Guard:
    guard = Guard(rule)
    guard._loaded = states
    return guard


def _reference(optimizer: Any) -> Any:
    """Return a function that returns an optimizer as long as it lives; one without weak references lives on."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class Protect(Hook):
    """Leaves the buffers of modules as they were if a step is skipped, such as BatchNorm's statistics.

    The buffers that exist when the first forward pass in training mode since the last update begins come back, by their
    names, also if the forward pass has put other tensors there. On a device this does not synchronise. The modules get
    forward hooks; those in copies and pickles of a module do nothing.
    """

    def __init__(self, modules: Module | Iterable[Module]) -> None:
        roots = [modules] if isinstance(modules, Module) or not isinstance(modules, Iterable) else list(modules)
        self._saved: dict[Module, Buffers] = {}  # in this step
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False  # the hooks end with the scaler
        for root in roots:
            if not isinstance(root, Module):
                raise TypeError(f"protect= takes modules, and {root!r} is not one; pass protect=[model]")
            for each in root.modules():  # a program may call only the inner ones, as Lightning's training_step does
                if each is root or each._buffers:
                    save, forget = (_Callback(self, method, root, each is not root) for method in ("_save", "_forget"))
                    self._handles.append(each.register_forward_pre_hook(save, prepend=True))
                    self._handles.append(each.register_load_state_dict_post_hook(forget))

    def _save(self, root: Module, module: Module) -> None:
        """Copy the buffers under `root`, in which a module is about to run, unless that was done in this step."""
        if module.training and root not in self._saved:
            self._saved[root] = Buffers(root)

    def _forget(self, root: Module, module: Module) -> None:
        """Drop the copies under `root`, since a state was loaded."""
        self._saved.pop(root, None)

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """Write the copies back if the step was not applied."""
        saved, self._saved = self._saved, {}
        for copies in saved.values() if info.applied is not True else ():
            copies.put_back(info.applied, with_caches=False)

    def abandon(self, scaler: Any) -> None:
        """Write the copies back unless an optimizer may have stepped."""
        saved, self._saved = self._saved, {}
        for copies in () if any(map(may_have_moved, scaler._per_optimizer_states.values())) else saved.values():
            copies.put_back(with_caches=False)

    def __reduce__(self) -> Any:
        if self._handles:
            warn_caller(
                "a copy or a pickle of a scaler protects no modules; make a scaler with protect= and pass it the "
                "state_dict() of this one",
            )
        return Protect, ((),)


class _Callback:
    """A callback of a module within a protected one. It keeps neither alive, and a copy of it does nothing."""

    def __init__(
        self, protect: Protect | None = None, method: str = "", root: Module | None = None, is_inner: bool = True
    ) -> None:
        self.protect = weakref.ref(protect) if protect is not None else _nothing
        self.root = weakref.ref(root) if root is not None else _nothing
        self.method, self.is_inner = method, is_inner

    def __call__(self, module: Module, _: Any) -> None:
        if not (self.is_inner and torch.compiler.is_compiling()):
            _call(self, module)

    def __reduce__(self) -> Any:
        return _Callback, ()


# A compiled function that calls the module breaks its graph at this call; a traced call would not copy at each run.
@not_compiled
def _call(callback: _Callback, module: Module) -> None:
    protect, root = callback.protect(), callback.root()
    if protect is not None and root is not None:
        getattr(protect, callback.method)(root, module)


def _nothing() -> None:
    """Stand in for a reference to an object that is gone."""


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class SameOnRanks(Hook):
    """Combines the flags of a step over the ranks of a group and of the parameters' meshes, also without gradients.

    The ranks must step their optimizers in the same order.
    """

    def __init__(self, process_group: Any = None, norm_group: Any = None) -> None:
        require_group(process_group)
        require_group(norm_group, "norm_group")
        self.process_group, self.norm_group = process_group, norm_group

    def before_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Replace the flags by their maximum over the ranks. Does not synchronise with the host."""
        if groups := self.groups([optimizer]):
            known = () if scaler._can_veto else record.get("known_to", ())
            groups = [group for group in groups if group not in known]
        if not groups:
            return
        found, device = record["found_inf_per_device"], scaler._scale.device
        overflow, veto = (
            (combined([flag for key, flag in found.items() if (type(key) is str) is is_text], device) != 0.0).float()
            for is_text in (False, True)
        )
        norm = moved(record["norm"], device).float() if "norm" in record else torch.zeros_like(overflow)
        row = torch.stack([overflow, veto, torch.where(overflow == 0.0, norm, math.inf)])
        reduce_max(row, groups)
        overflow, veto, norm = row.unbind()
        found.clear()
        found.update({device: overflow, "veto": veto} if scaler._can_veto else {device: overflow})
        if scaler._needs_norm:
            record["norm"] = norm

    def any_of(self, mine: bool, optimizers: list[Any], device: torch.device) -> bool:
        """Return whether something holds on a rank, for ranks that share a decision; else False with several ranks."""
        if groups := self.groups(optimizers):
            flag = torch.tensor(float(mine)).to(device)
            reduce_max(flag, groups)
            return bool(flag)
        return mine and not (torch.distributed.is_available() and torch.distributed.is_initialized())

    def require_same(self, mine: dict[str, Any]) -> None:
        """Raise `SyncError` with the ranks that have another state than rank 0."""
        require_member(self.process_group)
        require_same_on_ranks(mine, self.process_group)

    def groups(self, optimizers: list[Any], *, of_norm: bool = False) -> list[Any]:
        """Return the groups that decide together: of the parameters' meshes, `norm_group`, unless `of_norm` the other.

        Each is entered once. Raises `SyncError` on a rank that is not in a group.
        """
        groups = groups_of(optimizers)
        for name in ("norm_group",) if of_norm else ("norm_group", "process_group"):
            group = getattr(self, name)
            if group is not None and group not in groups:
                require_member(group, name)
                groups.append(group)
        return groups

    def __deepcopy__(self, memo: dict[int, Any]) -> "SameOnRanks":
        return self  # a group is shared, not copied

    def __reduce__(self) -> Any:
        return SameOnRanks, ()


def total_norm(optimizers: list[Any], one: Tensor, groups: list[Any], norm_group: Any) -> Tensor:
    """Return the 2-norm of unscaled gradients on all ranks: shape `()`, where `one` is. Does not synchronise."""
    read = Tensor.item if one.is_cpu and not is_being_recorded() else None
    gradients = Gradients(optimizers)
    norm, _ = gradients.norm(2.0, one, groups, norm_group, read)
    return norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=gradients.norm_dtype(one.device))


def require_hooks(hooks: Any) -> list[Hook]:
    """Return the hooks of a scaler; raise `TypeError` for what is not one."""
    for each in hooks if isinstance(hooks, Iterable) else [hooks]:
        if not isinstance(each, Hook) or not isinstance(hooks, Iterable):
            raise TypeError(
                f"hooks= was given {shown(each)}; it takes objects of lossscale_torch.hooks.Hook; derive a class from "
                "it, and pass [YourHook()]"
            )
    return list(hooks)

"""Buffers that a skipped step leaves unchanged, and averages of weights that follow only applied steps."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from lossscale_torch._gradients import moved, params_of
from lossscale_torch._rescue._buffers import SavedBuffers, unknown_modules
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import not_compiled

_UNPROTECTED = (
    "a copy or a pickle of a scaler protects no modules; make a scaler with protect= and pass it the state_dict() of "
    "this one"
)


class _ProtectedModule:
    """One protected module, and the copy of its buffers from before its first forward in training mode."""

    def __init__(self, module: Module) -> None:
        self.module = weakref.ref(module)
        self.saved: SavedBuffers | None = None
        self.updates = 0
        """The updates since the copy."""
        self._was_own = False  # whether the first of these was of a step of the module's own parameters
        self._known: dict[int, Module] = {}  # by their ids, which are unique while the modules are referenced here

    def before_forward(self, module: Module) -> None:
        """Copy the buffers of a module that is about to run, unless that was done in this step."""
        if self.saved is None or self.updates:
            self.saved, self.updates, self._known = SavedBuffers(), 0, {}
        if id(module) not in self._known:
            self.saved.save(unknown_modules(module, self._known))

    def end_step(self, applied: bool | Tensor, stepped: set[int], is_same_step: bool) -> None:
        """Restore the buffers if the step was not applied.

        A copy serves one more update without a forward in between: that of another optimizer after the same loss, or
        that of the module's own parameters after another's. So one forward of a generator serves both updates.
        """
        if self.saved is None:
            return
        if self.updates == 0 or is_same_step or not self._was_own:
            if isinstance(applied, Tensor):
                self.saved.keep_where(applied)
            elif not applied:
                self.saved.restore()
        if self.updates:
            self.saved = None
        else:
            self.saved.seal()
            self.updates, self._was_own = 1, self._has_any(stepped)

    def _has_any(self, params: set[int]) -> bool:
        """Return whether one of the parameters, by their ids, belongs to the module; True if it has none."""
        own = [id(param) for each in self._known.values() for param in each._parameters.values() if param is not None]
        return not own or not params.isdisjoint(own)


class Protection:
    """The modules of `GradScaler(protect=...)`: hooks that end with this object, and their copies of buffers.

    The hooks reference this object weakly, and it references the modules weakly.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self.is_paused = False
        """Whether `minimize` is running, which restores the buffers itself."""
        self._last_step: StepInfo | None = None
        self._protected = [_ProtectedModule(module) for module in modules]
        handles: list[Any] = []
        weakref.finalize(self, _remove, handles).atexit = False
        for number, protected in enumerate(self._protected):
            handles += self._hooks_on(number, protected.module())

    def modules(self) -> list[Module]:
        """Return the modules that are still alive."""
        return [module for protected in self._protected if (module := protected.module()) is not None]

    def __call__(self, scaler: Any, info: StepInfo) -> None:
        """Restore buffers if the step before an update was not applied. Does not synchronise."""
        self._last_step = info
        optimizers = [scaler._members[key].optimizer() for key in info._flags or () if key in scaler._members]
        stepped = {id(param) for each in optimizers if each is not None for param in params_of(each)}
        for protected in self._protected:
            protected.end_step(info.applied, stepped, scaler._waiting.continued)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_NoHook":
        warnings.warn(_UNPROTECTED, stacklevel=2)
        return _NoHook()

    def before_forward(self, number: int, module: Module) -> None:
        """Copy the buffers of a module in training mode, which its forward may write."""
        if module.training and not self.is_paused:
            self._protected[number].before_forward(module)

    def forget(self, number: int) -> None:
        """Drop the copy of a module, since its state was loaded."""
        self._protected[number].saved = None

    def average(self, averaged: AveragedModel, model: Module) -> None:
        """Update averaged weights if the last step was applied. Does not synchronise."""
        update = type(averaged).update_parameters
        applied = True if self._last_step is None else self._last_step.applied
        if not isinstance(applied, Tensor):
            if applied:
                update(averaged, model)
            return
        values = [each.detach() for each in (*averaged.parameters(), *averaged.buffers())]
        before = [each.clone() for each in values]
        update(averaged, model)
        for now, old in zip(values, before, strict=True):
            now.copy_(torch.where(moved(applied, now.device), now, old))

    def _hooks_on(self, number: int, root: Any) -> list[Any]:
        """Register hooks on a module, and on those within that own buffers; return the handles.

        A program may call only the inner modules and never the whole module, as Lightning's `training_step` does.
        """
        handles: list[Any] = []
        for module in root.modules():
            if module is root or module._buffers:
                before = _BeforeForward(self, number, is_root=module is root)
                handles.append(module.register_forward_pre_hook(before, prepend=True))
                handles.append(module.register_load_state_dict_post_hook(_AfterLoading(self, number)))
        if isinstance(root, AveragedModel):
            handles.append(_AverageIfApplied(root, self))
        return handles


class _Hook:
    """A hook with a weak reference to its `Protection`; in a copy or pickle of the module it does nothing."""

    def __init__(self, protection: Protection, number: int) -> None:
        self.protection, self.number = weakref.ref(protection), number

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _BeforeForward(_Hook):
    def __init__(self, protection: Protection, number: int, is_root: bool) -> None:
        super().__init__(protection, number)
        self._is_root = is_root

    def __call__(self, module: Module, _: Any) -> None:
        if self._is_root or not torch.compiler.is_compiling():
            _copy_before_forward(self, module)


# A compiled function that calls the module breaks its graph at this call; a traced call would not copy at each run.
@not_compiled
def _copy_before_forward(hook: _BeforeForward, module: Module) -> None:
    protection = hook.protection()
    if protection is not None:
        protection.before_forward(hook.number, module)


class _AfterLoading(_Hook):
    def __call__(self, module: Module, _: Any) -> None:
        protection = self.protection()
        if protection is not None:
            protection.forget(self.number)


class _AverageIfApplied:
    """The replacement of `update_parameters` for an average in `protect`; copies and pickles have torch's method."""

    def __init__(self, averaged: AveragedModel, protection: Protection) -> None:
        self._averaged, self._protection = weakref.ref(averaged), weakref.ref(protection)
        averaged.__dict__["update_parameters"] = self

    def __call__(self, model: Module) -> None:
        averaged, protection = self._averaged(), self._protection()
        if averaged is not None and protection is not None:
            protection.average(averaged, model)

    def __reduce__(self) -> Any:
        return getattr, (self._averaged(), "update_parameters")

    def remove(self) -> None:
        """Restore the average's own method."""
        averaged = self._averaged()
        if averaged is not None and averaged.__dict__.get("update_parameters") is self:
            del averaged.__dict__["update_parameters"]


def protect_modules(scaler: Any, protect: Any) -> None:
    """Let a scaler protect modules from its next update on; raise `TypeError` for other objects."""
    is_single = isinstance(protect, Module) or not isinstance(protect, Iterable)
    modules = [protect] if is_single else list(protect)
    for each in modules:
        if not isinstance(each, Module):
            raise TypeError(f"protect= takes modules, and {each!r} is not one; pass protect=[model]")
    if modules:
        scaler._observers.append(Protection(modules))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()

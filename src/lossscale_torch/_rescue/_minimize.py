"""The loop of `GradScaler.minimize`: run the loss, step, and repeat at a lower scale after an overflow."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lossscale_core import BaseScaling
from lossscale_core.adapters import check_setting
from lossscale_core.errors import CallOrderError, OverflowStreakError, SpikeStreakError, SyncError
from lossscale_torch._checkpoint import warn_if_resumed
from lossscale_torch._gradients import Gradients, grads_of, params_of
from lossscale_torch._members import READY, STEPPED
from lossscale_torch._random import RandomState
from lossscale_torch._rescue._buffers import SavedBuffers, unknown_modules
from lossscale_torch._rescue._protect import Protection
from lossscale_torch._step_info import StepInfo
from lossscale_torch._versions import fsdp2_explained
from lossscale_torch._weights import WeightsAndState

# torch warns at each call of a compiled module that a hook like ours fires twice for it; the second time does nothing:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
_FIRES_TWICE = "Using `torch.compile\\(module\\)` when there are global hooks on modules"


def minimize(scaler: Any, optimizer: Any, loss_fn: Any, retries: int, max_norm: float | None) -> StepInfo:
    """Take a whole step; see `GradScaler.minimize`."""
    with fsdp2_explained():
        return _Minimization(scaler, optimizer, loss_fn, retries, max_norm).run()


class _Minimization:
    """One call of `GradScaler.minimize`: the losses of a step, and the snapshots to restore if they overflow."""

    def __init__(self, scaler: Any, optimizer: Any, loss_fn: Any, retries: int, max_norm: float | None) -> None:
        self._scaler, self._optimizer, self._max_norm = scaler, optimizer, max_norm
        self._loss_fns = _as_list(loss_fn)
        self._retries = check_setting("retries", retries)
        if not (scaler.is_enabled() and BaseScaling.of(scaler.policy).adapts):
            self._retries = 0
        self._protections = [each for each in scaler._observers if isinstance(each, Protection)]
        self._protected = [module for each in self._protections for module in each.modules()]
        self._start = _Snapshot(optimizer, may_restore=self._retries > 0)
        self._error: Exception | None = None

    def run(self) -> StepInfo:
        """Step; run the losses again while they overflow and retries are left; return the outcome of the last try."""
        self._require_untouched()
        for each in self._protections:
            each.is_paused = True  # they would copy what is copied here
        try:
            info = self._run_any()
        except BaseException:
            self._scaler._records.pop(id(self._optimizer), None)  # so that the next call begins with nothing known
            raise
        finally:
            for each in self._protections:
                each.is_paused = False
        if self._error is not None:
            raise self._error
        return info

    def _update(self) -> StepInfo:
        """Update the scaler; an error about steps that were skipped in a row waits until no retry is left."""
        try:
            self._scaler.update()
            self._error = None
        except (OverflowStreakError, SpikeStreakError) as error:
            self._error = error  # the update itself is complete
        info: StepInfo = self._scaler.last_step
        return info

    def _run_any(self) -> StepInfo:
        if not needs_closure(self._optimizer):
            return self._run(self._try_step)
        weights = WeightsAndState(self._optimizer)
        try:
            info = self._run(functools.partial(self._try_closure, weights))
        except BaseException:  # the optimizer may have been on its way between two evaluations
            weights.restore()
            raise
        return info

    def _run(self, attempt: Callable[[], StepInfo]) -> StepInfo:
        """Try until the optimizer's step is applied or no retry is left; a step is skipped for an overflow alone."""
        while True:
            info = attempt()
            applied = info.applied_of(self._optimizer)
            if self._retries == 0 and isinstance(applied, Tensor):
                self._start.buffers.keep_where(applied)
                return info
            if applied:
                return info
            if self._retries == 0 or info.spiked:  # no scale helps against a spike
                self._start.buffers.restore()
                return info
            self._retries -= 1
            self._start.restore()

    def _try_step(self) -> StepInfo:
        _forget_gradients(self._optimizer)
        if self._retries and len(self._loss_fns) > 1:
            given_up = self._accumulate()
            if given_up is not None:
                return given_up
        else:
            for loss_fn in self._loss_fns:
                self._backward(loss_fn, [self._start])
        if self._max_norm is None:
            self._scaler.step(self._optimizer)
        else:
            self._scaler.unscale_and_clip_(self._optimizer, self._max_norm)
            self._scaler.step(self._optimizer)
        return self._update()

    def _accumulate(self) -> StepInfo | None:
        """Add up the gradients of micro-batches, each at a scale at which their sum is finite.

        Return None, or the outcome of the try that has used up the retries.
        """
        for number, loss_fn in enumerate(self._loss_fns):
            point = _Snapshot(self._optimizer, may_restore=True) if number else self._start
            sums = _GradientSums(self._optimizer, self._scaler.get_scale())
            while not self._is_finite_after(loss_fn, [self._start, point] if number else [point]):
                self._scaler.skip(self._optimizer)
                info = self._update()
                if self._retries == 0:
                    return info
                self._retries -= 1
                point.restore()
                sums.restore(self._scaler.get_scale())
            if number + 1 < len(self._loss_fns) and not grads_of(self._optimizer):
                raise CallOrderError(
                    f"loss_fn[{number}] left no gradients, so that it cannot be retried alone; if it runs under "
                    "set_requires_gradient_sync(False), let every micro-batch synchronise, or pass retries=0"
                )
        return None

    def _is_finite_after(self, loss_fn: Callable[[], Tensor], points: list["_Snapshot"]) -> bool:
        """Run a loss and its backward; return whether the gradients added up so far are finite on every rank."""
        self._backward(loss_fn, points)
        return all(flag.item() == 0.0 for flag in self._scaler._check_inf_per_device(self._optimizer).values())

    def _try_closure(self, weights: WeightsAndState) -> StepInfo:
        if not self._scaler._has_begun:
            warn_if_resumed(self._optimizer, self._scaler._state, stacklevel=8)
        try:
            self._optimizer.step(self._closure)
        except _OverflowInClosure:
            weights.restore()
        if self._scaler.is_enabled():
            self._scaler._records[id(self._optimizer)]["stage"] = STEPPED
        return self._update()

    def _closure(self) -> Tensor:
        """Compute the unscaled gradients again, and return the unscaled loss: shape `()`."""
        self._scaler._records.pop(id(self._optimizer), None)
        _forget_gradients(self._optimizer)
        losses = [self._backward(loss_fn, [self._start]) for loss_fn in self._loss_fns]
        if self._max_norm is None:
            self._scaler.unscale_(self._optimizer)
        else:
            self._scaler.unscale_and_clip_(self._optimizer, self._max_norm)
        if self._scaler.is_enabled() and not self._scaler._records[id(self._optimizer)].may_step():
            raise _OverflowInClosure
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, loss_fn: Callable[[], Tensor], points: list["_Snapshot"]) -> Tensor:
        """Run a loss, and the backward of the scaled one; return the loss without its graph."""
        # Autocast keeps float16 weights until its context ends; around several steps they would be those of the first.
        torch.clear_autocast_cache()
        loss = self._watched(loss_fn, points) if self._scaler.is_enabled() else loss_fn()
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn returned {loss!r}; return the loss, a tensor, without scaling it")
        self._scaler.scale(loss).backward()
        return loss.detach()

    def _watched(self, loss_fn: Callable[[], Tensor], points: list["_Snapshot"]) -> Tensor:
        """Run a loss, and copy the buffers of each module before it runs."""
        group = self._scaler._ranks.process_group
        with _Watch(points, are_ranks_free=self._retries > 0 and group is None) as watch:
            for module in self._protected:
                watch.see(module)
            return loss_fn()

    def _require_untouched(self) -> None:
        record = self._scaler._records.get(id(self._optimizer))
        if record is not None and record["stage"] is not READY:
            raise CallOrderError(
                "minimize() makes gradients of its own, but unscale_(), step() or skip() was called on this optimizer "
                "since the last update(); call update() first"
            )


class _OverflowInClosure(Exception):  # noqa: N818  # not an error: it ends an optimizer's step from within
    """The gradients from a closure are not finite."""


class _Snapshot:
    """Snapshot of buffers, other gradients and random state, restored before a retry."""

    def __init__(self, optimizer: Any, may_restore: bool) -> None:
        self.buffers = SavedBuffers()
        self._may_restore = may_restore
        self.modules: dict[int, Module] = {}
        """The copied modules by their ids, which are unique while the modules are referenced here."""
        self._other_gradients: list[tuple[Tensor, Tensor | None]] = []
        if may_restore:
            self._random = RandomState()
            self._own = {id(param) for param in params_of(optimizer)}

    def see(self, module: Module) -> None:
        """Copy the buffers of a module and its submodules, before the first of them runs."""
        new = unknown_modules(module, self.modules)
        self.buffers.save(new)
        if self._may_restore:
            others = (param for each in new for param in each._parameters.values() if id(param) not in self._own)
            self._other_gradients += [
                (param, None if param.grad is None else param.grad.clone())
                for param in others
                if param is not None and param.requires_grad
            ]

    def restore(self) -> None:
        """Restore the buffers, the random state, and the gradients of other optimizers' parameters."""
        self.buffers.restore()
        self._random.restore()
        for param, grad in self._other_gradients:
            param.grad = None if grad is None else grad.clone()


class _GradientSums:
    """The sum of the gradients of earlier micro-batches, and its loss scale."""

    def __init__(self, optimizer: Any, loss_scale: float) -> None:
        self._optimizer, self._loss_scale = optimizer, loss_scale
        self._grads = [(p, None if p.grad is None else p.grad.clone()) for p in params_of(optimizer)]

    @torch.no_grad()
    def restore(self, loss_scale: float) -> None:
        """Restore the gradients at another loss scale; exact if both scales are powers of two."""
        for param, grad in self._grads:
            if grad is None or param.grad is None or grad.layout is not torch.strided:
                param.grad = None if grad is None else grad.clone()
            else:
                param.grad.copy_(grad)  # in place, since the memory may be a bucket of DistributedDataParallel's
        Gradients([self._optimizer]).multiply_(loss_scale / self._loss_scale)


class _Watch:
    """The watch over modules: before the forward of each one in this thread, the snapshots copy it."""

    def __init__(self, points: list[_Snapshot], are_ranks_free: bool) -> None:
        self._points = points
        self._are_ranks_free = are_ranks_free  # whether the ranks decide without communication
        self.seen = points[-1].modules
        """The modules that every snapshot has copied, by their ids; the last snapshot is the newest."""

    def __enter__(self) -> "_Watch":
        if ("ignore", re.compile(_FIRES_TWICE, re.IGNORECASE), UserWarning, None, 0) not in warnings.filters:
            warnings.filterwarnings("ignore", _FIRES_TWICE, UserWarning)
        self._outer = _watches.get(get_ident())
        _watches[get_ident()] = self
        _add_hook()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._outer is None:
            del _watches[get_ident()]
        else:
            _watches[get_ident()] = self._outer
        if not _watches:
            _add_hook().remove()

    def see(self, module: Module) -> None:
        """Let the snapshots copy a module, unless they have done so."""
        if id(module) in self.seen:
            return
        if self._are_ranks_free and any(_is_unsynchronised(each) for each in module.modules()):
            raise SyncError(
                "under no_sync() each rank makes gradients of its own, and would retry alone; make the scaler with "
                "process_group=, or pass retries=0"
            )
        for point in self._points:
            point.see(module)


_watches: dict[int, _Watch] = {}  # by the thread in which a loss runs


def _is_unsynchronised(module: Module) -> bool:
    return vars(module).get("require_backward_grad_sync") is False


@functools.cache
def _registered() -> RemovableHandle:
    return register_module_forward_pre_hook(_before_forward)


def _add_hook() -> RemovableHandle:
    """Have torch call `_before_forward` for each module; return the handle, which is the same at each call.

    Dynamo recompiles if the hook or its key changes.
    """
    handle = _registered()
    hooks: Any = handle.hooks_dict_ref()
    hooks[handle.id] = _before_forward
    return handle


def _before_forward(module: Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watch = _watches.get(get_ident())
    if watch is not None and id(module) not in watch.seen:
        watch.see(module)


@functools.cache
def _step_needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer's `step` cannot be called without a closure, as LBFGS's."""
    return _step_needs_closure(type(optimizer).step)


def _forget_gradients(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.grad = None


def _as_list(loss_fn: Any) -> list[Callable[[], Tensor]]:
    loss_fns = list(loss_fn) if isinstance(loss_fn, list | tuple) else [loss_fn]
    if not loss_fns or not all(map(callable, loss_fns)):
        raise TypeError(
            f"loss_fn={loss_fn!r} must be a function without arguments that returns the loss, or a list of such "
            "functions, one for each micro-batch"
        )
    return loss_fns

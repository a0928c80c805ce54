"""The scalers that `lossscale run` puts in the place of torch's; they write a row for each update."""

import atexit
import contextlib
import functools
import inspect
import multiprocessing.util
import operator
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import sharded_grad_scaler

import lossscale_torch
from lossscale_core import ScalingPolicy
from lossscale_core.errors import LossScaleError
from lossscale_core.files import csv_lines
from lossscale_core.testing import TITLES

_MOST_WAITING, _MOST_LINES = 100, 10
_PARTS = ("_enabled", "_policy", "_state", "_watch", "_guard")
"""What a scaler's `diagnose` reads. A scaler itself may keep a model alive."""
_LAUNCH = "start each process by torchrun ... -m lossscale run, or accelerate launch -m lossscale run"
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
# Before `start`, which gives these names to other classes.
_GradScaler = lossscale_torch.GradScaler
_OfTorch = torch.amp.GradScaler
_ShardedGradScaler = sharded_grad_scaler.ShardedGradScaler


class Recording:
    """The policy and the trace of this run, and what is known of the scalers that this process updated.

    The first process of the run that updates a scaler writes the trace. A rank of `torch.distributed` has a trace of
    its own. Other processes, such as those that a script forks, record nothing.
    """

    ended_by_usage_error = False

    def __init__(self, policy: ScalingPolicy | None, trace: Path | None) -> None:
        self.policy, self.trace, self._command = policy, trace, os.getpid()
        # Ranks of a launcher other than torchrun have the same command line, and no process group yet.
        is_rank = "TORCHELASTIC_RUN_ID" not in os.environ and any(name in os.environ for name in _RANKS)
        self._locked = None if is_rank else self._own_file()
        if self._locked is not None and not _lock(self._locked):
            raise LossScaleError(f"another run writes {self._locked}; wait until it ends, or pass another file")
        # Forked processes share this lock, which the process that writes the trace never releases.
        self._claim = (multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing).Lock()
        self._start_process()
        if hasattr(os, "fork"):
            os.register_at_fork(after_in_child=self._start_process)
        atexit.register(self._finish)  # before the script registers anything, so that it comes last

    def _start_process(self) -> None:
        self._file: Path | None = None
        self._rows: list[tuple[Any, ...]] = []  # rows with numbers on a device
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._views: list[_GradScaler] = []

    def _own_file(self) -> Path | None:
        rank, ranks = _rank()
        if self.trace is None or ranks == 1:
            return self.trace
        return self.trace.with_suffix(f".rank{rank}{self.trace.suffix}")

    def add(self, scaler: Any, *row: Any) -> None:
        """Add a row. Synchronises with a device every hundred rows at most."""
        if not self._views and (file := self._own_file()) is not None:
            is_free = file not in (self.trace, self._locked) or self._claim.acquire(block=False)
            if is_free and (file == self._locked or _lock(file)):
                self._file = file
                if os.getpid() != self._command:  # whose end atexit sees only if os.fork made it
                    multiprocessing.util.Finalize(None, self._finish, exitpriority=0)
            else:
                self.say(f"process {os.getpid()} records nothing, since another process writes {file}; {_LAUNCH}")
        number = self._numbers.setdefault(scaler, len(self._views))
        if number == len(self._views):
            self._views.append(_GradScaler.__new__(_GradScaler))
        vars(self._views[number]).update({name: vars(scaler)[name] for name in _PARTS})
        self._rows.append((*row, number))
        is_waiting = any(isinstance(cell, torch.Tensor) and not cell.is_cpu for cell in row)
        if not is_waiting or len(self._rows) >= _MOST_WAITING:
            self._write()

    def say(self, line: str) -> None:
        """Print a line to stderr, which the script may have closed."""
        rank, ranks = _rank()
        with contextlib.suppress(OSError, ValueError):
            print(f"lossscale: {f'rank {rank}: ' if ranks > 1 else ''}{line}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        if self._file is None or not rows:
            return
        try:
            with open(self._file, "a+b") as file:  # opened each time: scripts fork and close files
                text = "".join(csv_lines(rows, () if file.tell() else TITLES))
                if file.tell():  # a process that was killed, or a full disk, may have cut the last row
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read() == b"\n" else f"\n{text}"
                file.write(text.encode())
        except OSError as error:  # a full disk must not end the training
            name, self._file = self._file, None
            self.say(f"the trace {name} ends at step {int(rows[0][0])}: {error.strerror}; pass another file")

    def _finish(self) -> None:
        self._write()
        views, self._views = self._views, []
        lines = [f"{f'scaler {n}: ' if len(views) > 1 else ''}{view.diagnose()}" for n, view in enumerate(views)]
        lines.sort(key=lambda line: "healthy: " in line)
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more scalers"]
        if not lines and os.getpid() == self._command and not self.ended_by_usage_error:
            lines = [f"no scaler was updated in this process; to record others, {_LAUNCH}"]
        for line in lines:
            self.say(line)
        with contextlib.suppress(OSError):
            if self._locked is not None and os.getpid() == self._command and not self._locked.stat().st_size:
                self._locked.unlink()  # it was made for the lock


def _lock(path: Path) -> bool:
    """Return whether no other run has a file; then it belongs to this process and those that it forks, to their end."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            path.with_suffix(".pid").unlink(missing_ok=True)  # fails while the process that opened it runs
            os.write(os.open(path.with_suffix(".pid"), os.O_WRONLY | os.O_CREAT | os.O_EXCL), str(os.getpid()).encode())
            return True
        return False
    import fcntl

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)  # never closed: this would release the file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # other errors are those of a file system without locks
    return True


RECORDING: Recording


def start(policy: ScalingPolicy | None, trace: Path | None) -> None:
    """Replace the scalers of torch and of this library, under every name that scripts import."""
    global RECORDING
    RECORDING = Recording(policy, trace)
    if policy is not None:
        RECORDING.say(f"--policy replaces the settings that the script gives its scaler: {policy!r}")
    for scaler, replaced, *modules in (
        (Recorded, _OfTorch, torch.amp.grad_scaler, torch.amp, torch),
        (_Own, _GradScaler, lossscale_torch),
        (_Sharded, _ShardedGradScaler, sharded_grad_scaler),
    ):
        name, home = replaced.__name__, replaced.__module__
        scaler.__name__, scaler.__qualname__, scaler.__module__ = name, name, home  # so that pickles find them
        for module in modules:
            setattr(module, name, scaler)
    amp: Any
    for device, amp in (("cuda", torch.cuda.amp), ("cpu", torch.cpu.amp)):
        init: Any = functools.partialmethod(Recorded.__init__, device)
        members = {"__init__": init, "__module__": amp.GradScaler.__module__}
        amp.GradScaler = amp.grad_scaler.GradScaler = type("GradScaler", (Recorded,), members)


def _rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # otherwise scripts use these variables for what they like
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


@torch.no_grad()
def _sizes(optimizer: Any, scale: Any) -> tuple[Any, Any] | None:
    """Return the norm and the largest magnitude of gradients that are still scaled. Does not synchronise."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in local]
    if RECORDING.trace is None or not dense:
        return None
    dense = [grad.float() if grad.dtype is torch.float16 else grad for grad in dense]  # squares of float16 overflow
    norm, largest = (torch.nn.utils.get_total_norm(dense, order) / scale for order in (2.0, float("inf")))
    is_whole = all(map(operator.is_, grads, local))
    return norm if is_whole else torch.full_like(norm, torch.nan), largest  # a rank with shards has a part of the norm


def _combined(sizes: list[tuple[Any, Any]]) -> Iterator[Any]:
    """Yield the norm and the largest magnitude of the gradients of several optimizers, which may be on two devices."""
    for function, each in zip((torch.hypot, torch.maximum), zip(*sizes, strict=True), strict=True):
        yield functools.reduce(function, [size.to(each[0]) for size in each])


class Recorded(_GradScaler):
    """The scaler in the place of each: this library's, under the policy of the run if there is one."""

    @functools.wraps(_GradScaler.__init__)  # type: ignore[misc]  # for programs that read the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if RECORDING.policy is not None:
            given = inspect.signature(_GradScaler).bind(*args, **kwargs).arguments
            args, kwargs = (), {name: given[name] for name in given if name not in _SETTINGS}
            kwargs["policy"] = RECORDING.policy
        super().__init__(*args, **kwargs)

    def _open(self, optimizer: Any, caller: str) -> lossscale_torch.hooks.OptimizerStep:
        """Measure the gradients when the script touches them first in a step: before they are unscaled or clipped."""
        record = super()._open(optimizer, caller)
        if "step" not in record:
            record["step"] = self.metrics()["steps"]
        if caller != "skip" and record["stage"] is OptState.READY and "sizes" not in record:
            record["sizes"] = _sizes(optimizer, self._scale)
        return record

    def _end_step(self, info: Any) -> None:
        """Write the row of a step before the hooks see its outcome, since one of them may end the run."""
        try:
            if info is not None:
                records = [record for record in self._per_optimizer_states.values() if "step" in record]
                step = records[0]["step"] if records else self.metrics()["steps"]
                sizes = [record["sizes"] for record in records if record.get("sizes")]
                outcome = (info.loss_scale_used, info.applied, info.overflowed, info.spiked)
                RECORDING.add(self, step, *outcome, *(_combined(sizes) if sizes else (None, None)))
        finally:
            super()._end_step(info)


class _Own(Recorded):
    """`lossscale_torch.GradScaler`."""


class _Sharded(Recorded, _ShardedGradScaler):  # type: ignore[misc]  # its update returns None
    """`ShardedGradScaler`, which takes the backoff factor before the growth factor, and float16 gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(_ShardedGradScaler).bind(*args, **kwargs).arguments
        if dist.is_initialized():  # the default there, which is looked up when the module is imported
            given.setdefault("process_group", dist.group.WORLD)
        Recorded.__init__(self, **given, half_gradients=True)

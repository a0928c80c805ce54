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

_MAX_WAITING_ROWS, _MAX_LINES = 100, 10
_PARTS = ("_enabled", "_policy", "_state", "_watch", "_guard")
"""The attributes that `diagnose` reads. A recording holds these, because a scaler may refer to a model."""
_LAUNCH = "start each process by torchrun ... -m lossscale run, or accelerate launch -m lossscale run"
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
# The original classes: `start` binds these names to other classes.
_GradScaler = lossscale_torch.GradScaler
_TorchGradScaler = torch.amp.GradScaler
_ShardedGradScaler = sharded_grad_scaler.ShardedGradScaler


class Recording:
    """The policy and the trace of this run, and views of the scalers that this process updated.

    The first process that updates a scaler writes the trace. Each rank of `torch.distributed` writes a separate trace.
    Other processes, for example processes that the script forks, do not record.
    """

    ended_by_usage_error = False

    def __init__(self, policy: ScalingPolicy | None, trace: Path | None) -> None:
        self.policy, self.trace, self._command_pid = policy, trace, os.getpid()
        # With launchers other than torchrun, the ranks have the same command line and no process group yet.
        is_rank = "TORCHELASTIC_RUN_ID" not in os.environ and any(name in os.environ for name in _RANKS)
        self._locked = None if is_rank else self._trace_of_rank()
        if self._locked is not None and not _lock(self._locked):
            raise LossScaleError(f"another run writes {self._locked}; wait until it ends, or pass another file")
        # Forked processes share this lock. The process that writes the trace holds it until its end.
        self._claim = (multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing).Lock()
        self._start_process()
        if hasattr(os, "fork"):
            os.register_at_fork(after_in_child=self._start_process)
        atexit.register(self._finish)  # registered before the script's functions, so that it runs last

    def _start_process(self) -> None:
        self._file: Path | None = None
        self._rows: list[tuple[Any, ...]] = []  # waiting rows, with numbers on a device
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._views: list[_GradScaler] = []

    def _trace_of_rank(self) -> Path | None:
        rank, ranks = _rank()
        if self.trace is None or ranks == 1:
            return self.trace
        return self.trace.with_suffix(f".rank{rank}{self.trace.suffix}")

    def add(self, scaler: Any, *row: Any) -> None:
        """Add a row. Synchronises with the host once per hundred rows if numbers are on a device."""
        if not self._views and (file := self._trace_of_rank()) is not None:
            is_free = file not in (self.trace, self._locked) or self._claim.acquire(block=False)
            if is_free and (file == self._locked or _lock(file)):
                self._file = file
                if os.getpid() != self._command_pid:  # `multiprocessing` ends a child process without atexit
                    multiprocessing.util.Finalize(None, self._finish, exitpriority=0)
            else:
                self.say(f"process {os.getpid()} records nothing, since another process writes {file}; {_LAUNCH}")
        number = self._numbers.setdefault(scaler, len(self._views))
        if number == len(self._views):
            self._views.append(_GradScaler.__new__(_GradScaler))
        vars(self._views[number]).update({name: vars(scaler)[name] for name in _PARTS})
        self._rows.append((*row, number))
        is_waiting = any(isinstance(cell, torch.Tensor) and not cell.is_cpu for cell in row)
        if not is_waiting or len(self._rows) >= _MAX_WAITING_ROWS:
            self._write()

    def say(self, line: str) -> None:
        """Print a line to stderr."""
        rank, ranks = _rank()
        with contextlib.suppress(OSError, ValueError):  # the script may have closed stderr
            print(f"lossscale: {f'rank {rank}: ' if ranks > 1 else ''}{line}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        if self._file is None or not rows:
            return
        try:
            with open(self._file, "a+b") as file:  # opened for each write, because scripts fork and close files
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
        if len(lines) > _MAX_LINES:
            lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more scalers"]
        if not lines and os.getpid() == self._command_pid and not self.ended_by_usage_error:
            lines = [f"no scaler was updated in this process; to record others, {_LAUNCH}"]
        for line in lines:
            self.say(line)
        with contextlib.suppress(OSError):
            if self._locked is not None and os.getpid() == self._command_pid and not self._locked.stat().st_size:
                self._locked.unlink()  # `_lock` created the file, and it is still empty


def _lock(path: Path) -> bool:
    """Lock a file for this process and its forks until they end. Return False if another run has locked it."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            path.with_suffix(".pid").unlink(missing_ok=True)  # fails while the process that opened it is running
            os.write(os.open(path.with_suffix(".pid"), os.O_WRONLY | os.O_CREAT | os.O_EXCL), str(os.getpid()).encode())
            return True
        return False
    import fcntl

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)  # not closed, because closing releases the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # a file system without locks raises other errors
    return True


RECORDING: Recording


def start(policy: ScalingPolicy | None, trace: Path | None) -> None:
    """Replace the scalers of torch and of this library, under every name that scripts import."""
    global RECORDING
    RECORDING = Recording(policy, trace)
    if policy is not None:
        RECORDING.say(f"--policy replaces the settings that the script gives its scaler: {policy!r}")
    for scaler, replaced, *modules in (
        (RecordingScaler, _TorchGradScaler, torch.amp.grad_scaler, torch.amp, torch),
        (_Own, _GradScaler, lossscale_torch),
        (_Sharded, _ShardedGradScaler, sharded_grad_scaler),
    ):
        name, home = replaced.__name__, replaced.__module__
        scaler.__name__, scaler.__qualname__, scaler.__module__ = name, name, home  # so that pickles find them
        for module in modules:
            setattr(module, name, scaler)
    amp: Any
    for device, amp in (("cuda", torch.cuda.amp), ("cpu", torch.cpu.amp)):
        init: Any = functools.partialmethod(RecordingScaler.__init__, device)
        members = {"__init__": init, "__module__": amp.GradScaler.__module__}
        amp.GradScaler = amp.grad_scaler.GradScaler = type("GradScaler", (RecordingScaler,), members)


def _rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # without torchrun, scripts use these variables for other purposes
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
    return norm if is_whole else torch.full_like(norm, torch.nan), largest  # shards give a part of the norm


def _combine(sizes: list[tuple[Any, Any]]) -> Iterator[Any]:
    """Yield the norm and the largest magnitude of the gradients of several optimizers, also on several devices."""
    for function, parts in zip((torch.hypot, torch.maximum), zip(*sizes, strict=True), strict=True):
        yield functools.reduce(function, [part.to(parts[0]) for part in parts])


class RecordingScaler(_GradScaler):
    """Scaler of this library in the place of torch's scaler, with the policy of `--policy` if it is set."""

    @functools.wraps(_GradScaler.__init__)  # type: ignore[misc]  # for programs that read the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if RECORDING.policy is not None:
            arguments = inspect.signature(_GradScaler).bind(*args, **kwargs).arguments
            args, kwargs = (), {name: value for name, value in arguments.items() if name not in _SETTINGS}
            kwargs["policy"] = RECORDING.policy
        super().__init__(*args, **kwargs)

    def _open(self, optimizer: Any, caller: str) -> lossscale_torch.hooks.OptimizerStep:
        """Measure the gradients at the script's first call in a step, before they are unscaled or clipped."""
        record = super()._open(optimizer, caller)
        if "step" not in record:
            record["step"] = self.metrics()["steps"]
        if caller != "skip" and record["stage"] is OptState.READY and "sizes" not in record:
            record["sizes"] = _sizes(optimizer, self._scale)
        return record

    def _end_step(self, info: Any) -> None:
        """Write the row of a step before the hooks get its outcome, because a hook may end the run."""
        try:
            if info is not None:
                records = [record for record in self._per_optimizer_states.values() if "step" in record]
                step = records[0]["step"] if records else self.metrics()["steps"]
                sizes = [record["sizes"] for record in records if record.get("sizes")]
                outcome = (info.loss_scale_used, info.applied, info.overflowed, info.spiked)
                RECORDING.add(self, step, *outcome, *(_combine(sizes) if sizes else (None, None)))
        finally:
            super()._end_step(info)


class _Own(RecordingScaler):
    """`lossscale_torch.GradScaler`."""


class _Sharded(RecordingScaler, _ShardedGradScaler):  # type: ignore[misc]  # its update returns None
    """`ShardedGradScaler`: the backoff factor precedes the growth factor, and it accepts float16 gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(_ShardedGradScaler).bind(*args, **kwargs).arguments
        if dist.is_initialized():  # torch's default is read when its module is imported, which may be too early
            arguments.setdefault("process_group", dist.group.WORLD)
        RecordingScaler.__init__(self, **arguments, half_gradients=True)

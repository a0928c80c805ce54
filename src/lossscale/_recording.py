"""The scalers that `lossscale run` puts in the place of torch's; they write a row for each update."""

import atexit
import contextlib
import functools
import inspect
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import sharded_grad_scaler

import lossscale_torch
from lossscale_core import ScalingPolicy
from lossscale_core.files import csv_lines
from lossscale_core.testing import CSV_COLUMNS

_MOST_WAITING = 100
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
# Before `start`, which gives these names to other classes.
_GradScaler = lossscale_torch.GradScaler
_OfTorch = torch.amp.GradScaler
_ShardedGradScaler = sharded_grad_scaler.ShardedGradScaler


class Recording:
    """The policy and the trace of this run, and the scalers that were updated."""

    def __init__(self, policy: ScalingPolicy | None, trace: Path | None) -> None:
        self.policy, self.trace, self._file = policy, trace, trace
        self._scalers: dict[int, Any] = {}  # by their ids, in the order of their first updates
        self._rows: list[tuple[Any, ...]] = []  # rows with numbers on a device
        atexit.register(self._finish)  # before the script registers anything, so that it comes last

    def add(self, scaler: Any, *row: Any) -> None:
        """Add a row. Synchronises with a device every hundred rows at most."""
        if not self._scalers and self.trace is not None and _rank()[1] > 1:
            self._file = self.trace.with_suffix(f".rank{_rank()[0]}{self.trace.suffix}")
        self._scalers.setdefault(id(scaler), scaler)
        self._rows.append((*row, [*self._scalers].index(id(scaler))))
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
            with open(self._file, "a", encoding="utf-8") as file:  # opened each time: scripts fork and close files
                file.writelines(csv_lines(rows, () if file.tell() else CSV_COLUMNS))
        except OSError as error:  # a full disk must not end the training
            self._file = None
            self.say(f"the trace ends at step {int(rows[0][0])}: {error}; make room, or pass another file")

    def _finish(self) -> None:
        self._write()
        for number, scaler in enumerate(self._scalers.values()):
            self.say(f"{f'scaler {number}: ' if len(self._scalers) > 1 else ''}{scaler.diagnose()}")
        if not self._scalers:
            self.say(
                "no scaler was updated in this process, so that nothing was recorded; if the script starts other "
                "processes, use torchrun ... -m lossscale run, or accelerate launch -m lossscale run"
            )


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
    for deprecated in (torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler):
        deprecated.__bases__ = (Recorded,)  # their constructors call the next one with the device


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

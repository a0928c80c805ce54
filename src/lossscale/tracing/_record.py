"""The record of one scaler's steps: a row per update in the trace, and a summary when the process ends."""

import atexit
import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

COLUMNS = ("step", "scale", "applied", "overflowed", "spiked", "norm")
_MOST_WAITING = 100


class Record:
    """A scaler's steps so far; the rows of the last ones wait while a device holds their values."""

    def __init__(self, scaler: Any, trace: Path | None) -> None:
        self.norm: Any = None
        """The norm of the unscaled gradients since the last update, if it is known."""
        self._scaler, self._trace = scaler, trace
        self._file: TextIO | None = None
        self._process = os.getpid()
        self._rows: list[tuple[Any, ...]] = []
        self._steps = 0
        # Scripts do not say when they are done; the rows that wait and the summary come when the process ends.
        atexit.register(self.finish)

    def end_step(self, info: Any) -> None:
        """Record an update. Synchronises with a device every hundred steps at most."""
        self._leave_parents_rows()
        overflowed = info.overflowed
        self._rows.append((self._steps, info.loss_scale_used, info.applied, overflowed, info.spiked, self.norm))
        self._steps, self.norm = self._steps + 1, None
        is_on_host = not isinstance(overflowed, torch.Tensor) or overflowed.is_cpu
        if is_on_host or len(self._rows) >= _MOST_WAITING:
            self._write_rows()

    def finish(self) -> None:
        """Write the rows that wait, and print the diagnosis to stderr."""
        if self._process != os.getpid():
            return  # a process that was forked, and has made no update
        self._write_rows()
        if self._file is not None:
            with contextlib.suppress(OSError):  # for example a full disk, which `_write_rows` has reported
                self._file.close()
        _print_line(self._scaler.diagnose())

    def _leave_parents_rows(self) -> None:
        """Let a process that was forked open a trace of its own, and leave the rows that wait to its parent."""
        if self._process != os.getpid():
            self._process, self._file, self._rows = os.getpid(), None, []

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, []
        if self._trace is None or not rows:
            return
        try:
            if self._file is None:
                self._file = _open_new(self._trace)
                self._file.write(",".join(COLUMNS) + "\n")
            self._file.writelines(",".join(map(_as_cell, row)) + "\n" for row in rows)
            self._file.flush()
        except OSError as error:  # a full disk must not end the training
            self._trace = None
            _print_line(f"the trace ends at step {rows[0][0]}: {error}")


def _rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    """Return the number in an environment variable, or `default` if a script has changed it to another value."""
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def _open_new(trace: Path) -> TextIO:
    """Open a new file for a scaler: `scale.csv`, `scale.rank3.csv` for a rank, and another name if that file exists."""
    rank, ranks = _rank()
    stem = f"{trace.stem}.rank{rank}" if ranks > 1 else trace.stem
    names = [stem, *(f"{stem}.process{os.getpid()}.{number}" for number in range(1, 1000))]
    for name in names:
        place = trace.with_name(name + trace.suffix)
        try:
            file = place.open("x", encoding="utf-8")  # which follows no link
        except FileExistsError:
            continue
        return file
    raise FileExistsError(f"{trace} and a thousand names like it are taken")


def _as_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        value = value.item()
    return repr(value)


def _print_line(line: str) -> None:
    rank, ranks = _rank()
    with contextlib.suppress(OSError, ValueError):  # a log on a full disk, or one that the script has closed
        print(f"lossscale: {f'rank {rank}: ' if ranks > 1 else ''}{line}", file=sys.stderr, flush=True)

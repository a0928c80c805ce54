"""Recorded runs, as `lossscale run --trace` writes them."""

import csv
import errno
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lossscale_core.adapters import read_text, shown_names, suffix_of
from lossscale_core.errors import TraceFileError

_REQUIRED = ("step", "scale", "overflowed")
_LARGEST = 2**26
_WORDS = {"": "nan", "True": "1", "False": "0"}


class RecordedRun(NamedTuple):
    """A run, a row per step; each array has shape `(steps,)`."""

    step: NDArray[np.float64]
    scale: NDArray[np.float64]
    overflowed: NDArray[np.bool_]
    spiked: NDArray[np.bool_]
    norm: NDArray[np.float64] | None
    """float64: the norm of the unscaled gradients, NaN if it is not known; None without norms."""


def read_run(path: Path) -> RecordedRun:
    """Return the run that a CSV file holds. Raises `TraceFileError`; `OSError`."""
    if not path.exists():
        hint = "pass a recorded run, such as lossscale run --trace writes"
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}; {hint}", str(path))
    if suffix_of(path) != ".csv":
        raise TraceFileError(f"{path} must be a .csv file, such as lossscale run --trace writes")
    columns = _columns(path)
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise TraceFileError(f"{path} has no column {missing[0]!r}; it has {shown_names(columns) or 'nothing'}")
    # No step counter and no loss scale is beyond these, and a picture could not be drawn.
    rows = (np.abs(columns["step"]) <= 2.0**53) & (columns["scale"] >= 2.0**-149) & (columns["scale"] <= 2.0**128)
    if not rows.any():
        raise TraceFileError(f"{path} holds no steps with a positive loss scale; write one row a step")
    # Rows of several processes may be out of order; those of one step stay in the order of the file.
    order = np.argsort(columns["step"][rows], kind="stable")
    step, scale, overflowed, spiked, norm = (
        columns[name][rows][order] if name in columns else np.full(len(order), np.nan)
        for name in ("step", "scale", "overflowed", "spiked", "norm")
    )
    # No float32 is finite beyond it, and a picture could not be drawn.
    norm = np.where((np.abs(norm) <= 2.0**128) | np.isinf(norm), norm, np.nan)
    return RecordedRun(step, scale, overflowed == 1.0, spiked == 1.0, norm if np.isfinite(norm).any() else None)


def _columns(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a CSV file by their titles; a cell that is not a number is NaN."""
    text = read_text(path, TraceFileError, _LARGEST, errors="replace")
    if text and not text.endswith("\n"):  # a process that was killed has not written all of its last row
        text, _, last = text.rpartition("\n")
        if last.strip():
            warnings.warn(f"{path}: the last row is ignored, since it has no end and may have been cut", stacklevel=2)
    try:
        titles, *rows = [row for row in csv.reader(text.splitlines()) if row] or [[]]
    except csv.Error as error:
        raise TraceFileError(f"{path} is not a CSV file: {error}") from error
    for number, row in enumerate(rows, 2):
        if len(row) != len(titles):
            raise TraceFileError(f"{path}: row {number} has {len(row)} cells, but the first row has {len(titles)}")
    return {title: np.array([_number(row[place]) for row in rows]) for place, title in enumerate(titles)}


def _number(cell: str) -> float:
    try:
        return float(_WORDS.get(cell, cell))
    except ValueError:
        return np.nan

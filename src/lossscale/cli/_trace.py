"""Traces: CSV files that `lossscale run --trace` and the demo write."""

import io
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click
import numpy as np
from numpy.typing import NDArray

from lossscale.cli._shared import say
from lossscale_core.adapters import describe, join_names
from lossscale_core.errors import LossScaleError
from lossscale_core.files import open_file
from lossscale_core.testing import TITLES

_APPLIED, _OVERFLOWED, _SCALER, _WIDTH = 2, 3, 7, 8
_WORDS = {"True": 1.0, "False": 0.0, "": np.nan}
_LONGEST_LINE = 10_000


class Trace(NamedTuple):
    """The run of one scaler: arrays of shape `(steps,)` with an element for each update."""

    step: NDArray[np.float64]
    scale: NDArray[np.float64]
    applied: NDArray[np.bool_]
    overflowed: NDArray[np.bool_]
    norm: NDArray[np.float64]
    """float64: the norm of the unscaled gradients, NaN if it is unknown."""
    gradient_max: NDArray[np.float64]
    """float64: the largest magnitude of the unscaled gradients, NaN if it is unknown."""


def read_trace(path: Path) -> Trace:
    """Return the run of the first scaler in a CSV file. If a restarted run repeats steps, the last rows count.

    A row with too few cells was cut; it is left out, with a warning.

    Raises:
        UsageError: The file does not hold a row for each step, or has more than 2**20 steps.
        OSError: The file cannot be read.
    """
    rows = array("d")  # of all columns, one row after the other
    scalers, cut = {0.0}, 0
    with io.TextIOWrapper(open_file(path, "trace", LossScaleError), "utf-8-sig", errors="replace") as text:
        lines = _rows(text)
        titles = next(lines, [])
        if missing := [name for name in ("step", "scale", "overflowed") if name not in titles]:
            has = join_names(titles) or "nothing"
            raise click.UsageError(f"{path} has no column {missing[0]}; it has {has}; add it")
        places = [titles.index(name) if name in titles else None for name in TITLES]
        for number, line in enumerate(filter(any, lines), 2):
            if len(line) < len(titles):
                cut = cut or number
                continue
            row = _numbers(path, number, len(titles), places, line)
            scalers.add(row[_SCALER])
            if row[_SCALER] != 0.0:
                continue
            # The step occurs again, so its earlier row and all later rows go.
            while rows and rows[-_WIDTH] + _is_counted(rows[_APPLIED - _WIDTH], rows[_OVERFLOWED - _WIDTH]) > row[0]:
                del rows[-_WIDTH:]
            rows.extend(row)
            if len(rows) > _WIDTH * 2**20:
                raise click.UsageError(f"{path} has more than 2**20 steps, which no run has; pass a part of it")
    step, scale, applied, overflowed, _, norm, largest, _ = np.array(rows).reshape(-1, _WIDTH).T
    if not np.any(_is_counted(applied, overflowed)):
        raise click.UsageError(f"{path} holds no steps; pass a trace with a row per step")
    if cut:  # by a full disk or a killed process
        say(f"lossscale: warning: {path}: rows that may have been cut are ignored, the first of them row {cut}")
    if len(scalers) > 1:
        say(f"lossscale: {path} has {len(scalers)} scalers; this is the first")
    applied = np.where(np.isnan(applied), overflowed != 1.0, applied == 1.0)
    return Trace(step, scale, applied, overflowed == 1.0, norm, largest)


def _rows(text: TextIO) -> Iterator[list[str]]:
    """Yield the cells of each line; of a long line, or of a last line without its end, only the first cell."""
    while line := text.readline(_LONGEST_LINE):
        cells = line.strip().replace('"', "").split(",")
        yield cells if line.endswith("\n") else cells[:1]


def _is_counted(applied: Any, overflowed: Any) -> Any:
    """Return whether the policy counted the step: it was applied or it overflowed."""
    return (applied != 0.0) | (overflowed == 1.0)


def _numbers(path: Path, number: int, width: int, places: list[int | None], line: list[str]) -> list[float]:
    try:
        cells = ["" if place is None else line[place] for place in places]
        row = [_WORDS[cell] if cell in _WORDS else float(cell) for cell in cells]
        row[_SCALER] = 0.0 if cells[_SCALER] == "" else row[_SCALER]
        if len(line) == width and 0.0 <= row[0] < 2.0**53 and 2.0**-149 <= row[1] <= 2.0**128:
            return row
    except (ValueError, IndexError):
        pass
    raise click.UsageError(
        f"{path}: row {number} is {describe(','.join(line))}, but must hold {width} numbers, with a step from 0 and "
        "a positive scale; delete the row"
    )

"""Traces: the CSV files that `lossscale run --trace` and the demo write."""

import csv
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from lossscale.cli._shared import say
from lossscale_core.adapters import shown, shown_names

COLUMNS = ("step", "scale", "applied", "overflowed", "spiked", "norm", "gradient_max", "scaler")
_WORDS = {"True": 1.0, "False": 0.0, "": np.nan}


class Trace(NamedTuple):
    """One scaler's run, a row per update; each array has shape `(steps,)`."""

    step: NDArray[np.float64]
    scale: NDArray[np.float64]
    applied: NDArray[np.bool_]
    overflowed: NDArray[np.bool_]
    norm: NDArray[np.float64]
    """float64: the norm of the unscaled gradients, NaN where it is not known."""
    gradient_max: NDArray[np.float64]
    """float64: the largest magnitude of the unscaled gradients, NaN where it is not known."""


def read_trace(path: Path) -> Trace:
    """Return the run of the first scaler in a CSV file; steps that a restarted run repeats count once.

    Raises:
        UsageError: The file does not hold a row for each step, or has more than 2**20 steps.
        OSError: The file cannot be read.
    """
    if path.suffix.lower() != ".csv":
        raise click.UsageError(f"{path} must be a .csv file; pass one that lossscale run --trace wrote")
    text = path.read_text("utf-8-sig", errors="replace")
    if text and not text.endswith("\n"):  # a process that was killed has not written all of its last row
        text, _, last = text.rpartition("\n")
        say(f"lossscale: warning: {path}: the last row {shown(last)} is ignored, since it may have been cut")
    titles, *lines = [line for line in csv.reader(text.splitlines()) if line] or [[]]
    if missing := [name for name in ("step", "scale", "overflowed") if name not in titles]:
        raise click.UsageError(f"{path} has no column {missing[0]}; it has {shown_names(titles) or 'nothing'}; add it")
    rows: list[dict[str, float]] = []
    scalers = {0.0}
    for number, line in enumerate(lines, 2):
        row = {**dict.fromkeys(COLUMNS, np.nan), "scaler": 0.0, **_numbers(path, number, titles, line)}
        scalers.add(row["scaler"])
        if row["scaler"] != 0.0:
            continue
        # A row that was counted, and those after it, if the step comes again.
        while rows and rows[-1]["step"] + _is_counted(rows[-1]) > row["step"]:
            rows.pop()
        rows.append(row)
    if not any(map(_is_counted, rows)):
        raise click.UsageError(f"{path} holds no steps; pass a trace with a row per step")
    if len(rows) > 2**20:
        raise click.UsageError(f"{path} has {len(rows)} steps, but a run has at most 2**20; pass a part of it")
    if len(scalers) > 1:
        say(f"lossscale: {path} has {len(scalers)} scalers; this is the first")
    step, scale, applied, overflowed, _, norm, largest, _ = np.array([list(row.values()) for row in rows]).T
    applied = np.where(np.isnan(applied), overflowed != 1.0, applied == 1.0)
    return Trace(step, scale, applied, overflowed == 1.0, norm, largest)


def _is_counted(row: dict[str, float]) -> bool:
    """Return whether the policy saw the step: it was applied or overflowed, and was not skipped for another reason."""
    return row["applied"] != 0.0 or row["overflowed"] == 1.0


def _numbers(path: Path, number: int, titles: list[str], line: list[str]) -> dict[str, float]:
    try:
        cells = {title: _WORDS.get(cell, cell) for title, cell in zip(titles, line, strict=True) if title in COLUMNS}
        row = {title: float(cell) for title, cell in cells.items()}
        if row["step"] >= 0 and 2.0**-149 <= row["scale"] <= 2.0**128:
            return row
    except ValueError:
        pass
    raise click.UsageError(
        f"{path}: row {number} is {shown(','.join(line))}, but must hold {len(titles)} numbers, with a step from 0 and "
        "a positive scale; delete the row"
    )

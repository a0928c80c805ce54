"""Traces: the CSV files that `lossscale run --trace` and the demo write."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lossscale.cli._shared import say
from lossscale_core.adapters import read_text, shown, shown_names, suffix_of
from lossscale_core.errors import TraceFileError

COLUMNS = ("step", "scale", "applied", "overflowed", "spiked", "norm", "gradient_max", "scaler")
_LARGEST = 2**26
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
        TraceFileError: The file does not hold a row for each step.
        OSError: The file cannot be read.
    """
    if suffix_of(path) != ".csv":
        raise TraceFileError(f"{path} must be a .csv file; pass one that lossscale run --trace wrote")
    text = read_text(path, TraceFileError, _LARGEST, errors="replace")
    if text and not text.endswith("\n"):  # a process that was killed has not written all of its last row
        text, _, last = text.rpartition("\n")
        say(f"lossscale: warning: {path}: the last row {shown(last)} is ignored, since it may have been cut")
    titles, *lines = [line for line in csv.reader(text.splitlines()) if line] or [[]]
    if missing := [name for name in ("step", "scale", "overflowed") if name not in titles]:
        raise TraceFileError(f"{path} has no column {missing[0]}; it has {shown_names(titles) or 'nothing'}; add it")
    rows: list[dict[str, float]] = []
    others = set()
    for number, line in enumerate(lines, 2):
        row = {**dict.fromkeys(COLUMNS, np.nan), **_numbers(path, number, titles, line)}
        if not row["step"] >= 0 or not 2.0**-149 <= row["scale"] <= 2.0**128:
            raise TraceFileError(
                f"{path}: row {number} has step {row['step']:g} and scale {row['scale']:g}, but a step is 0 or "
                "more, and a scale is a positive float32; delete the row"
            )
        if row["scaler"] > 0:
            others.add(row["scaler"])
            continue
        while rows and rows[-1]["step"] > row["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == row["step"] and (rows[-1]["applied"] == 1 or rows[-1]["overflowed"] == 1):
            rows.pop()
        rows.append(row)
    if not rows:
        raise TraceFileError(f"{path} holds no steps; pass a trace with a row per step")
    if others:
        say(f"lossscale: {path} has {len(others) + 1} scalers; this is the first")
    step, scale, applied, overflowed, _, norm, largest, _ = np.array(
        [[row[name] for name in COLUMNS] for row in rows]
    ).T
    applied = applied == 1.0 if np.isfinite(applied).any() else overflowed != 1.0
    return Trace(step, scale, applied, overflowed == 1.0, norm, largest)


def _numbers(path: Path, number: int, titles: list[str], line: list[str]) -> dict[str, float]:
    if len(line) != len(titles):
        raise TraceFileError(f"{path}: row {number} has {len(line)} cells, but {len(titles)} titles; delete the row")
    try:
        pairs = zip(titles, line, strict=True)
        return {title: _WORDS[cell] if cell in _WORDS else float(cell) for title, cell in pairs if title in COLUMNS}
    except ValueError as error:
        raise TraceFileError(f"{path}: row {number} holds text in the place of a number: {error}; correct it") from None

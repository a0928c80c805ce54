"""Runs as CSV files, which `lossscale run --trace` writes, too."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lossscale_core.files import Path, write_whole
from lossscale_core.testing._simulation import Trace

CSV_COLUMNS = ("step", "scale", "applied", "overflowed", "spiked", "norm", "gradient_max", "scaler")
"""The titles of a trace in CSV; `docs/command.md` describes the columns."""


def csv_lines(rows: Iterable[Sequence[Any]], *, has_titles: bool = True) -> Iterator[str]:
    """Yield rows as lines of a trace in CSV. Waits for the devices of the cells.

    Args:
        rows: A cell for each of `CSV_COLUMNS`: a number, an array of shape `()`, a bool, or None if it is not known.
        has_titles: Whether the line of titles comes first.

    Yields:
        Each line, with its end.
    """
    if has_titles:
        yield ",".join(CSV_COLUMNS) + "\n"
    for row in rows:
        cells = (cell.item() if hasattr(cell, "item") else cell for cell in row)
        yield ",".join("" if cell is None else repr(cell) for cell in cells) + "\n"


def trace_to_csv(trace: Trace, path: Path) -> None:
    """Write a simulated run as a CSV file, which `lossscale plot` and `lossscale simulate` read.

    An existing file is replaced atomically. Norms and magnitudes of gradients are not a part of a `Trace`, so that
    their columns are empty.

    Args:
        trace: A run that `simulate` or `simulate_gradients` returned.
        path: The path of the file, which ends in `.csv`.

    Raises:
        OSError: The file cannot be written.
    """
    spiked = getattr(trace, "spiked", np.zeros_like(trace.skipped))
    step = trace.steps - ~spiked  # before the step; a spike is not counted
    columns = (step, trace.loss_scale_used, ~(trace.skipped | spiked), trace.skipped, spiked)
    rows = ((*cells, None, None, 0) for cells in zip(*columns, strict=True))
    write_whole(path, "".join(csv_lines(rows)), overwrite=True)

"""Functions that the benchmarks share: rows with a bar, interleaved timing, and the table."""

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NOISE = 1.05


class Row(NamedTuple):
    """A measured number, its unit (for a ratio, the name of the divisor), and its bar."""

    work: str
    unit: str
    measured: float
    bar: float

    @property
    def held(self) -> bool:
        """Whether the number is within the bar, with a tolerance for the noise of a shared machine."""
        return self.measured <= self.bar * NOISE


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters, 25.6 M elements in all."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            shapes += [(width,)] * 4 + [(4 * width,)] * 2
            if block == 0:
                shapes += [(4 * width, width_in, 1, 1), (4 * width,), (4 * width,)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def interleaved(
    functions: list[Callable[[], object]],
    repetitions: int,
    calls: int = 1,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the median seconds per call of each function; the functions take turns, so that noise affects all alike.

    Each round begins with another function, so that a function does not always run after the same function. `before` is
    called before each turn and is not timed.
    """
    times: list[list[float]] = [[] for _ in functions]
    for first in range(repetitions):
        for turn in range(len(functions)):
            number = (first + turn) % len(functions)
            before()
            start = time.perf_counter()
            for _ in range(calls):
                functions[number]()
            times[number].append((time.perf_counter() - start) / calls)
    return [statistics.median(seconds) for seconds in times]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| work | measured | bar | held |", "|---|---|---|---|"]
    for row in rows:
        bar, held = (f"{row.bar:g} {row.unit}", "yes" if row.held else "no") if row.bar < math.inf else ("none", "")
        lines.append(f"| {row.work} | {row.measured:.2f} {row.unit} | {bar} | {held} |")
    return "\n".join(lines)


def run(name: str, title: str, measure: Callable[[bool], list[Row]], versions: str, usage: str, notes: str = "") -> int:
    """Measure, print, write the table and the notes if requested, and return 1 if a bar was missed on the CPU."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions: a test that everything runs")
    parser.add_argument("--output-folder", type=Path, help="a folder to write the table to, as Markdown")
    options = parser.parse_args()
    rows = measure(options.quick)
    machine = f"{versions}, Python {platform.python_version()}, {platform.machine()}"
    text = (
        f"{table(rows)}\n\nMedians over interleaved repetitions in one run; bars count as held within 5 %. {machine}."
    )
    print(text)
    text = f"{text}\n\n{notes}" if notes else text
    if options.output_folder:
        options.output_folder.mkdir(parents=True, exist_ok=True)
        (options.output_folder / f"{name}.md").write_text(
            f"# {title}\n\n{text}\n\nMade by `nox -s bench -- --output-folder {options.output_folder}`.\n"
        )
    return 0 if options.quick or all(row.held for row in rows if "(cuda)" not in row.work) else 1

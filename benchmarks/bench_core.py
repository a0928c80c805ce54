"""What the core costs: ratios measured side by side in one run, medians over interleaved repetitions.

    python benchmarks/bench_core.py                                       measure and print
    python benchmarks/bench_core.py --quick                               a smoke test, in seconds
    python benchmarks/bench_core.py --output docs/benchmarks/core.md      keep the table

Exits with status 1 where a bar is missed by more than the noise allowed.
"""

import argparse
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import lossscale_core as ls

NOISE = 1.05


class Row(NamedTuple):
    """One measured number, what it is a ratio of (if it is one), and the bar it is held against."""

    work: str
    unit: str
    measured: float
    bar: float

    @property
    def held(self) -> bool:
        """Whether the bar is held, give or take the noise of a shared machine."""
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


def interleaved(functions: list[Callable[[], object]], repetitions: int, calls: int = 1) -> list[float]:
    """Return each function's median seconds a call; the functions take turns, so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, of_function in zip(functions, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            of_function.append((time.perf_counter() - start) / calls)
    return [statistics.median(of_function) for of_function in times]


def update_rows(quick: bool) -> list[Row]:
    """Time `policy.update` on host scalars and on NumPy arrays, after finite steps and overflows."""
    rows = []
    for name, policy in (("DynamicScaling", ls.DynamicScaling()), ("TolerantScaling", ls.TolerantScaling())):
        host, arrays = policy.init_state(), ls.init_state(policy, xp=np)
        calls = [(host, True), (host, False), (arrays, np.asarray(True)), (arrays, np.asarray(False))]
        times = interleaved([functools.partial(policy.update, *call) for call in calls], 5 if quick else 50, 200)
        rows.append(Row(f"{name}.update, host scalars", "µs", 1e6 * max(times[:2]), 8.0))
        rows.append(Row(f"{name}.update, NumPy arrays", "µs", 1e6 * max(times[2:]), 60.0))
    return rows


def all_finite_rows(quick: bool) -> list[Row]:
    """Time `all_finite` on ResNet-50's gradients against `np.isfinite`."""
    rng = np.random.default_rng(0)
    rows = []
    for dtype, bar in ((np.float32, 0.75), (np.float16, 0.60)):
        grads = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in resnet50_shapes()]
        peer, ours = interleaved(
            [lambda g=grads: all(np.isfinite(a).all() for a in g), lambda g=grads: ls.all_finite(g)],
            3 if quick else 31,
        )
        name = np.dtype(dtype).name
        rows.append(Row(f"all_finite, {name}, 161 arrays", "× all(np.isfinite(a).all())", ours / peer, bar))
    return rows


def import_rows(quick: bool) -> list[Row]:
    """Time a process that imports the core against one that imports NumPy."""

    def importing(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    for module in ("numpy", "lossscale_core"):
        importing(module)()  # so that neither has to compile its files
    numpy_time, core_time = interleaved([importing("numpy"), importing("lossscale_core")], 5 if quick else 41)
    return [Row("import lossscale_core", "× import numpy, whole process", core_time / numpy_time, 1.3)]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| work | measured | bar | held |", "|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.work} | {row.measured:.2f} {row.unit} | {row.bar:g} {row.unit} | {'yes' if row.held else 'no'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and say by the exit status whether every bar was held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that everything runs")
    parser.add_argument("--output", type=Path, help="a Markdown file to keep the table in")
    options = parser.parse_args()
    rows = [*update_rows(options.quick), *all_finite_rows(options.quick), *import_rows(options.quick)]
    machine = f"NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()}, CPU"
    text = (
        f"{table(rows)}\n\nMedians over interleaved repetitions in one run; bars count as held within 5 %. {machine}."
    )
    print(text)
    if options.output:
        options.output.write_text(
            f"# What the core costs\n\n{text}\n\nMade by `nox -s bench -- --output {options.output}`.\n"
        )
    return 0 if options.quick or all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

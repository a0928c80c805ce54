"""Cost of the core: ratios of medians over interleaved repetitions in one run.

    python benchmarks/bench_core.py                                       measure and print
    python benchmarks/bench_core.py --quick                               a smoke test, in seconds
    python benchmarks/bench_core.py --output-folder benchmarks    write the table

Exits with status 1 if a bar is missed by more than the allowed noise.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
from measuring import Row, interleaved, resnet50_shapes, run

import lossscale_core as ls


def update_rows(quick: bool) -> list[Row]:
    """Time `policy.update` on host scalars and on NumPy arrays, after finite steps and overflows."""
    policy = ls.DynamicScaling()
    host, arrays = policy.init_state(), ls.init_state(policy, xp=np)
    calls = [(host, True), (host, False), (arrays, np.asarray(True)), (arrays, np.asarray(False))]
    times = interleaved([functools.partial(policy.update, *call) for call in calls], 5 if quick else 50, 200)
    return [
        Row("DynamicScaling.update, host scalars", "µs", 1e6 * max(times[:2]), 8.0),
        Row("DynamicScaling.update, NumPy arrays", "µs", 1e6 * max(times[2:]), 60.0),
    ]


def all_finite_rows(quick: bool) -> list[Row]:
    """Time `all_finite` on ResNet-50's gradients against `np.isfinite`."""
    rng = np.random.default_rng(0)
    rows = []
    for dtype in (np.float32, np.float16):
        grads = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in resnet50_shapes()]
        numpy_time, core_time = interleaved(
            [lambda g=grads: all(np.isfinite(a).all() for a in g), lambda g=grads: ls.all_finite(g)],
            3 if quick else 31,
        )
        name = np.dtype(dtype).name
        rows.append(Row(f"all_finite, {name}, 161 arrays", "× all(np.isfinite(a).all())", core_time / numpy_time, 1.25))
    return rows


def import_rows(quick: bool) -> list[Row]:
    """Time a process that imports the core against one that imports NumPy."""
    # NumPy is installed with its bytecode. This variable would make each process compile the core again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def importing(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)

    for module in ("numpy", "lossscale_core"):
        importing(module)()  # so that the timed processes find bytecode
    numpy_time, core_time = interleaved([importing("numpy"), importing("lossscale_core")], 5 if quick else 41)
    return [Row("import lossscale_core", "× import numpy, whole process", core_time / numpy_time, 1.3)]


def measure(quick: bool) -> list[Row]:
    """Measure every row that has a bar."""
    return [*update_rows(quick), *all_finite_rows(quick), *import_rows(quick)]


if __name__ == "__main__":
    sys.exit(run("core", "What the core costs", measure, f"NumPy {np.__version__}, CPU", __doc__))

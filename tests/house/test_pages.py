"""What the pages quote and list agrees with the benchmarks and the table of tools."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _text(*paths):
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


README, COSTS = _text(ROOT / "README.md"), _text(ROOT / "docs/do-i-need-this.md")
MEASURED = {
    "PyTorch: a step, SGD": ("torch", "| step, SGD foreach, 161 tensors", "torch's GradScaler"),
    "PyTorch: clip and step, SGD": ("torch", "| clip + step, SGD foreach, 161 tensors", "unscale_"),
    "PyTorch: clip and step, fused AdamW, with a spike guard": (
        *("torch", "| clip + step with a spike guard, AdamW fused, 161 tensors", "the same without a guard"),
    ),
    "JAX: `apply_gradients`, Adam, compiled": ("jax", "| apply_gradients, Adam, 161 arrays", "no scaling"),
    "TensorFlow: clip and Adam in a graph": ("tensorflow", "| clip + Adam, graph, 161 tensors", "the same without"),
}
"""The row of a benchmark for each row of the costs: its file, how it begins, and the peer."""
MIGRATING = _text(ROOT / "docs/migrating.md")


@pytest.mark.parametrize(
    ("work", "on_cpu", "on_gpu"), re.findall(r"^\| (.*) \| (\d.\d\d ×) \| (\d.\d\d ×)? ?\|", COSTS, re.MULTILINE)
)
def test_each_ratio_was_measured(work, on_cpu, on_gpu):
    """Each ratio in the table of costs is in the benchmark of the same work and device."""
    name, start, peer = MEASURED[work]
    for ratio, file in ((on_cpu, f"{name}.md"), (on_gpu, f"{name}-cuda.md")):
        rows = [row for row in _text(ROOT / "benchmarks" / file).splitlines() if row.startswith(start)] if ratio else []
        assert not ratio or any(f"| {ratio} {peer}" in row for row in rows)


def test_the_readme_quotes_the_costs():
    """The README's ratios of clipping are in the table of costs; the other numbers there are in a benchmark."""
    on_cpu, on_gpu = re.findall(r"(\d\.\d\d ×)", README)
    assert f"| PyTorch: clip and step, SGD | {on_cpu} | {on_gpu} |" in COSTS
    times = re.findall(r"\d+\.\d\d ms \(\d+\.\d%\)", COSTS)
    slowest = re.findall(r"\d\.\d\d ×", COSTS.partition("The slowest steps")[2])
    assert (len(times), len(slowest)) == (4, 2)
    benchmarks = _text(*(ROOT / "benchmarks" / f"{name}.md" for name in ("step", "torch-cuda", "jax")))
    assert all(f"| {number} " in benchmarks for number in times + slowest)


def test_the_page_has_the_tools_table():
    """The page of migration has the table that `python docs/_site/migrating_tables.py` writes."""
    assert runpy.run_path(str(ROOT / "docs/_site/migrating_tables.py"))["drawn"](MIGRATING) == MIGRATING

"""What the pages quote and list agrees with what is there: benchmarks, tools, promises."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "tests/adapters"


def _text(*paths):
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


COSTS = _text(ROOT / "docs/do-i-need-this.md")
MEASURED = _text(*sorted((ROOT / "benchmarks").glob("*.md")))
MIGRATING = _text(ROOT / "docs/migrating.md")


@pytest.mark.parametrize("number", re.findall(r"\b\d\.\d\d ×|\d+\.\d\d ms(?: \(\d+\.\d%\))?", COSTS))
def test_each_number_was_measured(number):
    """A ratio is in a row of a benchmark, and a time in the row of its model, with its share."""
    assert f"| {number} " in MEASURED


def test_the_page_quotes_some_numbers_and_says_where_they_were_measured():
    """On a CPU and on one GPU; the README's two ratios of clipping are those of the page's row."""
    assert len(re.findall(r"\b\d\.\d\d ×", COSTS)) >= 4
    assert len(re.findall(r"\d ms \(", COSTS)) >= 4
    assert "two-core x86 CPU" in COSTS
    assert "NVIDIA H200" in COSTS
    (row,) = re.findall(r"^\| PyTorch: clip and step, SGD \|.*$", COSTS, re.MULTILINE)
    assert re.findall(r"\d\.\d\d ×", _text(ROOT / "README.md")) == re.findall(r"\d\.\d\d ×", row)[:2]


def test_the_table_of_tools_is_that_of_the_translator():
    """If not, draw it: `python docs/_site/migrating_tables.py`."""
    assert runpy.run_path(str(ROOT / "docs/_site/migrating_tables.py"))["drawn"](MIGRATING) == MIGRATING


def test_every_promise_of_tensorflows_documents_has_a_test():
    """1 to 99; `test_promises_048_049_...` is a test of two."""
    text = _text(*sorted(each for name in ("keras", "tensorflow") for each in ADAPTERS.glob(f"test_{name}_*.py")))
    names = re.findall(r"^def test_promises?_((?:\d{3}_)+)\w+\(", text, flags=re.MULTILINE)
    assert {int(number) for name in names for number in name.split("_") if number} == set(range(1, 100))

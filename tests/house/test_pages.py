"""What the pages quote and list agrees with the benchmarks and the table of tools."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _text(*paths):
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


COSTS = _text(ROOT / "README.md", ROOT / "docs/do-i-need-this.md")
MEASURED = _text(*sorted((ROOT / "benchmarks").glob("*.md")))
MIGRATING = _text(ROOT / "docs/migrating.md")


@pytest.mark.parametrize("number", re.findall(r"\b\d\.\d\d ×|\d+\.\d\d ms(?: \(\d+\.\d%\))?", COSTS))
def test_each_number_was_measured(number):
    """A ratio is in a row of a benchmark, and a time in the row of its model, with its share."""
    assert f"| {number} " in MEASURED


def test_the_table_of_tools_is_that_of_the_translator():
    """If not, draw it: `python docs/_site/migrating_tables.py`."""
    assert runpy.run_path(str(ROOT / "docs/_site/migrating_tables.py"))["drawn"](MIGRATING) == MIGRATING

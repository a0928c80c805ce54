"""The page that helps to decide quotes the benchmarks as they were measured."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/do-i-need-this.md").read_text(encoding="utf-8")
MEASURED = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks").glob("*.md")))


@pytest.mark.parametrize("ratio", re.findall(r"\b\d\.\d\d ×", PAGE))
def test_each_ratio_is_one_that_was_measured(ratio):
    """A benchmark that is measured again changes the page, too."""
    assert f"| {ratio} " in MEASURED


@pytest.mark.parametrize("time", re.findall(r"\d+\.\d\d ms(?: \(\d+\.\d%\))?", PAGE))
def test_each_time_is_one_that_was_measured(time):
    """In the row of its model on the page of the whole step, with its share."""
    assert f"| {time} |" in MEASURED


def test_the_page_quotes_some_ratios_and_says_where_they_were_measured():
    """On a CPU and on one GPU."""
    assert len(re.findall(r"\b\d\.\d\d ×", PAGE)) >= 4
    assert len(re.findall(r"\d ms \(", PAGE)) >= 4
    assert "two-core x86 CPU" in PAGE
    assert "NVIDIA H200" in PAGE


def test_the_readme_quotes_the_page():
    """Its two ratios of clipping are those of the row."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| PyTorch: clip and step, SGD \|.*$", PAGE, re.MULTILINE)
    assert re.findall(r"\d\.\d\d ×", readme) == re.findall(r"\d\.\d\d ×", row)[:2]

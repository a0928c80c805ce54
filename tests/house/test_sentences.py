"""Each sentence of the pages that promises something names the test that runs it, in `sentences.toml`."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = tomllib.loads((Path(__file__).parent / "sentences.toml").read_text(encoding="utf-8"))
PAGES = ["README.md", "SECURITY.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCES = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(?:#|<a id=).*$", re.MULTILINE)
DRAWN = re.compile(r"^<!-- keys of .*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)  # tests/house/test_pages.py
PROMISE = re.compile(
    r"\b(?:never|always|bit for bit|exact|exactly|guess(?:es)?|same bits|[KM]iB|at most|every ordered pair|refuse[sd]?"
    r"|changes nothing|nothing waits|does not wait|no network|warns|a warning|raises? an error|\w+Error|\w+Warning)\b",
    re.IGNORECASE,
)


def _text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def _sentences(text):
    """Return the sentences of the prose, and the rows of the tables."""
    for block in re.split(r"\n\s*\n", HEADING.sub("", DRAWN.sub("", FENCES.sub("", text)))):
        if block.lstrip().startswith("|"):
            yield from block.splitlines()
            continue
        for item in re.split(r"\n(?= *(?:[-*]|\d+\.) )", block):
            yield from re.split(r"(?<=[.!?])\**\s+", " ".join(item.split()))


@pytest.mark.parametrize("page", PAGES)
def test_a_promise_has_a_row(page):
    """A new one needs a test, or an example on the page; one that no test can run is left out."""
    rows = ROWS.get(page, {})
    promises = [each for each in _sentences(_text(page)) if PROMISE.search(each)]
    assert [each for each in promises if not any(words in each for words in rows)] == []


@pytest.mark.parametrize("page", ROWS)
def test_a_row_has_its_sentence_and_its_test(page):
    """The words stand on the page, and the test is there; an example follows before the next heading."""
    text = _text(page)
    for words, test in ROWS[page].items():
        assert any(words in each for each in _sentences(text)), f"{page} does not say {words!r}"
        if test == "doctest":
            below = re.split(re.sub(r"\\? ", r"\\s+", re.escape(words)), text, maxsplit=1)[1]
            assert ">>>" in re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0], words
        elif test != "of others":
            path, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", _text(path), re.MULTILINE), f"{test} is missing"

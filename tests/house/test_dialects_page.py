"""The pages of dialects show the tables that the records draw, and say in words what differs."""

import re
import runpy
from pathlib import Path

import pytest

from lossscale.dialects._tools import PAGES, TOOLS

DOCS = Path(__file__).parents[2] / "docs"
OVERVIEW = DOCS / "migrating.md"
tables = runpy.run_path(str(DOCS / "_site/migrating_tables.py"))["tables"]
TOLD = re.compile(r"^\*\*`(\S+)`\*\*\. .+\n\n\| there \| here \|\n\|---\|---\|\n\| .+ \| .+ \|$", re.MULTILINE)


def test_the_overview_has_the_table_of_the_records():
    """If not, draw it: `python docs/_site/migrating_tables.py`."""
    assert OVERVIEW.read_text(encoding="utf-8").endswith(tables())


@pytest.mark.parametrize("page", PAGES)
def test_a_tools_page_has_the_tables_of_the_records_and_says_what_differs(page):
    """Under each tool's name are its rule and a table of what is there and what is here, in words of the page alone."""
    text = (DOCS / f"migrating/{page}.md").read_text(encoding="utf-8")
    assert text.endswith(tables(page))
    assert TOLD.findall(text) == [tool.name for tool in PAGES[page]]


def test_old_links_into_the_overview_still_arrive():
    """What was a heading of the one long page is a heading of the overview, or a row with a link to its page."""
    text = OVERVIEW.read_text(encoding="utf-8")
    headings = ["The settings", "The state", "The training step", "What is different", "Every tool at a glance"]
    assert all(f"\n## {heading}\n" in text for heading in headings)
    anchors = ["key-by-key", *TOOLS]
    assert all(text.count(f'<a id="{anchor}"></a>') == 1 for anchor in anchors)


@pytest.mark.parametrize("page", PAGES)
def test_each_record_is_shown(page):
    """The tables have a row for each key and each counter, and the overview has one for each tool."""
    text = tables(page)
    for record in PAGES[page]:
        assert f"[`{record.name}`](migrating/{page}.md#{record.name})" in tables()
        for form in record.forms:
            assert all(f"`{one.name}`" in text for one in form.keys)
        for saved in record.saved:
            assert all(f"`{field}`" in text for field in saved.counters)

"""The page of dialects shows the tables that the records draw, and says in words what differs."""

import re
from pathlib import Path

from lossscale_core.dialects import peers, tables

PAGE = Path(__file__).parents[2] / "docs/migrating.md"


def test_the_tables_are_those_of_the_records():
    """Else draw them anew: `python -m lossscale_core.dialects docs/migrating.md`."""
    assert PAGE.read_text(encoding="utf-8").endswith(tables())


TOLD = re.compile(r"^\*\*`(\S+)`\*\*\. .+\n\n\| there \| here \|\n\|---\|---\|\n\| .+ \| .+ \|$", re.MULTILINE)


def test_the_page_says_what_differs():
    """Under each tool's name are its rule and a table of what is there and what is here, in words of the page alone."""
    assert TOLD.findall(PAGE.read_text(encoding="utf-8")) == [peer.name for peer in peers()]

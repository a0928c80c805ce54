"""The page of dialects shows the tables that the records draw."""

from pathlib import Path

from lossscale_core.dialects import tables

PAGE = Path(__file__).parents[2] / "docs/migrating.md"


def test_the_tables_are_those_of_the_records():
    """Else draw them anew: `python -m lossscale_core.dialects docs/migrating.md`."""
    assert PAGE.read_text(encoding="utf-8").endswith(tables())

"""The migration page has a section for each tool, with the table of its keys."""

import re
import runpy
from pathlib import Path

from lossscale import tools

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "migrating.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_tools():
    """If not, draw them: `python docs/_site/migrating_tables.py`."""
    assert runpy.run_path(str(DOCS / "_site/migrating_tables.py"))["drawn"](TEXT) == TEXT


def test_every_tool_has_its_section():
    """torch comes first; each section has the keys, and what changes in a training step."""
    assert re.findall(r"<!-- keys of (\w+)", TEXT) == list(tools())
    sections = re.split(r"^## From ", TEXT, flags=re.MULTILINE)[1:]
    assert all("changes" in each for each in sections)

"""Every relative link leads to a file on GitHub; `nox -s docs` also checks the sections, and the links of the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"": "*.md", "docs": "**/*.md", "benchmarks": "*.md", "tests": "*.md", "examples": "**/*.ipynb"}
PAGES = sorted(page for folder, pattern in FOLDERS.items() for page in (ROOT / folder).glob(pattern))
CODE = re.compile(r"^( *)(```+).*?^\1\2$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:#]+)[^)\s:]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    """Each relative link leads to a file or a folder."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []

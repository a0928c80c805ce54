"""Every relative link leads somewhere on GitHub; on the site, `nox -s docs` is strict about them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), ROOT / "tests/README.md"]
)
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
FENCES = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)[^`].*?\1")
ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>\n(?=#)', re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s:]+)\)")


def _prose(path: Path) -> str:
    """Return a page without its blocks of code; of a notebook, the text between its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return FENCES.sub("", text)


def _heard(heading: str) -> str:
    """Return the text of a heading as a reader sees it."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")


def _github_slug(heading: str) -> str:
    """Follow https://github.com/gjtorikian/html-pipeline: drop punctuation, and write each space as a hyphen."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(path: Path) -> list[str]:
    """Return what a link may name after `#`: the anchors above headings, and the slugs, the second of two numbered."""
    text = _prose(path)
    seen: Counter[str] = Counter()
    names = ANCHOR.findall(text)
    for heading in HEADING.findall(text):
        slug = _github_slug(_heard(heading))
        names.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return names


ANCHORS = {path: _anchors(path) for path in PAGES}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    """Each relative link leads to a file, and to a section of the file if it names one."""
    wrong = []
    for link in LINK.findall(CODE.sub("", _prose(page))):
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (section and section not in ANCHORS.get(target, [])):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_anchor_names_one_section(page):
    """No two sections of a page have the same anchor on GitHub, which would open the first of them."""
    assert [name for name, count in Counter(ANCHORS[page]).items() if count > 1] == []

"""Every relative link leads somewhere in both places where the pages are read: on GitHub and on the site."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

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
OF_ONE_RENDERER = {
    "an attribute list": re.compile(r"\{[ :]*[#.][\w -]+\}"),
    "a tab": re.compile(r'^ *=== "', re.MULTILINE),
    "an include": re.compile(r"--8<--"),
    "a directive": re.compile(r"^ *(?:!!!|\?\?\?)", re.MULTILINE),
    "Markdown within HTML": re.compile(r"<div\b[^>]*\bmarkdown\b"),
    "front matter": re.compile(r"\A---\n"),
    "two powers, which are bold text on GitHub": re.compile(r"\d\*\*\d(?:[^|\n]|\n(?!\n))*\d\*\*\d"),
}


class Anchors(NamedTuple):
    """What links to a page may name after `#`, in each of the two places."""

    github: list[str]
    site: list[str]


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


def _site_slug(heading: str) -> str:
    """Follow `markdown.extensions.toc.slugify`: ASCII alone, and runs of spaces and hyphens are one hyphen."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def _numbered(slugs: list[str], sign: str) -> list[str]:
    """Tell equal slugs apart as both places do: the second gets a number."""
    seen: Counter[str] = Counter()
    numbered = []
    for slug in slugs:
        numbered.append(f"{slug}{sign}{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return numbered


def _anchors(path: Path) -> Anchors:
    """Return what a link may name: on GitHub every slug, on the site the anchor above a heading in its place."""
    text = _prose(path)
    headings = [_heard(heading) for heading in HEADING.findall(text)]
    without = [_heard(heading) for heading in HEADING.findall(re.sub(ANCHOR.pattern + "#.*", "", text, flags=re.M))]
    named = ANCHOR.findall(text)
    return Anchors(
        github=named + _numbered([_github_slug(each) for each in headings], "-"),
        site=named + _numbered([_site_slug(each) for each in without], "_"),
    )


ANCHORS = {path: _anchors(path) for path in PAGES}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    """The file exists, and its section has that name on GitHub and on the site."""
    wrong = []
    for link in LINK.findall(CODE.sub("", _prose(page))):
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        places = ANCHORS.get(target, Anchors([], []))
        if not target.exists() or (section and not all(section in place for place in places)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_anchor_names_one_section(page):
    """On GitHub the first of two equal ids gets the link, so no heading has the name of another section's anchor."""
    for place in ANCHORS[page]:
        assert [name for name, count in Counter(place).items() if count > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_markup_of_both_places_alone(page):
    """What only the site's renderer understands is shown as text on GitHub."""
    text = CODE.sub("", FENCES.sub("", page.read_text(encoding="utf-8")))
    assert [name for name, pattern in OF_ONE_RENDERER.items() if pattern.search(text)] == []

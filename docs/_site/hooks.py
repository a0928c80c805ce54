"""Hooks of the site's build, which add links, search words and markup to the Markdown files."""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCUMENTS = {"README.md": "index.md"} | {
    f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")
}
EXAMPLES = [path for path in sorted(ROOT.glob("examples/**/*")) if path.suffix in (".py", ".ipynb")]
TABLES = sorted((ROOT / "benchmarks").glob("*.md"))
COPIED = [ROOT / "CITATION.cff", *EXAMPLES, *TABLES]
PAGES = DOCUMENTS | {name: name for name in (path.relative_to(ROOT).as_posix() for path in COPIED)}
"""Files outside docs/ that the site contains, with their pages. Links to these files stay within the site."""
SOURCES = {page: source for source, page in PAGES.items()}
BOOSTS = {
    "troubleshooting.md": 8,
    "do-i-need-this.md": 6,
    "works-with.md": 4,
    "losses-inside-the-graph.md": 4,
}
"""Factors by which the search prefers a page to the others; pages of the reference have 0.5."""
SEARCH_WORDS = {"retries.md": ["retry"], "spike-guard.md": ["guard"]}
"""Words for which the search shows a page first, although its title contains another form of the word."""

_ELSEWHERE = r"""[^>]*?\b(?:src|href)=["']?(?:https?:)?//"""
_LOADED = re.compile(rf"""<(?:script|img|iframe|source|link\b(?![^>]*rel="(?:canonical|prev|next)"))\b{_ELSEWHERE}""")
_CELL, _CODE = re.compile(r"<td\b.*?</td>", re.DOTALL), re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_BREAK = re.compile(r"(?:(?<=[^\W_]_)|(?<=\())(?![_)]|$)")
"""The places within a word of code where a line may end: after an underscore and after an opening parenthesis."""


class Powers(Extension):
    """A Markdown extension that shows 2**-126 as a power; without it, the asterisks would begin bold text."""

    def extendMarkdown(self, md: Any) -> None:  # noqa: N802, the name in Markdown
        """Register the pattern with a priority below code and above emphasis."""
        md.inlinePatterns.register(_Power(r"(?<=\d)\*\*(-?\d+)", md), "power", 175)


class _Power(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> Any:  # noqa: N802
        element = Element("sup")
        element.text = m[1].replace("-", "−")
        return element, m.start(0), m.end(0)


def on_config(config: Any) -> Any:
    """Add the extension for powers and the links to the repository."""
    config.markdown_extensions.append(Powers())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    _link_to_repository(config, project["tool"]["lossscale"]["repository"])
    return config


def _link_to_repository(config: Any, repository: str) -> None:
    """Add links to the repository and to the source of each page; on GitHub also the addresses of the sitemap."""
    if not repository:
        return
    config.repo_url, config.repo_name, config.edit_uri = repository, "lossscale", "edit/HEAD/docs/"
    config.theme["features"].append("content.action.edit")
    if on_github := re.fullmatch(r"https://github\.com/([^/]+)/([^/]+?)/?", repository):
        config.site_url = f"https://{on_github[1].lower()}.github.io/{on_github[2]}/"


def on_files(files: Any, config: Any) -> Any:
    """Add the files from outside docs/ to the site."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to pages of the site, move anchors into the headings below them, and mark up examples at a prompt."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(place, 0.5 if place.startswith("reference/") else 1)}
    if place in SEARCH_WORDS:
        page.meta["tags"] = SEARCH_WORDS[place]  # the search looks at tags first; the pages do not show them
    if place == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    markdown = re.sub(r"\]\(([^)#\s:]+)", lambda match: f"]({_target(match[1], place)}", markdown)
    markdown = re.sub(r'^<a id="([\w-]+)"></a>\n(#.*)$', r"\2 { #\1 }", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^( *)```python\n(?=\1>>>)", r"\1```pycon\n", markdown, flags=re.MULTILINE)
    return re.sub(r" *# doctest: .*$", "", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Let a line of code in a table cell end only at a space, after an underscore or after an opening parenthesis."""
    return _CELL.sub(lambda cell: _CODE.sub(_add_breaks, cell[0]), html)


def _add_breaks(code: re.Match[str]) -> str:
    """Return code with a span around each part that must stay on one line, and `<wbr>` between such parts."""
    words = (_BREAK.split(word) for word in code[0].split(" "))
    return " ".join("<wbr>".join(f"<span>{part}</span>" for part in parts) for parts in words)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Raise an error if a page would load a file from another host."""
    if match := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads a file from another host: {match[0]}...; copy the file to docs/")


def _target(link: str, src_uri: str) -> str:
    """Convert a link between files of the repository to a link between pages of the site."""
    source = posixpath.dirname(SOURCES.get(src_uri, f"docs/{src_uri}"))
    target = posixpath.normpath(posixpath.join(source, link))
    if target not in PAGES and not target.startswith("docs/"):
        return link
    return posixpath.relpath(PAGES.get(target, target.removeprefix("docs/")), posixpath.dirname(src_uri) or ".")

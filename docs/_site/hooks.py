"""What the site's build adds to the Markdown files, which read well in the repository without it."""

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
AS_THEY_ARE = [ROOT / "CITATION.cff", *EXAMPLES, *TABLES]
PAGES = DOCUMENTS | {name: name for name in (path.relative_to(ROOT).as_posix() for path in AS_THEY_ARE)}
"""Files outside docs/ that the site has, too, programs as they are: links to them stay within the site."""
SOURCES = {page: source for source, page in PAGES.items()}
BOOSTS = {"troubleshooting.md": 8, "do-i-need-this.md": 6, "works-with.md": 4, "losses-inside-the-graph.md": 4}
"""How much the search prefers a page to the others."""

_ELSEWHERE = r"""[^>]*?\b(?:src|href)=["']?(?:https?:)?//"""
_LOADED = re.compile(rf"""<(?:script|img|iframe|source|link\b(?![^>]*rel="(?:canonical|prev|next)"))\b{_ELSEWHERE}""")


class Powers(Extension):
    """Markdown in which 2**-126 is a power, and not the beginning of bold text."""

    def extendMarkdown(self, md: Any) -> None:  # noqa: N802, Markdown's own name
        """Go before emphasis and after code."""
        md.inlinePatterns.register(_Power(r"(?<=\d)\*\*(-?\d+)", md), "power", 175)


class _Power(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> Any:  # noqa: N802
        element = Element("sup")
        element.text = m[1].replace("-", "−")
        return element, m.start(0), m.end(0)


def on_config(config: Any) -> Any:
    """Let pages and docstrings have powers."""
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
    """Add the files outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages of the site, name sections by the anchors above them, and mark up examples at a prompt."""
    place = page.file.src_uri
    if place in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[place]}
    if place == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    markdown = re.sub(r"\]\(([^)#\s:]+)", lambda match: f"]({_target(match[1], place)}", markdown)
    markdown = re.sub(r'^<a id="([\w-]+)"></a>\n(#.*)$', r"\2 { #\1 }", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^( *)```python\n(?=\1>>>)", r"\1```pycon\n", markdown, flags=re.MULTILINE)
    return re.sub(r" *# doctest: .*$", "", markdown, flags=re.MULTILINE)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Refuse a page that would fetch something from another host."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}...; keep it in docs/")


def _target(link: str, src_uri: str) -> str:
    """Return a link between two files of the repository, made to lead from page to page of the site."""
    source = posixpath.dirname(SOURCES.get(src_uri, f"docs/{src_uri}"))
    target = posixpath.normpath(posixpath.join(source, link))
    if target not in PAGES and not target.startswith("docs/"):
        return link
    return posixpath.relpath(PAGES.get(target, target.removeprefix("docs/")), posixpath.dirname(src_uri) or ".")

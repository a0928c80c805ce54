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
DOCUMENTS = {name: f"{Path(name).stem.lower()}.md" for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
EXAMPLES = [path for path in sorted(ROOT.glob("examples/**/*")) if path.suffix in (".py", ".ipynb")]
TABLES = sorted((ROOT / "benchmarks").glob("*.md"))
PAGES = DOCUMENTS | {name: name for name in (path.relative_to(ROOT).as_posix() for path in [*EXAMPLES, *TABLES])}
"""Files outside docs/ that the site has, too, programs as they are: links to them stay within the site."""

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
    """Lead links out of docs/ to their pages, and mark up examples as Python at its prompt."""
    markdown = re.sub(r"\]\(((?:\.\./)+[^)#\s]+)", lambda match: f"]({_target(match[1], page.file.src_uri)}", markdown)
    markdown = re.sub(r"^( *)```python\n(?=\1>>>)", r"\1```pycon\n", markdown, flags=re.MULTILINE)
    return re.sub(r" *# doctest: .*$", "", markdown, flags=re.MULTILINE)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Refuse a page that would fetch something from another host."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}...; keep it in docs/")


def _target(link: str, src_uri: str) -> str:
    """Return a relative link, made to lead to the file of the site where a file outside docs/ is in it."""
    folder = posixpath.dirname(src_uri)
    outside = posixpath.normpath(posixpath.join("docs", folder, link))
    return posixpath.relpath(PAGES[outside], folder or ".") if outside in PAGES else link

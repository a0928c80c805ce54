"""The metadata that depends on where the repository is published: the project's URLs, and the links of its README.

Only `[tool.lossscale] repository` in pyproject.toml names the address. The README has relative links, which work in
clones and forks. A package index needs absolute links; this hook makes them.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Add `readme` and `urls` to the metadata of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two fields; without an address there are no URLs, and the links stay relative."""
        root = Path(self.root)
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        repository = project["tool"]["lossscale"]["repository"].rstrip("/")
        readme = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(readme, repository)}
        metadata["urls"] = project_urls(repository)


def project_urls(repository: str) -> dict[str, str]:
    """Return the project's URLs for a package index; without a repository, an empty dict."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/HEAD/docs",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def absolute_links(readme: str, repository: str) -> str:
    """Return the README with links and pictures that work outside of the repository."""
    if not repository:
        return readme
    readme = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/raw/HEAD/", readme)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/blob/HEAD/", readme)

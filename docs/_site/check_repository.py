"""Check the links to the repository: build the site of a copy of the project that names one in pyproject.toml."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/Them/lossscale"
NEEDED = (
    "docs",
    "src",
    "examples",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "mkdocs.yml",
    "pyproject.toml",
)


def main() -> None:
    """Build the site with the address of a repository; exit with a message if a link is missing."""
    with TemporaryDirectory() as folder:
        for name in NEEDED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        project = Path(folder, "pyproject.toml")
        text = project.read_text(encoding="utf-8")
        project.write_text(re.sub(r'^repository = ""', f'repository = "{REPOSITORY}"', text, flags=re.M), "utf-8")
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=folder, check=True)
        page = Path(folder, "site/torch/index.html").read_text(encoding="utf-8")
        sitemap = Path(folder, "site/sitemap.xml").read_text(encoding="utf-8")
    for place, link in (
        (page, f'href="{REPOSITORY}"'),
        (page, f"{REPOSITORY}/edit/HEAD/docs/torch.md"),
        (sitemap, "<loc>https://them.github.io/lossscale/torch/</loc>"),
    ):
        if link not in place:
            sys.exit(f"the site has no {link}")


if __name__ == "__main__":
    main()

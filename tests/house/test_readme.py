"""The README's two commands are the ones that CI runs, and the files it shows are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_ci_runs_the_readmes_test_command():
    """One line, word for word the same in both places."""
    (command,) = re.findall(r"^python3 -m venv .*nox -j 2$", README, flags=re.MULTILINE)
    assert command in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document):
    """Every relative link and picture exists."""
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_project_stands_alone():
    """No file names a place outside the repository."""
    outside = re.compile(r"\.\./" + r"shared|/" + r"work/|/" + r"tmp/")
    for path in [
        *DOCUMENTS,
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("*.*"),
        ROOT / ".ci/run",
    ]:
        if path.is_file() and path.suffix != ".png":
            assert not outside.search(path.read_text()), path

"""The README's two commands are the ones that CI runs, and the files it shows are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^( *)```(\w+).*?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_ci_runs_the_readmes_test_command():
    """One line, word for word the same in both places."""
    (command,) = re.findall(r"^python3 -m venv .*nox -j 2$", README, flags=re.MULTILINE)
    assert command in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_code_fits_the_page(document):
    """A line of code has at most 88 columns, its comment included; what a program prints is wrapped by the page."""
    for indent, kind, block in BLOCK.findall(document.read_text()):
        prompts = ("$ ",) if kind == "console" else (">>> ", "... ") if ">>> " in block else ("",)
        lines = [line.removeprefix(indent) for line in block.splitlines()]
        assert [line for line in lines if line.startswith(prompts) and len(line) > 88] == []


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
        if path.is_file() and path.suffix != ".png" and path.name != ".git":  # which is a file in a worktree
            assert not outside.search(path.read_text()), path

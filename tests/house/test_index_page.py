"""What a package index shows: links that lead somewhere from there, authors, and one place for the address."""

import importlib.util
import re
from pathlib import Path

import pytest

import lossscale_core

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://example.org/them/lossscale"
TARGET = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def hook():
    """Return the module that the build runs."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _metadata(hook, folder, repository):
    """Return the metadata that a build adds where the address of the repository is this one."""
    (place,) = re.findall(r'^repository = "(.*)"', PYPROJECT, flags=re.MULTILINE)
    text = PYPROJECT.replace(f'repository = "{place}"', f'repository = "{repository}"')
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    metadata = {}
    hook.CustomMetadataHook(str(folder), {}).update(metadata)
    return metadata


def test_one_address_makes_every_link_of_the_readme_absolute(hook, tmp_path):
    """Pictures are raw files, documents are pages, and each of them is a file of the repository."""
    metadata = _metadata(hook, tmp_path, f"{ADDRESS}/")
    targets = TARGET.findall(metadata["readme"]["text"])
    assert len(targets) == len(TARGET.findall(README)) > 10
    for is_picture, target in targets:
        start = f"{ADDRESS}/raw/HEAD/" if is_picture else f"{ADDRESS}/blob/HEAD/"
        assert target.startswith(start)
        assert (ROOT / target.removeprefix(start).partition("#")[0]).exists(), target
    assert metadata["urls"]["Issues"] == f"{ADDRESS}/issues"


def test_without_an_address_nothing_is_invented(hook, tmp_path):
    """The README stays as it is, and has no URLs."""
    metadata = _metadata(hook, tmp_path, "")
    assert metadata["readme"] == {"content-type": "text/markdown", "text": README}
    assert metadata["urls"] == {}


def test_the_version_is_written_once():
    """In the core's `__init__.py`, from which the build reads it; the changelog has it when it is released."""
    version = lossscale_core.__version__
    files = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = [path for path in files if path.suffix in (".md", ".py", ".toml", ".cff", ".yml")]
    holders = [path.name for path in named if re.search(rf"\b{re.escape(version)}\b", path.read_text(encoding="utf-8"))]
    assert set(holders) - {"CHANGELOG.md"} == {"__init__.py"}

"""Facts that two files of the project hold are equal: a command, versions, a table, links."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


README, PYPROJECT = map(_text, ("README.md", "pyproject.toml"))
GROUPS, PROJECT = (tomllib.loads(PYPROJECT)[name] for name in ("dependency-groups", "project"))
EXTRAS = PROJECT["optional-dependencies"]
FRAMEWORKS = [name for name in EXTRAS if f"{name}-test" in GROUPS]
FLOORS = [*PROJECT["dependencies"], *(floor for name in FRAMEWORKS for floor in EXTRAS[name])]
ADDRESS = "https://example.org/them/lossscale"
TARGET = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


def test_ci_runs_the_readmes_test_command():
    """CI runs the test command of the README, word for word."""
    (command,) = re.findall(r"^python3 -m venv .*nox -j 2$", README, flags=re.MULTILINE)
    assert command in _text(".ci/run").splitlines()


def test_the_project_stands_alone():
    """No file names a place outside the repository."""
    outside = re.compile(r"\.\./" + r"shared|/" + r"work/|/" + r"tmp/")
    code = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / ".ci/run"]
    for path in [*ROOT.glob("*.*"), *ROOT.glob("docs/**/*.md"), *code]:
        if path.is_file() and path.suffix != ".png" and path.name != ".git":  # which is a file in a worktree
            assert not outside.search(path.read_text()), path


@pytest.mark.parametrize("floor", FLOORS)
def test_a_requirement_is_one_floor(floor: str):
    """A requirement is a name, `>=` and a version, which `nox -s oldest` installs."""
    name, version = re.fullmatch(r"([a-z-]+)>=([\d.]+)", floor).groups()
    pins = re.findall(r"^([a-z-]+?)(?:-cpu)?==([\d.]+?)(?:\.\*)?$", _text("tests/versions/oldest.txt"), re.MULTILINE)
    assert (name, version) in pins


def _metadata(folder, repository):
    """Return the metadata that a build adds where the address of the repository is this one."""
    (place,) = re.findall(r'^repository = "(.*)"', PYPROJECT, flags=re.MULTILINE)
    text = PYPROJECT.replace(f'repository = "{place}"', f'repository = "{repository}"')
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    metadata = {}
    runpy.run_path(str(ROOT / "hatch_build.py"))["CustomMetadataHook"](str(folder), {}).update(metadata)
    return metadata


def test_published_links_are_absolute(tmp_path):
    """With an address, each link of the published README leads to a file of the repository, a picture to a raw file."""
    metadata = _metadata(tmp_path, f"{ADDRESS}/")
    targets = TARGET.findall(metadata["readme"]["text"])
    assert len(targets) == len(TARGET.findall(README)) > 10
    for is_picture, target in targets:
        start = f"{ADDRESS}/raw/HEAD/" if is_picture else f"{ADDRESS}/blob/HEAD/"
        assert target.startswith(start)
        assert (ROOT / target.removeprefix(start).partition("#")[0]).exists(), target
    assert metadata["urls"]["Issues"] == f"{ADDRESS}/issues"


def test_no_address_changes_no_link(tmp_path):
    """Without an address, the README is published as it is, and the metadata have no URLs."""
    metadata = _metadata(tmp_path, "")
    assert metadata["readme"] == {"content-type": "text/markdown", "text": README}
    assert metadata["urls"] == {}


def test_the_page_has_the_tools_table():
    """The page of migration has the table that `python docs/_site/migrating_tables.py` writes."""
    page = _text("docs/migrating.md")
    assert runpy.run_path(str(ROOT / "docs/_site/migrating_tables.py"))["drawn"](page) == page

"""The files of the project say what it does: the README, versions, workflows, metadata."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


README, NOXFILE, PYPROJECT = map(_text, ("README.md", "noxfile.py", "pyproject.toml"))
GROUPS, PROJECT = (tomllib.loads(PYPROJECT)[name] for name in ("dependency-groups", "project"))
EXTRAS = PROJECT["optional-dependencies"]
FRAMEWORKS = [name for name in EXTRAS if f"{name}-test" in GROUPS]
FLOORS = [*PROJECT["dependencies"], *(floor for name in FRAMEWORKS for floor in EXTRAS[name])]
ADDRESS = "https://example.org/them/lossscale"
TARGET = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# -- the README --------------------------------------------------------------------------------------------------------


def test_ci_runs_the_readmes_test_command():
    """CI runs the test command of the README, word for word."""
    (command,) = re.findall(r"^python3 -m venv .*nox -j 2$", README, flags=re.MULTILINE)
    assert command in _text(".ci/run").splitlines()


def test_the_project_stands_alone():
    """No file names a place outside the repository."""
    outside = re.compile(r"\.\./" + r"shared|/" + r"work/|/" + r"tmp/")
    code = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / ".ci/run"]
    for path in [*ROOT.glob("*.*"), *DOCUMENTS, *code]:
        if path.is_file() and path.suffix != ".png" and path.name != ".git":  # which is a file in a worktree
            assert not outside.search(path.read_text()), path


# -- how others join ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_public_workflows_pin_their_actions(name):
    """The public workflows pin each action by commit, because a tag can be moved to other code."""
    used = re.findall(r"uses: (.+)$", _text(f".github/workflows/{name}"), flags=re.MULTILINE)
    assert used
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", each) for each in used)


# -- versions ----------------------------------------------------------------------------------------------------------


def _pins(session):
    """Return the versions that a session installs, without what stands for all patches of one."""
    lines = _text(f"tests/versions/{session}.txt").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {name.removesuffix("-cpu"): version.removesuffix(".*") for name, version in pins.items()}


@pytest.mark.parametrize("floor", FLOORS)
def test_a_requirement_is_one_floor(floor: str):
    """A requirement is a name, `>=` and a version, which `nox -s oldest` installs."""
    name, version = re.fullmatch(r"([a-z-]+)>=([\d.]+)", floor).groups()
    assert _pins("oldest")[name] == version


def test_each_declared_python_is_run():
    """A session runs each Python version of the classifiers, of which the lowest is required."""
    declared = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if ":: Python :: 3." in text]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert set(re.findall(r'python="(3\.\d+)"', NOXFILE)) == set(declared)


@pytest.mark.parametrize("session", ["oldest", "kaggle", "colab", "tests"])
def test_the_page_has_the_pinned_versions(session):
    """The row of a session in the table of versions has the versions that the session pins."""
    ((python, versions),) = re.findall(
        rf"^\| `{session}` \| (3\.\d+), (.*) \|$", _text("docs/works-with.md"), re.MULTILINE
    )
    pins = dict(re.findall(r'"([a-z]+)\S*==([\d.]+?)(?:\.\*)?"', NOXFILE)) if session == "tests" else _pins(session)
    assert {pins[name] for name in ("torch", "jax", "optax", "flax", "tensorflow", "keras")} <= {
        *re.split(r"[^\d.]+", versions)
    }
    assert session == "tests" or re.search(rf'python="{python}"\)\n.*\ndef {session}\(', NOXFILE)


# -- what a package index shows ----------------------------------------------------------------------------------------


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


def test_published_links_are_absolute(hook, tmp_path):
    """With an address, each link of the published README leads to a file of the repository, a picture to a raw file."""
    metadata = _metadata(hook, tmp_path, f"{ADDRESS}/")
    targets = TARGET.findall(metadata["readme"]["text"])
    assert len(targets) == len(TARGET.findall(README)) > 10
    for is_picture, target in targets:
        start = f"{ADDRESS}/raw/HEAD/" if is_picture else f"{ADDRESS}/blob/HEAD/"
        assert target.startswith(start)
        assert (ROOT / target.removeprefix(start).partition("#")[0]).exists(), target
    assert metadata["urls"]["Issues"] == f"{ADDRESS}/issues"


def test_no_address_changes_no_link(hook, tmp_path):
    """Without an address, the README is published as it is, and the metadata have no URLs."""
    metadata = _metadata(hook, tmp_path, "")
    assert metadata["readme"] == {"content-type": "text/markdown", "text": README}
    assert metadata["urls"] == {}

"""Every declared version, and every version that the docs call tried, is one that a session of `noxfile.py` runs."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
FRAMEWORKS = [name for name in EXTRAS if f"{name}-test" in PYPROJECT["dependency-groups"]]
FLOORS = [*PROJECT["dependencies"], *(floor for name in FRAMEWORKS for floor in EXTRAS[name])]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def _pins(session):
    """Return the versions that a session installs, without what stands for all patches of one."""
    lines = (ROOT / f"tests/versions/{session}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {name.removesuffix("-cpu"): version.removesuffix(".*") for name, version in pins.items()}


def test_the_frameworks_are_those_of_the_sessions():
    """Each extra of a framework has a group of packages for its tests, and is in `FRAMEWORKS` and in `all`."""
    (pins,) = (node.value for node in ast.parse(NOXFILE).body if ast.unparse(node).startswith("FRAMEWORKS = "))
    assert [key.value for key in pins.keys] == ["numpy", *FRAMEWORKS]
    assert EXTRAS["all"] == [f"lossscale[{','.join([*FRAMEWORKS, 'demo'])}]"]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_requirement_is_one_floor(floor: str):
    """A name, `>=` and a version, which `nox -s oldest` installs."""
    name, version = re.fullmatch(r"([a-z-]+)>=([\d.]+)", floor).groups()
    assert _pins("oldest")[name] == version


def test_the_pythons_declared_are_run():
    """Of the classifiers, the lowest is `requires-python`'s, and a session runs each."""
    declared = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if ":: Python :: 3." in text]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert set(re.findall(r'python="(3\.\d+)"', NOXFILE)) == set(declared)


def test_the_page_lists_the_versions_that_sessions_run():
    """Each row of the table of versions is a session: what it pins, and of the newest releases those that work."""
    page = (ROOT / "docs/works-with.md").read_text(encoding="utf-8")
    header, _, *rows = re.findall(r"^\|.+\|$", page.split("## Versions")[1].split("\n## ")[0], flags=re.MULTILINE)
    names = [each.strip().lower() for each in re.split("[|,]", header.strip("|"))]
    table = {}
    for row in rows:
        session, *cells = (each.strip() for each in re.split("[|,]", row.strip("|")))
        table[re.search(r"`(\w+)`", session)[1]] = dict(zip(names[1:], cells, strict=True))
    assert list(table) == ["oldest", "kaggle", "colab", "tests", "newest", "smoke"]
    pythons = {name: version for version, name in re.findall(r'python="(3\.\d+)"\)\n.*\ndef (\w+)', NOXFILE)}
    for session in ("oldest", "kaggle", "colab"):
        pins = _pins(session) | {"python": pythons[session]}
        pins["pytorch"] = pins["torch"]
        assert table[session] == {name: pins[name] for name in names[1:]}
    pinned = dict(re.findall(r'"([a-z-]+)==([\d.]+?)(?:\.\*)?"', NOXFILE))
    pinned |= {"pytorch": pinned["torch"], "tensorflow": pinned["tensorflow-cpu"]}
    assert table["tests"].items() >= {name: pinned[name] for name in names[3:]}.items()
    newest = table["newest"]
    assert newest["python"] == pythons["newest"]
    assert table["smoke"] == newest | {"python": pythons["smoke"], "tensorflow": "–", "keras": "–"}

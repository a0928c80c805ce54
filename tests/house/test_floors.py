"""Every declared version is one that a session of `noxfile.py` runs."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("floor", [*PROJECT["dependencies"], *EXTRAS["torch"], *EXTRAS["jax"], *EXTRAS["tensorflow"]])
def test_a_requirement_is_one_floor(floor: str):
    """A name, `>=` and a version: what `nox -s oldest` turns into a pin."""
    assert re.fullmatch(r"[a-z-]+>=[\d.]+", floor)


def test_the_pythons_declared_are_run():
    """Of the classifiers, the lowest is `requires-python`'s, and `nox -s versions` runs the others."""
    lowest, *newer = (text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if ":: Python :: 3." in text)
    assert PROJECT["requires-python"] == f">={lowest}"
    assert f"python={str(newer).replace(chr(39), chr(34))}" in (ROOT / "noxfile.py").read_text(encoding="utf-8")

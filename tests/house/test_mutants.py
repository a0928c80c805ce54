"""The lists that `nox -s mutants` goes by name what is there."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.house.plan import PLAN, TESTS, own_tests

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", PLAN)
def test_each_module_names_its_tests(package):
    """Each module of a package has a row of test files, and each of these files exists."""
    files = (ROOT / "src" / package.replace(".", "/")).glob("*.py")
    table = own_tests(package)
    assert {*table} == {"*", *(path.stem for path in files)}
    named = {each.partition("@")[0] for files in table.values() for each in files}
    missing = [each for each in named if not (ROOT / f"tests/{each.replace('/', '/test_')}.py").is_file()]
    assert not missing


def test_each_equivalent_mutant_is_one_of_the_code_and_has_a_proof():
    """The lines before the mutation are in the file as it is, and the proof is a sentence."""
    assert {*TESTS} == {*PLAN}
    listed = tomllib.loads((ROOT / "tests/mutants/equivalent.toml").read_text(encoding="utf-8")).get("mutant", [])
    for each in listed:
        assert each["before"] in " ".join((ROOT / each["path"]).read_text(encoding="utf-8").split()), each
        assert each["after"] != each["before"]
        assert re.fullmatch(r"[^\n]+\.", each["proof"]), each

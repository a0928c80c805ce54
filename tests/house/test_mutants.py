"""The lists that `nox -s mutants` goes by name what is there."""

from pathlib import Path

import pytest

from tests.house.plan import PLAN, own_tests

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

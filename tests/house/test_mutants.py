"""The list of test files that `nox -s mutants` reads names files and modules that exist."""

import pytest

from tests.mutants.own import PACKAGES, ROOT, own_tests


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_names_its_tests(package):
    """Each module has a test file of its own name or a row of existing files, and each row is of a module."""
    table = own_tests(package)
    assert {*table} - {"*"} == {path.stem for path in (ROOT / "src" / package.replace(".", "/")).glob("*.py")}
    named = {each.partition("@")[0] for files in table.values() for each in files}
    missing = [each for each in named if not (ROOT / f"tests/{each.replace('/', '/test_')}.py").is_file()]
    assert not missing

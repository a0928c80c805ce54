"""Public names: `__all__` is complete, and the reference shows each name; the build of the site checks the reverse."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import lossscale_core.testing

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "src").rglob("*.py") if "\n__all__ = [" in path.read_text(encoding="utf-8"))
PAGES = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md")]
SHOWN = {name for page in PAGES for name in re.findall(r"^::: (?:\w+\.)*(\w+)$", page, re.MULTILINE)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_the_reference_has_each_name(path):
    """The reference shows each name of a module's `__all__`, except modules in it."""
    (names,) = re.findall(r"^__all__ = (\[.*?\])", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    modules = {child.name.partition(".")[0] for child in path.parent.iterdir()}
    assert {*ast.literal_eval(names)} - modules - SHOWN == set()


def test_all_lists_the_public_names():
    """`__all__` of the core lists each public attribute."""
    public = {name for name in dir(lossscale_core) if not name.startswith("_") or name == "__version__"}
    assert public == {*lossscale_core.__all__}


def test_public_classes_name_their_package():
    """A pickle of a policy or state names the public package, not a private module that may be renamed."""
    for name in lossscale_core.__all__:
        value = getattr(lossscale_core, name)
        if inspect.isclass(value):
            assert value.__module__ == "lossscale_core", name

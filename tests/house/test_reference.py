"""The reference shows every public name. That what it shows exists is for the build of the site to prove."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
RUN = "lossscale"  # run, not imported, except for its translator: the page of the command describes it


def _public_modules() -> dict[str, Path]:
    """Return every module that a user may import, by its dotted name."""
    modules = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        is_private = any(part.startswith("_") for part in name.split("."))
        if not is_private and (parts[0] != RUN or name == "lossscale.other_tools"):
            modules[name] = path
    return modules


def _public_names(path: Path) -> list[str]:
    """Return a module's `__all__`, or where it has none the functions and classes without an underscore."""
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return [
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def _homes(path: Path) -> dict[str, str]:
    """Return the full names of the public objects that a module imports from another package."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if node.module in MODULES and (alias.name == "__version__" or not alias.name.startswith("_"))
    }


MODULES = _public_modules()
SHOWN = {
    name
    for page in (ROOT / "docs/reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
}


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_each_name(module):
    """The reference shows each public name of a module, in its module or in the module that defines it."""
    homes = _homes(MODULES[module])
    names = {homes.get(name, f"{module}.{name}") for name in _public_names(MODULES[module])}
    assert names, f"{module} offers nothing"
    assert names - SHOWN - MODULES.keys() == set()

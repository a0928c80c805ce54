"""The modules import each other by the layers of `plan.py`, and little from outside."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.plan import ADAPTERS, PLAN

SRC = Path(__file__).parents[2] / "src"
NETWORK = {"socket", "ssl", "urllib", "http", "ftplib", "smtplib", "xmlrpc"}
"""The parts of the standard library that open connections: no module imports them."""
IMPORTING_CALLS = {"import_module", "__import__", "find_spec", "run_module"}
PACKAGES = ["lossscale", "lossscale_core", *ADAPTERS]
CORE_REQUIRES = {"numpy", "array_api_compat"}
PARTS = {
    "lossscale": {
        "_recording": {"torch", "lossscale_torch"},
        "cli": {"click", "matplotlib", "numpy", "torch"},
        "demo": {"numpy", "threadpoolctl"},
    },
    "lossscale_core": {
        "testing": {"hypothesis", "array_api_strict", *CORE_REQUIRES},
        "_state": {"typing_extensions", *CORE_REQUIRES},  # for types
    },
}
"""The imports of parts of a package, where they are not those of all of its modules."""


def _module_of(path: Path, package: str) -> str:
    """Return the module or subpackage of a package in which a file is: `_policy`, `demo`, `__init__`."""
    return path.relative_to(SRC / package.replace(".", "/")).parts[0].removesuffix(".py")


def _nodes(path: Path, only_at_top: bool = False) -> Iterator[ast.AST]:
    """Return what a file consists of; `only_at_top` leaves out what runs when a function is called."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        yield node
        if not (only_at_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _imports(path: Path, only_at_top: bool = False) -> set[str]:
    """Return the dotted names that a file imports, at its top or within a function, by a statement or by a call.

    `from package import module` is `package.module`; a call with a name that is computed is `(computed)`.
    """
    names = set()
    for node in _nodes(path, only_at_top):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTING_CALLS:
            name = node.args[0]
            names.add(name.value if isinstance(name, ast.Constant) else "(computed)")
    return names


def _files(package: str) -> list[Path]:
    return sorted((SRC / package.replace(".", "/")).rglob("*.py"))


def _module_imports(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports at its top."""
    found: dict[str, set[str]] = {_module_of(path, package): set() for path in _files(package)}
    for path in _files(package):
        module = _module_of(path, package)
        for name in _imports(path, only_at_top=True):
            if name == package or name.startswith(f"{package}."):
                target = name[len(package) + 1 :].partition(".")[0]
                found[module] |= {target if target in found else "__init__"} - {module}
    return found


def _outside(path: Path, *packages: str) -> set[str]:
    """Return the packages that a file imports besides these and the standard library without its network."""
    usual = sys.stdlib_module_names - NETWORK
    return {name.partition(".")[0] for name in _imports(path)} - usual - {*packages}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__version__" for part in name.split("."))


@pytest.mark.parametrize("package", PLAN)
def test_a_module_imports_those_of_lower_layers(package):
    """So there is no circle; and no module is missing in the plan: add yours to a layer above all that it imports."""
    imports, layers = _module_imports(package), [line.split() for line in PLAN[package].strip().splitlines()]
    assert sorted(module for layer in layers for module in layer) == sorted(imports)
    lower = set()
    for layer in layers:
        assert [(module, imports[module] - lower) for module in layer if imports[module] - lower] == []
        lower |= {*layer}


def test_every_package_is_in_the_plan():
    """Also subpackages with several modules."""
    folders = {path.parent for path in SRC.rglob("*.py") if path.name != "__init__.py"}
    assert {str(folder.relative_to(SRC)).replace("/", ".") for folder in folders} <= PLAN.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_little_besides_the_core(package):
    """No adapter imports another one or another framework, not within a function either; some parts need more."""
    assert {path.name for path in SRC.iterdir() if path.is_dir()} <= {*PACKAGES}
    usual = ADAPTERS.get(package, CORE_REQUIRES if package == "lossscale_core" else set())
    more = {"(computed)"} if package == "lossscale" else set()
    for path in _files(package):
        allowed = PARTS.get(package, {}).get(_module_of(path, package), usual) | more
        assert _outside(path, package, "lossscale_core") <= allowed, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_private_name_of_another(package):
    """What a package of this project needs of another one, it finds under a public name."""
    others = {*PACKAGES} - {package}
    for path in _files(package):
        for name in _imports(path):
            assert name.partition(".")[0] not in others or not _is_private(name), (path, name)

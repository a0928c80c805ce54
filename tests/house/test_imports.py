"""The modules import each other only as `plan.py` says."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.plan import ADAPTERS, PLAN

SRC = Path(__file__).parents[2] / "src"
STANDARD_LIBRARY = sys.stdlib_module_names
IMPORTING_CALLS = {"import_module", "__import__", "find_spec", "run_module"}

CORE_REQUIRES = {"numpy", "array_api_compat"}
REQUIRED_BY_TESTS = {
    "testing": {"hypothesis", "array_api_strict"},
    "_state": {"typing_extensions"},
}  # or types
PACKAGES = ["lossscale", "lossscale_core", *ADAPTERS]


COMMAND = {
    "_recording": {"torch", "lossscale_torch"},
    "cli": {"click", "matplotlib", "numpy", "torch"},
    "demo": {"numpy", "threadpoolctl"},
}
"""The imports of the parts of the command in addition to the core; the other parts have none."""


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


def _module_imports(package: str, only_at_top: bool = False) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports."""
    found: dict[str, set[str]] = {_module_of(path, package): set() for path in _files(package)}
    for path in _files(package):
        module = _module_of(path, package)
        for name in _imports(path, only_at_top):
            if name == package or name.startswith(f"{package}."):
                target = name[len(package) + 1 :].partition(".")[0]
                found[module] |= {target if target in found else "__init__"} - {module}
    return found


def _planned(package: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return for each module in the plan what it imports at its top, and what within a function."""
    planned = {}
    for line in filter(str.strip, re.sub(r"\n {12}", " ", PLAN[package]).split("\n")):
        modules, _, names = line.partition(":")
        late = set(re.findall(r"\((\w+)\)", names))
        planned |= dict.fromkeys(modules.split(), ({*re.findall(r"\w+", names)} - late, late))
    return planned


def _outside(path: Path, *packages: str) -> set[str]:
    """Return the packages that a file imports besides the standard library and these."""
    return {name.partition(".")[0] for name in _imports(path)} - STANDARD_LIBRARY - {*packages}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__version__" for part in name.split("."))


@pytest.mark.parametrize("package", PLAN)
def test_a_package_imports_as_planned(package):
    """No import more and none fewer, and no module is missing in the plan; add yours there."""
    at_top, anywhere = _module_imports(package, only_at_top=True), _module_imports(package)
    assert {name: (at_top[name], anywhere[name] - at_top[name]) for name in anywhere} == _planned(package)


def test_every_package_is_in_the_plan():
    """Also subpackages with several modules."""
    folders = {path.parent for path in SRC.rglob("*.py") if path.name != "__init__.py"}
    assert {str(folder.relative_to(SRC)).replace("/", ".") for folder in folders} <= PLAN.keys()


@pytest.mark.parametrize("package", PLAN)
def test_no_package_has_an_import_circle(package):
    """Its modules can be put in an order; what a function imports when it is called does not count."""
    list(graphlib.TopologicalSorter(_module_imports(package, only_at_top=True)).static_order())


def test_only_the_report_logs():
    """All else in the core is pure."""
    logging = {path.name for path in _files("lossscale_core") if "logging" in _imports(path)}
    assert logging == {"_report.py"}


@pytest.mark.parametrize("path", _files("lossscale_core"), ids=lambda path: path.stem)
def test_the_core_needs_numpy_and_array_api_compat_only(path):
    """No adapter and no framework is imported, not within a function either; some need more to test."""
    more = REQUIRED_BY_TESTS.get(_module_of(path, "lossscale_core"), set())
    assert _outside(path, "lossscale_core") <= CORE_REQUIRES | more


@pytest.mark.parametrize("package", [*ADAPTERS, "lossscale"])
def test_a_package_imports_little_besides_the_core(package):
    """An adapter imports no other one, no other framework and not the command; each part of that, what it needs."""
    assert {path.name for path in SRC.iterdir() if path.is_dir()} <= {*PACKAGES}
    for path in _files(package):
        allowed = ADAPTERS.get(package) or COMMAND.get(_module_of(path, package), set()) | {"(computed)"}
        assert _outside(path, package, "lossscale_core") <= allowed, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_private_name_of_another(package):
    """What a package of this project needs of another one, it finds under a public name."""
    others = {*PACKAGES} - {package}
    for path in _files(package):
        for name in _imports(path):
            assert name.partition(".")[0] not in others or not _is_private(name), (path, name)


POLICIES = {"BaseScaling", "NoScaling", "FixedScaling", "DynamicScaling", "ScalingPolicy"}


def _is_policy(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in {"policy", "_policy"}


def test_only_the_base_module_asks_for_the_type_of_a_policy():
    """Only `_base` asks for a policy's type or whether it has a member; elsewhere `BaseScaling.of` knows."""
    for path in (path for path in SRC.rglob("*.py") if path.name != "_base.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                if node.func.id in {"getattr", "hasattr"}:
                    assert not _is_policy(node.args[0]), (path, node.lineno)
                if node.func.id == "isinstance":
                    names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                    assert not names & POLICIES, (path, node.lineno)


FACTORS = {"growth_factor", "backoff_factor"}
BOUNDS = {"min_scale", "max_scale"}


def _moves_a_scale(node: ast.AST) -> bool:
    """Return whether an expression multiplies by a policy's factor what may be the scale of a state.

    A bound of a policy is not: its product with a factor says how far the rule may go.
    """
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    names = {each.attr for each in (node.left, node.right) if isinstance(each, ast.Attribute)}
    return bool(names & FACTORS) and not names & BOUNDS


def test_the_factors_are_applied_in_one_file():
    """Only `_policy` multiplies a scale by a growth or backoff factor.

    torch's kernel does, too, for a state on a device: `tests/adapters/test_torch_states.py` compares every bit.
    """
    for path in SRC.rglob("*.py"):
        for node in _nodes(path):
            assert path.name == "_policy.py" or not _moves_a_scale(node), (path, getattr(node, "lineno", None))
            if isinstance(node, ast.Attribute) and node.attr == "_amp_update_scale_":
                assert path.relative_to(SRC).as_posix() == "lossscale_torch/_state.py", (path, node.lineno)

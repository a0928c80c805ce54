"""The house's arrows, read off the imports: who may import whom. What is not drawn here is not allowed."""

import ast
import graphlib
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"
STANDARD_LIBRARY = sys.stdlib_module_names
IMPORTING_CALLS = {"import_module", "__import__", "find_spec", "run_module"}

CORE = {
    "errors": set(),
    "_state": {"_settings"},
    "tree": set(),
    "_finite": set(),
    "messages": set(),
    "files": {"messages", "errors"},
    "_settings": {"messages", "errors"},
    "_arrays": {"tree", "_finite", "_state"},
    "_base": {"_settings", "_arrays", "_state", "errors"},
    "_policy": {"_base", "_settings", "_arrays", "_state"},
    "_guard": {"_arrays", "_settings", "_state", "errors"},
    "_config": {"files", "_base", "_policy", "_settings", "messages", "errors"},
    "_schema": {"_base", "_settings"},
    "_checkpoint": {"_base", "_config", "_guard", "_policy", "_settings", "_state", "_voice", "messages", "errors"},
    "_diagnosis": {"_base", "_guard", "_settings", "_state"},
    "_voice": {"_base", "_config", "_diagnosis", "_state", "errors"},
    "_report": {"_base", "_config", "_diagnosis", "_guard", "_settings", "_state", "_voice", "errors"},
    "_range_picture": set(),
    "_range_records": set(),
    "_range_search": {"_policy", "_range_records", "_settings"},
    "_range": {"files", "_range_picture", "_range_records", "_range_search"},
    "_strategies": {"_base", "_settings"},
    "dialects": {"_base", "_checkpoint", "_config", "files", "_settings", "_state", "messages", "errors"},
    "_placement": {"_arrays", "_base", "_config", "_policy", "_state"},
    "testing": {"_base", "_checkpoint", "_config", "_guard", "_policy", "_settings", "_state", "_strategies", "tree"},
    "__main__": set(),
}
CORE_REQUIRES = {"numpy", "array_api_compat"}
FOR_WHO_TESTS = {"_strategies": {"hypothesis"}, "testing": {"hypothesis"}, "_state": {"typing_extensions"}}  # or types
ADAPTERS = {
    "lossscale_torch": {"torch"},
    "lossscale_jax": {"jax", "optax"},
    "lossscale_tf": {"tensorflow", "keras", "tf_keras"},
}
PACKAGES = ["lossscale", "lossscale_core", *ADAPTERS]


class Drawn(NamedTuple):
    """What a room of the command may import besides the core: other rooms of it, and other packages."""

    rooms: set[str]
    outside: set[str]


COMMAND = {
    "__init__": Drawn(set(), set()),
    "_install": Drawn(set(), set()),
    "__main__": Drawn({"_install", "cli"}, set()),
    "demo": Drawn(set(), {"numpy", "sklearn", "threadpoolctl", *ADAPTERS}.union(*ADAPTERS.values())),
    "tracing": Drawn(set(), {"torch", "lossscale_torch"}),
    "cli": Drawn(
        {"_install", "demo", "tracing"},
        {"click", "matplotlib", "numpy", "rich", "torch", "tensorboard"},
    ),
}


def _room(path: Path) -> str:
    """Return a file's place in its package: `_policy`, `demo`, `__init__`."""
    return path.relative_to(SRC).parts[1].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, at its top or within a function, by a statement or by a call.

    `from package import module` is `package.module`; a call with a name that is computed is `(computed)`.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
    return sorted((SRC / package).rglob("*.py"))


def _arrows(package: str) -> dict[str, set[str]]:
    """Return which rooms of a package each of its rooms imports."""
    rooms = {_room(path) for path in _files(package)}
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for path in _files(package):
        for name in _imports(path):
            parts = [*name.split("."), "__init__"]
            if parts[0] == package:
                target = parts[1] if parts[1] in rooms else "__init__"
                arrows[_room(path)] |= {target} - {_room(path)}
    return arrows


def _outside(path: Path, *packages: str) -> set[str]:
    """Return the packages that a file imports besides the standard library and these."""
    return {name.partition(".")[0] for name in _imports(path)} - STANDARD_LIBRARY - {*packages}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__version__" for part in name.split("."))


def test_the_core_has_only_the_arrows_drawn():
    """Each room imports what it may, and no room is without a line in the drawing."""
    arrows = _arrows("lossscale_core")
    assert arrows.keys() == CORE.keys() | {"__init__"}
    for room, allowed in CORE.items():
        assert arrows[room] <= allowed, room
    assert "__main__" not in arrows["__init__"]


@pytest.mark.parametrize("package", ["lossscale", "lossscale_core"])
def test_no_package_has_an_import_circle(package):
    """The rooms of the core, and those of the command, can be put in an order."""
    list(graphlib.TopologicalSorter(_arrows(package)).static_order())


@pytest.mark.parametrize("path", _files("lossscale_core"), ids=lambda path: path.stem)
def test_the_core_stands_on_numpy_and_array_api_compat(path):
    """No adapter and no framework is imported, not within a function either; hypothesis serves who tests with it."""
    assert _outside(path, "lossscale_core") <= CORE_REQUIRES | FOR_WHO_TESTS.get(_room(path), set())


def test_the_command_has_only_the_arrows_drawn():
    """It may import everything by its public name."""
    arrows = _arrows("lossscale")
    assert arrows.keys() == COMMAND.keys()
    for path in _files("lossscale"):
        drawn = COMMAND[_room(path)]
        assert arrows[_room(path)] <= drawn.rooms, path
        assert _outside(path, "lossscale", "lossscale_core") - {"(computed)"} <= drawn.outside, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_private_name_of_another(package):
    """What a package of this project needs of another one, it finds under a public name."""
    others = {*PACKAGES} - {package}
    for path in _files(package):
        for name in _imports(path):
            assert name.partition(".")[0] not in others or not _is_private(name), (path, name)


def test_adapters_use_their_own_framework():
    """No adapter imports another adapter or another framework."""
    assert {path.name for path in SRC.iterdir() if path.is_dir()} <= {*PACKAGES}
    for package, frameworks in ADAPTERS.items():
        for path in _files(package):
            assert _outside(path, "lossscale_core", package) <= frameworks, path


@pytest.mark.parametrize("folder", ["src/lossscale_core", *(f"src/{package}" for package in ADAPTERS), "examples"])
def test_nothing_imports_the_command(folder):
    """`lossscale` is what a person runs, and no package needs it."""
    for path in (SRC.parent / folder).rglob("*.py"):
        assert "lossscale" not in {name.partition(".")[0] for name in _imports(path)}, path


POLICIES = {"BaseScaling", "NoScaling", "FixedScaling", "DynamicScaling", "TolerantScaling", "ScalingPolicy"}


def _is_policy(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in {"policy", "_policy"}


def test_nobody_asks_a_policy_what_it_is():
    """Only `_base` asks for a policy's type or whether it has a member; elsewhere `BaseScaling.of` knows."""
    for path in (path for path in SRC.rglob("*.py") if path.name != "_base.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                if node.func.id in {"getattr", "hasattr"}:
                    assert not _is_policy(node.args[0]), (path, node.lineno)
                if node.func.id == "isinstance":
                    names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                    assert not names & POLICIES, (path, node.lineno)


def test_the_factors_are_applied_in_one_file():
    """Only `_policy` multiplies a scale by a growth or backoff factor."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                factors = {side.attr for side in (node.left, node.right) if isinstance(side, ast.Attribute)}
                if factors & {"growth_factor", "backoff_factor"}:
                    assert path.name == "_policy.py", path

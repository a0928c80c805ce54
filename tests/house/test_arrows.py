"""The house's arrows, read off the imports: who may import whom. What is not drawn here is not allowed."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
STANDARD_LIBRARY = sys.stdlib_module_names

CORE = {
    "errors": set(),
    "_state": set(),
    "tree": set(),
    "_finite": set(),
    "_words": set(),
    "_files": {"_words", "errors"},
    "_trace_file": {"_files", "_words", "errors"},
    "_settings": {"_words", "errors"},
    "_arrays": {"tree", "_finite", "_state"},
    "_policy": {"_settings", "_arrays", "_state"},
    "_config": {"_files", "_policy", "_settings", "_words", "errors"},
    "_schema": {"_config", "_policy", "_settings"},
    "_checkpoint": {"_config", "_policy", "_settings", "_state", "_words", "errors"},
    "_report": {"_config", "_policy", "_settings", "_state", "errors"},
    "_range_picture": set(),
    "_range": {"_policy", "_range_picture", "_settings"},
    "_strategies": {"_config", "_policy", "_settings"},
    "dialects": {"_checkpoint", "_config", "_files", "_policy", "_settings", "_words", "errors"},
    "_foreign_files": {"_files", "_words", "dialects", "errors"},
    "_placement": {"_config"},
    "testing": {"_checkpoint", "_config", "_policy", "_settings", "_state", "_strategies", "tree"},
}
COMMAND = {"cli", "demo", "__main__"}
THIRD_PARTY = {"numpy", "array_api_compat"}
EXTRA = {
    **{"_strategies": {"hypothesis"}, "testing": {"hypothesis"}},
    **{"_foreign_files": {"torch"}, "_range_picture": {"matplotlib"}},
}
DEMO_EXTRA = {"click", "matplotlib", "rich", "sklearn", "threadpoolctl"}
ADAPTERS = {
    "lossscale_torch": {"torch"},
    "lossscale_jax": {"jax"},
    "lossscale_tf": {"tensorflow", "keras", "tf_keras"},
}


def _room(path: Path) -> str:
    """Return a file's place in its package: `_policy`, `demo`, `__init__`."""
    return path.relative_to(SRC).parts[1].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, `from package import module` as `package.module`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _core_arrows() -> dict[str, set[str]]:
    """Return which rooms of the core each of its rooms imports."""
    rooms = {_room(path) for path in (SRC / "lossscale_core").rglob("*.py")}
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for path in (SRC / "lossscale_core").rglob("*.py"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "lossscale_core":
                target = parts[1] if parts[1] in rooms else "__init__"
                arrows[_room(path)] |= {target} - {_room(path)}
    return arrows


def test_the_core_has_only_the_arrows_drawn():
    """Each room imports what it may, and no room is without a line in the drawing."""
    arrows = _core_arrows()
    assert arrows.keys() == CORE.keys() | COMMAND | {"__init__"}
    for room, allowed in CORE.items():
        assert arrows[room] <= allowed, room
    assert not arrows["__init__"] & COMMAND
    assert arrows["__main__"] == {"cli"}
    assert not arrows["demo"] & {"cli", "__main__"}


def test_the_core_has_no_import_circle():
    """The rooms of the core can be put in an order."""
    list(graphlib.TopologicalSorter(_core_arrows()).static_order())


@pytest.mark.parametrize("path", sorted((SRC / "lossscale_core").rglob("*.py")), ids=lambda path: path.stem)
def test_the_core_stands_on_numpy_and_array_api_compat(path):
    """Nothing else is imported, but for what an extra installs and only in the rooms that need it."""
    room = _room(path)
    allowed = THIRD_PARTY | EXTRA.get(room, set()) | (DEMO_EXTRA if room in COMMAND else set())
    adapter = f"lossscale{path.stem}".replace("tensorflow", "tf")
    if room == "demo" and adapter in ADAPTERS:  # demo/_torch.py and its like, imported when they are asked for
        allowed |= {adapter} | ADAPTERS[adapter]
    outside = {name.partition(".")[0] for name in _imports(path)} - STANDARD_LIBRARY - {"lossscale_core"}
    assert outside <= allowed


def test_adapters_use_public_names_and_their_own_framework():
    """No adapter reaches into the core's private rooms or into another adapter."""
    packages = {path.name for path in SRC.iterdir() if path.is_dir()}
    assert packages <= {"lossscale_core", *ADAPTERS}
    for package in packages - {"lossscale_core"}:
        for path in (SRC / package).rglob("*.py"):
            for name in _imports(path):
                parts = name.split(".")
                assert not (parts[0] == "lossscale_core" and any(part.startswith("_") for part in parts)), path
                assert parts[0] in STANDARD_LIBRARY | {"lossscale_core", package} | ADAPTERS[package], path


def test_the_factors_are_applied_in_one_file():
    """Only `_policy` multiplies a scale by a growth or backoff factor."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                factors = {side.attr for side in (node.left, node.right) if isinstance(side, ast.Attribute)}
                if factors & {"growth_factor", "backoff_factor"}:
                    assert path.name == "_policy.py", path

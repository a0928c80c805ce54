"""The house's arrows, read off the imports: who may import whom. What is not drawn here is not allowed."""

import ast
import graphlib
import sys
from collections.abc import Iterator
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
    "_checkpoint": {"_base", "_config", "_guard", "_policy", "_settings", "_state", "messages", "errors"},
    "_diagnosis": {"_base", "_guard", "_settings", "_state", "messages"},
    "_watch": {"_base", "_config", "_diagnosis", "_state", "messages", "errors"},
    "_report": {"_base", "_config", "_diagnosis", "_guard", "_settings", "_state", "_watch", "messages", "errors"},
    "_range_picture": set(),
    "_range_records": set(),
    "_range_search": {"_policy", "_range_records", "_settings"},
    "_range": {"files", "_range_picture", "_range_records", "_range_search"},
    "_strategies": {"_base", "_settings"},
    "_placement": {"_arrays", "_base", "_config", "_policy", "_state"},
    "testing": {"_base", "_checkpoint", "_config", "_guard", "_policy", "_settings", "_state", "_strategies", "tree"},
    "__main__": set(),
}
CORE_REQUIRES = {"numpy", "array_api_compat"}
FOR_WHO_TESTS = {"_strategies": {"hypothesis"}, "testing": {"hypothesis"}, "_state": {"typing_extensions"}}  # or types
TORCH = {
    "__init__": {"_report", "_scaler", "_step_info", "_verbs", "range"},
    "_types": set(),
    "_versions": set(),
    "_step_info": set(),
    "_gradients": set(),
    "_watch": set(),
    "_checkpoint": set(),
    "_state": {"_step_info"},
    "_members": {"_gradients", "_state"},
    "_waiting": {"_gradients", "_members", "_state"},
    "_guard": {"_members", "_state"},
    "_ranks": {"_gradients", "_members", "_versions"},
    "_norm": {"_gradients", "_ranks", "_state", "_versions"},
    "_clip": {"_gradients", "_norm", "_ranks", "_state"},
    "_torch_names": {"_checkpoint", "_guard", "_members", "_ranks", "_state", "_waiting", "_watch"},
    "_scaler": {
        "_checkpoint", "_clip", "_gradients", "_guard", "_members", "_ranks", "_state", "_step_info",
        "_torch_names", "_types", "_versions", "_waiting", "_watch",
    },
    "_verbs": {"_gradients", "_ranks", "_types"},
    "_report": {"_gradients", "_verbs"},
    "range": {"_gradients", "_verbs", "_versions"},
    "_rescue": {"_checkpoint", "_gradients", "_members", "_step_info", "_versions"},
    "testing": {"_scaler", "_step_info", "_types", "_rescue", "_versions"},
}  # fmt: skip
TORCH_LATE = {"_scaler": {"_rescue"}}  # imported within a function, when it is called
ADAPTERS = {
    "lossscale_torch": {"torch", "numpy"},
    "lossscale_jax": {"jax", "optax"},
    "lossscale_tf": {"tensorflow", "keras", "tf_keras"},
}
PACKAGES = ["lossscale", "lossscale_core", *ADAPTERS]


class Drawn(NamedTuple):
    """What a room of the command may import besides the core: other rooms of it, and other packages."""

    rooms: set[str]
    outside: set[str]


COMMAND = {
    "__init__": Drawn({"dialects"}, set()),  # imported when it is asked for
    "_install": Drawn(set(), set()),
    "_tried": Drawn(set(), set()),
    "__main__": Drawn({"_install", "cli"}, set()),
    "demo": Drawn(set(), {"numpy", "sklearn", "threadpoolctl", *ADAPTERS}.union(*ADAPTERS.values())),
    "tracing": Drawn(set(), {"torch", "lossscale_torch"}),
    "dialects": Drawn(set(), {"numpy"}),
    "checkpoint_files": Drawn({"dialects"}, set()),
    "cli": Drawn(
        {"_install", "_tried", "checkpoint_files", "demo", "dialects", "tracing"},
        {"click", "matplotlib", "numpy", "rich", "tensorboard"},
    ),
}


def _room(path: Path) -> str:
    """Return a file's place in its package: `_policy`, `demo`, `__init__`."""
    return path.relative_to(SRC).parts[1].removesuffix(".py")


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
    return sorted((SRC / package).rglob("*.py"))


def _arrows(package: str, only_at_top: bool = False) -> dict[str, set[str]]:
    """Return which rooms of a package each of its rooms imports."""
    rooms = {_room(path) for path in _files(package)}
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for path in _files(package):
        for name in _imports(path, only_at_top):
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


def test_torchs_adapter_has_only_the_arrows_drawn():
    """The step does not know the rescue of a batch, the range report or the check of a loop: they are built on it."""
    at_top, anywhere = _arrows("lossscale_torch", only_at_top=True), _arrows("lossscale_torch")
    assert at_top.keys() == TORCH.keys()
    for room, allowed in TORCH.items():
        assert at_top[room] <= allowed, room
        assert anywhere[room] - at_top[room] <= TORCH_LATE.get(room, set()), room
    assert at_top["_scaler"].isdisjoint({"_rescue", "range", "testing"})


def test_torchs_adapter_has_no_import_circle_at_the_tops_of_its_files():
    """Its rooms can be put in an order; what a function imports when it is called does not count."""
    list(graphlib.TopologicalSorter(_arrows("lossscale_torch", only_at_top=True)).static_order())


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


FACTORS = {"growth_factor", "backoff_factor"}
BOUNDS = {"min_scale", "max_scale"}


def _moves_a_scale(node: ast.AST) -> bool:
    """Return whether an expression multiplies by a policy's factor what may be the scale of a state.

    A bound of the same policy is not: its product with a factor says how far the rule may go.
    """
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    policies = {ast.unparse(each.value) for each in sides if isinstance(each, ast.Attribute)}
    names = {each.attr for each in sides if isinstance(each, ast.Attribute)}
    is_of_one_policy = len(policies) == 1 and all(isinstance(each, ast.Attribute) for each in sides)
    return bool(names & FACTORS) and not (is_of_one_policy and names & BOUNDS)


@pytest.mark.parametrize(
    ("expression", "moves"),
    [
        ("state.loss_scale * policy.growth_factor", True),
        ("policy.backoff_factor * scale", True),
        ("state.max_scale * policy.growth_factor", True),
        ("max_scale * policy.growth_factor", True),
        ("policy.init_scale * policy.growth_factor", True),
        ("policy.max_scale * policy.growth_factor", False),
        ("self.policy.backoff_factor * self.policy.min_scale", False),
        ("policy.max_scale * count", False),
    ],
)
def test_which_products_move_a_scale(expression, moves):
    """A factor times anything does, but for a bound of the policy that has the factor."""
    assert _moves_a_scale(ast.parse(expression, mode="eval").body) == moves


def test_the_factors_are_applied_in_one_file():
    """Only `_policy` multiplies a scale by a growth or backoff factor.

    torch's kernel does, too, for a state on a device: `tests/adapters/test_torch_states.py` compares every bit.
    """
    for path in SRC.rglob("*.py"):
        for node in _nodes(path):
            assert path.name == "_policy.py" or not _moves_a_scale(node), (path, getattr(node, "lineno", None))
            if isinstance(node, ast.Attribute) and node.attr == "_amp_update_scale_":
                assert path.relative_to(SRC).as_posix() == "lossscale_torch/_state.py", (path, node.lineno)

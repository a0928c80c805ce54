"""What the packages import from outside. The layers of their modules are contracts in `pyproject.toml`."""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
NETWORK = {"socket", "ssl", "urllib", "http", "ftplib", "smtplib", "xmlrpc"}
"""The parts of the standard library that open connections: no module imports them."""
IMPORTING_CALLS = {"import_module", "__import__", "find_spec", "run_module"}
ADAPTERS = {
    "lossscale_torch": {"torch", "numpy"},
    "lossscale_jax": {"jax", "optax"},
    "lossscale_tf": {"tensorflow", "keras", "tf_keras", "numpy", "lossscale_keras"},
    "lossscale_keras": {"keras", "jax", "torch", "tensorflow", "numpy"},
}
"""The packages that each adapter imports in addition to the core."""
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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_little_besides_the_core(package):
    """No adapter imports another one or another framework, not within a function either; some parts need more."""
    assert {path.name for path in SRC.iterdir() if path.is_dir()} <= {*PACKAGES}
    usual = ADAPTERS.get(package, CORE_REQUIRES if package == "lossscale_core" else set())
    everywhere = {*sys.stdlib_module_names, package, "lossscale_core"} - NETWORK
    if package == "lossscale":
        everywhere.add("(computed)")
    for path in _files(package):
        part = path.relative_to(SRC / package).parts[0].removesuffix(".py")
        allowed = PARTS.get(package, {}).get(part, usual) | everywhere
        assert {name.partition(".")[0] for name in _imports(path)} <= allowed, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_private_name_of_another(package):
    """What a package of this project needs of another one, it finds under a public name."""
    others = {*PACKAGES} - {package}
    for path in _files(package):
        for name in _imports(path):
            package_of_name, *parts = name.removesuffix("__version__").split(".")
            assert package_of_name not in others or not any(part.startswith("_") for part in parts), (path, name)

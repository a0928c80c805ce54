"""The built wheel in `dist`, as `nox -s build` builds and installs it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lossscale_core

ROOT = Path(__file__).parents[2]
(WHEEL,) = (ROOT / "dist").glob("*.whl")
MAX_BYTES = 300_000
OLDEST = {"numpy": "2.0", "torch": "2.6", "jax": "0.7.2", "optax": "0.2.6", "tensorflow": "2.18", "keras": "3.9"}


def _run(*arguments, **options):
    """Return the lines that a command prints; it must succeed."""
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.splitlines())


@pytest.fixture
def python(tmp_path):
    """Return the interpreter of a new virtual environment."""
    _run(sys.executable, "-m", "virtualenv", "--quiet", tmp_path / "environment")
    return next(path for path in tmp_path.glob("environment/*/python*") if path.stem == "python")


def _empty_wheel(folder, name, version):
    """Write a wheel that has a name and a version but no modules, and return its path."""
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        zipped.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        zipped.writestr(f"{about}/RECORD", "")
    return path


def test_the_wheel_holds_only_the_source():
    """The packages in the wheel have the files of `src`, byte for byte, and the wheel is small."""
    with zipfile.ZipFile(WHEEL) as zipped:
        packed = {name: zipped.read(name) for name in zipped.namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {path.relative_to(ROOT / "src").as_posix(): path.read_bytes() for path in files}
    assert WHEEL.stat().st_size <= MAX_BYTES


def test_the_wheel_runs_without_extras(python):
    """The core works, and the command names the extra that it needs."""
    _run(python, "-m", "pip", "install", WHEEL)
    _run(python, "-c", "import lossscale, lossscale_core as core; core.testing.simulate('dynamic', [True])")
    command = subprocess.run([python.with_name("lossscale")], capture_output=True, text=True, check=False)
    assert (command.returncode, "lossscale[cli]" in command.stderr) == (2, True)


@pytest.mark.parametrize("extras", ["", "[torch,jax,tensorflow,keras]"])
def test_an_installation_changes_no_other_package(python, tmp_path, extras):
    """An empty package in its oldest version stands for each framework: pip reads names and versions only."""
    pip = python, "-m", "pip"
    _run(*pip, "install", *(_empty_wheel(tmp_path, *package) for package in OLDEST.items()))
    before = _run(*pip, "freeze", "--all")
    _run(*pip, "install", f"{WHEEL}{extras}")
    changed = {line.partition("==")[0].partition(" @")[0] for line in before ^ _run(*pip, "freeze", "--all")}
    assert changed == {"array-api-compat", "lossscale"}


def test_tests_pass_on_the_wheel(tmp_path):
    """The tests of the core's import, of its verbs and of the command run in a folder without the source."""
    assert "site-packages" in lossscale_core.__file__
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = ("tests/core/test_import.py", "tests/core/test_verbs.py", "tests/command/test_command.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    _run(sys.executable, "-m", "pytest", *files, cwd=tmp_path, env=environment)

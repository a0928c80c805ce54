"""Every check of the project, each in a virtual environment of its own.

nox                                  all of them, as CI does
nox -s "tests(framework='numpy')"    the core's tests, without any framework
nox -s "tests(framework='torch')"    one framework's
nox -s oldest versions               the oldest versions declared, and newer Pythons: nightly
nox -s sweep                         the tests with more seeds and examples: nightly
nox -s bench -- --output-folder docs/benchmarks
nox -s docs -- serve                 the documentation, while you write it
"""

import os
import shutil
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
# pip otherwise compiles every module of every framework, of which the tests import a small part.
os.environ.setdefault("PIP_COMPILE", "0")
# Containers often set this; then each of the many processes of the tests would compile what it imports once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The tests run in as many processes as there are cores; threads of each would only wait for one another.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}

PROJECT = nox.project.load_toml("pyproject.toml")
# Pinned: other torch builds bring several gigabytes of CUDA along. The package itself allows a range.
TORCH = "torch==2.13.0"
JAX = "jax==0.10.2"
OPTAX = "optax==0.2.8"
TENSORFLOW = "tensorflow-cpu==2.21.*"
FRAMEWORKS = {"numpy": None, "torch": TORCH, "jax": JAX, "tensorflow": TENSORFLOW}


def _group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


# What tests need, without its dependencies: timm's torchvision has no build for this torch, and tf-keras brings the
# whole of tensorflow along, over tensorflow-cpu and of another version.
ALONE = {"torch": "timm>=1.0.31", "tensorflow": "tf-keras==2.21.*"}
# What tests need beside the oldest versions: the newest that goes with them.
OLDEST_FOR_TESTS = {
    "numpy": [],
    "torch": _group("torch-test"),
    "jax": ["flatbuffers>=25", "flax==0.12.6", "equinox>=0.13", "jmp==0.0.4"],
    "tensorflow": ["tensorboard==2.19.*"],
}
OLDEST_ALONE = ALONE | {"tensorflow": "tf-keras==2.19.*"}


# Each process begins with a stretch of the tests, so that neighbours share what they compile, and helps out at the end.
IN_PARALLEL = ("-n", "auto", "--dist", "worksteal")


def _run_tests(session: nox.Session, framework: str) -> None:
    """Run the tests of one framework, or those of the core where it is `numpy`."""
    adapter = "" if framework == "numpy" else f"test_{framework}_*.py"
    of_adapter = map(str, sorted(Path("tests/adapters").glob(adapter))) if adapter else ()
    session.run("pytest", *IN_PARALLEL, *of_adapter, *session.posargs, env=ONE_THREAD)


def _install(session: nox.Session, framework: str) -> None:
    """Install the newest versions of what one framework's tests need."""
    session.install("-e", ".[demo]", *_group("test"))
    if framework != "numpy":
        session.install(FRAMEWORKS[framework], *_group(f"{framework}-test"))
    if framework in ALONE:
        session.install("--no-deps", ALONE[framework])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting: `nox -s lint`."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types strictly: `nox -s typing`."""
    session.install("-e", ".[demo]", TORCH, JAX, OPTAX, *_group("typing"))
    session.run("mypy")
    session.run("mypy", "--strict", "--config-file=", *map(str, sorted(Path("tests/typing").glob("*.py"))))
    session.run("pyright", "-p", "tests/typing")


@nox.session
@nox.parametrize("framework", list(FRAMEWORKS))
def tests(session: nox.Session, framework: str) -> None:
    """Run one framework's tests, and its benchmark quickly, where the others are not installed."""
    _install(session, framework)
    _run_tests(session, framework)
    session.run("python", f"benchmarks/bench_{'core' if framework == 'numpy' else framework}.py", "--quick")
    if framework == "torch":
        session.run("python", "benchmarks/spike_guard_runs.py", "--quick")


@nox.session(default=False)
@nox.parametrize("framework", list(FRAMEWORKS))
def sweep(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with more seeds, random programs and examples: `nox -s sweep`, nightly.

    `tests` checks the same behaviour with one seed, a tenth of the programs, and a few examples where each of them
    compiles something. `tests/sweeping.py` has the numbers.
    """
    _install(session, framework)
    session.env["LOSSSCALE_SWEEP"] = "1"
    _run_tests(session, framework)


@nox.session(default=False, python=["3.12", "3.13"])
@nox.parametrize("framework", [name for name in FRAMEWORKS if name != "torch"])  # TORCH is at hand for 3.11 alone
def versions(session: nox.Session, framework: str) -> None:
    """Run one framework's tests on a newer Python: `nox -s "versions-3.13(framework='numpy')"`, nightly."""
    _install(session, framework)
    _run_tests(session, framework)


@nox.session(default=False, python="3.11")
@nox.parametrize("framework", list(FRAMEWORKS))
def oldest(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the oldest versions that pyproject.toml declares: `nox -s oldest`, nightly."""
    project = PROJECT["project"]
    floors = [*project["dependencies"], *project["optional-dependencies"].get(framework, [])]
    pins = [floor.replace(">=", "==").replace("tensorflow==", "tensorflow-cpu==") for floor in floors]
    session.install("-e", ".[demo]", *pins, *OLDEST_FOR_TESTS[framework], *_group("test"))
    if framework in OLDEST_ALONE:
        session.install("--no-deps", OLDEST_ALONE[framework])
    _run_tests(session, framework)


@nox.session
def conformance(session: nox.Session) -> None:
    """Run one suite and the docs' examples on all frameworks with the loggers, and carry checkpoints between them.

    The examples run here, since every framework is installed here already.
    """
    groups = [*_group("test"), *_group("conformance"), *_group("logging")]
    session.install("-e", ".[demo]", *groups, TORCH, JAX, TENSORFLOW, OPTAX)
    session.run("pytest", "tests/conformance", *IN_PARALLEL, *session.posargs, env=ONE_THREAD)
    if not session.posargs:
        session.run("pytest", "--doctest-glob=*.md", "README.md", "docs", *IN_PARALLEL, env=ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the docs: `nox -s docs`; or see it: `-- serve`. `conformance` runs their examples."""
    session.install("-e", ".", *_group("docs"))
    session.run("mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build the wheel and test it where no source tree is in reach: `nox -s build`."""
    session.install("build")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    (wheel,) = Path("dist").resolve().glob("*.whl")
    session.install(str(wheel))
    session.run("python", "-c", "import lossscale, lossscale_core as c; c.testing.simulate('dynamic', [True])")
    session.run("lossscale", success_codes=[2])
    _require_the_source(session, wheel)
    session.install(f"{wheel}[demo]", *_group("test"))
    elsewhere = session.create_tmp()
    shutil.rmtree(f"{elsewhere}/tests", ignore_errors=True)
    shutil.copytree("tests", f"{elsewhere}/tests")
    shutil.copy("pyproject.toml", elsewhere)
    session.chdir(elsewhere)
    session.run("python", "-c", "import lossscale_core as c; assert 'site-packages' in c.__file__, c.__file__")
    session.run("pytest", "tests/core/test_import.py", "tests/core/test_verbs.py", "tests/command/test_cli.py")


def _require_the_source(session: nox.Session, wheel: Path) -> None:
    """Require that the wheel holds every file of the source as it is, so that what is true of one is of the other."""
    with zipfile.ZipFile(wheel) as zipped:
        packed = {name: zipped.read(name) for name in zipped.namelist() if ".dist-info/" not in name}
    files = [path for path in Path("src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    source = {path.relative_to("src").as_posix(): path.read_bytes() for path in files}
    if different := sorted(name for name, _ in packed.items() ^ source.items()):
        session.error(f"the wheel and src differ in {', '.join(different)}")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what is published, and check that a package index can show it: `nox -s release`."""
    session.install(*_group("release"))
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir())))


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, and the benchmark with its GPU rows, on this machine's: `nox -s gpu`."""
    _install(session, "torch")
    session.run("python", "-c", "import torch; torch.zeros((), device='cuda')")  # without a GPU it fails, not skips
    session.run("pytest", "-m", "gpu", *map(str, sorted(Path("tests/adapters").glob("test_torch_*.py"))))
    session.run("python", "benchmarks/bench_torch.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what the library costs against its bars: `    nox -s bench -- --output-folder docs/benchmarks`."""
    session.install("-e", ".", TORCH, JAX, TENSORFLOW, *_group("jax-test"))
    session.install("--no-deps", ALONE["tensorflow"])
    for name in ("core", "torch", "step", "jax", "tensorflow"):
        session.run("python", f"benchmarks/bench_{name}.py", *session.posargs)

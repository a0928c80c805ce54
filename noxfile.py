"""Every check of the project, each in a virtual environment of its own.

nox -j 2                             all of them, two at a time, as CI does
nox -s "tests(framework='numpy')"    the core's tests, without any framework
nox -s "tests(framework='torch')"    one framework's
nox -s "oldest(framework='torch')"   its oldest version; `newest`, `kaggle`, `colab` and `smoke` are others: nightly
nox -s sweep                         the tests with more seeds and examples: nightly
nox -s mutants -- src/lossscale_core/_policy.py    the faults of a file, or of a package, that no test notices
nox -s bench -- --output-folder benchmarks
nox -s docs -- serve                 the documentation, while you write it
"""

import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.allow_parallel = True  # with `-j 2` one session tests while another one installs
# pip otherwise compiles every module of every framework, of which the tests import a small part.
os.environ.setdefault("PIP_COMPILE", "0")
# Containers often set this; then each of the many processes of the tests would compile what it imports once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
ENVIRONMENT = {
    # The tests run in as many processes as there are cores; threads of each would only wait for one another.
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "KERAS_BACKEND": "tensorflow",
    # The processes and sessions share what JAX compiles, however small.
    "JAX_COMPILATION_CACHE_DIR": str(Path(".nox/compiled-by-jax").resolve()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

PROJECT = nox.project.load_toml("pyproject.toml")
# Pinned, so that a new release breaks no change; the package itself allows a range.
TORCH = "torch==2.13.0"
JAX = ["jax==0.10.2", "optax==0.2.8"]
FLAX = "flax==0.12.8"
TENSORFLOW = "tensorflow-cpu==2.21.*"
MLX = "mlx[cpu]==0.32.*"  # of an example, which the conformance session runs
FRAMEWORKS = {
    "numpy": [],
    "torch": [TORCH],
    "jax": [*JAX, FLAX],
    "tensorflow": [TENSORFLOW, "keras==3.15.*"],
}
# In sessions that take other versions.
UNPINNED = {name: [re.split("[=>]", each)[0] for each in pins] for name, pins in FRAMEWORKS.items()}


def _group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


# Packages to install without their dependencies: timm's torchvision has no build for this torch, and tf-keras would
# install tensorflow of another version over tensorflow-cpu.
ALONE = {"torch": "timm>=1.0.31", "tensorflow": "tf-keras==2.21.*"}

# With `-j`, sessions are processes that share the cores. More test processes than cores take no less time, since each
# imports every framework again.
if "-j" in sys.argv:
    jobs = sys.argv[sys.argv.index("-j") + 1]  # a number, or `auto`: one for each core
    workers = (os.cpu_count() or 1) // int(jobs) if jobs.isdigit() else 1
    os.environ.setdefault("PYTEST_XDIST_AUTO_NUM_WORKERS", str(max(1, workers)))

# Each process begins with consecutive tests, which share what they compile; at the end it takes tests from the others.
IN_PARALLEL = ("-n", "auto", "--dist", "worksteal")
KERAS = [str(path) for path in sorted(Path("tests/adapters").glob("test_keras_*.py"))]


def _run_tests(session: nox.Session, framework: str) -> None:
    """Run the tests of one framework, or those of the core where it is `numpy`."""
    adapter = "" if framework == "numpy" else f"test_{framework}_*.py"
    of_adapter = map(str, sorted(Path("tests/adapters").glob(adapter))) if adapter else ()
    session.run("pytest", *IN_PARALLEL, *of_adapter, *session.posargs, env=ENVIRONMENT)


def _install_torch(session: nox.Session, torch: str = TORCH, *constraints: str) -> None:
    """Install torch alone from the index that TORCH_INDEX names, if it does: of builds without CUDA, for example."""
    if index := os.environ.get("TORCH_INDEX"):
        session.install("--no-deps", torch, "--index-url", index, *constraints)


def _install(session: nox.Session, framework: str) -> None:
    """Install what one framework's tests need, the framework in the version that CI uses."""
    if framework == "torch":
        _install_torch(session)
    session.install("-e", ".[demo]", *_group("test"))
    if framework != "numpy":
        session.install(*FRAMEWORKS[framework], *_group(f"{framework}-test"))
    if framework in ALONE:
        session.install("--no-deps", ALONE[framework])


def _test_with(session: nox.Session, framework: str, *constraints: str) -> None:
    """Run one framework's tests with other versions of it: the newest, or those of a file of constraints."""
    if framework == "torch":
        _install_torch(session, "torch", *constraints)
    groups = [*_group("test"), *(_group(f"{framework}-test") if framework != "numpy" else [])]
    session.install("-e", ".[demo]", *UNPINNED[framework], *groups, *constraints)
    if framework in ALONE:
        session.install("--no-deps", re.split("[=>]", ALONE[framework])[0], *constraints)
    _run_tests(session, framework)
    if framework == "tensorflow":
        session.run("pytest", *IN_PARALLEL, *KERAS, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and the layers of imports: `nox -s lint`."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": "src"})  # of pyproject.toml


def _check_types(session: nox.Session) -> None:
    """Check types strictly, in an environment that has every framework."""
    session.install(*_group("typing"))
    session.run("mypy")
    users = map(str, sorted(Path("tests/typing").glob("*.py")))
    # A user has none of our settings. With the option of pyproject.toml, mypy reuses the cache of the first run.
    session.run("mypy", "--strict", "--warn-unreachable", "--config-file=", *users)
    session.run("pyright", "-p", "tests/typing")


@nox.session
def conformance(session: nox.Session) -> None:
    """Run one suite and the docs' examples on all frameworks with the loggers; load checkpoints of each in the others.

    The examples and the check of types run here, since every framework is installed here. It takes longest, and so
    begins early.
    """
    _install_torch(session)
    groups = [*_group("test"), *_group("logging")]
    session.install("-e", ".[demo]", *groups, TORCH, *JAX, FLAX, TENSORFLOW, MLX)
    more = session.posargs or [*KERAS, "--doctest-glob=*.md", "README.md", "docs"]
    session.run("pytest", *IN_PARALLEL, "tests/conformance", *more, env=ENVIRONMENT)
    if not session.posargs:
        for backend in ("jax", "torch"):  # one process for each, since more would import every framework again
            env = {**ENVIRONMENT, "KERAS_BACKEND": backend}
            session.run("pytest", *KERAS, "tests/conformance/test_backends.py", "-k", "keras", env=env)
        _check_types(session)


@nox.session(default=False)
def typing(session: nox.Session) -> None:
    """Check types strictly: `nox -s typing`; in CI, `conformance` does so."""
    _install_torch(session)
    session.install("-e", ".[demo]", TORCH, *JAX, *FRAMEWORKS["tensorflow"])
    _check_types(session)


@nox.session
@nox.parametrize("framework", list(FRAMEWORKS))
def tests(session: nox.Session, framework: str) -> None:
    """Run one framework's tests where the others are not installed."""
    _install(session, framework)
    _run_tests(session, framework)


BENCHMARKS = {
    "numpy": ["bench_core"],
    "torch": ["bench_torch", "spike_guard_runs"],
    "jax": ["bench_jax"],
    "tensorflow": ["bench_tensorflow", "bench_keras"],
}


@nox.session(default=False)
@nox.parametrize("framework", [*FRAMEWORKS, "all"])
def sweep(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with more seeds, random programs and examples, and its benchmarks quickly: nightly.

    `tests` checks the same behaviour with one seed, a tenth of the programs, a part of the combinations, and a few
    examples where each of them compiles something. `tests/sweeping.py` has the numbers. With "all", it runs
    `conformance` in the same way.
    """
    session.env["LOSSSCALE_SWEEP"] = "1"
    if framework == "all":
        conformance(session)
        return
    _install(session, framework)
    _run_tests(session, framework)
    for benchmark in BENCHMARKS[framework]:
        session.run("python", f"benchmarks/{benchmark}.py", "--quick")


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Find small faults of the code that no test notices: `nox -s mutants`; `-- --help` lists the options. Nightly."""
    _install_torch(session)
    groups = [
        *_group("test"),
        *_group("mutants"),
        *_group("torch-test"),
        *_group("jax-test"),
        *_group("tensorflow-test"),
    ]
    session.install("-e", ".[demo]", *groups, TORCH, *JAX, FLAX, *FRAMEWORKS["tensorflow"])
    session.install("--no-deps", *ALONE.values())
    jobs = ("--jobs", str(os.cpu_count()))
    session.run("python", "tests/mutants", *jobs, *session.posargs, env=ENVIRONMENT)


# The sessions below run all tests of a framework with other versions of it. PyTorch brings five to seven gigabytes of
# CUDA packages, unless an index of builds for CPUs is set: run one at a time then, and delete its
# folder in .nox.
@nox.session(default=False, python="3.11")
@nox.parametrize("framework", list(FRAMEWORKS))
def oldest(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the oldest versions that pyproject.toml declares: `nox -s oldest`, nightly."""
    _test_with(session, framework, "-c", "tests/versions/oldest.txt")


@nox.session(default=False, python="3.12")
@nox.parametrize("framework", list(FRAMEWORKS))
def kaggle(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the versions of a Kaggle notebook: `nox -s kaggle`, nightly."""
    _test_with(session, framework, "-c", "tests/versions/kaggle.txt")


@nox.session(default=False, python="3.13")
@nox.parametrize("framework", list(FRAMEWORKS))
def colab(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the versions of a Colab notebook: `nox -s colab`, nightly."""
    _test_with(session, framework, "-c", "tests/versions/colab.txt")


@nox.session(default=False, python="3.13")
@nox.parametrize("framework", list(FRAMEWORKS))
def newest(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the newest releases: `nox -s newest`, nightly; fails for an untried one."""
    _test_with(session, framework)
    session.run("python", "tests/versions/check_newest.py", *(UNPINNED[framework] or ["numpy"]))


# TensorFlow has no release for Python 3.14 yet.
SMOKE = {
    "numpy": ["tests/core", "tests/command/test_other_tools.py"],
    "torch": [f"tests/adapters/test_torch_{name}.py" for name in ("scaler", "states")],
    "jax": ["tests/adapters/test_jax_optimizer.py", "tests/adapters/test_jax_verbs.py"],
}


@nox.session(default=False, python="3.14")
@nox.parametrize("framework", list(SMOKE))
def smoke(session: nox.Session, framework: str) -> None:
    """Run the tests of one framework's main interface on the newest Python, on three systems: `nox -s smoke`."""
    if framework == "torch":
        _install_torch(session, "torch")
    session.install("-e", ".[demo]", *UNPINNED[framework], *_group("test"), "flatbuffers")
    session.run("pytest", *IN_PARALLEL, *SMOKE[framework], *session.posargs, env=ENVIRONMENT)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the docs: `nox -s docs`; or see it: `-- serve`. `conformance` runs their examples."""
    session.install("-e", ".", *_group("docs"))
    session.run("mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"})
    if not session.posargs:
        session.run("python", "docs/_site/check_repository.py", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build the wheel, install it, and run the tests of the wheel: `nox -s build`."""
    session.install("build", "virtualenv")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    (wheel,) = Path("dist").resolve().glob("*.whl")
    session.install(f"{wheel}[demo]", *_group("test"))
    session.run("pytest", "tests/packaging", *session.posargs)


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
    """Measure what the library costs against its bars: `nox -s bench -- --output-folder benchmarks`."""
    _install_torch(session)
    session.install("-e", ".", TORCH, *JAX, FLAX, TENSORFLOW, *_group("jax-test"))
    session.install("--no-deps", ALONE["tensorflow"])
    for name in ("core", "torch", "step", "jax", "tensorflow", "keras"):
        session.run("python", f"benchmarks/bench_{name}.py", *session.posargs)

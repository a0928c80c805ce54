"""Every check of the project, each in a virtual environment of its own.

nox                                  all of them, as CI does
nox -s "tests(framework='numpy')"    the core's tests, without any framework
nox -s "tests(framework='torch')"    one framework's
nox -s oldest                        every framework's tests with the oldest versions declared, nightly
nox -s bench -- --output-folder docs/benchmarks
nox -s docs -- serve                 the documentation, while you write it
"""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

PROJECT = nox.project.load_toml("pyproject.toml")
# Pinned: other torch builds bring several gigabytes of CUDA along. The package itself allows a range.
TORCH = "torch==2.13.0"
JAX = "jax==0.10.2"
OPTAX = "optax==0.2.8"
TENSORFLOW = "tensorflow-cpu==2.21.*"
FRAMEWORKS = {"numpy": None, "torch": TORCH, "jax": JAX, "tensorflow": TENSORFLOW}


def _group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


# The newest of what only tests need that goes with the oldest framework. torch 2.6 is declared and has not been run
# yet, since the registries at hand have the pinned torch alone.
OLDEST_FOR_TESTS = {
    "numpy": [],
    "torch": _group("torch-test"),
    "jax": ["optax", "flax", "equinox>=0.13", "jmp==0.0.4"],
    "tensorflow": ["tf-keras==2.19.*", "tensorboard>=2.19"],
}


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
    session.run("mypy", "--strict", "--config-file=", "tests/typing/user.py", "tests/typing/user_jax.py")
    session.run("pyright", "-p", "tests/typing")


@nox.session
@nox.parametrize("framework", list(FRAMEWORKS))
def tests(session: nox.Session, framework: str) -> None:
    """Run one framework's tests, and its benchmark quickly, where the others are not installed."""
    session.install("-e", ".[demo]", *_group("test"))
    if framework == "numpy":
        session.run("pytest", "-n", "auto", *session.posargs)
        session.run("python", "benchmarks/bench_core.py", "--quick")
        return
    session.install(FRAMEWORKS[framework], *_group(f"{framework}-test"))
    if framework == "torch":
        session.install("--no-deps", "timm>=1.0.31")  # its torchvision has no build for this torch
    session.run("pytest", "-n", "auto", *map(str, sorted(Path("tests/adapters").glob(f"test_{framework}_*.py"))))
    session.run("python", f"benchmarks/bench_{framework}.py", "--quick")


@nox.session(default=False)
@nox.parametrize("framework", list(FRAMEWORKS))
def oldest(session: nox.Session, framework: str) -> None:
    """Run one framework's tests with the oldest versions that pyproject.toml declares: `nox -s oldest`, nightly."""
    project = PROJECT["project"]
    floors = [*project["dependencies"], *project["optional-dependencies"].get(framework, [])]
    pins = [floor.replace(">=", "==").replace("tensorflow==", "tensorflow-cpu==") for floor in floors]
    session.install("-e", ".[demo]", *pins, *OLDEST_FOR_TESTS[framework], *_group("test"))
    if framework == "numpy":
        session.run("pytest", "-n", "auto", *session.posargs)
        return
    tests = map(str, sorted(Path("tests/adapters").glob(f"test_{framework}_*.py")))
    session.run("pytest", "-n", "auto", *tests, *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Run one suite on every framework, and carry checkpoints between them: `nox -s conformance`."""
    session.install("-e", ".[demo]", *_group("test"), *_group("conformance"), TORCH, JAX, OPTAX, TENSORFLOW)
    session.run("pytest", "tests/conformance", "-n", "auto", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Run every example of the README and the docs, and build the site: `nox -s docs`; or see it: `-- serve`."""
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.install("-e", ".", *_group("docs"))
    if session.posargs:
        session.run("mkdocs", *session.posargs, env=quiet)
        return
    session.run("mkdocs", "build", "--strict", env=quiet)
    session.install("-e", ".[demo]", TORCH, JAX, OPTAX, TENSORFLOW, *_group("test"))
    session.run("pytest", "--doctest-glob=*.md", "README.md", "docs")


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
    session.install(f"{wheel}[demo]", *_group("test"))
    elsewhere = session.create_tmp()
    shutil.rmtree(f"{elsewhere}/tests", ignore_errors=True)
    shutil.copytree("tests", f"{elsewhere}/tests")
    shutil.copy("pyproject.toml", elsewhere)
    session.chdir(elsewhere)
    session.run("python", "-c", "import lossscale_core as c; assert 'site-packages' in c.__file__, c.__file__")
    of_the_wheel = [f"tests/core/test_{name}.py" for name in ("import", "verbs", "config", "checkpoint")]
    session.run("pytest", *of_the_wheel, "tests/command/test_cli.py", "-n", "auto")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what the library costs against its bars: `    nox -s bench -- --output-folder docs/benchmarks`."""
    session.install("-e", ".", TORCH, JAX, TENSORFLOW, *_group("jax-test"), *_group("tensorflow-test"))
    for name in ("core", "torch", "jax", "tensorflow"):
        session.run("python", f"benchmarks/bench_{name}.py", *session.posargs)

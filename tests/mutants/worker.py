"""A process that has imported the frameworks, and forks for each mutant of a package a child that runs the tests.

A mutant survives if the tests of its module and of its package pass. It is broken, not killed, if its module cannot be
imported or a test file cannot be collected. The tests run on a copy of `src`.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import hypothesis
import pytest

LIMIT = 5  # times the seconds of the unchanged code
PASSED, FAILED, BROKEN = 0, 1, 70


class _Record:
    """A pytest plugin that notes the failed tests, and ends the process if a file cannot be collected."""

    def __init__(self, path):
        self.path = path

    def pytest_sessionstart(self):
        """Let hypothesis stop at the first example that fails, in the profile of `conftest.py`."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_collectreport(self, report):
        if report.failed:
            os._exit(BROKEN)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def _in_child(module, stage, options, failures, output):
    """Run tests and end the process, whatever happens, with their exit status."""
    status = BROKEN
    try:
        os.setsid()  # so that what a test starts can be ended with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when the worker does
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        backend, word, *files = stage
        os.environ["KERAS_BACKEND"] = backend
        importlib.import_module(module)
        chosen = sys.modules["keras"].backend.backend() if "keras" in sys.modules else backend
        assert chosen == backend, f"Keras runs on {chosen} where the stage asks for {backend}"
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        chosen_tests = ["-k", word] if word else []
        status = pytest.main([*options, *quiet, *chosen_tests, *files], plugins=[_Record(failures)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status if status in (PASSED, FAILED) else BROKEN)


def run(module, stage, options, limit=None):
    """Return the exit status (None: stopped at the limit), the seconds, the failed tests and the end of the output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        failures = Path(folder, "failures")
        failures.touch()
        start = time.monotonic()
        if not (child := os.fork()):
            _in_child(module, stage, options, failures, output)
        waiting = os.pidfd_open(child)
        is_over = bool(select.select([waiting], [], [], limit)[0])
        seconds = time.monotonic() - start
        os.close(waiting)
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")[-3000:]
        return os.waitstatus_to_exitcode(status) if is_over else None, seconds, failures.read_text().splitlines(), text


def limit(module, stage, options):
    """Run the unchanged code, which must pass, and return how many seconds a mutant has."""
    status, seconds, failed, text = run(module, stage, options)
    if status != PASSED:
        sys.exit(f"{text}\nthe unchanged code does not pass {failed or stage}: exit status {status}")
    return LIMIT * seconds + 1


def outcome(job, path, limits, options):
    """Return whether a mutant was killed, and by which tests."""
    unchanged, module = path.read_text(), job["module"]

    def run_mutant():
        path.write_text(job["code"])
        status, _, failed, _ = run(module, stage, options, limits[stage])
        path.write_text(unchanged)
        return status, failed

    for stage in map(tuple, job["tests"]):
        if stage not in limits:
            limits[stage] = limit(module, stage, options)
        status, failed = run_mutant()
        if status is None:  # the machine may be slower than at the time of the limit
            limits[stage] = max(limits[stage], limit(module, stage, options))
            status, failed = run_mutant()
        if status != PASSED:
            return {None: "endless", BROKEN: "broken"}.get(status, "killed"), failed
    return "survived", []


def main():
    """Read mutants from the standard input, one a line, and write the outcome of each."""
    copy, limits = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]), {}
    imports, *options = sys.argv[1:]
    for framework in imports.split(","):
        importlib.import_module(framework)
    if "keras" not in imports.split(","):  # TensorFlow imports Keras, which keeps the backend that it finds
        for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
            del sys.modules[name]
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(outcome(job, copy / job["path"], limits, options)), flush=True)


if __name__ == "__main__":
    main()

"""`lossscale run` on whole scripts that do not know of it, beside the same scripts without it."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lossscale_core import DynamicScaling, dump_policy
from lossscale_core.testing import simulate
from tests.command.commanding import room_for, succeed
from tests.command.sessions import replay, sections

RUN = ("-m", "lossscale", "run")
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
)
ENDS, TRAINS = (Path(__file__).with_name("programs") / name for name in ("ends.py", "trains.py"))
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)


def _python(folder, *arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def start():
    """Return a function that runs Python in a folder, in a process that is forked after the import of torch."""
    server = [sys.executable, Path(__file__).with_name("command_server.py")]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def start(folder, *arguments):
            request = [str(folder), dict(os.environ), *map(str, arguments)]
            print(json.dumps(request), file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            output = [(folder / name).read_text() for name in ("out.txt", "err.txt")]
            return subprocess.CompletedProcess(arguments, status, *output)

        yield start
        process.stdin.close()


@pytest.fixture
def trace(start, tmp_path):
    """Return a function that runs code of `trains.py` with a trace, and returns the process and the trace's rows.

    With `is_compared`, the weights must have the bits of a run without the command.
    """

    def trace(code, *options, run=start, is_compared=False):
        done = run(tmp_path, *RUN, "--trace", "scale.csv", *options, TRAINS, code)
        assert done.returncode == 0, done.stderr
        assert not is_compared or done.stdout == start(tmp_path, TRAINS, code).stdout != ""
        return done, _rows(tmp_path / "scale.csv")

    return trace


def _rows(path):
    return [*csv.DictReader(path.read_text().splitlines())] if path.exists() else []


def _require_simulated(rows):
    """Require that the steps 2 and 5 of 8 overflowed, and that the scale followed the policy."""
    applied = [step not in (2, 5) for step in range(8)]
    flags = [(row["step"], row["applied"], row["overflowed"]) for row in rows]
    assert flags == [(str(step), str(flag), str(not flag)) for step, flag in enumerate(applied)]
    assert [float(row["scale"]) for row in rows] == simulate(POLICY, applied).loss_scale_used.tolist()


MODULE = "import sys; print(sys.argv, __name__, __file__, __package__, __spec__.name, sys.path[0]); sys.exit(4)"
FILES = {
    "syntax.py": "x = (\n",
    "package/__init__.py": "import sys; print(sys.argv)",
    "package/__main__.py": MODULE,
    "package/module.py": MODULE,
    "broken.py": "import absent",
}
PROGRAMS = {"-m package.module -x 1": 4, "-m package -x 1": 4, "-m broken.module": 1, "syntax.py": 1}
ENDINGS = {"end": 0, "status": 3, "killed": -15, "error": 1, "hook": 1, "interrupted": -2, "forked": 0}
ENDINGS |= {"--help": 0, "-x": 2}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files."""
    (tmp_path / "package").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "status"), [*((f"{ENDS} {name}", status) for name, status in ENDINGS.items()), *PROGRAMS.items()]
)
def test_a_program_ends_as_without_us(start, folder, program, status):
    """Output, traceback, path and status are the same, byte for byte; stderr ends with an additional line."""
    expected, done = _python(folder, *program.split()), start(folder, *RUN, *program.split())
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.returncode == status
    *traceback, added = [*done.stderr.splitlines(), ""] if status in (2, -15) else done.stderr.splitlines()
    if program.startswith("-m"):  # the first frames are other ones
        assert traceback[-1:] == expected.stderr.splitlines()[-1:]
    else:
        assert traceback == expected.stderr.splitlines()
    assert not added or added.startswith("lossscale: no scaler was updated in this process")
    assert not added or "torchrun ... -m lossscale run" in added


REFUSED = {
    "--trace none/scale.csv syntax.py": "none/scale.csv: No such file or directory; make its folder first",
    "-m nowhere": "lossscale: -m nowhere: ",
    "-m package.nowhere": "lossscale: -m package.nowhere: ",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_wrong_arguments_are_refused(start, folder, arguments, message):
    """The command names the wrong argument before a script begins, with status 2 and without a traceback."""
    done = start(folder, *RUN, *arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_all_names_of_scalers_are_replaced(trace, tmp_path):
    """Classes replace the classes of torch, so that subclasses, copies and pickles work."""
    dump_policy(POLICY, tmp_path / "policy.toml")
    done, rows = trace("names()", "--policy", "policy.toml")
    assert done.stderr.count("--policy replaces the settings that the script gives its scaler: Dynamic") == 1
    assert "lossscale: scaler 0: healthy: 2 of 8 steps skipped" in done.stderr
    _require_simulated(rows[:8])
    assert (rows[8]["step"], rows[8]["scaler"]) == ("8", "1")
    for row in rows:  # before the clip
        norm, largest = float(row["norm"]), float(row["gradient_max"])
        assert norm >= largest > 1e-3 if row["applied"] == "True" else norm == float("inf")


@pytest.mark.parametrize(("options", "init_scale"), [((), 2.0**10), (("--policy", "128"), 128.0)])
def test_scalers_of_this_library_are_traced(trace, options, init_scale):
    """The script keeps its policy, unless the command has a policy; gradients are measured before they are clipped."""
    done, rows = trace(f"own({init_scale})", *options, is_compared=not options)
    assert [row["applied"] for row in rows] == [str(step not in (2, 5)) for step in range(8)]
    for row in rows:
        is_measured = 1000.0 > float(row["norm"]) >= float(row["gradient_max"]) > 1e-2
        assert is_measured if row["applied"] == "True" else row["norm"] == row["gradient_max"] == "inf"
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr


@pytest.mark.parametrize("fused", [False, True])
def test_a_script_keeps_its_weights(trace, fused):
    """The weights have the same bits as without the command; the gradients of a fused optimizer are measured, too."""
    _, rows = trace(f"train(scaler, fused={fused})", is_compared=True)
    _require_simulated(rows)
    assert [0.0 <= float(row["gradient_max"]) < 100.0 for row in rows] == [step not in (2, 5) for step in range(8)]
    assert float(rows[0]["gradient_max"]) > 0.01


def test_devices_are_read_every_hundred_rows(trace):
    """A step does not wait for the trace; gradients of a fused optimizer are divided by the scale of the row."""
    done, rows = trace("device()")
    assert done.stdout == "101\n"
    assert len(rows) == 104
    _require_simulated(rows[:8])
    for row in rows:
        unscaled = 4096.0 / float(row["scale"]) if row["applied"] == "True" else float("inf")
        assert float(row["gradient_max"]) == unscaled


def test_a_norm_beyond_float16(trace):
    """The norm of float16 gradients may be larger than the largest float16 number."""
    _, (row,) = trace("half()")
    assert (row["gradient_max"], row["norm"]) == ("60000.0", "120000.0")


@pytest.mark.parametrize(("cut", "steps"), [(0, 8), (1, 8), (9, 7)])
def test_a_resumed_run_continues_its_trace(trace, tmp_path, cut, steps):
    """Rows are appended below one header; a row that a crash has cut stays on its own line and is ignored."""
    trace("resumes()")
    (tmp_path / "new").touch()
    assert (tmp_path / "scale.csv").stat().st_mode == (tmp_path / "new").stat().st_mode
    os.truncate(tmp_path / "scale.csv", (tmp_path / "scale.csv").stat().st_size - cut)
    _, rows = trace("resumes()")
    if steps == 8:
        _require_simulated(rows)
    data, messages = succeed("simulate", "dynamic", "scale.csv", "--json", cwd=tmp_path)
    assert json.loads(data)["steps"] == steps
    assert ("cut are ignored, the first of them row 5" in messages) == (steps < 8)


def test_torchrun_writes_a_trace_per_rank(trace, tmp_path):
    """The file has the rank of the process group in its name, and each rank prints its diagnosis."""
    done, rows = trace("rank()", run=lambda folder, *arguments: _python(folder, *TORCHRUN, *arguments))
    assert not rows
    for rank in range(2):
        _require_simulated(_rows(tmp_path / f"scale.rank{rank}.csv"))
        assert f"lossscale: rank {rank}: healthy: 2 of 8" in done.stderr or "lossscale: healthy: 2 of 8" in done.stderr


FIRST = {
    "train(scaler, range(2)); train(scaler, [] if os.fork() else range(7))": 1,
    "child = os.fork(); child and os.waitpid(child, 0); train(scaler, range(9 if child else 2))": 1,
    "[fork.Process(target=train, args=(scaler, range(2))).start() for _ in range(3)]": 2,
}


@pytest.mark.parametrize(("code", "others"), FIRST.items(), ids=["parent", "child", "one of three"])
def test_the_first_process_writes_the_trace(trace, monkeypatch, code, others):
    """Other processes record nothing and say so; a RANK and a WORLD_SIZE with another meaning are ignored."""
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "0/2")
    done, rows = trace(code)
    assert [int(row["step"]) for row in rows] == [0, 1]
    assert done.stderr.count("records nothing, since another process writes") == others
    assert done.stderr.count("lossscale: healthy: ") >= 1


def test_a_second_writer_is_refused(trace, tmp_path):
    """The first command keeps its trace until it ends, even before its first update; then a restart appends rows."""
    second = f"{sys.executable} -m lossscale run --trace scale.csv x.py 2>&1; echo $?"
    (tmp_path / "x.py").write_text("print('begins')")
    done, before = trace(f"os.system({second!r}); train(scaler)")
    message, status, _ = done.stdout.splitlines()
    assert "scale.csv; wait until it ends, or pass another file" in message
    assert (status, len(before)) == ("2", 8)
    _, after = trace("train(scaler)")
    assert (after[:8], len(after)) == (before, 16)


def test_a_full_disk_hides_no_diagnosis(trace):
    """The trace ends, and the exit still prints the diagnosis."""
    with room_for(90):
        done, _ = trace("train(scaler)", run=_python)
    assert "scale.csv ends at step" in done.stderr
    assert "2 of 8 steps skipped" in done.stderr.splitlines()[-1]


def test_the_session_on_the_page(tmp_path, monkeypatch):
    """The page's script, its trace and its picture print the output on the page."""
    monkeypatch.setenv("COLUMNS", "80")
    assert replay(sections()["run"], tmp_path) == 3
    assert os.path.getsize(tmp_path / "scale.svg")

"""`lossscale run` on whole scripts that know nothing of it, in processes of their own."""

import csv
import json
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from lossscale_core import DynamicScaling, dump_policy
from lossscale_core.testing import simulate
from tests.command.commanding import succeed
from tests.command.sessions import replay, sections

RUN = ("-m", "lossscale", "run")
ROOT = str(Path(__file__).parents[2])
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
)
COMMON = """
import os, pickle, sys, torch
torch.manual_seed(0)

def spoil(parameter, step):
    if step in (2, 5):
        parameter.grad.view(-1)[0] = float("inf")

def train(scaler, steps=range(8), clip=None, **options):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
        spoil(model.weight, step)
        if clip:
            clip(scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()
    return model
"""


def _python(folder, *arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs the command in a folder, in a process that is forked after the import of torch."""
    outputs = tmp_path_factory.mktemp("outputs")
    server = [sys.executable, Path(__file__).with_name("command_server.py")]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(folder, *arguments):
            out, err = (outputs / f"{uuid.uuid4()}" for _ in range(2))
            request = {"arguments": ["run", *map(str, arguments)], "folder": str(folder), "out": str(out)}
            request |= {"err": str(err), "environment": dict(os.environ)}
            print(json.dumps(request), file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

        yield run
        process.stdin.close()


def _traced(run, folder, script, *options):
    """Run a script with a trace to its end; return what it printed, and the rows of the trace."""
    (folder / "train.py").write_text(COMMON + textwrap.dedent(script))
    done = run(folder, "--trace", "scale.csv", *options, "train.py", "--fp16")
    assert done.returncode == 0, done.stderr
    return done, _rows(folder / "scale.csv") if (folder / "scale.csv").exists() else []


def _rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def _require_simulated(rows):
    """Require that eight steps overflowed where they were spoilt, and moved the scale as the policy does."""
    applied = [step not in (2, 5) for step in range(8)]
    flags = [(row["step"], row["applied"], row["overflowed"]) for row in rows]
    assert flags == [(str(step), str(each), str(not each)) for step, each in enumerate(applied)]
    assert [float(row["scale"]) for row in rows] == simulate(POLICY, applied).loss_scale_used.tolist()


BEFORE = """
import argparse, atexit, os, pickle, signal, sys, threading

class Own:
    pass

def show():
    print("late", type(pickle.loads(pickle.dumps(Own()))), sys.path[0])

print(__file__, type(__loader__).__name__)
argparse.ArgumentParser().parse_args()
atexit.register(show)
threading.Thread(target=lambda: (threading.main_thread().join(), show())).start()
"""
ENDINGS = {
    "end": "",
    "error": 'try:\n    {}["a"]\nexcept KeyError as error:\n    raise ValueError("b") from error',
    "hook": 'sys.excepthook = lambda *error: print("hook", error[:2])\nraise ValueError',
    "status": "sys.exit(3)",
    "interrupted": "raise KeyboardInterrupt",
    "forked": """
import multiprocessing
sys.stdout.flush()  # the forked process would print what is buffered once more, unless it is ended before
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(type, [Own()]))
""",
    "syntax": "x = (\n",
    "killed": "os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize(("how", "options"), [*((how, ()) for how in ENDINGS), ("end", ["--help"]), ("end", ["-x"])])
def test_a_program_ends_as_it_does_without_us(run, tmp_path, how, options):
    """Output, tracebacks and the status are the same, byte for byte; a line at the end of stderr is added."""
    (tmp_path / "train.py").write_text(BEFORE + ENDINGS[how])
    expected = _python(tmp_path, "train.py", *options)
    done = run(tmp_path, "train.py", *options)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    is_cut = how == "killed" or done.returncode == 2  # after a usage error nothing is said of scalers
    added = done.stderr.removeprefix(expected.stderr).splitlines()
    assert len(added) == (0 if is_cut else 1), done.stderr
    assert is_cut or added[0].startswith("lossscale: no scaler was updated in this process")
    assert is_cut or "torchrun ... -m lossscale run" in added[0]


@pytest.mark.parametrize(("name", "status"), [("package.module", 4), ("package", 4), ("broken.module", 1)])
def test_a_module_runs_as_it_does_without_us(run, tmp_path, name, status):
    """Its arguments, its spec and the path are those of `python -m`; so is the error of a package that lacks one."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("import sys; print(sys.argv)")
    text = "import sys; print(sys.argv, __name__, __file__, __package__, __spec__.name, sys.path[0]); sys.exit(4)"
    for module in ("module", "__main__"):
        (tmp_path / f"package/{module}.py").write_text(text)
    (tmp_path / "broken.py").write_text("import absent")
    expected, done = _python(tmp_path, "-m", name, "-x", "1"), run(tmp_path, "-m", name, "-x", "1")
    assert (done.returncode, done.stdout) == (status, expected.stdout)
    assert (status == 1) == ("No module named 'absent'" in done.stderr)


def test_a_trace_in_a_folder_that_does_not_exist_is_refused(run, tmp_path):
    """Before the script begins."""
    (tmp_path / "train.py").write_text("print('begins')")
    done = run(tmp_path, "--trace", "none/scale.csv", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none/scale.csv: No such file or directory; make its folder first" in done.stderr


@pytest.mark.parametrize("program", [("-m", "nowhere"), ("-m", "package.nowhere"), ("-m", "gone.nowhere")])
def test_a_program_that_is_not_there_is_named(run, tmp_path, program):
    """Before anything else, with status 2."""
    (tmp_path / "package").mkdir()
    done = run(tmp_path, *program)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lossscale: {' '.join(program)}: ")
    assert "Traceback" not in done.stderr


NAMES = """
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    import copy, lossscale_torch, warnings

    assert sys.argv == ["train.py", "--fp16"], sys.argv
    for old in (torch.cpu.amp.GradScaler(64.0, 3.0), ShardedGradScaler("cpu", 64.0, 0.25, enabled=False)):
        assert isinstance(old, GradScaler)
    assert isinstance(old, ShardedGradScaler) and isinstance(old, torch.amp.grad_scaler.GradScaler)
    assert torch.GradScaler is GradScaler is torch.amp.grad_scaler.GradScaler
    assert issubclass(torch.cuda.amp.GradScaler, GradScaler) and issubclass(lossscale_torch.GradScaler, GradScaler)

    class Mine(GradScaler):
        def __init__(self, scale):
            self.mine = "early"
            super().__init__("cpu", scale)
            self.also = "late"

    mine = pickle.loads(pickle.dumps(Mine(8.0)))
    assert (type(mine), mine.mine, mine.also, mine.get_scale()) == (Mine, "early", "late", 1024.0)

    def clip(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    scaler = copy.copy(GradScaler("cpu", 4.0))
    train(scaler, clip=clip)
    train(pickle.loads(pickle.dumps(scaler)), range(1))
"""


def test_every_name_of_the_scaler_is_replaced(run, tmp_path):
    """By classes: subclasses, copies and pickles work."""
    dump_policy(POLICY, tmp_path / "policy.toml")
    done, rows = _traced(run, tmp_path, NAMES, "--policy", "policy.toml")
    assert done.stderr.count("--policy replaces the settings that the script gives its scaler: Dynamic") == 1
    assert "lossscale: scaler 0: healthy: 2 of 8 steps skipped" in done.stderr
    _require_simulated(rows[:8])
    assert (rows[8]["step"], rows[8]["scaler"]) == ("8", "1")
    for row in rows:  # before the clip
        norm, largest = float(row["norm"]), float(row["gradient_max"])
        assert norm >= largest > 1e-3 if row["applied"] == "True" else norm == float("inf")


OWN = """
    import lossscale_torch
    from lossscale_core import DynamicScaling, SpikeGuard

    policy = DynamicScaling(init_scale=2.0**10, growth_interval=3)
    scaler = lossscale_torch.GradScaler("cpu", policy=policy, guard=SpikeGuard(), protect=[])
    train(scaler, clip=CLIP)
    assert scaler.policy.init_scale == EXPECTED, scaler.policy
    pickle.loads(pickle.dumps(scaler))
"""
CLIP = "lambda scaler, optimizer, model: scaler.unscale_and_clip_(optimizer, 1e-3)"


@pytest.mark.parametrize(("clip", "options"), [("None", ()), (CLIP, ()), (CLIP, ("--policy", "128"))])
def test_a_script_that_uses_this_library_is_traced(run, tmp_path, options, clip):
    """With its own policy, or that of the run in its place; its gradients are measured before they are clipped."""
    script = OWN.replace("EXPECTED", "128.0" if options else "2.0**10").replace("CLIP", clip)
    done, rows = _traced(run, tmp_path, script, *options)
    assert [row["applied"] for row in rows] == [str(step not in (2, 5)) for step in range(8)]
    for row in rows:
        is_measured = 1000.0 > float(row["norm"]) >= float(row["gradient_max"]) > 0.0
        assert is_measured if row["applied"] == "True" else row["norm"] == row["gradient_max"] == "inf"
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr


@pytest.mark.parametrize("options", ["fused=True", ""])
def test_results_are_those_of_the_script_alone(run, tmp_path, options):
    """The weights are the same to the last bit; the gradients of a fused optimizer are measured, too."""
    script = f"""
        model = train(torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3), {options})
        print(model.weight.tolist(), model.bias.tolist())
    """
    done, rows = _traced(run, tmp_path, script)
    assert done.stdout == _python(tmp_path, "train.py").stdout
    _require_simulated(rows)
    assert [0.0 <= float(row["gradient_max"]) < 100.0 for row in rows] == [step not in (2, 5) for step in range(8)]
    assert float(rows[0]["gradient_max"]) > 0.01


ON_DEVICE = f"""
    sys.path.append({ROOT!r})
    from tests.adapters.emulated_device import Emulated

    def main():  # whose locals die before the exit
        with Emulated("mps"):
            params = [torch.nn.Parameter(torch.ones(3, device="mps"))]
            optimizer = torch.optim.SGD(params, lr=0.5, fused=True)
            scaler = torch.amp.GradScaler("mps", init_scale=2.0**10, growth_interval=3)
            for step in range(104):
                scaler.scale(torch.ones((), device="mps"))
                params[0].grad = torch.full((3,), 4096.0, device="mps")
                spoil(params[0], step)
                scaler.step(optimizer)
                scaler.update()
        print(len(open("scale.csv").readlines()))

    main()
"""


def test_rows_of_a_device_are_written_a_hundred_at_a_time(run, tmp_path):
    """So that a step waits for nothing; the gradients of the fused optimizer are divided by the scale of the row."""
    done, rows = _traced(run, tmp_path, ON_DEVICE)
    assert done.stdout == "101\n"
    assert len(rows) == 104
    _require_simulated(rows[:8])
    for row in rows:
        unscaled = 4096.0 / float(row["scale"]) if row["applied"] == "True" else float("inf")
        assert float(row["gradient_max"]) == unscaled


SIZES = """
    import lossscale_torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    for size in (64.0, 1.0):
        for attempt in scaler.attempts():
            optimizer.zero_grad()
            scaler.scale((weight * size).sum()).backward()
            scaler.unscale_(optimizer)
            if size > 1.0:
                break
            scaler.step(optimizer)
            scaler.update()
    scaler.step(optimizer)

    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    scaler = lossscale_torch.GradScaler("cpu", init_scale=1.0, half_gradients=True)
    scaler.scale(param.sum() * 60000.0).backward()
    scaler.step(torch.optim.SGD([param], lr=0.0))
    scaler.update()
"""


def test_what_is_measured(run, tmp_path):
    """Not the gradients of a step that is left; and a norm beyond float16, twice the largest of four gradients."""
    _, rows = _traced(run, tmp_path, SIZES)
    assert [(row["gradient_max"], row["norm"]) for row in rows[1:]] == [("60000.0", "120000.0")]
    assert rows[0]["gradient_max"] == "1.0"


RESUMED = """
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    if os.path.exists("scaler.pt"):
        scaler.load_state_dict(torch.load("scaler.pt"))
        train(scaler, range(4, 8))
    else:
        train(scaler, range(4))
        torch.save(scaler.state_dict(), "scaler.pt")
"""


@pytest.mark.parametrize(("cut", "steps"), [(0, 8), (1, 8), (9, 7)])
def test_a_resumed_run_continues_its_trace(run, tmp_path, cut, steps):
    """Rows are appended with one header; a last row that a crash has cut stays on its own line, and is not read."""
    _traced(run, tmp_path, RESUMED)
    os.truncate(tmp_path / "scale.csv", (tmp_path / "scale.csv").stat().st_size - cut)
    _, rows = _traced(run, tmp_path, RESUMED)
    if steps == 8:
        _require_simulated(rows)
    data, said = succeed("simulate", "dynamic", "scale.csv", "--json", cwd=tmp_path)
    assert json.loads(data)["steps"] == steps
    assert ("cut are ignored, the first of them row 5" in said) == (steps < 8)


DDP = """
    torch.distributed.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    train(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
"""


def test_torchrun_writes_a_trace_for_each_rank(tmp_path):
    """The rank is that of the process group, and each rank says its diagnosis."""
    done, rows = _traced(lambda folder, *arguments: _python(folder, *TORCHRUN, *RUN, *arguments), tmp_path, DDP)
    assert not rows
    for rank in range(2):
        _require_simulated(_rows(tmp_path / f"scale.rank{rank}.csv"))
        assert f"lossscale: rank {rank}: healthy: 2 of 8" in done.stderr or "lossscale: healthy: 2 of 8" in done.stderr


FIRST = {
    "the parent": "train(scaler, range(2)); child = os.fork(); train(scaler, [] if child else range(7))",
    "a child": "child = os.fork(); child and os.waitpid(child, 0); train(scaler, range(9 if child else 2))",
    "a pool": "pool = mp.get_context('fork').Pool(2); pool.map(work, [2], 1); pool.close(); pool.join(); train(scaler)",
    "one of many": "[mp.get_context('fork').Process(target=work, args=[2]).start() for _ in range(3)]",
}
FORKED = """
    import torch.multiprocessing as mp

    scaler = torch.amp.GradScaler("cpu")

    def work(steps):
        train(scaler, range(steps))
"""


@pytest.mark.parametrize("who", FIRST)
def test_the_first_process_that_updates_a_scaler_writes_the_trace(run, tmp_path, monkeypatch, who):
    """Other processes record nothing and say so; a RANK and a WORLD_SIZE that are something else are ignored."""
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "0/2")
    done, rows = _traced(run, tmp_path, f"{FORKED}\n    {FIRST[who]}\n")
    assert [int(row["step"]) for row in rows] == [0, 1]
    others = 2 if who == "one of many" else 1
    assert done.stderr.count("records nothing, since another process writes") == others
    assert done.stderr.count("lossscale: healthy: ") >= 1


def test_forked_ranks_have_a_trace_each(run, tmp_path):
    """The rank is that of the process group, and an empty file of the command itself is removed."""
    script = f"""
    {FORKED}
    def work(rank):
        torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/group", rank=rank, world_size=2)
        train(scaler, range(2 + rank))

    mp.start_processes(work, nprocs=2, start_method="fork")
    """
    _traced(run, tmp_path, script)
    assert [len(_rows(tmp_path / f"scale.rank{rank}.csv")) for rank in range(2)] == [2, 3]
    assert not (tmp_path / "scale.csv").exists()


@pytest.mark.parametrize("has_updated", [True, False])
def test_a_second_command_on_a_trace_is_refused(run, tmp_path, has_updated):
    """As long as the first runs, whether it has updated a scaler or not; afterwards a restart appends."""
    script = 'scaler = torch.amp.GradScaler("cpu")\ntrain(scaler, range({}))\nprint(input(), flush=True)\ntrain(scaler)'
    (tmp_path / "train.py").write_text(COMMON + 'print("ready", flush=True)\n' + script.format(2 * has_updated))
    command = [sys.executable, *RUN, "--trace", "scale.csv", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        second = run(tmp_path, "--trace", "scale.csv", "train.py")
        assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
        assert "scale.csv; wait until it ends, or pass another file" in second.stderr
        first.communicate("go\n")
    before = (tmp_path / "scale.csv").read_text()
    assert before.count("\n") == 9 + 2 * has_updated
    _traced(run, tmp_path, 'train(torch.amp.GradScaler("cpu"))')
    after = (tmp_path / "scale.csv").read_text()
    assert after.startswith(before)
    assert after.count("\n") == before.count("\n") + 8


def test_many_scalers_are_neither_kept_nor_listed(run, tmp_path):
    """A scaler and what it protects are freed with the script's last reference; unhealthy scalers are listed first."""
    script = """
        import gc, weakref
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**(n == 150)) for n in range(200)]
        for n, scaler in enumerate(scalers):
            train(scaler, [2, 5] * 10 if n == 150 else range(1))
        references = [weakref.ref(each) for each in scalers]
        del scaler, scalers
        gc.collect()
        assert not any(reference() for reference in references)
    """
    done, rows = _traced(run, tmp_path, script)
    assert {int(row["scaler"]) for row in rows} == set(range(200))
    lines = [line for line in done.stderr.splitlines() if line.startswith("lossscale: ")]
    assert (len(lines), lines[-1]) == (11, "lossscale: and 190 more scalers")
    assert "scaler 150: " in lines[0]


def test_a_full_disk_hides_no_diagnosis(tmp_path):
    """The trace ends, and the summary at the exit is printed all the same."""
    script = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (90, 90))
        train(torch.amp.GradScaler("cpu", init_scale=8.0))
    """
    done, _ = _traced(lambda folder, *arguments: _python(folder, *RUN, *arguments), tmp_path, script)
    assert "scale.csv ends at step" in done.stderr
    assert "2 of 8 steps skipped" in done.stderr.splitlines()[-1]


def test_the_session_on_the_commands_page_is_real(tmp_path, monkeypatch):
    """The page's script, its trace and its picture print what the page shows."""
    monkeypatch.setenv("COLUMNS", "80")
    assert replay(sections()["run"], tmp_path) == 3
    assert os.path.getsize(tmp_path / "scale.svg")

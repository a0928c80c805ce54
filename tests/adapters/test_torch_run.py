"""`lossscale run` on whole scripts that know nothing of it, in processes of their own."""

import csv
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from lossscale_core import DynamicScaling, dump_policy
from lossscale_core.testing import simulate
from tests.command.sessions import replay, sections

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ACCELERATE_LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--master-addr", "127.0.0.1", "--master-port", "0"),
]
COMMON = """
    import sys, torch
    torch.manual_seed(0)

    def spoil(parameter, step):
        if step in (2, 5):
            parameter.grad.view(-1)[0] = float("inf")
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder that holds a policy."""
    dump_policy(POLICY, tmp_path / "policy.toml")
    return tmp_path


def _command(folder, script, *launcher, options=("--policy", "policy.toml")):
    (folder / "train.py").write_text(textwrap.dedent(COMMON) + textwrap.dedent(script))
    run = [sys.executable, "-m", "lossscale", "run", *options, "--trace", "scale.csv", "--"]
    return [*run, *(launcher or [sys.executable]), "train.py", "--fp16"]


def _run(folder, script, *launcher, **options):
    command = _command(folder, script, *launcher, **options)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def _rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def _require_simulated(rows, steps=8):
    """Require that the policy does with the recorded flags what the trace says it did."""
    assert [int(row["step"]) for row in rows] == list(range(steps))
    overflowed = [row["overflowed"] == "True" for row in rows]
    assert [step for step in range(steps) if overflowed[step]] == [2, 5]
    assert [row["applied"] == "True" for row in rows] == [not each for each in overflowed]
    trace = simulate(POLICY, [not each for each in overflowed])
    assert [float(row["scale"]) for row in rows] == trace.loss_scale_used.tolist()


PLAIN = """
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.nn.utils import clip_grad_norm_
    import copy, pickle

    assert sys.argv[1:] == ["--fp16"]
    for old in (torch.cpu.amp.GradScaler(64.0, 3.0), ShardedGradScaler("cpu", 64.0, 0.25, enabled=False)):
        assert isinstance(old, (GradScaler, torch.cpu.amp.GradScaler))
    assert isinstance(old, ShardedGradScaler) and isinstance(old, ShardedGradScaler.__mro__[-2])
    assert torch.GradScaler is GradScaler is torch.amp.grad_scaler.GradScaler
    assert issubclass(torch.cuda.amp.GradScaler, GradScaler)


    def main():
        scaler = copy.copy(GradScaler("cpu", init_scale=4.0))
        pickle.dumps(scaler)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            spoil(model[0].weight, step)
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()

    main()
    sys.exit(3)
"""


OWN = """
    import lossscale_torch
    from lossscale_core import DynamicScaling, SpikeGuard
    from lossscale_torch import GradScaler

    policy = DynamicScaling(init_scale=2.0**10, growth_interval=3)
    scaler = GradScaler("cpu", policy=policy, guard=SpikeGuard(), protect=[])
    assert scaler.policy.init_scale == EXPECTED, scaler.policy
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        spoil(model.weight, step)
        norm = scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        info = scaler.update()
        assert info.applied == (step not in (2, 5))
    assert isinstance(scaler, lossscale_torch.GradScaler)
"""


@pytest.mark.parametrize("options", [(), ("--policy", "policy.toml")])
def test_a_script_that_uses_this_library_is_traced(folder, options):
    """With its own policy, or that of the run in its place; the norms are those of the scaler's own clipping."""
    dump_policy(DynamicScaling(init_scale=2.0**7), folder / "policy.toml")
    done = _run(folder, OWN.replace("EXPECTED", "2.0**7" if options else "2.0**10"), options=options)
    assert done.returncode == 0, done.stderr
    rows = _rows(folder / "scale.csv")
    assert [row["applied"] for row in rows] == [str(step not in (2, 5)) for step in range(8)]
    assert [float(row["norm"]) < 100.0 for row in rows] == [step not in (2, 5) for step in range(8)]
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr


def test_a_plain_loop_is_traced_and_keeps_its_exit_status(folder, monkeypatch):
    """Every name of torch's scaler is covered, and the rows hold the norm."""
    other = folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('another sitecustomize')")
    monkeypatch.setenv("PYTHONPATH", str(other), prepend=os.pathsep)
    done = _run(folder, PLAIN)
    assert done.returncode == 3, done.stderr
    assert "another sitecustomize" in done.stdout
    rows = _rows(folder / "scale.csv")
    _require_simulated(rows)
    assert [row["spiked"] for row in rows] == ["False"] * 8
    assert [row["norm"] for row in rows if row["applied"] == "False"] == ["inf"] * 2
    assert all(0.0 < float(row["norm"]) < 100.0 for row in rows if row["applied"] == "True")
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr
    again = _run(folder, "sys.exit(9)")
    assert again.returncode == 2
    assert "scale.csv exists and is not overwritten" in again.stderr
    assert len(_rows(folder / "scale.csv")) == 8


LIGHTNING = """
    import warnings
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

    class Module(LightningModule):
        steps = 0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def on_after_backward(self):
            spoil(self.layer.weight, self.steps)
            self.steps += 1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    Trainer(
        accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=1, gradient_clip_val=1.0,
    ).fit(Module(), torch.utils.data.DataLoader([torch.randn(8, 4) for _ in range(8)], batch_size=None))
"""
ACCELERATE = """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.modeling import get_grad_scaler

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = get_grad_scaler(DistributedType.FSDP, device="cpu")  # it offers none for a CPU by itself
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(8):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        spoil(model.weight, step)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped == (step in (2, 5))
"""
TIMM = """
    import importlib.util, types
    (place,) = importlib.util.find_spec("timm").submodule_search_locations
    for name, path in (("timm", place), ("timm.utils", f"{place}/utils")):  # timm as a whole needs torchvision
        sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [path]
    from timm.utils.cuda import NativeScaler

    scaler, model = NativeScaler(device="cpu"), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda weight: spoil(weight, step))
    for step in range(8):
        optimizer.zero_grad()
        scaler(model(torch.randn(8, 4)).square().mean(), optimizer, clip_grad=1.0, parameters=model.parameters())
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    signal.pause()
"""


def test_lightning_is_traced(folder):
    """Lightning makes the scaler and clips; the trace is what the policy does with the flags, and the norm is known."""
    done = _run(folder, LIGHTNING)
    assert done.returncode == 0, done.stderr
    rows = _rows(folder / "scale.csv")
    _require_simulated(rows)
    assert all(row["norm"] for row in rows)
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr


def test_accelerate_launch_is_traced(folder):
    """FSDP's scaler under `accelerate launch`; a norm of gradients that are still scaled is not recorded."""
    done = _run(folder, ACCELERATE, *ACCELERATE_LAUNCH)
    assert done.returncode == 0, done.stderr
    rows = _rows(folder / "scale.csv")
    _require_simulated(rows)
    assert not any(row["norm"] for row in rows)
    assert "lossscale: healthy: 2 of 8 steps skipped" in done.stderr


def test_a_signal_reaches_a_script_with_timms_scaler(folder):
    """A script that handles SIGTERM ends as it wishes; the rows until then are there."""
    with subprocess.Popen(_command(folder, TIMM), cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            rows = _rows(folder / "scale.csv")
            _require_simulated(rows)
            assert all(row["norm"] for row in rows)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 7
        finally:
            process.kill()  # else a failure would wait for a script that waits for its signal


RANKS = """
    scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        spoil(model.weight, step)
        scaler.step(optimizer)
        scaler.update()
"""


def test_torchrun_writes_a_trace_for_each_rank(folder):
    """Each rank of two; without --policy the script's own settings hold."""
    done = _run(folder, RANKS, *TORCHRUN, options=())
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.glob("*.csv")} == {"scale.rank0.csv", "scale.rank1.csv"}
    for rank in range(2):
        _require_simulated(_rows(folder / f"scale.rank{rank}.csv"))
        assert f"lossscale: rank {rank}: healthy: 2 of 8" in done.stderr


def test_nothing_is_replaced_without_the_command(folder):
    """The folder on PYTHONPATH alone changes nothing."""
    import lossscale.tracing

    (site,) = lossscale.tracing.__path__
    check = "import torch; assert torch.amp.GradScaler.__module__ == 'torch.amp.grad_scaler'"
    paths = [f"{site}/site", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, cwd=folder)


def test_the_session_on_the_commands_page_is_real(tmp_path, monkeypatch):
    """The page's script, its trace and its picture print what the page shows."""
    monkeypatch.setenv("COLUMNS", "80")
    assert replay(sections()["Running a script as it is"], tmp_path) == 3


STEPS = """
    import os
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train(steps):
        for step in steps:
            scaler.scale((parameter * 2.0).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", ["", "first", "0/2"])
def test_a_rank_that_is_not_a_number_is_none(folder, rank, monkeypatch):
    """Scripts use RANK and WORLD_SIZE for what they like, and empty them."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", rank)
    done = _run(folder, STEPS + "    train(range(3))\n")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(_rows(folder / "scale.csv")) == 3


def test_a_forked_process_opens_a_trace_of_its_own(folder):
    """The rows of the parent and of the child do not mix."""
    done = _run(
        folder,
        STEPS
        + """
    train(range(2))
    child = os.fork()
    train(range(2, 5 if child else 9))
    if child:
        assert os.waitpid(child, 0)[1] == 0
""",
    )
    assert done.returncode == 0, done.stderr
    assert [int(row["step"]) for row in _rows(folder / "scale.csv")] == list(range(5))
    (other,) = folder.glob("scale.process*.csv")
    assert [int(row["step"]) for row in _rows(other)] == list(range(2, 9))


def test_a_full_disk_hides_no_diagnosis(folder):
    """The trace ends, and the summary at the exit is printed all the same."""
    limit = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
"""
    done = _run(folder, limit + STEPS + "    train(range(9))\n")
    assert done.returncode == 0, done.stderr
    assert "the trace ends at step" in done.stderr
    assert "Traceback" not in done.stderr
    assert "0 of 9 steps skipped" in done.stderr.splitlines()[-1]

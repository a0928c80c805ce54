"""`lossscale certify` writes a page that claims what has run, and nothing else."""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.adapters.pages import ROOT
from tests.command.commanding import refused, run
from tests.command.sessions import replay, sections

LOOPS = """
import atexit, collections, numpy, pathlib, torch


class Held:
    def __init__(self, scaler):
        self.scaler, self.model = scaler, torch.nn.Linear(4, 1)
        self.parallel = self.model
        if torch.distributed.is_initialized():
            self.parallel = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.scaler.scale(self.parallel(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())

    def follow(self, info):
        if info.applied:
            self.scheduler.step()


class NotHeld(Held):
    def follow(self, info):
        self.scheduler.step()


class PrintsThreads(Held):
    "Prints how many threads of a process group are left when the process ends."
    def __init__(self, scaler):
        super().__init__(scaler)
        atexit.unregister(print_threads)  # of the loop before this one
        atexit.register(print_threads)


def print_threads():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    assert names
    print(f"{sum('gloo' in name for name in names)} threads of gloo at exit")


class OneRankAdds(Held):
    "Adds something to the gradients of the last rank, where its steps are skipped or not."
    def step(self, batch):
        self.optimizer.zero_grad()
        self.scaler.scale(self.parallel(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        if not self.scaler.update().applied and torch.distributed.get_rank() == 1:
            self.model.bias.data.add_(1.0)


class Disabled(Held):
    def __init__(self, scaler):
        super().__init__(torch.amp.GradScaler("cpu", enabled=False))

    def follow(self, info):
        pass


class OtherData(Held):
    def step(self, batch):
        self.model.weight.data.add_(torch.rand(1, generator=GENERATOR))
        super().step(batch)


class Stops(Held):
    def follow(self, info):
        if not info.applied:
            raise SystemExit("a step was skipped | the run\\nends")


class Hidden(Held):
    "Has no member for its model."
    def __init__(self, scaler):
        super().__init__(scaler)
        self.hidden, self.model = self.model, None

    def step(self, batch):
        super().step(batch)
        self.hidden.weight.data.add_(1.0)


class ByHand(Held):
    "Unscales by hand, and tells the scaler the next scale."
    def __init__(self, scaler):
        super().__init__(scaler)
        self.own = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # which no step uses

    def step(self, batch):
        self.own.zero_grad()
        self.scaler.scale(self.model(torch.ones(2, 4)).square().mean()).backward()
        for param in self.model.parameters():
            param.grad /= self.scaler.get_scale()
        self.own.step()
        self.scaler.update(1024.0)


class NeverSteps(Held):
    def step(self, batch):
        self.scaler.scale(self.model(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()


class NoRate(Held):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.scheduler = None

    def follow(self, info):
        pass


class NotFinite(Held):
    def __init__(self, scaler):
        super().__init__(scaler)
        torch.nn.init.constant_(self.model.weight, float("nan"))


class TwoModels(Held):
    "Has a second model, which it does not show, and steps its optimizer without the scaler."
    def __init__(self, scaler):
        super().__init__(scaler)
        self.second = torch.nn.Linear(1, 1)
        self.of_second = torch.optim.Adam(self.second.parameters())

    def step(self, batch):
        self.of_second.zero_grad()
        self.scaler.scale(self.second(torch.ones(1)).square().mean()).backward()
        super().step(batch)
        self.of_second.step()


class SecondIsRight(TwoModels):
    "The loss of the second model is not scaled."
    def step(self, batch):
        self.of_second.zero_grad()
        self.second(torch.ones(1)).square().mean().backward()
        Held.step(self, batch)
        self.of_second.step()


class _Average:
    "Moves on each step, skipped or not."
    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return self.content


class InNumPy(Held):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average({"mean": numpy.zeros(2)})

    def follow(self, info):
        super().follow(info)
        self.ema.content["mean"] += 1


class InADeque(InNumPy):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average(collections.deque([0]))

    def follow(self, info):
        Held.follow(self, info)
        self.ema.content.append(1)


class InAnObject(InNumPy):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average({"steps": 0, "history": object()})

    def follow(self, info):
        Held.follow(self, info)


class InNothing(InAnObject):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average({})


class NoState(InAnObject):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = [torch.zeros(1)]


class Complex(Held):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.model = torch.nn.Linear(4, 1, dtype=torch.complex64)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = None

    def follow(self, info):
        pass

    def step(self, batch):
        self.optimizer.zero_grad()
        output = self.model(torch.ones(2, 4, dtype=torch.complex64))
        self.scaler.scale(torch.view_as_real(output).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Lazily(Held):
    "Adds a loss that is not scaled in each fourth step."
    def step(self, batch):
        self.optimizer.zero_grad()
        if batch % 4 == 3:
            self.model.weight.square().sum().backward()
        self.scaler.scale(self.model(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())


class ClipsLater(Held):
    "Clips scaled gradients from its sixth step on."
    def step(self, batch):
        self.optimizer.zero_grad()
        self.scaler.scale((self.model(torch.ones(2, 4)) - batch).square().mean()).backward()
        if batch >= 5:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())


class ClipsTheOther(TwoModels):
    "Clips the scaled gradients of a second model."
    def step(self, batch):
        self.of_second.zero_grad()
        self.scaler.scale(self.second(torch.ones(1)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.second.parameters(), 0.01)
        self.scaler.step(self.of_second)
        Held.step(self, batch)


def fails(scaler):
    raise OSError("no data")


GENERATOR = torch.Generator()
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with loops in `loops.py`, which is imported from there."""
    (tmp_path / "loops.py").write_text(textwrap.dedent(LOOPS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    return tmp_path


def _certified(folder, name, status):
    done = run("certify", f"loops:{name}", "--page", "page.md", "--overwrite", cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    page, content = (folder / "page.md").read_text(), json.loads((folder / "page.json").read_text())
    assert content["result"] == ("held", "not held", "not tried")[status]
    assert page.startswith(f"# Loss scaling: {content['result']} (")
    for line in content["lines"]:
        assert any(row.startswith(f"| {line['result']} | {line['what']} |") for row in page.splitlines())
        assert line["reason"]
    return page, {line["what"]: line for line in content["lines"]}


def test_a_loop_that_holds_ends_with_status_0(folder):
    """What it lacks is not tried, with the reason; the page has the versions, the seed and the command."""
    page, lines = _certified(folder, "Held", 0)
    results = [line["result"] for line in lines.values()]
    assert (results.count("held"), results.count("not held"), results.count("not tried")) == (8, 0, 5)
    assert lines["a skipped step leaves averaged weights as they were"]["reason"] == "the loop has no member `ema`"
    for part in (
        "`lossscale certify loops:Held --page page.md --overwrite`",
        "torch.manual_seed(0)",
        "\n- torch: ",
        "\n- lossscale: ",
    ):
        assert part in page


def test_a_loop_that_fails_ends_with_status_1(folder):
    """The other checks run all the same, and their lines are there."""
    _, lines = _certified(folder, "NotHeld", 1)
    line = lines["with its own optimizer: a step is skipped as a whole where each loss of it is infinite"]
    assert "scheduler.last_epoch went from 0 to 1" in line["reason"]
    assert lines["all gradients come from losses that are scaled or attached"]["result"] == "held"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NeverSteps", "no parameter changed"),
        ("NoRate", "no parameter changed"),
        ("NotFinite", "none of its steps was applied; look for a loss that is not finite"),
        ("Disabled", "the loop did not use the scaler that build was given; a scaler that is disabled"),
        ("OtherData", "they differ in model.weight, "),
        ("fails", "OSError: no data"),
    ],
)
def test_what_cannot_be_tried_ends_with_status_2(folder, name, reason):
    """A loop that does not train, a disabled scaler, a loop that is another one each time, one that cannot be built."""
    page, lines = _certified(folder, name, 2)
    assert reason in page
    assert {line["result"] for line in lines.values()} == {"not tried"}


def test_what_a_check_has_not_seen_is_not_claimed(folder):
    """A loop that unscales by hand, with an optimizer that is another one than it shows."""
    _, lines = _certified(folder, "ByHand", 1)
    line = lines["with its own optimizer: the loss scale makes no difference to the gradients"]
    assert line["result"] == "held"  # gradients are compared for every optimizer that steps
    line = lines["all gradients come from losses that are scaled or attached"]
    assert (line["result"], line["reason"]) == ("not tried", "the scaler was shown no gradients")


def test_an_optimizer_that_the_loop_does_not_show_is_stepped_by_the_scaler(folder):
    """Its parameters are finite after a planned overflow, if its loss was not scaled."""
    page, _ = _certified(folder, "TwoModels", 1)
    assert "parameters of Adam are not finite after it; call scaler.step(optimizer) for each optimizer" in page
    _certified(folder, "SecondIsRight", 0)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("InNumPy", 1, "step 0 was to be skipped, but ema.mean changed"),
        ("InADeque", 1, "step 0 was to be skipped, but ema.1 appeared"),
        ("InAnObject", 0, "| not tried | a skipped step leaves ema.history as it was | only tensors, arrays, "),
        (
            "InNothing",
            0,
            "| not tried | a skipped step leaves averaged weights as they were | the state_dict() of `ema`",
        ),
        (
            "NoState",
            0,
            "| a skipped step leaves averaged weights as they were | the loop's `ema` has no state_dict() |",
        ),
    ],
)
def test_state_that_no_check_reads_is_not_claimed(folder, name, status, reason):
    """Arrays and containers are compared; objects and empty states are named as not tried."""
    page, _ = _certified(folder, name, status)
    assert reason in page
    assert ("compared exactly: scheduler, ema, model, optimizer" in page) == (name not in ("InNothing", "NoState"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Lazily", "at step 3 the loss was multiplied by zero, and weight has a gradient other than zero"),
        ("ClipsLater", "at step 5 a loss scale of 1 and one of 1024 gave the optimizer gradients of norm"),
        ("ClipsTheOther", "at step 0 a loss scale of 1 and one of 1024 gave the optimizer gradients of norm"),
    ],
)
def test_every_step_and_every_optimizer_is_compared(folder, name, reason):
    """Faults in later steps alone, and in a second optimizer alone."""
    page, _ = _certified(folder, name, 1)
    assert reason in page


def test_a_complex_parameter_has_no_fused_kernel(folder):
    """So that its loop is held, and not tried with one."""
    page, _ = _certified(folder, "Complex", 0)
    assert "a parameter is complex, which fused kernels refuse" in page


def test_a_loop_that_raises_at_a_skip_has_not_held(folder):
    """Even if it ends the process; the reason stays within its cell of the table."""
    page, _ = _certified(folder, "Stops", 1)
    assert r"the loop raised SystemExit: a step was skipped \| the run ends |" in page


def test_weights_are_compared_without_a_model(folder):
    """Those of the optimizer, by number."""
    page, _ = _certified(folder, "Hidden", 1)
    assert "step 0 was to be skipped, but optimizer.parameter 0 of group 0 changed" in page


@pytest.mark.parametrize("name", ["loops", "loops:", "loops:number", "loops:absent", "absent:Held", ":Held"])
def test_what_is_not_a_loop_is_refused(folder, name):
    """No page is written."""
    assert "name" in refused(run("certify", name, cwd=folder))
    assert not (folder / "certificate.md").exists()


def test_a_page_is_not_overwritten(folder):
    """Neither is its JSON; with `--overwrite` both are, and the page ends in .md."""
    (folder / "certificate.json").write_text("mine")
    assert "certificate.json exists" in refused(run("certify", "loops:Held", cwd=folder))
    assert "must end in .md" in refused(run("certify", "loops:Held", "--page", "page.txt", cwd=folder))
    assert run("certify", "loops:Disabled", "--overwrite", cwd=folder).returncode == 2
    assert json.loads((folder / "certificate.json").read_text())["result"] == "not tried"


@pytest.mark.parametrize("name", ["PrintsThreads", "OneRankAdds"])
def test_one_rank_overflows_under_torchrun(folder, name):
    """Rank 0 writes the page, and what fails on another rank has failed.

    No thread of the group is left: one that frees a tensor while the interpreter ends would abort the process.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lossscale")
    command = [sys.executable, *launcher, "certify", f"loops:{name}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)
    page = (folder / "certificate.md").read_text()
    assert "on the last of 2 ranks" in page
    assert "`torchrun --standalone --nproc-per-node 2 -m lossscale certify" in page
    if name == "PrintsThreads":
        assert done.returncode == 0, done.stderr
        assert page.startswith("# Loss scaling: held")
        assert done.stdout.count("0 threads of gloo at exit") == 2
    else:
        assert done.returncode == 1  # torchrun's own
        assert "rank 1: step 0 was to be skipped, but model.bias changed" in page


def test_the_session_on_the_page_is_real(tmp_path):
    """The loop of docs/certify.md prints what the page shows."""
    assert replay(sections(ROOT / "docs/certify.md")["Certify a loop"], tmp_path) == 2


def test_the_session_with_planned_overflows_is_real(tmp_path):
    """So does the script."""
    assert replay(sections(ROOT / "docs/certify.md")["Plant overflows in a script"], tmp_path) == 2

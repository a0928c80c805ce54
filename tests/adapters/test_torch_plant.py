"""`lossscale run --plant` writes what planned overflows have moved in a script, and claims nothing that did not run."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.adapters.certify_score import SCRIPTS, run_script
from tests.command.commanding import refused, run

SCRIPT = """
    import sys, torch
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    other = torch.optim.SGD(model.parameters(), lr=0.5)  # which no step uses
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
"""
SKIPPED = "planned overflows are skipped"
SAME = "a planned overflow changes no parameter and nothing in the optimizer's state"
ZERO = "gradients are zero where each scaled loss is multiplied by zero"
SCALED = "each update follows a loss that the scaler has scaled"
RATES = "learning-rate schedules do not move on skipped steps"
AVERAGES = "averaged weights do not move on skipped steps"
STATISTICS = "the statistics of BatchNorm do not move on skipped steps"
CLIPPED = "gradients are unscaled before they are clipped"
SAVED = "torch.save writes the scaler's numbers with the optimizer's state"


def _lines(page):
    return {line["what"]: line for line in page["lines"]}


def _all_not_tried(done, page, reason):
    assert done.returncode == 2, done.stderr
    assert page["result"] == "not tried"
    assert all(line["result"] == "not tried" and reason in line["reason"] for line in page["lines"])


def test_the_page_says_what_was_planted(tmp_path):
    """The first update of a fused optimizer, which allocates its state there, and a trace next to the page."""
    done, page = run_script(tmp_path, SCRIPT, options=("--plant", "0, 1", "--trace", "scale.csv"))
    assert done.returncode == 0, done.stderr
    lines = _lines(page)
    assert lines[SKIPPED] == {"what": SKIPPED, "result": "held", "reason": "updates [0, 1]"}
    assert lines[SAME]["reason"] == "4 digests before and after 2 updates"
    assert lines[ZERO]["reason"].startswith("update 2, before unscaling")
    assert lines[RATES]["result"] == "not tried"
    assert page["about"]["repeat it with"].startswith("`lossscale run --plant '0, 1' --page page.md --overwrite -- ")
    rows = (tmp_path / "scale.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2:4] for row in rows[:4]] == [
        *[["False", "True"]] * 2,
        ["False", "False"],
        ["True", "False"],
    ]
    assert (tmp_path / "page.md").read_text().startswith("# Loss scaling: held (")


def test_a_script_that_uses_this_library_is_tried(tmp_path):
    """Its scaler takes part in the plan, as torch's does."""
    script = SCRIPT.replace("import sys, torch", "import sys, torch, lossscale_torch")
    script = script.replace("torch.amp.GradScaler", "lossscale_torch.GradScaler")
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    lines = _lines(page)
    assert {lines[name]["result"] for name in (SKIPPED, SAME, ZERO)} == {"held"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"cpu")', '"cpu", enabled=False)', "the scaler is disabled"),
        ('torch.amp.GradScaler("cpu")', "torch.cuda.amp.GradScaler()", "the scaler is disabled"),
        ("range(8)", "range(4)", "the script made 4 updates, numbered from 0"),
        ("    scaler = ", "    sys.exit(0)\n    scaler = ", "no process made a scaler"),
    ],
)
def test_what_did_not_run_is_not_tried(tmp_path, old, new, reason):
    """A scaler that is disabled, as most are on a CPU, too few updates, and no scaler."""
    done, page = run_script(tmp_path, SCRIPT.replace(old, new), options=("--plant", "3,4"))
    _all_not_tried(done, page, reason)


def test_what_follows_a_skip_is_not_tried_without_one(tmp_path):
    """A script that repairs its gradients, and moves its rate by each update that was applied."""
    repair = "backward(); model.weight.grad.nan_to_num_(0, 0, 0); model.bias.grad.nan_to_num_(0, 0, 0)"
    script = SCRIPT.replace("backward()", repair) + "        optimizer.param_groups[0]['lr'] *= 0.9\n"
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 1, done.stderr
    assert _lines(page)[SKIPPED]["result"] == "not held"
    line = _lines(page)[RATES]
    assert (line["result"], line["reason"]) == ("not tried", "no planned overflow was skipped")


def test_an_optimizer_of_the_scripts_own_is_tried(tmp_path):
    """It has digests, too; of a rank that ended early there are no findings."""
    own = """
        class Own:
            def __init__(self, params, **_):
                self.param_groups, self.state = [{"params": list(params)}], {}

            def step(self):
                with torch.no_grad():
                    for param in self.param_groups[0]["params"]:
                        param -= 0.1 * param.grad

            def zero_grad(self):
                for param in self.param_groups[0]["params"]:
                    param.grad = None

        torch.optim.SGD = Own
    """
    script = SCRIPT.replace("    model =", textwrap.indent(textwrap.dedent(own), "    ") + "    model =")
    script += "    import os; os.environ['WORLD_SIZE'] = '3'\n"
    _, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert _lines(page)[SKIPPED]["result"] == "held"
    assert _lines(page)[SAME]["result"] == "held"
    assert _lines(page)["every rank says what it found"]["reason"].startswith("1 of 3 ranks")


def test_the_line_of_a_step_that_was_not_reached_is_not_tried(tmp_path):
    """The script ends with the planned overflows."""
    done, page = run_script(tmp_path, SCRIPT, options=("--plant", "7"))
    assert done.returncode == 0, done.stderr
    assert _lines(page)[SKIPPED]["result"] == "held"
    assert _lines(page)[SAME]["result"] == "held"
    assert _lines(page)[ZERO] == {"what": ZERO, "result": "not tried", "reason": "the script did not reach update 8"}


def test_a_loss_that_is_not_finite_by_itself_is_not_tried(tmp_path):
    """Times zero it is NaN, which says nothing about the gradients."""
    script = SCRIPT.replace(".mean())", ".mean() / float(step != 5))")
    _, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert _lines(page)[ZERO]["reason"] == "a loss of update 5, or its gradient at zero, was not finite by itself"


def test_the_exit_status_of_a_script_that_fails_is_its_own(tmp_path):
    """The page says it, and has what was found until then; it is not held."""
    done, page = run_script(tmp_path, SCRIPT + "    sys.exit(7)\n", options=("--plant", "3,4"))
    assert done.returncode == 7
    assert page["about"]["exit status of the script"] == "7"
    assert page["result"] == "not held"
    assert _lines(page)["the script ends with exit status 0"]["reason"] == "it ended with 7"
    assert _lines(page)[SKIPPED]["result"] == "held"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        scaler.step(optimizer)\n", ""),
        ("lr=0.1, momentum=0.9", "lr=0.0, momentum=0.9"),
        ("        scaler.step(optimizer)\n", "        model.requires_grad_(False)\n        scaler.step(optimizer)\n"),
    ],
)
def test_a_run_that_changes_no_parameter_is_not_tried(tmp_path, old, new):
    """Without a step, with a learning rate of 0, or with frozen parameters, a skipped step looks like any other."""
    done, page = run_script(tmp_path, SCRIPT.replace(old, new), options=("--plant", "3,4"))
    assert done.returncode in (1, 2), done.stderr
    assert page["result"] != "held"


def test_another_optimizer_that_takes_the_overflow_is_found(tmp_path):
    """Its loss was scaled, too, and its step is not the scaler's: its parameters are NaN after the planned update."""
    second = """
    head = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(head.parameters(), lr=1e-6)
    """
    script = textwrap.dedent(SCRIPT).replace("for step", textwrap.dedent(second) + "for step")
    script = script.replace("model(torch.ones(8, 4))", "head(model(torch.ones(8, 4)))")
    script = script.replace("    scaler.update()", "    plain.step()\n    plain.zero_grad()\n    scaler.update()")
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 1, done.stderr
    line = _lines(page)[SAME]
    assert (line["result"], "is not finite" in line["reason"]) == ("not held", True), line


def test_each_checkpoint_needs_the_scalers_numbers(tmp_path):
    """A file of the scaler alone, written once, does not make later checkpoints whole."""
    save = """
        torch.save(optimizer.state_dict(), "optimizer.pt")
        if step == 0:
            torch.save(scaler.state_dict(), "scaler.pt")
    """
    script = SCRIPT + textwrap.indent(textwrap.dedent(save), "        ")
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 1, done.stderr
    line = _lines(page)[SAVED]
    assert line["result"] == "not held"
    assert "lack scaler.state_dict()" in line["reason"]
    script = script.replace("if step == 0:", "if True:")  # two files of one checkpoint
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("load", "result"),
    [
        ('scaler.load_state_dict(torch.load("7.pt")["scaler"])', "held"),
        ('scaler.load_state_dict(torch.load("3.pt")["scaler"])', "held"),
        ('scaler = torch.amp.GradScaler("cpu", init_scale=32768.0)', "not held"),
    ],
)
def test_a_resumed_run_is_compared_with_the_files_that_it_loads(tmp_path, load, result):
    """If it loads none, with the newest: the scale of an earlier file is not enough."""
    save = """
        torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, f"{step}.pt")
    """
    script = SCRIPT.replace("    model =", f"    if 'resume' in sys.argv: {load}\n    model =") + save
    options = ("--plant", "3,4", "--resume", f"{sys.executable} train.py resume")
    _, page = run_script(tmp_path, script, options=options)
    assert _lines(page)["a resumed run begins with the scale and the counters that were saved"]["result"] == result


@pytest.mark.parametrize(
    "moves",
    [
        "optimizer.param_groups[0]['lr'] = 0.1 if step < 1 else 0.05",
        "step % 6 or torch.optim.lr_scheduler.StepLR(optimizer, 1)",
        "step == 0 and schedule.step()",
    ],
)
def test_what_is_constant_next_to_the_planned_updates_says_nothing(tmp_path, moves):
    """Rates and schedules that move, but not there."""
    made = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)"
    script = SCRIPT.replace("    for step", f"    {made}\n    for step")
    done, page = run_script(tmp_path, script + f"        {moves}\n", options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert _lines(page)[RATES]["result"] == "not tried"
    assert "learning rates did not change in the updates next to the planned ones" in _lines(page)[RATES]["reason"]


def test_a_second_scaler_that_is_disabled_hides_nothing(tmp_path):
    """The enabled one is tried, and a line names the other."""
    script = SCRIPT + "    second = torch.amp.GradScaler('cpu', enabled=False)\n"
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert "the scaler is disabled, so that no loss was scaled" in _lines(page)["every scaler is tried"]["reason"]
    assert _lines(page)[SKIPPED]["result"] == "held"


def test_a_resume_that_does_not_run_is_not_tried(tmp_path):
    """Without a saved scaler, without such a program, or where the command fails."""
    for script, command, reason in (
        (SCRIPT, "python train.py", "no file had the scaler's numbers"),
        (SCRIPTS["nanoGPT"], "no-such-program", "no-such-program is not a command that can be run"),
        (SCRIPTS["nanoGPT"], f"{sys.executable} absent.py", "ended with status 2"),
    ):
        _, page = run_script(tmp_path, script, options=("--plant", "3,4", "--resume", command))
        line = _lines(page)["a resumed run begins with the scale and the counters that were saved"]
        assert line["result"] == "not tried"
        assert reason in line["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plant", "3"), "go together"),
        (("--page", "page.md"), "go together"),
        (("--resume", "python train.py"), "--resume goes with them"),
        (("--plant", "3,x", "--page", "page.md"), "--plant 3,x must list numbers of updates"),
        (("--plant", "-1", "--page", "page.md"), "--plant -1 must list numbers of updates"),
        (("--plant", "3", "--page", "page.txt"), "must end in .md"),
        (("--plant", "3", "--page", "there.md"), "there.md exists"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, message):
    """Before the script runs."""
    (tmp_path / "there.md").write_text("mine")
    assert message in refused(run("run", *options, "--", sys.executable, "absent.py", cwd=tmp_path))


def test_without_a_page_nothing_is_planted(tmp_path):
    """The command then becomes the script, as before."""
    (tmp_path / "train.py").write_text("import torch; print(torch.save.__module__, hasattr(torch.save, '__wrapped__'))")
    command = [sys.executable, "-m", "lossscale", "run", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.serialization False\n"


def test_a_signal_reaches_a_script_that_has_a_page(tmp_path):
    """The command waits for the script to end as it wishes, and writes the page."""
    end = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    signal.pause()
"""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT + end))
    command = [sys.executable, "-m", "lossscale", "run", "--plant", "3,4", "--page", "page.md", "--", sys.executable]
    with subprocess.Popen([*command, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 7
        finally:
            process.kill()  # else a failure would wait for a script that waits for its signal
    assert "- exit status of the script: 7\n" in (tmp_path / "page.md").read_text()


LOOP = """
    import copy, dataclasses, sys, torch
    torch.manual_seed(0)
    DEFINED = 0
    MODEL = torch.nn.Linear(4, 1)

    def main():
        model = MODEL
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu")
        MADE = 0
        for step in range(9):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            AFTER = 0

    main()
"""
CLASSES = """
    class EMA(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.ema, self.model = copy.deepcopy(model).requires_grad_(False), model
        def update(self):
            for ema, param in zip(self.ema.parameters(), self.model.parameters()):
                ema.data.mul_(0.9).add_(param.data, alpha=0.1)

    class ModelEMA:
        def __init__(self, model):
            self.shadow, self.model = {name: param.detach().clone() for name, param in model.named_parameters()}, model
        def update(self):
            for name, param in self.model.named_parameters():
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * param.detach()

    class Warm(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.optimizer, self._last_lr, self.count = optimizer, [0.1], 0
        def step(self):
            self.count += 1
            self.optimizer.param_groups[0]["lr"] = 0.1 / self.count
            self._last_lr = [0.1 / self.count]

    class CodebookEMA(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    @dataclasses.dataclass
    class Saved:
        scaler: dict

    class Odd:
        __slots__ = ()
        def __getattr__(self, name):
            raise KeyError(name)
"""
NORMED = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))"
CHAINED = "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])"
FOLLOW = """if scaler.get_scale() >= before:
                schedule.step()
            before = scaler.get_scale()"""
CLIP_LATE = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
OTHER = """other, weights = torch.amp.GradScaler("cpu"), torch.nn.Linear(4, 1)
        second = torch.optim.SGD(weights.parameters(), lr=0.1)"""
STEP_OTHER = """second.zero_grad()
            other.scale(weights(torch.ones(8, 4)).square().mean()).backward()
            other.step(second)
            other.update()"""
SAVE_ONE = "torch.save([optimizer.state_dict(), second.state_dict(), scaler.state_dict()], 'f.pt')"


def _loop(model="torch.nn.Linear(4, 1)", made="pass", after="pass"):
    """Return a script with its loop in a function, which frees the optimizer before the process ends."""
    script = LOOP.replace("MODEL = torch.nn.Linear(4, 1)", f"MODEL = {model}").replace("MADE = 0", made)
    return script.replace("    DEFINED = 0\n", CLASSES).replace("AFTER = 0", after)


@pytest.mark.parametrize(
    ("script", "held"),
    [
        (_loop(), {SKIPPED, SAME, ZERO, SCALED}),
        (_loop(made=f"schedule, before = {CHAINED}, 0", after=FOLLOW), {SAME, RATES}),
        (_loop(made="schedule, before = Warm(optimizer), 0", after=FOLLOW), {SAME, RATES}),
        (_loop(NORMED).replace('"cpu")', '"cpu", protect=[model])').replace("torch.amp.", "lossscale_torch.").replace(
            "import copy", "import lossscale_torch, copy"), {SAME, STATISTICS}),
        (_loop("torch.nn.LazyLinear(1)"), {SAME, ZERO}),
        (_loop(after="torch.save({'o': optimizer.state_dict(), 's': Saved(scaler.state_dict()), 'x': Odd()}, 'f.pt')"),
         {SAME, SAVED}),
        (_loop(made="import os, time; os.fork() or sys.exit(0); os.wait()"), {SAME, ZERO}),
        (_loop(after="torch.save(obj=[optimizer.state_dict(), scaler.state_dict()], f=open('f.pt', 'wb'))"), {SAVED}),
    ],
    ids=["a function", "ChainedScheduler", "no last_epoch", "protected", "lazy", "a dataclass", "a fork", "a file"],
)  # fmt: skip
def test_what_is_right_is_held(tmp_path, script, held):
    """Ways of writing a script that change nothing about its steps."""
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    lines = _lines(page)
    assert {name for name in held if lines[name]["result"] == "held"} == held, lines
    assert "every scaler is tried" not in lines


@pytest.mark.parametrize(
    ("script", "line", "reason"),
    [
        (_loop(made="ema = EMA(model)", after="ema.update()"), AVERAGES, "EMA moved on 2 of 2 skipped steps"),
        (_loop(made="ema = ModelEMA(model)", after="ema.update()"), AVERAGES, "ModelEMA moved on 2 of 2 skipped"),
        (_loop("torch.nn.Sequential(CodebookEMA(), torch.nn.Linear(4, 1))"), AVERAGES, "CodebookEMA moved on 2 of 2"),
        (_loop(made=f"schedule = {CHAINED}", after="schedule.step()"), RATES, "ChainedScheduler moved on 2 of 2"),
        (_loop(NORMED), STATISTICS, "BatchNorm1d was updated by 2 of 2 skipped steps"),
        (_loop(after=f"{CLIP_LATE}; scaler.update()").replace("            scaler.update()\n", ""),
         CLIPPED, "9 of 9 clips were not between"),
        (_loop().replace("scaler.scale(model(torch.randn(8, 4)).square().mean())",
                         "(scaler.scale if step % 4 != 2 else abs)(model(torch.randn(8, 4)).square().mean())"),
         SCALED, "updates 2, 6 of 9 came without scaler.scale(loss)"),
        (_loop(made=OTHER, after=f"{STEP_OTHER}\n            {SAVE_ONE}"),
         SAVED, "lack scaler.state_dict()"),
    ],
    ids=["by data", "a plain class", "a layer", "Chained", "BatchNorm", "clipped late", "not scaled", "one saved"],
)  # fmt: skip
def test_what_is_wrong_is_found(tmp_path, script, line, reason):
    """In scripts that keep nothing until the process ends."""
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 1, done.stderr
    found = _lines(page)[line]
    assert (found["result"], reason in found["reason"]) == ("not held", True), found


def test_the_last_updates_are_compared(tmp_path):
    """The state after them is read when the process ends."""
    wrong = _loop(after="[param.data.mul_(2.0) for param in model.parameters()]")
    done, page = run_script(tmp_path, wrong, options=("--plant", "8"))
    assert done.returncode == 1, done.stderr
    assert "changed" in _lines(page)[SAME]["reason"]


TWO = """
    import torch

    class Trained:
        def __init__(self):
            self.model, self.scaler = torch.nn.Linear(4, 1), torch.amp.GradScaler("cpu")
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

        def step(self):
            before = self.scaler.get_scale()
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.ones(8, 4)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() >= before:
                self.schedule.step()

    one, other = Trained(), Trained()
    for step in range(20):
        one.step()
        if step % EVERY == 0:
            other.step()
"""


def test_two_scalers_with_steps_of_their_own(tmp_path):
    """A schedule counts for the scaler of its optimizer; one that did not reach the planned updates is named."""
    done, page = run_script(tmp_path, TWO.replace("EVERY", "2"), options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert _lines(page)[RATES]["result"] == "held"
    assert _lines(page)[AVERAGES]["reason"].endswith("the process has 2 scalers, and each may skip alone")
    done, page = run_script(tmp_path, TWO.replace("EVERY", "9"), options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert "the script made 3 updates" in _lines(page)["every scaler is tried"]["reason"]


def test_a_gradient_that_is_nan_at_a_loss_of_zero_is_not_tried(tmp_path):
    """That of a square root; it says nothing about losses that are not scaled."""
    penalty = "loss = model(torch.randn(8, 4)).square().mean()\n            scaler.scale(loss).sqrt().backward()"
    script = _loop().replace("scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()", penalty)
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert _lines(page)[ZERO]["result"] == "not tried"


def test_statistics_before_the_first_update_are_not_known(tmp_path):
    """The first forward pass comes before the first loss is scaled."""
    done, page = run_script(tmp_path, _loop(NORMED), options=("--plant", "0"))
    assert done.returncode == 0, done.stderr
    assert (
        _lines(page)[STATISTICS]["reason"]
        == "BatchNorm1d: nothing was read before the planned updates; plan later ones"
    )

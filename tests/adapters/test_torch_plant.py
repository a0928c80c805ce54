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
    assert lines["learning-rate schedules do not move on skipped steps"]["result"] == "not tried"
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
    line = _lines(page)["learning-rate schedules do not move on skipped steps"]
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
    assert _lines(page)[ZERO]["reason"] == "the loss of update 5 was not finite by itself"


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
    line = _lines(page)["torch.save writes the scaler's numbers with the optimizer's state"]
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


def test_a_rate_that_is_constant_next_to_the_planned_updates_says_nothing(tmp_path):
    """It moves, but not there."""
    script = SCRIPT + "        optimizer.param_groups[0]['lr'] = 0.1 if step < 1 else 0.05\n"
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    line = _lines(page)["learning-rate schedules do not move on skipped steps"]
    assert line["result"] == "not tried"
    assert "no learning rate changes next to the planned updates" in line["reason"]


def test_a_second_scaler_that_is_disabled_hides_nothing(tmp_path):
    """The enabled one is tried, and a line names the other."""
    script = SCRIPT + "    second = torch.amp.GradScaler('cpu', enabled=False)\n"
    done, page = run_script(tmp_path, script, options=("--plant", "3,4"))
    assert done.returncode == 0, done.stderr
    assert _lines(page)["every scaler is enabled"]["reason"].startswith("1 of 2 are disabled")
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

"""The `lossscale` command as a person meets it, on real files; that a process says the same is one test."""

import json
import subprocess
import sys

import pytest

from lossscale import from_tool, tools
from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    dump_policy,
    load_policy,
    state_from_dict,
    state_to_dict,
)
from tests.command.commanding import run


def _succeed(*arguments, cwd="."):
    done = run(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [("policy", "show", "p.toml"), ("policy", "check", "none.toml")])
def test_a_process_says_what_the_command_says_here(tmp_path, monkeypatch, arguments):
    """The same output, the same error and the same status."""
    monkeypatch.setenv("COLUMNS", "80")
    dump_policy(DynamicScaling(), tmp_path / "p.toml")
    command = [sys.executable, "-m", "lossscale", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (process.returncode, process.stdout, process.stderr) == run(*arguments, cwd=tmp_path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return a short demo's output, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("demo")
    dump_policy(DynamicScaling(init_scale=2.0**44, growth_interval=5, max_scale=2.0**48), folder / "policy.toml")
    printed = _succeed("demo", "--steps", 30, "--seed", 1, "--policy", "policy.toml", "--out", "out/deep", cwd=folder)
    return printed, folder


def test_demo_prints_a_table_and_leaves_a_picture_and_a_trace(demo):
    """Four regimes, a PNG and a JSON record."""
    printed, folder = demo
    for word in ("float32", "float16, no scaling", "float16, fixed 64", "float16, your policy", "accuracy", "flushed"):
        assert word in printed
    assert (folder / "out/deep/demo.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "out/deep/trace.json").read_text())
    assert (record["steps"], record["seed"], len(record["overflow"])) == (30, 1, 30)
    assert len(record["accuracy_by_loss_weight"]["float32"]) == 7


def test_the_demos_table_fits_a_phone(tmp_path, monkeypatch):
    """On 40 columns each result of each regime is there, and no line is longer or cut."""
    monkeypatch.setenv("COLUMNS", "40")
    printed = _succeed("demo", "--steps", 2, cwd=tmp_path)
    table = printed[printed.index("Digits in") : printed.index("wrote")]
    assert "…" not in table
    assert all(len(line) <= 40 for line in table.splitlines())
    for word in ("accuracy", "flushed", "skipped", "final scale"):
        assert table.count(f"│ {word} ") == 4


@pytest.mark.parametrize("option", ["--overflow", "--gradient-max"])
def test_simulate_reads_the_demos_trace(demo, option):
    """Table, summary and picture."""
    _, folder = demo
    picture = f"s{option}.png"
    printed = _succeed("simulate", "policy.toml", option, "out/deep/trace.json", "--plot", picture, cwd=folder)
    for word in (
        "loss scale",
        "backs off",
        "skipped:",
        "of 30 steps",
        "first applied step:",
        "final scale:",
        "steps skipped",
    ):
        assert word in printed
    assert (folder / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.txt", "0010"),
        ("t.txt", "0 0 1 0\n"),
        ("t.csv", "0,0\n1,0"),
        ("t.txt", "false false true false"),
        ("t.json", "[0, 0, 1, 0]"),
        ("t.json", "[false, false, true, false]"),
        ("t.json", '"0010"'),
        ("t.json", '{"overflow": "0010"}'),
    ],
)
def test_simulate_reads_overflows_as_people_write_them(tmp_path, name, text):
    """Flags in a row or apart, as text or JSON."""
    (tmp_path / name).write_text(text)
    printed = _succeed("simulate", "dynamic", "--overflow", name, cwd=tmp_path)
    assert "skipped: 25.0% of 4 steps" in printed
    assert "final scale: 2**15" in printed
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_plain_terminal_and_a_windows_file_are_no_obstacle(tmp_path, monkeypatch):
    """Output that ASCII lacks is replaced, and a byte-order mark is passed over."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "t.txt").write_text("0 1", encoding="utf-8-sig")
    (tmp_path / "p.TOML").write_text('kind = "dynamic"', encoding="utf-8-sig")
    assert "skipped: 50.0%" in _succeed("simulate", "p.TOML", "--overflow", "t.txt", cwd=tmp_path)


def test_simulate_tells_where_training_would_have_stopped(tmp_path):
    """A limit on the streak is part of the policy, so reaching it is part of the answer."""
    (tmp_path / "p.toml").write_text('kind = "dynamic"\nmax_overflow_streak = 3\n')
    (tmp_path / "t.txt").write_text("0111110")
    assert "max_overflow_streak=3 is reached at step 3" in _succeed(
        "simulate", "p.toml", "--overflow", "t.txt", cwd=tmp_path
    )


def test_simulate_takes_a_number_and_a_dtype(tmp_path):
    """A fixed scale, and the dtype that sets the largest number; null is a gradient that is not finite."""
    (tmp_path / "g.json").write_text("[1.0, null, 1e5]")
    assert "skipped: 66.7%" in _succeed("simulate", "128", "--gradient-max", "g.json", cwd=tmp_path)
    bfloat16 = _succeed(
        "simulate", "128", "--gradient-max", "g.json", "--dtype", "bfloat16", "--overwrite", cwd=tmp_path
    )
    assert "skipped: 33.3%" in bfloat16


def test_policy_commands(tmp_path):
    """check says what it is, show lists every setting."""
    path = tmp_path / "p.json"
    dump_policy(DynamicScaling(growth_interval=77), path)
    assert _succeed("policy", "check", "p.json", cwd=tmp_path) == "p.json: a valid policy of kind 'dynamic'\n"
    shown = _succeed("policy", "show", "p.json", cwd=tmp_path)
    assert "growth_interval" in shown
    assert "77" in shown
    assert "max_overflow_streak" in shown


@pytest.mark.parametrize("policy", [FixedScaling(2.0), DynamicScaling()], ids=lambda each: each.kind)
def test_policy_show_explains_every_setting(tmp_path, policy):
    """Each setting has its meaning next to its allowed values."""
    dump_policy(policy, tmp_path / "p.toml")
    settings = json.loads(_succeed("policy", "show", "p.toml", "--json", cwd=tmp_path))["settings"]
    assert settings
    assert all(setting["meaning"] and setting["allowed"] for setting in settings.values())


def test_policy_show_takes_what_simulate_takes():
    """The default policy by its name, and a fixed scale by its number."""
    assert json.loads(_succeed("policy", "show", "dynamic", "--json"))["settings"]["growth_interval"]["value"] == 2000
    assert json.loads(_succeed("policy", "show", "128", "--json"))["settings"]["init_scale"]["value"] == 128.0


def test_policy_show_writes_powers_of_two_as_such(tmp_path):
    """A scale reads as 2**16, and a factor as 2."""
    dump_policy(DynamicScaling(), tmp_path / "p.toml")
    shown = _succeed("policy", "show", "p.toml", cwd=tmp_path)
    assert "Multiplies the scale when it grows" in shown
    assert "2**16" in shown
    assert "2**32" in shown


def test_policy_check_as_json_says_what_is_wrong(tmp_path):
    """A program reads the verdict, and still gets the status and the line on stderr."""
    (tmp_path / "good.toml").write_text('kind = "dynamic"')
    (tmp_path / "bad.toml").write_text('kind = "dynamic"\ngrowth_factor = 1.0')
    good = json.loads(_succeed("policy", "check", "good.toml", "--json", cwd=tmp_path))
    assert good == {"file": "good.toml", "valid": True, "kind": "dynamic"}
    done = run("policy", "check", "bad.toml", "--json", cwd=tmp_path)
    bad = json.loads(done.stdout)
    assert (bad["valid"], done.returncode) == (False, 2)
    assert done.stderr == f"lossscale: {bad['error']}\n"


def test_simulate_as_json_has_every_stretch(tmp_path):
    """The counts, the final scale and the diagnosis are values."""
    (tmp_path / "t.txt").write_text("01" * 50)
    found = json.loads(_succeed("simulate", "dynamic", "--overflow", "t.txt", "--json", cwd=tmp_path))
    assert (found["steps"], found["skipped_steps"], found["first_applied_step"]) == (100, 50, 0)
    assert [row["loss_scale"] for row in found["stretches"][:3]] == [65536.0, 32768.0, 16384.0]
    assert sum(row["applied"] + row["skipped"] for row in found["stretches"]) == 100
    assert found["diagnosis"].startswith("skipping too often")
    assert [each.name for each in tmp_path.iterdir()] == ["t.txt"]


def test_checkpoint_show_as_json_has_state_policy_and_diagnosis(tmp_path):
    """The state is what `state_from_dict` reads; another tool's checkpoint has no number of steps to diagnose."""
    state = DynamicScaling().update(DynamicScaling().init_state(), False)
    own = _write_json(tmp_path / "own.json", state_to_dict(state, DynamicScaling()))
    found = json.loads(_succeed("checkpoint", "show", own, "--json", cwd=tmp_path))
    assert state_from_dict(found["state"]) == state
    assert found["policy"]["kind"] == "dynamic"
    assert found["diagnosis"].startswith("calibrating")
    apex = _write_json(tmp_path / "apex.json", APEX)
    found = json.loads(_succeed("checkpoint", "show", apex, "--json", cwd=tmp_path))
    assert (found["source"], found["diagnosis"]) == ("the scaler of apex", None)


def test_the_help_of_from_says_where_the_tools_are_listed():
    """Each `--from` leads to the one list, which names every tool."""
    for command in (("checkpoint", "show"), ("checkpoint", "convert")):
        assert "lossscale policy convert --help" in " ".join(_succeed(*command, "--help").split())
    listed = "".join(_succeed("policy", "convert", "--help").split())  # a line may end at the hyphen of a name
    assert all(name in listed for name in tools())


COMMANDS = [
    *((), ("demo",), ("simulate",), ("run",), ("plot",)),
    *(("policy",), ("policy", "check"), ("policy", "show")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(command):
    """Every command's --help ends in something to copy; a group alone prints its help."""
    assert "Example:\n    lossscale" in _succeed(*command, "--help")
    if command in [(), ("policy",)]:
        assert "Example:\n    lossscale" in _succeed(*command)


def _write_json(path, content):
    path.write_text(json.dumps(content))
    return path.name


DEEPSPEED = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}
APEX = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}


def test_policy_convert_writes_a_policy_file(tmp_path):
    """From a whole DeepSpeed JSON to a file that `policy check` takes, or to the terminal."""
    _write_json(tmp_path / "ds_config.json", DEEPSPEED)
    command = ("policy", "convert", "--from", "deepspeed", "ds_config.json")
    printed = _succeed(*command, "--to", "policy.toml", cwd=tmp_path)
    assert "wrote policy.toml: a policy of kind 'dynamic'" in printed
    assert load_policy(tmp_path / "policy.toml") == from_tool("deepspeed", DEEPSPEED["fp16"])
    assert _succeed(*command, cwd=tmp_path) == (tmp_path / "policy.toml").read_text()
    assert "a valid policy" in _succeed("policy", "check", "policy.toml", cwd=tmp_path)


def test_policy_convert_reads_toml(tmp_path):
    """The policy is that of the tool."""
    (tmp_path / "theirs.toml").write_text("growth_interval = 0\n")
    done = run("policy", "convert", "--from", "torch", "theirs.toml", "--to", "policy.json", cwd=tmp_path)
    assert done.returncode == 0
    assert load_policy(tmp_path / "policy.json").growth_interval == 2**31 - 1


def test_policy_convert_lists_every_tool():
    """The help names all that `from_tool` knows."""
    printed = " ".join(_succeed("policy", "convert", "--help").replace("-\n  ", "-").split())
    assert all(name in printed for name in tools())


def test_checkpoint_convert_makes_a_state_of_ours(tmp_path):
    """Another tool's saved scaler, guessed or named, becomes the JSON that `state_from_dict` reads."""
    dump_policy(from_tool("apex", {"scale_window": 500}), tmp_path / "policy.toml")
    _write_json(tmp_path / "amp.json", {"epoch": 3, "amp": APEX})
    command = ("checkpoint", "convert", "amp.json", "--policy", "policy.toml")
    assert "the scaler of apex at 'amp', with its policy" in _succeed(*command, "--to", "state.json", cwd=tmp_path)
    saved = json.loads((tmp_path / "state.json").read_text())
    assert (saved["loss_scale"], saved["growth_tracker"], saved["policy"]["growth_interval"]) == (8.0, 7, 500)
    assert json.loads(_succeed(*command, "--key", "amp", "--from", "apex", cwd=tmp_path)) == saved
    assert state_from_dict(saved, load_policy(tmp_path / "policy.toml")).growth_tracker == 7


def test_checkpoint_show_tells_what_is_in_a_file(tmp_path):
    """Ours with its policy and a diagnosis, another tool's under its name."""
    state = DynamicScaling().update(DynamicScaling().init_state(), False)
    _write_json(tmp_path / "ours.json", {"scaler": state_to_dict(state, DynamicScaling())})
    printed = _succeed("checkpoint", "show", "ours.json", cwd=tmp_path)
    for words in ("a state of this library", "2**15", "policy: growth_interval", "2000", "1 of 1 steps skipped"):
        assert words in printed.replace("\n", " ")
    _write_json(tmp_path / "jmp.json", {"loss_scale": 8.0, "counter": 7})
    printed = _succeed("checkpoint", "show", "jmp.json", cwd=tmp_path)
    assert "the scaler of jmp" in printed
    assert "healthy" not in printed


BAD_INPUT = [
    (("demo", "--steps", "0"), "--steps"),
    (("demo", "--steps", "many"), "many"),
    (("demo", "--seed", "-1"), "--seed"),
    (("demo", "--weight", "nan"), "--weight"),
    (("demo", "--weight", "0"), "--weight"),
    (("demo", "--weight", "1e300"), "--weight"),
    (("demo", "--policy", "none.toml"), "none.toml: No such file or directory"),
    (("demo", "--policy", "bad.toml"), "did you mean 'growth_interval'"),
    (("demo", "--steps", "1", "--out", "bad.toml"), "bad.toml: File exists"),
    (("demo", "--policy", "streak.toml", "--steps", "9"), "max_overflow_streak=2"),
    (("simulate",), "POLICY"),
    (("simulate", "dynamic"), "--overflow FILE"),
    (("simulate", "dynamic", "--overflow", "t.txt", "--gradient-max", "t.txt"), "--overflow FILE"),
    (("simulate", "dynamik", "--overflow", "t.txt"), "'dynamik' is not a loss-scaling policy"),
    (("simulate", "nan", "--overflow", "t.txt"), "POLICY nan: a fixed loss scale must be a number from 2**-126 to"),
    (("simulate", "none.toml", "--overflow", "good.txt"), "none.toml: No such file or directory; pass the path of a"),
    (("run", "--policy", "0", "--", "python", "x.py"), "--policy 0: a fixed loss scale must be a number from 2**-126"),
    (
        ("simulate", "dynamic", "--overflow", "none.txt"),
        "none.txt: No such file or directory; pass the path of a file that exists",
    ),
    (("simulate", "dynamic", "--overflow", "empty.txt"), "empty.txt holds no steps"),
    (("simulate", "dynamic", "--overflow", "t.txt"), "t.txt: step 1 is 'x', but must be 0 or 1"),
    (("simulate", "dynamic", "--gradient-max", "t.txt"), "t.txt: step 1 is 'x', but must be a number"),
    (("simulate", "dynamic", "--overflow", "broken.json"), "broken.json is not valid JSON"),
    (("simulate", "dynamic", "--overflow", "object.json"), "object.json has no 'overflow'; it has loss"),
    (
        ("simulate", "dynamic", "--overflow", "good.txt", "--plot", "none/s.png"),
        "none/s.png: No such file or directory; make its folder first",
    ),
    (("simulate", "dynamic", "--overflow", "good.txt", "--plot", "s.docx"), "s.docx"),
    (("policy", "check", "bad.toml"), "growth_intervall"),
    (("policy", "check", "."), ".toml or .json"),
    (("policy", "show", "none.json"), "none.json: No such file"),
    (("policy", "check", "deep.json"), "deep.json is not valid JSON"),
    (("policy", "check", "deep.toml"), "deep.toml is not valid TOML"),
    (("simulate", "dynamic", "--overflow", "deep.json"), "deep.json is not valid JSON"),
    (("simulate", "dynamic", "--gradient-max", "huge.json"), "huge.json: step 0"),
    (("simulate", "dynamic", "--overflow", "number.json"), "but must hold a list"),
    (("policy", "convert", "--from", "deepspeed", "none.json"), "none.json: No such file"),
    (("policy", "convert", "--from", "deepspeed", "broken.json"), "broken.json is not valid JSON"),
    (("policy", "convert", "--from", "deepspeed", "number.json"), "but must hold a dict of keys"),
    (("policy", "convert", "--from", "deepspeed", "object.json"), "'loss' is not a key of deepspeed"),
    (("policy", "convert", "--from", "deepsped", "object.json"), "did you mean 'deepspeed'"),
    (("policy", "convert", "object.json"), "--from"),
    (("checkpoint", "show", "object.json", "--from", "torhc"), "did you mean 'torch'"),
    (("checkpoint", "show", "none.json"), "none.json: No such file"),
    (("checkpoint", "show", "number.json"), "but must hold a dict"),
    (("checkpoint", "show", "broken.json"), "broken.json is not valid JSON"),
    (
        ("checkpoint", "show", "object.json"),
        "object.json: no known tool saves its scaler under these names: loss; pass --from TOOL with the tool that "
        "saved it\n",
    ),
    (("checkpoint", "show", "none"), "none: No such file or directory; pass the path of a file that exists\n"),
    (("checkpoint", "show", "."), ". must be a file in JSON (.json), NumPy's .npz, or written by torch.save"),
    (("checkpoint", "show", "object.json", "--from", "torch"), "has no scale, growth_tracker"),
    (("checkpoint", "show", "object.json", "--key", "scaler"), "no key 'scaler'; it has loss"),
    (("checkpoint", "show", "object.json", "--key", "loss"), "but must hold a dict"),
    (("checkpoint", "show", "bad.toml"), "must be a file in JSON (.json), NumPy's .npz, or written by torch.save"),
    (("checkpoint", "show", "several.json"), "several.json holds several scalers; pass --key with one of a, b"),
    (("checkpoint", "convert", "several.json", "--key", "a", "--to", "none/s.json"), "none/s.json: No such file"),
    (("policy", "convert", "--from", "torch", "empty.json", "--to", "empty.json"), "empty.json exists and is not over"),
    (("checkpoint", "convert", "several.json", "--key", "a", "--to", "several.json"), "several.json exists"),
    (("policy", "convert", "--from", "torch", "infinite.json"), "growth_factor=inf"),
    (("policy", "convert", "--from", "torch", "lists.json"), "init_scale=[1, 2] must be one number"),
    (("checkpoint", "show", "odd.json", "--from", "torch"), "growth_tracker=inf"),
    (("polizy",), "polizy"),
    (("--colour",), "--colour"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), BAD_INPUT, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_bad_input_is_one_sentence_and_status_two(tmp_path, arguments, words):
    """Never a traceback: one line on stderr that names what is wrong."""
    (tmp_path / "bad.toml").write_text('kind = "dynamic"\ngrowth_intervall = 3\n')
    (tmp_path / "streak.toml").write_text(
        'kind = "dynamic"\ninit_scale = 1e36\nmax_scale = 1e37\nmax_overflow_streak = 2\n'
    )
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "deep.toml").write_text("a=" + "[" * 5000)
    (tmp_path / "huge.json").write_text(f"[1{'0' * 400}]")
    (tmp_path / "number.json").write_text("3")
    (tmp_path / "t.txt").write_text("0 x 1")
    (tmp_path / "good.txt").write_text("0 1")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.json").write_text("[0,")
    (tmp_path / "object.json").write_text('{"loss": [1]}')
    _write_json(tmp_path / "several.json", {"a": APEX, "b": APEX})
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "infinite.json").write_text('{"growth_factor": Infinity}')
    (tmp_path / "odd.json").write_text('{"scale": 8.0, "_growth_tracker": Infinity}')
    _write_json(tmp_path / "lists.json", {"init_scale": [1, 2]})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(*arguments, cwd=tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lossscale: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout

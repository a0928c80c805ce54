"""The `lossscale` command as a person meets it, on real files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale_core
from lossscale import from_tool, tools
from lossscale_core import DynamicScaling, dump_policy, load_policy
from lossscale_core.testing import simulate, trace_to_csv
from tests.command.commanding import succeed

DEEPSPEED = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}
APEX = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}
COMMANDS = ["", "demo", "simulate", "run", "plot", "checkpoint", "policy", "policy check", "policy convert"]
TITLES = "step,scale,applied,overflowed,spiked,norm,gradient_max,scaler\n"


def _write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    """Every command's --help ends in something to copy; a group alone prints its help with status 0."""
    help_, _ = succeed(*command.split(), "--help")
    assert "Example:\n    lossscale" in help_
    assert succeed(*command.split(), "-h")[0] == help_
    if command in ["", "policy"]:
        assert succeed(*command.split())[0] == help_


# -- policies


@pytest.mark.parametrize(
    ("name", "text", "tool", "config"),
    [
        ("c.json", json.dumps(DEEPSPEED), "deepspeed", DEEPSPEED),
        ("c.toml", "[fp16]\nenabled = true\n", "deepspeed", {"fp16": {"enabled": True}}),
        ("c.toml", "init_scale = 8.0\ngrowth_interval = 0\n", "torch", {"init_scale": 8.0, "growth_interval": 0}),
        ("c.toml", "initial-loss-scale = 1024\nloss-scale-window = 5e2\n", "megatron", {"loss_scale_window": 500}),
    ],
)
def test_policy_convert_guesses_the_tool(tmp_path, name, text, tool, config):
    """From JSON or TOML, with hyphens too; to a file, or to stdout."""
    _write(tmp_path, name, text)
    expected = from_tool(tool, {"initial_loss_scale": 1024, **config} if tool == "megatron" else config)
    data, _ = succeed("policy", "convert", name, cwd=tmp_path)
    succeed("policy", "convert", name, "--from", tool, "--to", "p.toml", cwd=tmp_path)
    assert load_policy(tmp_path / "p.toml") == expected
    _write(tmp_path, "q.toml", data)
    assert load_policy(tmp_path / "q.toml") == expected
    assert all(name in succeed("policy", "convert", "--help")[0] for name in tools())


# -- traces


def _trace(folder, rows, titles=TITLES):
    return _write(folder, "t.csv", titles + "".join(f"{row}\n" for row in rows))


def _simulated(folder, *arguments):
    return json.loads(succeed("simulate", *arguments, "t.csv", "--json", cwd=folder)[0])


def test_simulate_reacts_to_the_scale(tmp_path):
    """A step overflows if its magnitude is too large for the new scale; an overflow depends on the scale, too."""
    rows = ["0,1024.0,False,True,False,inf,inf,0", *(f"{n},512.0,True,False,False,9,{2.0**n},0" for n in range(1, 9))]
    _trace(tmp_path, rows)
    summary = _simulated(tmp_path, "512")
    assert (summary["steps"], summary["skipped_steps"], summary["first_applied_step"]) == (9, 2, 0)  # 2**7 and 2**8
    assert _simulated(tmp_path, "1024")["skipped_steps"] == 4
    assert _simulated(tmp_path, "512", "--dtype", "bfloat16")["skipped_steps"] == 0
    _, said = succeed("simulate", "dynamic", "t.csv", cwd=tmp_path)
    assert "In the trace 1 of 9 steps were skipped" in said
    assert "above float16's largest number" in said


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**128])
def test_a_trace_may_have_any_scale_of_a_tool(tmp_path, scale):
    """From the smallest float32 to the first number above the largest."""
    _trace(tmp_path, [f"0,{scale},False"], "step,scale,overflowed\n")
    assert _simulated(tmp_path, "512")["steps"] == 1


def test_simulate_says_where_training_would_have_stopped(tmp_path):
    """A limit on the streak is part of the policy, so reaching it is part of the answer."""
    _write(tmp_path, "p.toml", 'kind = "dynamic"\nmax_overflow_streak = 3\n')
    _trace(tmp_path, [f"{n},8.0,{1 <= n <= 60}" for n in range(70)], "step,scale,overflowed\n")
    data, said = succeed("simulate", "p.toml", "t.csv", cwd=tmp_path)
    assert "max_overflow_streak is reached at step 3" in said
    assert "skipping too often: 60 of 70 steps skipped" in said
    lines = [line.split() for line in data.splitlines()]
    assert (lines[1][0], lines[-1]) == ("0-1", ["17-69", "1", "44", "ends"])


def test_a_restarted_run_counts_its_steps_once(tmp_path):
    """Repeated steps take the place of those before; spikes share the step of the next row, and move no scale."""
    rows = [
        *(f"{n},64.0,True,False,False,1.0,1.0,0" for n in range(6)),
        *(f"{n},32.0,True,False,False,1.0,1.0,0" for n in range(3, 5)),
        "5,32.0,False,False,True,9.0,9.0,0",
        "5,32.0,False,True,False,inf,inf,0",
        "6,16.0,True,False,False,1.0,1.0,0",
        "0,4.0,True,False,False,1.0,1.0,1",
    ]
    _trace(tmp_path, rows)
    assert _simulated(tmp_path, "16")["steps"] == 7
    _, said = succeed("plot", "t.csv", "-o", "p.svg", cwd=tmp_path)
    assert "t.csv has 2 scalers; this is the first" in said
    assert "8 steps, 2 of them skipped" in said


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=9, max_size=30), st.booleans(), st.integers(0, 10**6))
def test_a_written_trace_is_simulated_by_its_own_steps(tmp_path_factory, finite, has_guard, first):
    """The same policy has the same run, and the stretches name the steps of the file, wherever they begin."""
    folder, policy = tmp_path_factory.mktemp("traces"), DynamicScaling(growth_interval=2)
    guarded = {
        "norms": [4.0 ** (n % 3) for n in range(len(finite))],
        "guard": lossscale_core.SpikeGuard(threshold=2.0, warmup=1),
    }
    trace = simulate(policy, finite, **(guarded if has_guard else {}))
    trace_to_csv(trace, folder / "t.csv")
    dump_policy(policy, folder / "p.toml")
    rows = [row.split(",") for row in (folder / "t.csv").read_text().splitlines()[1:]]
    numbers = [int(row[0]) + first for row in rows if row[4] == "False"]
    _trace(folder, [",".join([str(int(row[0]) + first), *row[1:]]) for row in rows])
    summary = _simulated(folder, "p.toml")
    assert summary["final_loss_scale"] == trace.loss_scale_after[-1]
    assert [n for row in summary["stretches"] for n in range(row["first_step"], row["last_step"] + 1)] == numbers


def test_a_picture_without_norms(tmp_path):
    """The loss scale alone, in each format; rows that were cut are left out with a warning."""
    (tmp_path / "t.csv").write_text("step,scale,overflowed\n0,8.0,False\n1,8\n1,8.0,True\n2,4.0,Fal")
    for suffix in ("png", "pdf", "svg", "svg"):
        _, said = succeed("plot", "t.csv", "-o", f"p.{suffix}", "--overwrite", cwd=tmp_path)
        assert "rows that may have been cut are ignored, the first of them row 3" in said
        assert "2 steps, 1 of them skipped" in said
        assert (tmp_path / f"p.{suffix}").stat().st_size > 1000


# -- checkpoints


def test_checkpoint_reads_other_tools(tmp_path):
    """Guessed or named, and under the policy that continues."""
    dump_policy(from_tool("apex", {"scale_window": 500}), tmp_path / "policy.toml")
    _write(tmp_path, "amp.json", {"epoch": 3, "amp": APEX})
    for named in ((), ("--from", "apex")):
        data, _ = succeed("checkpoint", "amp.json", "--policy", "policy.toml", *named, cwd=tmp_path)
        entries = json.loads(data)
        assert (entries["loss_scale"], entries["growth_tracker"], entries["policy"]["growth_interval"]) == (8.0, 7, 500)


def test_several_scalers_are_printed_under_their_places(tmp_path):
    """Escaped, so that a key writes no lines nor colours; the search ends where each parameter has a dict."""
    _write(tmp_path, "two.json", {"a\nlossscale: all is well\x1b[31m": APEX, "b": {"c": APEX}})
    data, said = succeed("checkpoint", "two.json", cwd=tmp_path)
    assert [*json.loads(data)] == ["a\nlossscale: all is well\x1b[31m", "b.c"]
    assert "\x1b" not in data + said
    assert r"a\nlossscale" in said
    states = {str(number): {"step": 1} for number in range(30_000)}
    _write(tmp_path, "large.json", {"optimizer": {"state": states, "grad_scaler": APEX}})
    data, said = succeed("checkpoint", "large.json", cwd=tmp_path)
    assert json.loads(data)["loss_scale"] == 8.0
    assert "only the first 1000 dicts were searched" in said

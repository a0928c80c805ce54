"""The `lossscale` command on files; `sessions.md` has more of its sessions."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale_core
from lossscale_core import DynamicScaling, dump_policy
from lossscale_core.testing import simulate, trace_to_csv
from tests.command.commanding import succeed

APEX = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}
COMMANDS = ["", "demo", "simulate", "run", "plot", "checkpoint", "policy", "policy check", "policy convert"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    """The help of each command has an example; a group of commands without arguments prints its help."""
    help_, _ = succeed(*command.split(), "--help")
    assert "Example:\n    lossscale" in help_
    assert succeed(*command.split(), "-h")[0] == help_
    if command in ["", "policy"]:
        assert succeed(*command.split())[0] == help_


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=9, max_size=30), st.booleans(), st.integers(0, 10**6))
def test_a_written_trace_keeps_its_steps(tmp_path_factory, finite, has_guard, first):
    """A policy has the same run in `simulate`, in which stretches have the steps of the file, whatever the first is."""
    folder, policy = tmp_path_factory.mktemp("traces"), DynamicScaling(growth_interval=2)
    guarded = {
        "norms": [4.0 ** (n % 3) for n in range(len(finite))],
        "guard": lossscale_core.SpikeGuard(threshold=2.0, warmup=1),
    }
    trace = simulate(policy, finite, **(guarded if has_guard else {}))
    trace_to_csv(trace, folder / "t.csv")
    dump_policy(policy, folder / "p.toml")
    titles, *rows = [row.split(",") for row in (folder / "t.csv").read_text().splitlines()]
    numbers = [int(row[0]) + first for row in rows if row[4] == "False"]
    rows = [titles, *([str(int(row[0]) + first), *row[1:]] for row in rows)]
    (folder / "t.csv").write_text("".join(f"{','.join(row)}\n" for row in rows))
    summary = json.loads(succeed("simulate", "p.toml", "t.csv", "--json", cwd=folder)[0])
    assert summary["final_loss_scale"] == trace.loss_scale_after[-1]
    assert [n for row in summary["stretches"] for n in range(row["first_step"], row["last_step"] + 1)] == numbers


def test_a_picture_has_complete_rows_only(tmp_path):
    """Each format of a picture shows the loss scale; rows that were cut are left out with a warning."""
    (tmp_path / "t.csv").write_text("step,scale,overflowed\n0,8.0,False\n1,8\n1,8.0,True\n2,4.0,Fal")
    for suffix in ("png", "pdf", "svg", "svg"):
        _, said = succeed("plot", "t.csv", "-o", f"p.{suffix}", "--overwrite", cwd=tmp_path)
        assert "rows that may have been cut are ignored, the first of them row 3" in said
        assert "2 steps, 1 of them skipped" in said
        assert (tmp_path / f"p.{suffix}").stat().st_size > 1000


def test_several_scalers_have_their_places(tmp_path):
    """A key is printed without control characters; the search for scalers ends after a thousand dicts."""
    scalers = {"a\nlossscale: all is well\x1b[31m": APEX, "b": {"c": APEX}}
    (tmp_path / "two.json").write_text(json.dumps(scalers))
    data, said = succeed("checkpoint", "two.json", cwd=tmp_path)
    assert [*json.loads(data)] == [next(iter(scalers)), "b.c"]
    assert "\x1b" not in data + said
    assert r"a\nlossscale" in said
    states = {str(number): {"step": 1} for number in range(30_000)}
    (tmp_path / "large.json").write_text(json.dumps({"optimizer": {"state": states, "grad_scaler": APEX}}))
    data, said = succeed("checkpoint", "large.json", cwd=tmp_path)
    assert json.loads(data)["loss_scale"] == 8.0
    assert "only the first 1000 dicts were searched" in said

"""Untrusted files: the command answers any content in one short sentence."""

import json
import re

import numpy as np
import pytest

from lossscale import state_from_tool, tools
from lossscale.other_tools import table, tools_of_checkpoint
from lossscale_core.errors import CheckpointError, CheckpointWarning
from tests.command.commanding import refused, run

LONGEST = 3000
"""What a message may have in characters: it is read in a terminal."""


HUGE = "x" * 10_000_000


@pytest.mark.parametrize(
    "saved",
    [
        {"scale": HUGE, "_growth_tracker": 1},
        {"scale": [1.0] * 1_000_000, "_growth_tracker": 1},
        {"scale": 8.0, "_growth_tracker": 1, "growth_factor": HUGE},
        {"scale": 8.0, "_growth_tracker": 10**400},
        {"scale": 10**400, "_growth_tracker": 1},
        {"scale": 8.0, "_growth_tracker": 1 << 20_000},
        {"scale": 8.0, "_growth_tracker": 1, "growth_interval": 10**400},
        {"scale": 8.0, "_growth_tracker": 1, "growth_factor": 0.5},
        {"scale": 8.0, "_growth_tracker": 1, "growth_factor": np.ones(3)},
        {"scale": 8.0, "_growth_tracker": 1, "growth_factor": {}},
        {"scale": np.ones(3), "_growth_tracker": np.ones(3)},
        {"scale": 1j, "_growth_tracker": 1},
        {"scale": b"8", "_growth_tracker": None},
        {("scale",): 8.0, 3: 4, None: 5, b"scale": 6.0},
    ],
    ids=lambda _: "saved",
)
@pytest.mark.filterwarnings("ignore::lossscale_core.errors.CheckpointWarning")
def test_state_from_tool_raises_checkpoint_errors(saved):
    """Whatever a checkpoint holds, the error is of one kind and is short."""
    with pytest.raises(CheckpointError) as caught:
        state_from_tool("torch", saved)
    assert len(str(caught.value)) < LONGEST
    assert "jmp" not in tools_of_checkpoint({**saved, "zzz": 1})


@pytest.mark.parametrize("name", tools())
def test_no_value_of_a_known_key_raises_another_error(name):
    """Every key of every tool's checkpoint takes any value, or refuses it as a `CheckpointError`."""
    tool = table()[name]
    keys = {*tool["keys"], *tool.get("more_keys", {}), *tool.get("names", {})}
    keys |= {*re.findall(r"\w+", str(tool["saved"].values()))}
    for bad in (None, True, -1, 0, 0.3, 10**400, float("nan"), "x", [], {}, (1, 2), np.ones(2), b"", 1j):
        for key in sorted(keys):
            checkpoint = {**dict.fromkeys(sorted(keys), 8), key: bad}
            try:
                state_from_tool(name, checkpoint)
            except (CheckpointError, CheckpointWarning):
                continue


def _write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


FILES = {
    "counters of 10**400": (
        ("checkpoint", "show", "f.json"),
        {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 10**400}},
    ),
    "a state with a count of 10**400": (
        ("checkpoint", "show", "f.json"),
        {"version": 1, "loss_scale": 8.0, "steps": 10**400, "growth_tracker": 0},
    ),
    "a TOML integer of 5,000 digits": (("policy", "check", "f.toml"), f'kind = "fixed"\ninit_scale = {"9" * 5000}'),
    "a TOML integer of 5,000 hexadecimal digits": (
        ("policy", "check", "f.toml"),
        f'kind = "fixed"\ninit_scale = 0x{"f" * 5000}',
    ),
    "a foreign TOML integer of 5,000 digits": (
        ("policy", "convert", "--from", "torch", "f.toml"),
        f"growth_interval = 0x{'f' * 5000}",
    ),
    "a foreign list of foreign integers": (
        ("policy", "convert", "--from", "torch", "f.toml"),
        f"growth_interval = [0x{'f' * 5000}, 1]",
    ),
    **{
        f"JSON nested {depth} deep in a {what}": (arguments, f'{{"{key}": {"[" * depth}{"]" * depth}}}')
        for depth in (300, 900, 1200)
        for what, arguments, key in (
            ("policy", ("policy", "check", "f.json"), "kind"),
            ("config", ("policy", "convert", "--from", "torch", "f.json"), "growth_interval"),
            ("checkpoint", ("checkpoint", "show", "f.json"), "scale"),
            ("guess", ("checkpoint", "show", "f.json", "--from", "torch"), "scale"),
            ("run", ("simulate", "dynamic", "--overflow", "f.json"), "overflow"),
        )
    },
    "a message of 10 MB": (("policy", "check", "f.json"), {"kind": "x" * 900_000}),
    "a long key": (("checkpoint", "show", "f.json", "--key", "a"), {"x" * 1_000_000: 1}),
    "a thousand keys": (("checkpoint", "show", "f.json", "--key", "a"), {f"key{n}": 1 for n in range(1000)}),
    "a step that is long": (("simulate", "dynamic", "--overflow", "f.txt"), "x" * 1_000_000),
    "a policy that names a file": (
        ("checkpoint", "show", "f.json"),
        {"version": 1, "loss_scale": 8.0, "policy": "/dev/null.toml"},
    ),
}


@pytest.mark.parametrize(("arguments", "content"), FILES.values(), ids=FILES)
def test_no_file_makes_a_traceback_or_a_flood(tmp_path, arguments, content):
    """One line on stderr, short enough to read, and status 2."""
    name = next(argument for argument in arguments if argument.startswith("f."))
    _write(tmp_path, name, content)
    assert len(refused(run(*arguments, cwd=tmp_path))) < LONGEST


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "check", "f.toml"),
        ("policy", "check", "f.json"),
        ("policy", "convert", "--from", "torch", "f.json"),
        ("checkpoint", "show", "f.json"),
        ("simulate", "dynamic", "--overflow", "f.txt"),
        ("simulate", "dynamic", "--gradient-max", "f.json"),
    ],
    ids=" ".join,
)
def test_a_link_to_a_device_without_an_end_is_refused(tmp_path, arguments):
    """What /dev/zero holds is more than any file of ours may hold."""
    name = next(argument for argument in arguments if argument.startswith("f."))
    (tmp_path / name).symlink_to("/dev/zero")
    said = refused(run(*arguments, cwd=tmp_path))
    assert "MiB" in said or "regular file" in said


@pytest.mark.parametrize("name", ["[/x].json", "[red]p.json", ":bomb:.json"])
def test_names_are_no_markup(tmp_path, name):
    """`policy show '[/x].json'` shows the file under its name."""
    folder = tmp_path / name.partition("/")[0]
    if "/" in name:
        folder.mkdir()
    (tmp_path / name).write_text('{"kind": "fixed", "init_scale": 8.0}')
    done = run("policy", "show", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert name.replace("\n", "") in done.stdout.replace("\n", "")


def test_keys_with_newlines_and_escapes_are_shown_escaped(tmp_path):
    """A key of a checkpoint cannot write lines of its own, nor colours, into a terminal."""
    apex = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}
    _write(tmp_path, "f.json", {"a\nlossscale: all is well\x1b[31m": apex, "b": apex})
    said = refused(run("checkpoint", "show", "f.json", cwd=tmp_path))
    assert "\x1b" not in said
    assert r"\n" in said
    assert r"\x1b" in said
    _write(tmp_path, "f.json", {"a\n\x1b[31m": apex})
    done = run("checkpoint", "show", "f.json", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert r"\x1b" in done.stdout

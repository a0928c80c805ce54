"""Files that are damaged, or made to end in a traceback: one line that names what is wrong."""

import json
import subprocess
import sys
import warnings
from decimal import Decimal

import numpy as np
import pytest

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    dump_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import shown
from lossscale_core.errors import CheckpointError, PolicyError
from tests.command.commanding import refused, run

LONGEST = 3000
READERS = [
    ("checkpoint", "show", "f.json"),
    ("checkpoint", "convert", "f.json"),
    ("policy", "check", "f.toml"),
    ("policy", "check", "f.json"),
    ("policy", "show", "f.json"),
    ("policy", "convert", "--from", "torch", "f.json"),
    ("plot", "f.csv", "-o", "f.svg"),
    ("simulate", "dynamic", "--overflow", "f.txt"),
    ("simulate", "dynamic", "--gradient-max", "f.json"),
    ("simulate", "f.toml", "--overflow", "flags.txt"),
]


def _refused(folder, arguments):
    """Return what the command says, which must be short."""
    said = refused(run(*arguments, cwd=folder))
    assert len(said) < LONGEST
    return said


def test_a_pipe_of_the_shell_is_read(tmp_path):
    """`/dev/stdin` stays possible where another command writes."""
    command = [sys.executable, "-m", "lossscale", "simulate", "dynamic", "--overflow", "/dev/stdin"]
    done = subprocess.run(command, input="0 1 0 0", capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 steps" in done.stdout


def test_json_above_4_mib_is_refused(tmp_path):
    """A scaler in JSON has a few hundred bytes; a checkpoint with its weights is not JSON."""
    (tmp_path / "f.json").write_bytes(b"[" + b" " * 2**22 + b"]")
    assert "more than 4 MiB" in _refused(tmp_path, ("checkpoint", "show", "f.json"))


def _strided(dims):
    return np.lib.stride_tricks.as_strided(np.zeros(1), (7,) * dims, (0,) * dims)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _strided(12), f"ndarray of shape {(7,) * 12}"),
        (lambda: {"a": [_strided(12)]}, f"ndarray of shape {(7,) * 12}"),
        (lambda: np.zeros((2, 2)), "ndarray of shape (2, 2)"),
        (lambda: bytearray(2**30), r"\x00'..."),
        (lambda: bytes(2**20), r"\x00'..."),
        (lambda: b"short", "b'short'"),
    ],
    ids=["strided", "nested", "small", "bytearray", "bytes", "short"],
)
def test_large_values_are_cut_before_they_are_shown(make, words):
    """An array of a few bytes may have more elements than the memory."""
    text = shown(make())
    assert words in text
    assert "\n" not in text
    assert len(text) < LONGEST


SAVED = state_to_dict(DynamicScaling().init_state(), "dynamic")


BAD = {
    "a signalling NaN": Decimal("sNaN"),
    "a NaN": Decimal("NaN"),
    "an array": np.ones(3),
    "an empty array": np.array([]),
    "a strided array": _strided(12),
    "an integer": 10**400,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", [*SAVED, "kind", "growth_factor"])
def test_no_value_of_a_state_makes_another_error(name, bad):
    """A state with any value in any place is restored, with a note, or refused as a `CheckpointError`: in a line."""
    saved = {**SAVED, "policy": {**SAVED["policy"], name: BAD[bad]}} if name not in SAVED else {**SAVED, name: BAD[bad]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state_from_dict(saved, DynamicScaling())
            said = [str(each.message) for each in caught]
        except CheckpointError as error:
            said = [str(error)]
    assert said
    assert all(len(each) < LONGEST and "\n" not in each for each in said)


@pytest.mark.parametrize("kind", [np.ones(3), Decimal("sNaN"), [1], None])
def test_no_kind_makes_another_error(kind):
    """Whatever stands for the kind of a policy."""
    with pytest.raises(PolicyError, match="is not a kind of policy"):
        policy_from_dict({"kind": kind})


def test_numbers_that_are_none_make_no_traceback(tmp_path):
    """JSON's NaN and infinities in torch's state, with a policy to continue with: noted, or refused."""
    saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
    for policy in (DynamicScaling(growth_interval=7), FixedScaling(8.0)):
        dump_policy(policy, tmp_path / "policy.toml")
        for name in saved:
            for bad in ("NaN", "Infinity", "-Infinity", "1e999"):
                (tmp_path / "f.json").write_text(json.dumps({**saved, name: "?"}).replace('"?"', bad))
                done = run("checkpoint", "show", "f.json", "--policy", "policy.toml", cwd=tmp_path)
                assert done.returncode in (0, 2)
                assert all(line.startswith("lossscale: ") for line in done.stderr.splitlines())


# -- recorded runs

ROWS = "step,scale,overflowed\n0,8.0,False\n1,8.0,True\n2,4.0,False\n"


def test_a_last_row_that_was_cut_is_ignored(tmp_path):
    """What was written before it is drawn, and the row is named."""
    for cut in ("3", "3,4.", "3,4.0,Fal", "3,4.0,False"):
        (tmp_path / "f.csv").write_text(ROWS + cut)
        done = run("plot", "f.csv", "-o", "f.svg", "--overwrite", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said = "lossscale: warning: f.csv: the last row is ignored, since it has no end and may have been cut\n"
        assert done.stderr == said
        assert done.stdout.startswith("3 steps: 1 overflowed")


def test_a_row_in_the_middle_that_was_cut_is_refused(tmp_path):
    """Two writers may have written over each other."""
    (tmp_path / "f.csv").write_text(ROWS + "3,4.0\n" + "4,4.0,False\n")
    assert "row 5 has 2 cells" in _refused(tmp_path, ("plot", "f.csv", "-o", "f.svg"))


@pytest.mark.parametrize("rows", ["-1e308,8,1\n1e308,4,1\n", "0,5e-324,1\n1,1e308,1\n", "0,8,-1e308\n1,8,1e308\n"])
def test_numbers_beyond_every_run_are_left_out(tmp_path, rows):
    """No step, no scale and no norm is that large, and a picture could not show it: neither an error nor a warning."""
    (tmp_path / "f.csv").write_text("step,scale,norm,overflowed\n5,16,1,True\n" + rows.replace("\n", ",False\n"))
    done = run("plot", "f.csv", "-o", "f.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader[0] != "plot"], ids=" ".join)
def test_a_folder_is_refused_by_its_name(tmp_path, reader):
    """Not by a number that Python has given it."""
    (tmp_path / "flags.txt").write_text("0 1")
    name = next(argument for argument in reader if argument.startswith("f."))
    (tmp_path / name).mkdir()
    assert f"{name} is a folder" in _refused(tmp_path, reader)


def test_names_of_files_are_escaped(tmp_path):
    """A message stays one line, and writes nothing else to a terminal."""
    said = _refused(tmp_path, ("policy", "check", "a\n\x1b[31m.toml"))
    assert r"a\n\x1b[31m.toml" in said

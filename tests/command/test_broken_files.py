"""Files made to hang, to fill the memory or to end in a traceback: one line, within two seconds and 300 MB."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from decimal import Decimal

import numpy as np
import pytest

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    dump_policy,
    load_policy,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import read_data, shown
from lossscale_core.errors import CheckpointError, PolicyError
from tests.command.commanding import refused, run
from tests.command.test_pickles import refused_soon

LONGEST = 3000
SECONDS = 2.0
READERS = [
    ("checkpoint", "show", "f.json"),
    ("checkpoint", "convert", "f.json"),
    ("policy", "check", "f.toml"),
    ("policy", "check", "f.json"),
    ("policy", "show", "f.json"),
    ("policy", "convert", "--from", "torch", "f.json"),
    ("plot", "f.csv", "-o", "f.svg"),
    ("plot", "f.json", "-o", "f.svg"),
    ("simulate", "dynamic", "--overflow", "f.txt"),
    ("simulate", "dynamic", "--gradient-max", "f.json"),
    ("simulate", "f.toml", "--overflow", "flags.txt"),
    ("report", "f.json"),
    ("report", "--policy", "f.toml"),
]


def _refused_soon(folder, arguments):
    """Return what the command says; it must say it soon."""
    start = time.process_time()  # of the processor, since the machine may be busy
    said = refused(run(*arguments, cwd=folder))
    assert time.process_time() - start < SECONDS
    assert len(said) < LONGEST
    return said


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_a_named_pipe_is_refused(tmp_path, arguments):
    """Its writer may never come, and no reader waits for it."""
    (tmp_path / "flags.txt").write_text("0 1")
    os.mkfifo(tmp_path / next(argument for argument in arguments if argument.startswith("f.")))
    assert "is not a regular file" in _refused_soon(tmp_path, arguments)


def test_a_pipe_of_the_shell_is_read(tmp_path):
    """`/dev/stdin` stays possible where another command writes."""
    command = [sys.executable, "-m", "lossscale", "simulate", "dynamic", "--overflow", "/dev/stdin"]
    done = subprocess.run(command, input="0 1 0 0", capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 steps" in done.stdout


@pytest.mark.parametrize("count", [20_000, 400_000])
def test_a_name_that_occurs_twice_is_found_soon(tmp_path, count):
    """Among as many names in one JSON object as a file may have."""
    names = ",".join(f'"{n:x}":0' for n in range(count))
    (tmp_path / "f.json").write_text(f'{{{names},"7":1}}')
    assert "'7' occurs twice" in _refused_soon(tmp_path, ("checkpoint", "show", "f.json"))


@pytest.mark.parametrize("form", ["{}=1", "[{}]", "[[{}]]", "kind={{{}=1}}", "{}", '"x".{}=1'])
@pytest.mark.parametrize("word", ["a.", "a . ", '"a".', "'a' .", '"\\"".'])
def test_toml_with_deep_keys_is_refused_soon(tmp_path, form, word):
    """A dotted key of twenty thousand parts makes as many tables."""
    key = word * (40_000 // len(word)) + "a"
    (tmp_path / "f.toml").write_text(form.format(key))
    assert "more than 16 parts" in _refused_soon(tmp_path, ("policy", "check", "f.toml"))


@pytest.mark.parametrize("unit", ["a", '"', "a ", "a.a ", "[", "a.\n", '\\"', "'''", '"""\\', "'.", '"""a'])
def test_odd_toml_of_64_kib_is_refused_soon(tmp_path, unit):
    """Whatever it repeats."""
    (tmp_path / "f.toml").write_text(unit * (65_000 // len(unit)))
    _refused_soon(tmp_path, ("policy", "check", "f.toml"))


DOTS = "1.3.6.1.4.1.311.21.8.1.2.3.4.5.6.7.8.9"
NOT_KEYS = [
    "# id {}\n",
    "x = 1 # {}\n",
    'x = "{}"\n',
    "x = '{}'\n",
    'x = """\n{}\n"""\n',
    "x = '''\n{}\n'''\n",
    'x = ["""a"""", """{}"""]\n',
]


@pytest.mark.parametrize("line", NOT_KEYS, ids=str.strip)
def test_many_dots_outside_of_keys_do_no_harm(tmp_path, line):
    """Such as the number of an object in a standard, in a comment or a text."""
    (tmp_path / "f.toml").write_text(line.format(DOTS))
    read_data(tmp_path / "f.toml", PolicyError)
    (tmp_path / "f.toml").write_text(line.format(DOTS) + "a." * 20 + "a = 1\n")
    with pytest.raises(PolicyError, match="more than 16 parts"):
        read_data(tmp_path / "f.toml", PolicyError)


def test_toml_above_64_kib_is_refused(tmp_path):
    """A policy has a few hundred bytes."""
    (tmp_path / "f.toml").write_text('kind = "dynamic"\n' + "# more\n" * 10_000)
    assert "more than 64 KiB" in _refused_soon(tmp_path, ("policy", "check", "f.toml"))


@pytest.mark.parametrize("unit", ["[],", "{},", '"a",', "0,", '{"a":0},'])
def test_json_takes_less_than_300_mb(tmp_path, unit):
    """The largest file that is read, of what takes the most memory for each byte."""
    (tmp_path / "f.json").write_text(f'{{"scale":[{unit * (4_180_000 // len(unit))}0]}}')
    refused_soon(tmp_path, "checkpoint", "show", "f.json")


def test_json_above_4_mib_is_refused(tmp_path):
    """A scaler in JSON has a few hundred bytes; a checkpoint with its weights is not JSON."""
    (tmp_path / "f.json").write_bytes(b"[" + b" " * 2**22 + b"]")
    assert "more than 4 MiB" in _refused_soon(tmp_path, ("checkpoint", "show", "f.json"))


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
    value, start = make(), time.perf_counter()
    text = shown(value)
    assert time.perf_counter() - start < SECONDS
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


# -- what a writer leaves


def _kill_while_writing(folder):
    """Leave a temporary file of a process that was killed before it renamed the file."""
    code = """
import os, signal, lossscale_core as c
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
c.dump_policy(c.FixedScaling(8192.0), "policy.toml")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_writer_removes_what_killed_ones_left(tmp_path):
    """After kills in the middle of a write, the folder holds the policy alone; what it cannot remove stays."""
    for _ in range(3):
        _kill_while_writing(tmp_path)
    assert len(list(tmp_path.glob(".lossscale-*"))) >= 1
    (tmp_path / f".lossscale-{'0' * 16}.tmp").mkdir()
    dump_policy(FixedScaling(8.0), tmp_path / "policy.toml")
    assert sorted(each.name for each in tmp_path.iterdir()) == [f".lossscale-{'0' * 16}.tmp", "policy.toml"]


WRITE = """
import sys, lossscale_core as c
for _ in range(200):
    c.dump_policy(c.FixedScaling(float(sys.argv[1])), sys.argv[1] + ".toml")
"""


def test_writers_leave_the_files_of_writers_that_live(tmp_path):
    """Threads and processes that write to one folder at a time do not disturb each other."""

    def write(number):
        for _ in range(50):
            dump_policy(FixedScaling(float(number)), tmp_path / f"{number}.toml")

    others = [subprocess.Popen([sys.executable, "-c", WRITE, str(number)], cwd=tmp_path) for number in (1, 2)]
    threads = [threading.Thread(target=write, args=[number]) for number in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(60) for other in others] == [0, 0]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{n}.toml" for n in range(1, 5)]


@pytest.mark.parametrize("policy", [FixedScaling(8192.0), DynamicScaling(growth_interval=2000, hysteresis=2)])
def test_a_policy_file_that_was_cut_is_refused(tmp_path, policy):
    """None of its prefixes loads as another policy."""
    path = tmp_path / "policy.toml"
    dump_policy(policy, path)
    whole = path.read_text()
    for length in range(len(whole) - 1):
        path.write_text(whole[:length])
        with pytest.raises(PolicyError):
            load_policy(path)
        path.write_bytes(whole[:length].replace("\n", "\r\n").encode())  # as some editors convert it
        with pytest.raises(PolicyError):
            load_policy(path)
    for end in (whole[:-1], whole.replace("\n", "\r\n")):
        path.write_bytes(end.encode())
        assert load_policy(path) == policy


def test_a_policy_file_written_by_hand_needs_no_last_line(tmp_path):
    """Comments and added lines do no harm, also after the last line of a written file."""
    (tmp_path / "policy.toml").write_text('kind = "fixed"\ninit_scale = 8.0')
    assert load_policy(tmp_path / "policy.toml") == FixedScaling(8.0)
    dump_policy(DynamicScaling(), tmp_path / "policy.toml")
    with (tmp_path / "policy.toml").open("a") as file:
        file.write("# ours\n")
    assert load_policy(tmp_path / "policy.toml") == DynamicScaling()


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
    assert "row 5 has 2 cells" in _refused_soon(tmp_path, ("plot", "f.csv", "-o", "f.svg"))


ODD = {
    "columns": b"1," * 2_000_000 + b"\n",
    "rows": b"1\n" * 500_000,
    "quote": b'"' * 4_000_000,
    "cells": (b"1," * 4000 + b"1\n") * 500,
    "no scale": b"a,b\n" + b"1,1\n" * 4_000_000,
    "empty lines": b"step,scale\n" + b"\n" * 2**25,
    "words": b"step,scale,overflowed,applied,norm\n" + b"a,b,c,d,e\n" * 500_000 + b"1\n",
    "many rows": b"step,scale\n" + b"1,1\n" * 4_000_000,
    "not text": b"\xff" * 2**26,
    "lines that are not text": b"step,scale\n" + (b"\xff" * 1000 + b"\n") * 60_000,
    "wide rows": b"step,scale" + b",a" * 900 + b"\n" + (b"1,1" + b",1" * 900 + b"\n") * 36_000 + b"1\n",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_odd_csv_is_refused_soon(tmp_path, content):
    """Many columns, many rows, an open quote, bytes that are not text."""
    (tmp_path / "f.csv").write_bytes(content)
    refused_soon(tmp_path, "plot", "f.csv", "-o", "f.svg")


ODD_STEPS = {
    "flags": ("--overflow", b"0 " * 2_090_000 + b"x"),
    "digits": ("--overflow", b"01" * 2_090_000 + b"x"),
    "words": ("--overflow", b"true " * 800_000 + b"x"),
    "numbers": ("--gradient-max", b"1," * 2_090_000 + b"x"),
    "not text": ("--gradient-max", b"\xff" * 4_190_000),
    "nothing": ("--gradient-max", b" " * 4_190_000),
}


@pytest.mark.parametrize(("option", "content"), ODD_STEPS.values(), ids=ODD_STEPS)
def test_odd_steps_are_refused_soon(tmp_path, option, content):
    """The largest file that is read, with a bad value at its end."""
    (tmp_path / "f.txt").write_bytes(content)
    refused_soon(tmp_path, "simulate", "dynamic", option, "f.txt")


ODD_JSON = {
    "rows of a thousand names": "[" + ",".join(f'{{"a{n % 999}":8}}' for n in range(290_000)) + "]",
    "many dicts": "{" + ",".join(f'"k{n}":{{"a":{{}}}}' for n in range(200_000)) + "}",
    "many lists": "{" + ",".join(f'"k{n}":[0]' for n in range(250_000)) + "}",
    "lists in a list": '{"scale":[' + "[]," * 1_300_000 + "0]}",
}


@pytest.mark.parametrize("reader", [("plot", "f.json", "-o", "f.svg"), ("checkpoint", "show", "f.json")], ids=" ".join)
@pytest.mark.parametrize("text", ODD_JSON.values(), ids=ODD_JSON)
def test_odd_json_is_refused_soon(tmp_path, text, reader):
    """Many rows of many names, many dicts, many lists."""
    (tmp_path / "f.json").write_text(text)
    refused_soon(tmp_path, *reader)


@pytest.mark.parametrize("rows", ["-1e308,8,1\n1e308,4,1\n", "0,5e-324,1\n1,1e308,1\n", "0,8,-1e308\n1,8,1e308\n"])
def test_numbers_beyond_every_run_are_left_out(tmp_path, rows):
    """No step, no scale and no norm is that large, and a picture could not show it: neither an error nor a warning."""
    (tmp_path / "f.csv").write_text("step,scale,norm\n5,16,1\n" + rows)
    done = run("plot", "f.csv", "-o", "f.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader[0] != "plot"], ids=" ".join)
def test_a_folder_is_refused_by_its_name(tmp_path, reader):
    """Not by a number that Python has given it."""
    (tmp_path / "flags.txt").write_text("0 1")
    name = next(argument for argument in reader if argument.startswith("f."))
    (tmp_path / name).mkdir()
    assert f"{name} is not a regular file" in _refused_soon(tmp_path, reader)


def test_names_of_files_are_escaped(tmp_path):
    """A message stays one line, and writes nothing else to a terminal."""
    said = _refused_soon(tmp_path, ("policy", "check", "a\n\x1b[31m.toml"))
    assert r"a\n\x1b[31m.toml" in said


def test_rows_of_different_names_are_refused_soon(tmp_path):
    """Each name is a column of all rows."""
    (tmp_path / "f.json").write_text(json.dumps([{f"n{n}": 0} for n in range(20_000)]))
    assert "more than 1000 columns" in _refused_soon(tmp_path, ("plot", "f.json", "-o", "f.svg"))

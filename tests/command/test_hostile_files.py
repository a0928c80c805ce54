"""The promises of SECURITY.md: a hostile file is refused in one sentence, with little memory and no waiting."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.commanding import refused, run

ROOT = Path(__file__).parents[2]
MIB = 2**20
ROW = b"0,8.0,False\n"
POLICY, CONVERT, CHECKPOINT = "policy check", "policy convert", "checkpoint"
SIMULATE, PLOT = "simulate dynamic", "plot -o p.png"
OF_TEXT = [
    ("large.toml", POLICY, b"#" * 2**17, "has 131072 bytes, but a policy may have 65536 at most"),
    ("large.json", POLICY, b" " * 2**17, "may have 65536 at most"),
    ("large_config.json", CONVERT, b" " * MIB, "may have 65536 at most"),
    ("dotted.toml", POLICY, b"a." * 20_000 + b"a = 1", "line 1 has 40005 characters"),
    ("dotted_lines.toml", POLICY, b"".join(b"%d." % n + b"a." * 480 + b"a = 1\n" for n in range(60)), "no 'kind'"),
    ("nested.toml", POLICY, b"a = " + b"[\n" * 30_000, "is not valid TOML"),
    ("inline.toml", POLICY, b"a = " + b"{a=" * 300, "is not valid TOML"),
    ("digits.toml", POLICY, b"a = 1" + b"_0" * 490, "no 'kind'"),
    ("infinite.toml", POLICY, b'kind = "dynamic"\ninit_scale = 1e400', "init_scale=inf"),
    ("twice.toml", POLICY, b"a = 1\na = 2", "is not valid TOML"),
    ("utf_16.toml", POLICY, "a = 1".encode("utf-16"), "is not valid TOML"),
    ("nested.json", POLICY, b"[" * 60_000, "is not valid JSON"),
    ("twice.json", POLICY, b'{"kind": "dynamic", "init_scale": 4.0, "init_scale": 8.0}', "'init_scale' is there twice"),
    ("exponent.json", POLICY, b'{"kind": "fixed", "init_scale": 1e999999}', "init_scale=inf"),
    ("escape.json", POLICY, b'{"\\u001b[31m": 1}', "'\\x1b[31m'"),
    ("surrogate.json", POLICY, b'{"\\ud800": 1}', "'\\ud800'"),
    ("large_state.json", CHECKPOINT, b"[" + b" " * 4 * MIB, "has 4194305 bytes, but a state may have 4194304 at most"),
    ("lists.json", CHECKPOINT, b"[" + b"[]," * (4 * MIB // 3 - 2) + b"0]", "must hold a dict"),
    ("dicts.json", CHECKPOINT, b'{"a":[' + b'{"":0},' * (4 * MIB // 7 - 3) + b"0]}", "no known scaler"),
    ("keys.json", CHECKPOINT, b"{" + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}", "no known scaler"),
    ("twice_state.json", CHECKPOINT, b'{"scale": 8.0, "_growth_tracker": 1, "scale": 9.0}', "'scale' is there twice"),
    ("nested_state.json", CHECKPOINT, b'{"a":' * 800_000, "is not valid JSON"),
    ("line.csv", SIMULATE, b"step" + b"," * 10 * MIB, "has a line of more than 10000 characters"),
    ("quote.csv", SIMULATE, b'step,scale,overflowed\n"' + b"0\n" * 200_000, "is not valid CSV"),
    ("zeros.csv", SIMULATE, bytes(MIB), "has a line of more than 10000 characters"),
    ("letters.csv", PLOT, b"step,scale,overflowed\n" + ROW + b"a,b,c\n", "row 3 is 'a,b,c'"),
    ("infinite.csv", SIMULATE, b"step,scale,overflowed\ninf,8.0,False\n", "row 2"),
    ("scalers.csv", PLOT, b"step,scale,overflowed,scaler\n" + b"0,8.0,False,1\n" * 10_000, "holds no steps"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the files, a FIFO, links to devices and a CSV file of a terabyte that takes no room."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, _, content, _ in OF_TEXT:
        (folder / name).write_bytes(content)
    for suffix in ("toml", "json", "csv"):
        os.mkfifo(folder / f"fifo.{suffix}")
        (folder / f"zero.{suffix}").symlink_to("/dev/zero")
    with (folder / "terabyte.csv").open("wb") as file:
        file.truncate(2**40)
    return folder


@pytest.mark.parametrize(
    ("name", "command", "content", "words"), OF_TEXT, ids=lambda value: value if type(value) is str else ""
)
def test_a_hostile_text_is_refused_in_one_sentence(folder, name, command, content, words):
    """It names what is wrong."""
    first, *more = command.split(" -")
    assert words in refused(run(*first.split(), name, *(f"-{each}" for each in " ".join(more).split()), cwd=folder))


@pytest.mark.parametrize("name", ["fifo", "zero"])
def test_nothing_waits_for_a_fifo_or_reads_a_device(folder, name):
    """The kind of the file is looked at before its content."""
    for command, suffix in ((POLICY, "toml"), (CONVERT, "json"), (CHECKPOINT, "json"), (SIMULATE, "csv")):
        assert "pass a regular file" in refused(run(*command.split(), f"{name}.{suffix}", cwd=folder))


def test_a_large_trace_is_refused_by_its_size(folder):
    """Before a byte is read."""
    assert "may have 67108864 at most" in refused(run("plot", "terabyte.csv", "-o", "p.png", cwd=folder))


def test_hostile_texts_take_less_than_300_megabytes(folder):
    """The largest memory of a process that reads them all."""
    program = (
        "import json, re, sys; from tests.command.commanding import run\n"
        "for command, name in json.loads(sys.argv[1]): run(*command.split(), name)\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    commands = [(command, name) for name, command, _, _ in OF_TEXT if command != PLOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    arguments = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300_000


def test_no_module_opens_a_connection():
    """None imports what does."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"socket", "ssl", "urllib", "http", "requests"}, (
                path
            )

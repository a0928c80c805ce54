"""The promises of SECURITY.md: a hostile or wrong file is refused in one sentence, soon and with little memory."""

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
POLICY, CONVERT, CHECKPOINT = "policy check {}", "policy convert {}", "checkpoint {}"
SIMULATE, PLOT = "simulate dynamic {}", "plot {} -o p.png"
TITLES = b"step,scale,overflowed\n"
LONG = TITLES + b"".join(b"%d,1,\n" % step for step in range(2**20 + 1))
ODD = b'{"scale": 8.0, "_growth_tracker": Infinity}'
HOSTILE = [
    ("large.toml", POLICY, b"#" * (2**16 + 1), "has 65537 bytes, but a policy may have 65536 at most"),
    ("dotted.toml", POLICY, b"a." * 20_000 + b"a = 1", "a line has more than 1000 characters"),
    ("dotted_lines.toml", POLICY, b"".join(b"%d." % n + b"a." * 480 + b"a = 1\n" for n in range(60)), "no 'kind'"),
    ("nested.toml", POLICY, b"a = " + b"[\n" * 30_000, "is not valid TOML"),
    ("dicts.json", CHECKPOINT, b'{"a":[' + b'{"":0},' * (4 * MIB // 7 - 3) + b"0]}", "no known scaler"),
    ("keys.json", CHECKPOINT, b"{" + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}", "no known scaler"),
    ("line.csv", SIMULATE, b"step" + b"," * 10 * MIB, "has no column scale; it has step; add it"),
    ("edge.csv", SIMULATE, TITLES[:-1].ljust(10_000, b",") + b"\n" + ROW, "has no column scale; it has step; add it"),
    ("long.csv", SIMULATE, LONG, "long.csv has more than 2**20 steps"),
]
WRONG = [
    ("deepspeed.json", POLICY, b'{"fp16": {}}', "for the config of another tool run: lossscale policy convert FILE"),
    ("good.csv", "plot {} -o s.docx", TITLES + ROW, "s.docx must end in .png, .pdf or .svg"),
    ("tiny.csv", SIMULATE, TITLES + b"0,1e-45,False\n", "and a positive scale; delete the row"),
    ("object.json", CHECKPOINT, b'{"loss": [1]}', "no known scaler under the names loss; pass its own part"),
    ("odd.json", CHECKPOINT, ODD, "save these names: scale, _growth_tracker; pass --from TOOL"),
    ("bad.toml", "run --trace scale.txt {}", b"", "--trace scale.txt must end in .csv"),
    # not a file
    ("none.csv", SIMULATE, None, "none.csv: No such file or directory; pass the path of a file that exists"),
    ("large.csv", PLOT, None, "has 67108865 bytes, but a trace may have 67108864 at most"),
]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with FIFOs, links to devices, a folder and a large CSV file that takes no room."""
    for suffix in ("toml", "json", "csv"):
        os.mkfifo(tmp_path / f"fifo.{suffix}")
        (tmp_path / f"zero.{suffix}").symlink_to("/dev/zero")
    (tmp_path / "folder.csv").mkdir()
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(2**26 + 1)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "command", "content", "words"), WRONG, ids=lambda value: value if type(value) is str else ""
)
def test_a_wrong_file_is_refused(folder, name, command, content, words):
    """The command refuses a wrong file with status 2 and one sentence that names the fault, and changes no file."""
    if content is not None:
        (folder / name).write_bytes(content)
    before = sorted(filter(Path.is_file, folder.rglob("*")))
    assert words in refused(run(*command.replace("{}", name).split(), cwd=folder))
    assert sorted(filter(Path.is_file, folder.rglob("*"))) == before
    assert content is None or (folder / name).read_bytes() == content


@pytest.mark.parametrize("name", ["fifo", "zero"])
def test_a_special_file_is_not_read(folder, name):
    """The command refuses a FIFO and a device before it reads them."""
    for command, suffix in ((POLICY, "toml"), (CONVERT, "json"), (CHECKPOINT, "json"), (SIMULATE, "csv")):
        assert "pass a regular file" in refused(run(*command.format(f"{name}.{suffix}").split(), cwd=folder))


def test_hostile_files_take_little_memory(folder):
    """A process that refuses all hostile files needs less than 300 megabytes of memory."""
    program = (
        "import json, re, sys; from tests.command.commanding import refused, run\n"
        "for command, words in json.loads(sys.argv[1]): assert words in refused(run(*command.split())), words\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    commands = []
    for name, command, content, words in HOSTILE:
        (folder / name).write_bytes(content)
        commands.append((command.format(name), words))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    arguments = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300_000
    assert [(folder / name).read_bytes() for name, *_ in HOSTILE] == [content for _, _, content, _ in HOSTILE]

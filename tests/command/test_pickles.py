"""Files of `torch.save` without torch: what is read, and pickles made to run code, to hang or to fill the memory."""

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale
from tests.command.commanding import refused, run

LONGEST = 3000
SECONDS = 2.0
KILOBYTES = 300_000
MEASURED = """
import os, sys, threading, time
from pathlib import Path
from lossscale.cli import run

def told(process, name):
    try:
        return int(Path(f"/proc/{process}/status").read_text().partition(name)[2].split()[0])
    except (OSError, IndexError):
        return 0

def watch():
    while True:
        started = [each.name for each in Path("/proc").glob("[0-9]*") if told(each.name, "PPid:") == os.getpid()]
        peaks.extend(told(each, "VmHWM:") for each in started)
        time.sleep(0.01)

peaks = []
threading.Thread(target=watch, daemon=True).start()
def used():
    return sum(os.times()[:4])

start = used()
try:
    run(sys.argv[1:])
finally:
    print(f"\\nMEASURED {used() - start} {max(peaks, default=0)} {told('self', 'VmHWM:')}")
"""
TORCHS = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}


def archive(pickled, **parts):
    """Return a file as `torch.save` writes it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        for name, part in {"data.pkl": pickled, "byteorder": b"little", **parts}.items():
            zipped.writestr(f"archive/{name}", part)
    return content.getvalue()


def shown_soon(folder, *arguments):
    """Return what a command did, which it must do within so many seconds of the processor, and within little memory."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=60)
    seconds, *kilobytes = map(float, done.stdout.partition("MEASURED ")[2].split())
    assert seconds < SECONDS
    assert max(kilobytes) < KILOBYTES
    return done


def refused_soon(folder, *arguments):
    """Return the one line in which a command refuses its input."""
    done = shown_soon(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert len(done.stderr) < LONGEST
    return done.stderr


class Call:
    """An object with a pickle that calls a function with arguments."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


def _tuples(depth):
    """Return the opcodes of a tuple that holds a tuple twice, and so on."""
    return b"K\x01K\x02\x86" + b"2\x86" * depth


def _body(value):
    """Return the opcodes of a value, without the first and the last."""
    return pickle.dumps(value, protocol=2)[2:-1]


SCALER = _body(TORCHS)
HANGING = {
    "a key of shared tuples": b"}" + _tuples(34) + b"K\x01s",
    "a key of shared tuples in the scaler": SCALER + _tuples(40) + b"K\x01s",
    "a set of shared tuples": b"}U\x05scale(" + _tuples(40) + b"\x91s",
    "a scale of shared tuples": SCALER + b"U\x05scale" + _tuples(60) + b"s",
    "a key that is deep": b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s",
    "a scale that is deep": SCALER + b"U\x05scale" + b")" + b"\x85" * 1_000_000 + b"s",
    "a gibibyte": SCALER + b"U\x05scale" + _body(Call(bytearray, 2**30)) + b"s",
    "a gibibyte that was announced": b"\x8e" + struct.pack("<Q", 2**30) + b"x",
    "dicts": b"}" * 4_000_000,
    "sets": b"\x8f" * 4_000_000,
    "marks": b"(" * 4_000_000,
    "a place in the memo": b"}r\xff\xff\xff\x7f",
    "classes": b"".join(b"cm\nn%d\n" % n for n in range(300_000)),
    "objects": b"cm\nn\nq\x00" + b"h\x00)R" * 1_000_000,
    "a long integer": SCALER + b"U\x05scale\x8b" + struct.pack("<i", 2**22) + b"\x01" * 2**22 + b"s",
    "digits": SCALER + b"U\x05scale" + b"I" + b"9" * 4_000_000 + b"\ns",
}


@pytest.mark.parametrize("name", HANGING)
def test_a_pickle_made_to_hang_or_to_fill_the_memory_is_refused_soon(tmp_path, name):
    """Also where no exception of Python can end it."""
    (tmp_path / "f.pt").write_bytes(archive(b"\x80\x02" + HANGING[name] + b"."))
    refused_soon(tmp_path, "checkpoint", "show", "f.pt")


def _shown_many_times(count):
    text = dict.fromkeys([f"k{n}" for n in range(50)], "\U0001f600" * 5000)
    return {**TORCHS, **{f"n{n}": text for n in range(count)}}


@pytest.mark.parametrize(
    "content",
    [
        _shown_many_times(60),
        _shown_many_times(1000),
        {"\x01" * 2**24: TORCHS},
        {"x" * 2**24: TORCHS, "y" * 2**24: TORCHS},
    ],
    ids=["60 times", "1000 times", "a long key", "two long keys"],
)
def test_little_is_shown_of_a_file(tmp_path, content):
    """A text that a file holds once may stand in many places, and a key may be as long as the file."""
    (tmp_path / "f.pt").write_bytes(archive(pickle.dumps(content, protocol=2)))
    done = shown_soon(tmp_path, "checkpoint", "show", "f.pt")
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr


def test_names_of_classes_are_escaped(tmp_path):
    """They come from the file."""
    named = b"cm\n\x1b]0;title\x07\n"
    (tmp_path / "f.pt").write_bytes(archive(b"\x80\x02}" + named + b"K\x01s."))
    said = refused(run("checkpoint", "show", "f.pt", "--key", "foo", cwd=tmp_path))
    assert r"\x1b" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("how", ["trap '' PROF", "ulimit -c unlimited"])
def test_the_limits_hold_whatever_the_process_inherits(tmp_path, how):
    """An ignored signal, or a shell that wants core files."""
    deep = "a key that is deep" if "ulimit" in how else "a key of shared tuples"
    (tmp_path / "f.pt").write_bytes(archive(b"\x80\x02" + HANGING[deep] + b"."))
    command = f"{how}; exec {sys.executable} -m lossscale checkpoint show f.pt"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=15
    )
    assert "takes too much time or memory" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["f.pt"]


def test_a_path_that_the_command_has_serves_the_reader_too(tmp_path):
    """As where a program has put the library on its own path."""
    (tmp_path / "f.pt").write_bytes(archive(pickle.dumps(TORCHS, protocol=2)))
    code = (
        "import sys; sys.path.append(sys.argv[1]); from lossscale.cli import run; run(['checkpoint', 'show', 'f.pt'])"
    )
    source = str(Path(lossscale.__file__).parents[1])
    command = [sys.executable, "-c", code, source]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_a_search_through_shared_dicts_ends_soon(tmp_path):
    """Dicts that hold one dict hundreds of times, three deep, have more ways to it than anyone can walk."""
    level = {"amp": {"loss_scale": 8.0}}
    for _ in range(3):
        level = {f"n{n}": level for n in range(400)}
    (tmp_path / "f.pt").write_bytes(archive(pickle.dumps(level, protocol=2)))
    refused_soon(tmp_path, "checkpoint", "show", "f.pt")


@pytest.mark.parametrize("way", [Call(exec, "open('ran', 'w')"), Call(open, "ran", "w")], ids=["exec", "open"])
@pytest.mark.parametrize("opcodes", [b"", b"0", b"}b", b"(K\x01a", b"K\x01K\x01s", b"(K\x01K\x01u"])
def test_nothing_in_a_file_runs(tmp_path, way, opcodes):
    """A call is read as an object without attributes, and what is done with the object does nothing."""
    body = SCALER + b"U\x05other" + _body(way) + opcodes + b"s"
    (tmp_path / "f.pt").write_bytes(archive(b"\x80\x02" + body + b"."))
    run("checkpoint", "show", "f.pt", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_modules_beside_the_file_are_not_imported(tmp_path):
    """The process that reads a file does not look for modules in the present folder."""
    for name in ("json", "zipfile", "numpy", "lossscale"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    (tmp_path / "f.pt").write_bytes(archive(pickle.dumps(TORCHS, protocol=2)))
    assert run("checkpoint", "show", "f.pt", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "ran").exists()


def _made(name, module):
    return type(name, (), {"__module__": module})


def test_pickled_objects_are_dicts_of_their_attributes(tmp_path, monkeypatch):
    """DeepSpeed saves its scaler whole, and Megatron-LM its arguments next to it: neither is imported."""
    kind = _made("DynamicLossScaler", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "DynamicLossScaler", kind, raising=False)
    scaler = kind()
    scaler.__dict__.update(cur_scale=8.0, cur_iter=20, last_overflow_iter=11, scale_window=9, dtype=None)
    (tmp_path / "f.pt").write_bytes(archive(pickle.dumps({"loss_scaler": scaler, "a": 1j}, protocol=2)))
    done = run("checkpoint", "convert", "f.pt", "--from", "deepspeed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    assert (state["loss_scale"], state["growth_tracker"]) == (8.0, 7)


NUMBERS = {"FloatStorage": "<f", "DoubleStorage": "<d", "HalfStorage": "<e", "LongStorage": "<q", "ShortStorage": "<h"}


def _with_tensor(kind, code, *, shape=(1,), offset=1, count=2, key="0"):
    """Return a file in which the scale is a tensor with the second number of a storage."""
    pid = b"(U\x07storagectorch\n%s\nU\x01%sU\x03cpuK%ctQ" % (kind.encode(), key.encode(), count)
    shapes = _body(shape) + _body((1,) * len(shape))
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K%c" % offset + shapes + b"\x89}tR"
    body = SCALER + b"U\x05scale" + tensor + b"s"
    return archive(b"\x80\x02" + body + b".", **{"data/0": struct.pack(f"<{2 * code[1:]}", 3, 16)})


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_one_element_are_numbers(tmp_path, kind, shape):
    """As Megatron-LM saves its scale."""
    (tmp_path / "f.pt").write_bytes(_with_tensor(kind, NUMBERS[kind], shape=shape))
    done = run("checkpoint", "convert", "f.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss_scale"] == 16.0


ODD_TENSORS = {
    "several elements": {"shape": (2, 1)},
    "none": {"shape": (0,)},
    "outside of its storage": {"offset": 9},
    "a type that is not known": {"kind": "OtherStorage"},
}


@pytest.mark.parametrize("odd", ODD_TENSORS.values(), ids=ODD_TENSORS)
def test_other_tensors_are_refused_by_their_shape(tmp_path, odd):
    """Where a number is needed."""
    (tmp_path / "f.pt").write_bytes(_with_tensor(odd.pop("kind", "FloatStorage"), "<f", **odd))
    said = refused(run("checkpoint", "show", "f.pt", cwd=tmp_path))
    assert "scale=Tensor of shape (" in said
    assert "must be one number" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"key": "7"}, "is not what torch.save writes, or is damaged"),
        ({"count": 0}, "must be one number"),
        ({"shape": ("a",)}, "is not what torch.save writes, or is damaged"),
    ],
)
def test_odd_storages_are_refused(tmp_path, content, words):
    """A storage that is not in the file, one of no elements, a shape of text."""
    (tmp_path / "f.pt").write_bytes(_with_tensor("FloatStorage", "<f", **content))
    assert words in refused(run("checkpoint", "show", "f.pt", cwd=tmp_path))


def test_a_number_of_many_dimensions_is_read(tmp_path):
    """It is one number."""
    (tmp_path / "f.pt").write_bytes(_with_tensor("FloatStorage", "<f", shape=(1,) * 200))
    assert json.loads(run("checkpoint", "convert", "f.pt", cwd=tmp_path).stdout)["loss_scale"] == 16.0


WHOLE = archive(pickle.dumps({"scaler": TORCHS, "model": {"weight": [1.0, 2.0]}}, protocol=2))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_in_one_line(tmp_path_factory, data):
    """Or read, where the damage is elsewhere; numbers that were damaged may get a warning."""
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "f.pt").write_bytes(content[: data.draw(st.sampled_from([None, -1, -30, 100]))])
    done = run("checkpoint", "show", "f.pt", cwd=folder)
    lines = done.stderr.splitlines()
    if done.returncode == 0:
        assert all(line.startswith("lossscale: warning: ") for line in lines), done.stderr
    else:
        assert done.returncode == 2
        assert len(lines) == 1, done.stderr

"""The promises of SECURITY.md about files of `torch.save`: a hostile one is refused in a sentence, and runs nothing."""

import json
import os
import pickle
import sys
import zipfile

import pytest
import torch

from tests.command.commanding import refused, run, succeed

MIB, META = 2**20, torch.ones((), device="meta")


class _Runs:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self):
        return open, ("was_run", "w")


def _zipped(path, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/version", b"3\n")


def _expanded(path):
    torch.save({"scale": torch.ones(1).expand(2**40), "_growth_tracker": 3}, path)


def _lying(path):
    torch.save({"scale": torch.ones(4), "_growth_tracker": 3}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content.replace(b"K\x04", b"K\xff") if name.endswith("data.pkl") else content)


OF_TORCH = {
    "a FIFO, for which nothing waits": lambda path: os.mkfifo(path),
    "of an old torch": lambda path: torch.save({"scale": 8.0}, path, _use_new_zipfile_serialization=False),
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_bytes(pickle.dumps({"scale": 8.0})),
    "a cut archive": lambda path: (_lying(path), path.write_bytes(path.read_bytes()[:-40])),
    "a program": lambda path: _zipped(path, pickle.dumps(_Runs())),
    "a bomb": lambda path: _zipped(path, bytes(200 * MIB), zipfile.ZIP_DEFLATED),
    "large pickles": lambda path: _zipped(path, bytes(20 * MIB)),
    "cut pickles": lambda path: _zipped(path, pickle.dumps({"scale": 8.0})[:-5]),
    "a tensor without values": lambda path: torch.save({"scale": META, "_growth_tracker": 3}, path),
    "an expanded tensor": _expanded,
    "a storage of another size": _lying,
    "a list": lambda path: torch.save([1.0], path),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_hostile_checkpoint_is_refused_in_one_sentence(tmp_path, name):
    """No code in it runs, and no number is read from a tensor that has none, or too many."""
    OF_TORCH[name](tmp_path / "c.pt")
    said = refused(run("checkpoint", "c.pt", "--from", "torch", cwd=tmp_path))
    if (tmp_path / "c.pt").is_file() and not zipfile.is_zipfile(tmp_path / "c.pt"):
        assert "c.pt is not a zip archive, as torch.save writes" in said
        assert "load and save it again with a newer PyTorch" in said
    assert not (tmp_path / "was_run").exists()


def test_other_classes_are_read_as_dicts(tmp_path):
    """They are not imported, and nothing in them runs: their attributes are enough."""
    scaler = type("LossScaler", (), {"__module__": "nowhere"})()
    vars(scaler).update(cur_scale=8.0, cur_iter=20, last_overflow_iter=11, scale_window=9)
    sys.modules["nowhere"] = type(sys)("nowhere")
    sys.modules["nowhere"].LossScaler = type(scaler)
    try:
        torch.save({"loss_scaler": scaler, "other": _Runs()}, tmp_path / "c.pt")
    finally:
        del sys.modules["nowhere"]
    assert json.loads(succeed("checkpoint", "c.pt", "--from", "deepspeed", cwd=tmp_path)[0])["loss_scale"] == 8.0
    assert not (tmp_path / "was_run").exists()

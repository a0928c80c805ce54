"""The promises of SECURITY.md about files of `torch.save`: a hostile one is refused in a sentence, and runs nothing."""

import json
import pickle
import zipfile

import numpy as np
import pytest
import torch

from lossscale_core import DynamicScaling, SpikeGuard, dump_policy, policy_to_dict
from lossscale_core.adapters import TORCH_KEYS
from lossscale_core.testing import simulate, trace_to_csv
from lossscale_torch import GradScaler
from tests.adapters.torch_steps import ready, take_steps, two
from tests.command.commanding import refused, run, succeed
from tests.sweeping import IS_SWEEP

MIB = 2**20


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


OLD = "is neither .json nor a zip archive, as torch.save writes: "
HOSTILE = {
    "of an old torch": (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), OLD),
    "a program": (lambda path: _zipped(path, pickle.dumps(_Runs())), "is damaged"),
    "a bomb": (lambda path: _zipped(path, bytes(200 * MIB), zipfile.ZIP_DEFLATED), "it has more than"),
    "large pickles": (lambda path: _zipped(path, b"\x80\x02(" + b"}" * 4 * MIB + b"l."), "it has more than"),
    "a bytearray": (lambda path: _zipped(path, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x08\x85R."), "it has"),
    "an expanded tensor": (_expanded, "scale"),
}


@pytest.mark.parametrize(("write", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_checkpoint_is_refused(tmp_path, write, words):
    """No code in it runs, and one sentence says why it is refused."""
    write(tmp_path / "c.pt")
    assert words in refused(run("checkpoint", "c.pt", "--from", "torch", cwd=tmp_path))
    assert not (tmp_path / "was_run").exists()


class _LossScaler:
    """A scaler of another tool."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_other_classes_are_read_as_dicts(tmp_path):
    """Nothing in them runs: their attributes are enough."""
    scaler = _LossScaler(cur_scale=8.0, cur_iter=20, last_overflow_iter=11, scale_window=9)
    torch.save({"loss_scaler": scaler, "other": _Runs()}, tmp_path / "c.pt")
    assert json.loads(succeed("checkpoint", "c.pt", "--from", "deepspeed", cwd=tmp_path)[0])["loss_scale"] == 8.0
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("policy", [None, DynamicScaling(growth_interval=77)])
def test_all_entries_are_printed(tmp_path, policy):
    """A scaler loads what is printed; only torch's keys, which another policy contradicts, are left out."""
    scaler = GradScaler("cpu", 8.0, guard=SpikeGuard())
    take_steps(*two(), scaler, 2.0, 2.0)
    saved = {**scaler.state_dict(), "averages": torch.arange(3.0), "odd": {1j}}
    torch.save({"scaler": saved}, tmp_path / "c.pt")
    dump_policy(policy or scaler.policy, tmp_path / "p.toml")
    options = ["--policy", "p.toml"] if policy else []
    printed = json.loads(succeed("checkpoint", "c.pt", *options, cwd=tmp_path)[0])
    expected = {**saved, "averages": [0.0, 1.0, 2.0], "odd": "{1j}", "policy": policy_to_dict(policy or scaler.policy)}
    assert printed == {name: value for name, value in expected.items() if not policy or name not in TORCH_KEYS}
    GradScaler("cpu", policy=policy, guard=SpikeGuard()).load_state_dict(printed)


def test_lists_that_are_shared_end(tmp_path):
    """The text of a list that holds the same list twice at 60 levels would never end."""
    shared = []
    for _ in range(60):
        shared = [shared, shared]
    torch.save({**ready().state_dict(), "shared": shared}, tmp_path / "c.pt")
    assert "the result has more than 524288 parts and was cut" in run("checkpoint", "c.pt", cwd=tmp_path).stderr


GOOD = {
    "c.pt": lambda path: torch.save({"epoch": 3, "scaler": ready().state_dict()}, path),
    "c.json": lambda path: path.write_text(json.dumps({"scaler": ready().state_dict()})),
    "p.toml": lambda path: dump_policy(DynamicScaling(), path),
    "t.csv": lambda path: trace_to_csv(simulate("dynamic", [False, True, True]), path),
}
READERS = {"c": ["checkpoint"], "p": ["policy", "check"], "t": ["simulate", "dynamic"]}


@pytest.mark.parametrize("seed", range(20 if IS_SWEEP else 4))
@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_is_refused(tmp_path, name, seed):
    """A file with changed, added and lost bytes is read, or refused in a sentence without a traceback."""
    random, path = np.random.default_rng(seed), tmp_path / name
    GOOD[name](path)
    content = path.read_bytes()
    for _ in range(10):
        damaged = bytearray(content)
        for at in random.integers(len(content), size=random.integers(1, 5)):
            damaged[at : at + random.integers(20)] = random.bytes(random.integers(20))
        path.write_bytes(damaged[: len(damaged) // random.choice([1, 2], p=[0.9, 0.1])])
        done = run(*READERS[name[0]], name, cwd=tmp_path)
        assert done.returncode == 0 or refused(done)

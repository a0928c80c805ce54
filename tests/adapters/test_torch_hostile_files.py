"""The promises of SECURITY.md about files of `torch.save`: a hostile one is refused in a sentence, and runs nothing."""

import json
import os
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard, dump_policy, policy_to_dict
from lossscale_core.adapters import TORCH_KEYS
from lossscale_core.testing import simulate, trace_to_csv
from lossscale_torch import GradScaler, hooks
from tests.adapters.torch_steps import ready, take_steps, two
from tests.command.commanding import refused, run, succeed
from tests.sweeping import IS_SWEEP

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


OF_TORCH = {
    "a FIFO, for which nothing waits": lambda path: os.mkfifo(path),
    "of an old torch": lambda path: torch.save({"scale": 8.0}, path, _use_new_zipfile_serialization=False),
    "a cut archive": lambda path: (torch.save({"scale": 8.0}, path), os.truncate(path, path.stat().st_size - 40)),
    "a program": lambda path: _zipped(path, pickle.dumps(_Runs())),
    "a bomb": lambda path: _zipped(path, bytes(200 * MIB), zipfile.ZIP_DEFLATED),
    "large pickles": lambda path: _zipped(path, b"\x80\x02(" + b"}" * 4 * MIB + b"l."),
    "a large bytearray": lambda path: _zipped(path, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x08\x85R."),
    "a tensor without values": lambda path: torch.save({"scale": META, "_growth_tracker": 3}, path),
    "an expanded tensor": _expanded,
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_hostile_checkpoint_is_refused_in_one_sentence(tmp_path, name):
    """No code in it runs, and no number is read from a tensor that has none, or too many."""
    OF_TORCH[name](tmp_path / "c.pt")
    said = refused(run("checkpoint", "c.pt", "--from", "torch", cwd=tmp_path))
    if (tmp_path / "c.pt").is_file() and not zipfile.is_zipfile(tmp_path / "c.pt"):
        assert "c.pt is damaged, or is neither .json nor a zip archive, as torch.save writes" in said
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


class _Noted(hooks.Hook):
    """A hook with entries of its own: plain data, a small tensor, and what JSON does not have."""

    def state_dict(self):
        return {"note": {"a": [1, None, "b"]}, "averages": torch.arange(3.0), "odd": {1j}}


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("policy", [None, DynamicScaling(growth_interval=77)])
def test_all_entries_of_a_state_are_printed(tmp_path, optimizers, policy):
    """Those of guards and hooks, too; only torch's keys, which another policy contradicts, are left out."""
    scaler, (params, steps) = GradScaler("cpu", 8.0, guard=SpikeGuard(), hooks=[_Noted()]), two()
    take_steps(params[:optimizers], steps[:optimizers], scaler, *[2.0] * optimizers)
    saved = scaler.state_dict()
    torch.save({"scaler": saved}, tmp_path / "c.pt")
    dump_policy(policy or scaler.policy, tmp_path / "p.toml")
    printed = json.loads(succeed("checkpoint", "c.pt", *((policy and ("--policy", "p.toml")) or ()), cwd=tmp_path)[0])
    expected = {**saved, "averages": [0.0, 1.0, 2.0], "odd": "{1j}", "policy": policy_to_dict(policy or scaler.policy)}
    assert printed == {name: value for name, value in expected.items() if not policy or name not in TORCH_KEYS}
    assert isinstance(printed["guard"], list) == (optimizers == 2)
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
    "c.ckpt": lambda path: torch.save(
        {"model": torch.nn.Linear(2, 2).state_dict(), "scaler": {"scale": 8.0, "_growth_tracker": 3}}, path
    ),
    "c.json": lambda path: path.write_text(json.dumps({"scaler": ready().state_dict()})),
    "p.toml": lambda path: dump_policy(DynamicScaling(), path),
    "p.json": lambda path: dump_policy(FixedScaling(8.0), path),
    "t.csv": lambda path: trace_to_csv(simulate("dynamic", [False, True, True]), path),
}
READERS = {"c": ["checkpoint"], "p": ["policy", "check"], "t": ["simulate", "dynamic"]}


@pytest.mark.parametrize("seed", range(20 if IS_SWEEP else 4))
@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path, name, seed):
    """Bytes that were changed, added, cut out or lost at the end; never a traceback."""
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

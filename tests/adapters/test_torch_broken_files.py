"""State dicts with any value in any place, and files that users have."""

import json
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch

from lossscale_core.adapters import shown
from lossscale_core.errors import CheckpointError
from lossscale_torch import GradScaler
from tests.command.commanding import run

LONGEST = 3000


def _shared(depth):
    value = (1.0, 2.0)
    for _ in range(depth):
        value = (value, value)
    return value


def _expanded():
    return torch.zeros(1).expand((7,) * 8)


OURS = {
    "version": 1,
    "loss_scale": 8.0,
    "growth_tracker": 0,
    "hysteresis_tracker": 1,
    "steps": 0,
    "skipped_steps": 0,
    "overflow_streak": 0,
}
TORCHS = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
BAD = {
    "10**400": 10**400,
    "-10**400": -(10**400),
    "no elements": torch.zeros(0),
    "three elements": torch.ones(3),
    "expanded": _expanded(),
    "a long string": "x" * 100_000,
    "shared tuples": _shared(30),
    "a signalling NaN": Decimal("sNaN"),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "a list": [1.0],
    "None": None,
    "a bool": True,
    "complex": 1j,
    "a dict": {"a": _shared(30)},
    "bytes": bytearray(2**20),
    "an array": np.ones(3),
    "a strided array": np.lib.stride_tricks.as_strided(np.zeros(1), (7,) * 12, (0,) * 12),
}


def _loaded(scaler, saved):
    """Return the warnings of `load_state_dict`, or "refused" and why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scaler.load_state_dict(saved)
        except CheckpointError as error:
            return ["refused", str(error)]
        except KeyError as error:  # torch's error for a missing key
            return ["refused", str(error)]
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("follows", [True, False])
def test_a_bad_state_dict_leaves_the_scaler_as_it_was(bad, follows):
    """Any value in any place is taken, or refused by one short error."""
    scaler = GradScaler("cpu", **({} if follows else {"policy": "dynamic"}))
    scaler.scale(torch.ones(()))
    ours = scaler.state_dict()
    places = [("torchs", name) for name in TORCHS] + [("ours", name) for name in ours]
    places += [("policy", name) for name in ours["policy"]] + [("whole", "")]
    before = repr(ours)
    for place, name in places:
        saved = {
            "torchs": lambda name=name: {**TORCHS, name: BAD[bad]},
            "ours": lambda name=name: {**ours, name: BAD[bad]},
            "policy": lambda name=name: {**ours, "policy": {**ours["policy"], name: BAD[bad]}},
            "whole": lambda: BAD[bad],
        }[place]()
        said = _loaded(scaler, saved)
        assert all(len(each) < LONGEST and "\n" not in each for each in said), (place, name, said)
        if said[:1] == ["refused"]:
            assert repr(scaler.state_dict()) == before, (place, name)
        scaler.load_state_dict(ours)


def test_tensors_are_shown_on_one_line():
    """By their shape, if they have several elements."""
    assert shown(torch.ones(2, 3)) == "Tensor of shape (2, 3)"
    assert shown({"a": torch.ones(3)}) == "{'a': Tensor of shape (3,)}"
    assert shown(torch.ones(())) == "tensor(1.)"
    assert json.loads(json.dumps(shown(_expanded()))) == f"Tensor of shape {(7,) * 8}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_growth_tracker", np.int64(3)),
        ("_growth_tracker", torch.tensor(3)),
        ("growth_interval", np.int64(7)),
        ("growth_interval", float("inf")),
        ("scale", torch.tensor(8.0)),
        ("scale", np.float32(8.0)),
    ],
)
def test_numbers_of_numpy_and_torch_are_taken(name, value):
    """As other savers write them."""
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**TORCHS, name: value})
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["_growth_tracker"] == 3


def test_files_that_users_have_are_read(tmp_path):
    """Without checksums, and with bytes elsewhere in the checkpoint."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"scaler": TORCHS, "loader": bytearray(b"abc")}, tmp_path / "f.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    done = run("checkpoint", "f.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss_scale"] == 8.0
    assert done.stderr == "f.pt at 'scaler': the scaler of torch\n"

"""The command with a policy of the user's own, in a module that `--import` names."""

import json
import subprocess
import sys

import pytest

OWN = """
import dataclasses
import numpy as np
from lossscale_core import BaseScaling, DynamicScaling

@dataclasses.dataclass(frozen=True)
class HalvingScaling(BaseScaling):
    kind = "halving"
    adapts = True
    backoff_factor = 0.5
    init_scale: float = 2.0**16
    \"\"\"The first scale.\"\"\"

    def init_state(self):
        return DynamicScaling(init_scale=self.init_scale).init_state()

    def update(self, state, grads_finite, *, xp=None):
        return DynamicScaling(init_scale=self.init_scale, growth_interval=2**31 - 1).update(state, grads_finite, xp=xp)
"""
MAKE = """
import json
import mine
from lossscale_core import dump_policy, state_to_dict
policy = mine.HalvingScaling(init_scale=8.0)
dump_policy(policy, "p.toml")
json.dump(state_to_dict(policy.update(policy.init_state(), False), policy), open("s.json", "w"))
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a module of the user's own, a policy of its kind and a state under it."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "flags.txt").write_text("0 1 0")
    subprocess.run([sys.executable, "-c", MAKE], cwd=tmp_path, check=True)
    return tmp_path


def _lossscale(folder, *arguments):
    command = [sys.executable, "-P", "-m", "lossscale", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


COMMANDS = [
    ("policy", "check", "p.toml"),
    ("policy", "show", "p.toml"),
    ("checkpoint", "show", "s.json"),
    ("checkpoint", "convert", "s.json"),
    ("simulate", "p.toml", "--overflow", "flags.txt", "--json"),
    ("run", "--policy", "p.toml", "--", "script.py"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_policy_of_ones_own_is_read_after_its_module_is_imported(folder, arguments):
    """Without `--import` the command says what to do."""
    (folder / "script.py").write_text("print('ran')")
    known = _lossscale(folder, "--import", "mine", *arguments)
    assert known.returncode == 0, known.stderr
    unknown = _lossscale(folder, *arguments)
    assert unknown.returncode == 2
    assert "'halving' is not a kind of policy" in unknown.stderr
    assert "once its module is imported" in unknown.stderr


def test_the_policy_of_the_state_is_known(folder):
    """Its kind and its settings, as in the file."""
    done = _lossscale(folder, "--import", "mine", "checkpoint", "show", "s.json", "--json")
    assert json.loads(done.stdout)["policy"] == {"kind": "halving", "init_scale": 8.0}


def test_a_module_that_cannot_be_imported_is_named(folder):
    """In a line, whatever it raises."""
    (folder / "broken.py").write_text("raise KeyError('a\\nb')")
    for module, words in (("nowhere", "No module named 'nowhere'"), ("broken", "KeyError")):
        done = _lossscale(folder, "--import", module, "policy", "check", "p.toml")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"--import {module}: " in done.stderr
        assert words in done.stderr

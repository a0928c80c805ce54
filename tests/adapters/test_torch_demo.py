"""The demo on PyTorch: the same network, data and policy file, and the same kind of trace."""

import json

import pytest

from lossscale.demo import DEFAULT_POLICY, DEFAULT_WEIGHT, Settings, regimes, train
from lossscale.demo._network import load
from lossscale_core.testing import simulate
from tests.command.commanding import run
from tests.sweeping import seeds


@pytest.mark.parametrize("seed", seeds(3))
def test_dynamic_stays_with_float32_where_unscaled_float16_collapses(seed):
    """As on NumPy: within a point of float32's accuracy, and unscaled at least ten points below."""
    names = ("float32", "float16, no scaling", "float16, dynamic")
    digits = load()
    runs = {
        regime.name: train(Settings("torch", regime.policy, DEFAULT_WEIGHT, seed, 300), regime.dtype, digits)
        for regime in regimes(DEFAULT_POLICY)
        if regime.name in names
    }
    exact, unscaled, dynamic = (runs[name] for name in names)
    assert exact.accuracy > 0.97
    assert abs(dynamic.accuracy - exact.accuracy) <= 0.01
    assert unscaled.accuracy <= exact.accuracy - 0.10
    assert exact.flushed == 0.0
    assert dynamic.flushed < 0.05
    replayed = simulate(DEFAULT_POLICY, [not step.skipped for step in dynamic.steps])
    assert replayed.loss_scale_used.tolist() == [step.loss_scale for step in dynamic.steps]


def test_the_command(tmp_path):
    """`lossscale demo --framework torch` writes what `lossscale simulate` reads."""
    done = run("demo", "--framework", "torch", "--steps", 5, "--out", ".", cwd=tmp_path)
    assert "float16, dynamic" in done.stdout, done.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["framework"] == "torch"
    done = run("simulate", "policy.toml", "--gradient-max", "trace.json", cwd=tmp_path)
    assert "of 5 steps" in done.stdout, done.stderr

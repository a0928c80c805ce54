"""The demo on TensorFlow: the same network, data and policy file, and the same kind of trace."""

from tests.adapters import tensorflow_devices  # noqa: F401, I001, before any other module uses TensorFlow
import json

import pytest

from lossscale_core import DynamicScaling
from lossscale.demo import DEFAULT_POLICY, DEFAULT_WEIGHT, Settings, regimes, train
from lossscale.demo._network import load
from lossscale_core.errors import OverflowStreakError
from lossscale_core.testing import simulate, simulate_gradients
from tests.command.commanding import run
from tests.sweeping import seeds


@pytest.mark.parametrize("seed", seeds(3))
def test_dynamic_stays_with_float32_where_unscaled_float16_collapses(seed):
    """As on NumPy: within a point of float32's accuracy, and unscaled at least ten points below."""
    names = ("float32", "float16, no scaling", "float16, dynamic")
    digits = load()
    runs = {
        regime.name: train(Settings("tensorflow", regime.policy, DEFAULT_WEIGHT, seed, 300), regime.dtype, digits)
        for regime in regimes(DEFAULT_POLICY)
        if regime.name in names
    }
    exact, unscaled, dynamic = (runs[name] for name in names)
    assert exact.accuracy > 0.97
    assert abs(dynamic.accuracy - exact.accuracy) <= 0.01
    assert unscaled.accuracy <= exact.accuracy - 0.10
    assert unscaled.flushed > 0.5
    assert exact.flushed == 0.0
    assert dynamic.flushed < 0.05
    replayed = simulate(DEFAULT_POLICY, [not step.skipped for step in dynamic.steps])
    assert replayed.loss_scale_used.tolist() == [step.loss_scale for step in dynamic.steps]


@pytest.mark.parametrize("regime", regimes(DEFAULT_POLICY), ids=lambda regime: regime.name)
def test_it_trains_as_numpy_does(regime):
    """The same weights, batches and optimizer: losses and largest gradients agree while rounding has not added up."""
    ours, numpys = (
        train(Settings(framework, regime.policy, DEFAULT_WEIGHT, 0, 10), regime.dtype, load())
        for framework in ("tensorflow", "numpy")
    )
    tolerance = 1e-4 if regime.dtype == "float32" else 1e-2
    for one, other in zip(ours.steps, numpys.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.gradient_max == pytest.approx(other.gradient_max, rel=tolerance)
        assert (one.loss_scale, one.skipped) == (other.loss_scale, other.skipped)
    assert ours.flushed == pytest.approx(numpys.flushed, abs=0.01)


def test_overflows_replay_from_the_gradients():
    """A skipped step records its largest gradient in float32, and left its mark on the scale."""
    policy = DynamicScaling(init_scale=2.0**45, growth_interval=4, max_scale=2.0**48)
    run = train(Settings("tensorflow", policy, DEFAULT_WEIGHT, 0, 40), "float16", load())
    assert run.skipped_steps > 0
    replayed = simulate_gradients(policy, [step.gradient_max for step in run.steps])
    assert replayed.skipped.tolist() == [step.skipped for step in run.steps]
    assert replayed.loss_scale_used.tolist() == [step.loss_scale for step in run.steps]


def test_a_limit_on_the_streak_ends_the_run():
    """A traced step cannot raise, but the demo reads the state after it, and does where the policy asks for it."""
    policy = DynamicScaling(init_scale=2.0**120, max_scale=2.0**126, max_overflow_streak=4)
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=4"):
        train(Settings("tensorflow", policy, 1.0, 0, 10), "float16", load())


def test_the_command(tmp_path):
    """`lossscale demo --framework tensorflow` writes what `lossscale simulate` reads."""
    done = run("demo", "--framework", "tensorflow", "--steps", 5, "--out", ".", cwd=tmp_path)
    assert "float16, dynamic" in done.stdout, done.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["framework"] == "tensorflow"
    done = run("simulate", "policy.toml", "--gradient-max", "trace.json", cwd=tmp_path)
    assert "of 5 steps" in done.stdout, done.stderr

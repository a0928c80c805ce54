"""The demo's effect is real: float16 needs loss scaling once the loss is small, and the dynamic policy provides it."""

import json

import numpy as np
import pytest

from lossscale.cli._pictures import experiment_as_png
from lossscale.demo import DEFAULT_POLICY, DEFAULT_WEIGHT, Settings, regimes, run_experiment, train
from lossscale.demo._network import backward, cross_entropy, forward, gradients, init_weights, load
from lossscale.demo._training import Trainer
from lossscale_core import DynamicScaling, NoScaling
from lossscale_core.errors import OverflowStreakError
from lossscale_core.testing import simulate, simulate_gradients
from tests.sweeping import seeds

STEPS = 300
DIGITS = load()


def _train(name, weight, seed, steps=STEPS):
    regime = next(regime for regime in regimes(DEFAULT_POLICY) if regime.name == name)
    return train(Settings(regime.policy, weight, seed, steps), regime.dtype, DIGITS)


@pytest.mark.parametrize("seed", seeds(5))
def test_dynamic_stays_with_float32_where_unscaled_float16_collapses(seed):
    """At the default weight: within a point of float32's accuracy, and unscaled at least ten points below."""
    exact, unscaled, dynamic = (
        _train(name, DEFAULT_WEIGHT, seed) for name in ("float32", "float16, no scaling", "float16, dynamic")
    )
    assert exact.accuracy > 0.97
    assert abs(dynamic.accuracy - exact.accuracy) <= 0.01
    assert unscaled.accuracy <= exact.accuracy - 0.10
    assert unscaled.flushed > 0.5
    assert dynamic.flushed < 0.01
    assert exact.flushed == 0.0


def test_at_full_weight_nothing_is_lost():
    """The demo does not overstate its case: without a small weight float16 trains without scaling too."""
    assert _train("float16, no scaling", 1.0, 0).accuracy > 0.97


def test_a_fixed_scale_holds_part_of_the_way():
    """It serves the default weight and fails at a tenth of it."""
    assert _train("float16, fixed 64", DEFAULT_WEIGHT, 0).accuracy > 0.97
    assert _train("float16, fixed 64", 1e-6, 0).accuracy < 0.8
    assert _train("float16, dynamic", 1e-6, 0).accuracy > 0.97


def test_the_same_seed_gives_the_same_run():
    """Every number of a run is reproducible."""
    assert _train("float16, dynamic", 1e-5, 3, steps=20) == _train("float16, dynamic", 1e-5, 3, steps=20)


def test_storage_is_real_float16():
    """Activations and gradients are stored in float16; only products are summed wider, and weights are float32."""
    trainer = Trainer(NoScaling(), "float16", 1.0, init_weights(0))
    images, labels = DIGITS.train_images[:8], DIGITS.train_labels[:8]
    _, stored = gradients(trainer.learnt.weights, "float16", images, labels, np.float32(1.0))
    assert {array.dtype for array in [trainer.logits(images), *stored]} == {np.dtype(np.float16)}
    assert {array.dtype for array in trainer.learnt.weights} == {np.dtype(np.float32)}


def test_backward_is_the_gradient_of_the_loss():
    """The hand-written backward pass agrees with central differences."""
    weights = [array.astype(np.float64) for array in init_weights(1)]
    images, labels = DIGITS.train_images[:16].astype(np.float64), DIGITS.train_labels[:16]

    outputs = forward(weights, images)
    grads = backward(weights, images, outputs, cross_entropy(outputs[-1], labels)[1], "float64")

    def loss_with(parameter, row, column, shift):
        moved = [array.copy() for array in weights]
        moved[parameter][row, column] += shift
        return cross_entropy(forward(moved, images)[-1], labels)[0]

    for parameter, row, column in [(0, 20, 5), (2, 3, 7), (4, 11, 2)]:
        slope = (loss_with(parameter, row, column, 1e-2) - loss_with(parameter, row, column, -1e-2)) / 2e-2
        assert grads[parameter][row, column] == pytest.approx(slope, rel=2e-2, abs=1e-5)


def test_the_record_can_be_simulated():
    """The trace left behind replays: its overflows, and its gradients, give the recorded scales."""
    settings = Settings(DynamicScaling(init_scale=2.0**45, growth_interval=4, max_scale=2.0**48), 1e-5, 0, 40)
    calls = []

    def on_run(name, total):
        calls.append((name, total))
        return lambda: None

    experiment = run_experiment(settings, on_run)
    record = json.loads(json.dumps(experiment.as_json()))
    assert [name for name, _ in calls] == list(record["results"]) == list(experiment.sweep)
    assert {total for _, total in calls} == {40 * 7}
    assert sum(record["overflow"]) > 0
    replayed = simulate(record["policy"], [not flag for flag in record["overflow"]])
    assert replayed.loss_scale_used.tolist() == record["loss_scale"]
    by_gradient = simulate_gradients(record["policy"], record["gradient_max"])
    assert by_gradient.skipped.tolist() == [bool(flag) for flag in record["overflow"]]
    assert experiment_as_png(experiment).startswith(b"\x89PNG")


def test_a_limit_on_the_streak_ends_the_run():
    """The demo knows the flag on the host, so it raises where the policy asks for it."""
    policy = DynamicScaling(init_scale=2.0**120, max_scale=2.0**126, max_overflow_streak=4)
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=4"):
        train(Settings(policy, 1.0, 0, 10), "float16", DIGITS)
    train(Settings(NoScaling(), 1.0, 0, 10), "float32", DIGITS)

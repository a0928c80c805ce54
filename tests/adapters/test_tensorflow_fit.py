"""`LossScaleOptimizer` in `fit`, whichever way it runs: overflows at random, replicas, frozen layers, callbacks."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer

INF = float("inf")
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ROWS = 4
"""A batch's: under the strategy each of the two replicas gets half of them."""


def _data(steps):
    inputs = np.random.default_rng(0).normal(size=(steps * ROWS, 3)).astype(np.float32)
    return inputs, inputs.sum(axis=1, keepdims=True)


def _spoilt(inputs, rows):
    spoilt = inputs.copy()
    spoilt[rows, 0] = INF
    return spoilt


def _model(optimizer, **options):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def _fit(model, inputs, targets, **options):
    return model.fit(inputs, targets, batch_size=ROWS, verbose=0, shuffle=False, **options)


def _assert_close(model, expected, **tolerance):
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


class Replicas(keras.callbacks.Callback):
    """After every step, the state on the first replica; and an error where the second one's bits differ in anything."""

    def __init__(self):
        super().__init__()
        self.states, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        """Compare everything that the model and its optimizer keep."""
        for variable in (*self.model.variables, *self.model.optimizer.variables):
            first, second = (copy.numpy() for copy in STRATEGY.experimental_local_results(variable.value))
            assert first.tobytes() == second.tobytes(), (batch, variable.path)
        self.states.append([float(field) for field in self.model.optimizer.scale_state])
        self.weights.append(self.model.get_weights())


@pytest.mark.usefixtures("mixed_float16")
def test_200_steps_on_two_replicas():
    """An overflow on either skips on both: all bits stay alike, and the state goes as the policy alone says."""
    steps = 200
    victims = np.random.default_rng(1).integers(0, 5, steps)  # neither replica overflows where it is 2 or more
    inputs, targets = _data(steps)
    spoilt = _spoilt(inputs, [n * ROWS + victim * ROWS // 2 for n, victim in enumerate(victims) if victim < 2])
    with STRATEGY.scope():
        model = _model(LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY), jit_compile=False)
    replicas, before = Replicas(), model.get_weights()
    _fit(model, spoilt, targets, callbacks=[replicas])
    state = POLICY.init_state()
    for n, victim in enumerate(victims):
        state = POLICY.update(state, bool(victim >= 2))
        assert replicas.states[n] == [float(field) for field in state], n
        after = replicas.weights[n]
        assert (victim < 2) == all(map(np.array_equal, before, after)), n
        before = after
    assert len(replicas.states) == steps
    assert model.optimizer.steps_with_missing_calls == 0


WAYS = {
    "graph": {"jit_compile": False},
    "auto": {"jit_compile": "auto"},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "several steps an execution": {"jit_compile": False, "steps_per_execution": 3},
    "several steps an execution, XLA": {"jit_compile": True, "steps_per_execution": 3},
}


def _run(options, atol):
    """Fit over random overflows in one way, and in a graph with Keras's own wrapper over the other batches alone."""
    steps = 24
    finite = np.random.default_rng(2).random(steps) > 0.3
    inputs, targets = _data(steps)
    model = _model(optimizer := LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY), **options)
    assert model.optimizer is optimizer  # not wrapped a second time under mixed_float16
    _fit(model, _spoilt(inputs, np.flatnonzero(~finite) * ROWS), targets)
    expected = simulate(POLICY, list(finite))
    assert float(optimizer.loss_scale) == expected.loss_scale_after[-1]
    assert int(optimizer.metrics()["skipped_steps"]) == expected.skipped_steps[-1]
    assert int(optimizer.iterations) == finite.sum()
    clean = _model(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**10), jit_compile=False)
    kept = np.repeat(finite, ROWS)
    _fit(clean, inputs[kept], targets[kept])
    _assert_close(model, clean, atol=atol)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run(way):
    """The state goes as the policy says, and the weights as if only the finite batches had been."""
    _run(WAYS[way], atol=1e-6)


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("way", ["eager", "several steps an execution, XLA"])
def test_mixed_float16(way):
    """As in float32, but for rounding; `compile` does not wrap a second time."""
    _run(WAYS[way], atol=1e-3)

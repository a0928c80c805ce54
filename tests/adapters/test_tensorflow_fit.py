"""`LossScaleOptimizer` in `fit`, whichever way it runs: overflows at random, replicas, frozen layers, callbacks."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale_keras
from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
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
@pytest.mark.parametrize(
    ("wrapper", "graph"),
    [(LossScaleOptimizer, True), (LossScaleOptimizer, False), (lossscale_keras.LossScaleOptimizer, True)],
)
def test_200_steps_on_two_replicas(wrapper, graph):
    """An overflow on either skips on both: all bits stay alike, and the state goes as the policy alone says."""
    steps = 200 if graph else 8  # eagerly a step under a strategy takes long
    victims = np.random.default_rng(1).integers(0, 5, steps)  # neither replica overflows where it is 2 or more
    inputs, targets = _data(steps)
    spoilt = _spoilt(inputs, [n * ROWS + victim * ROWS // 2 for n, victim in enumerate(victims) if victim < 2])
    with STRATEGY.scope():
        optimizer = wrapper(keras.optimizers.Adam(0.01), POLICY)
        model = _model(optimizer, jit_compile=False, run_eagerly=not graph)
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
    assert wrapper is not LossScaleOptimizer or model.optimizer.steps_with_missing_calls == 0


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


def _bare():
    return keras.optimizers.Adam(0.01)


def _wrapped():
    return LossScaleOptimizer(_bare(), POLICY)


def _both(train, steps=6):
    """Train twice: wrapped, with a second batch that overflows, and with the bare optimizer, without that batch."""
    inputs, targets = _data(steps)
    kept = np.r_[:ROWS, 2 * ROWS : steps * ROWS]
    return train(_wrapped(), _spoilt(inputs, [ROWS]), targets), train(_bare(), inputs[kept], targets[kept])


def test_layers_frozen_and_unfrozen():
    """Between fits, as with the bare optimizer: what is frozen stays, what is unfrozen moves, slots continue."""

    def train(optimizer, inputs, targets):
        model = _model(optimizer, jit_compile=False)
        optimizer.build(model.trainable_variables)
        for trainable in (True, False, True):
            before = model.get_layer("first").get_weights()
            model.get_layer("first").trainable = trainable
            model.compile(optimizer, loss="mse", jit_compile=False)
            _fit(model, inputs, targets)
            assert trainable != all(map(np.array_equal, before, model.get_layer("first").get_weights()))
        return model

    wrapped, bare = _both(train)
    _assert_close(wrapped, bare)
    assert int(wrapped.optimizer.metrics()["skipped_steps"]) == 3


@pytest.mark.skipif(KERAS < (3, 11), reason="Keras fails to name the variable in a graph before 3.11")
def test_variables_it_was_not_built_with():
    """Are refused in Keras's words."""
    model = _model(_wrapped(), jit_compile=False)
    model.get_layer("first").trainable = False
    model.compile(model.optimizer, loss="mse", jit_compile=False)
    _fit(model, *_data(2))
    model.get_layer("first").trainable = True
    model.compile(model.optimizer, loss="mse", jit_compile=False)
    with pytest.raises(ValueError, match="Unknown variable"):
        _fit(model, *_data(2))


class Step(keras.Model):
    """A model with a `train_step` of its own, which follows one of the two documented protocols."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol, self.dense = protocol, keras.layers.Dense(1)

    def call(self, inputs):
        """Return the output."""
        return self.dense(inputs)

    def train_step(self, data):
        """Take a step."""
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, targets, self(inputs, training=True))
            scaled = (
                self.optimizer.scale_loss(loss) if self.protocol == "Keras 3" else self.optimizer.get_scaled_loss(loss)
            )
        grads = tape.gradient(scaled, self.trainable_variables)
        if self.protocol == "Keras 3":
            self.optimizer.apply(grads, self.trainable_variables)
        else:
            grads = self.optimizer.get_unscaled_gradients(grads)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_a_train_step_of_ones_own(options):
    """By either protocol it ends with the weights of `fit`'s own."""
    inputs, targets = _data(6)
    weights = {}
    for protocol in ("Keras 3", "tf.keras", None):
        keras.utils.set_random_seed(0)
        model = Step(protocol) if protocol else keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer=_wrapped(), loss="mse", **options)
        _fit(model, _spoilt(inputs, [0, 9]), targets)
        assert int(model.optimizer.metrics()["applied_steps"]) == 4
        assert model.optimizer.steps_with_missing_calls == 0
        weights[protocol] = model.get_weights()
    for protocol in ("Keras 3", "tf.keras"):
        for ours, expected in zip(weights[protocol], weights[None], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


CALLBACKS = {
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=INF),
    "SwapEMAWeights": lambda: keras.callbacks.SwapEMAWeights(),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own variables, to NumPy
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_reach_the_inner_optimizer(name):
    """They set its learning rate and swap its averages, as if it were not wrapped."""

    def train(optimizer, inputs, targets):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner.use_ema = name == "SwapEMAWeights"
        model = _model(optimizer, jit_compile=False)
        _fit(model, inputs, targets, epochs=3, callbacks=[CALLBACKS[name]()])
        return model

    wrapped, bare = _both(train)
    _assert_close(wrapped, bare)
    assert float(wrapped.optimizer.learning_rate) == float(bare.optimizer.learning_rate)


EVERY = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
]
EVERY += [
    pytest.param("Muon", marks=pytest.mark.skipif(KERAS < (3, 11), reason="Keras has no Muon that runs before 3.11"))
]


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_of_keras(name):
    """A skipped step between two others leaves no trace in it, to the last bit."""
    grads = [np.full((2, 2), 0.5, np.float32), np.full((2, 2), INF, np.float32), np.eye(2, dtype=np.float32)]

    def train(optimizer, grads):
        variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        for grad in grads:
            loss_scale = optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply([grad * loss_scale], [variable])
        return [each.numpy() for each in (variable, *getattr(optimizer, "inner_optimizer", optimizer).variables)]

    make = getattr(keras.optimizers, name)
    wrapped, bare = train(LossScaleOptimizer(make(0.1), POLICY), grads), train(make(0.1), grads[::2])
    assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(wrapped, bare, strict=True))

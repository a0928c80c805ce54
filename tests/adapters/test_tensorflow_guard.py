"""`LossScaleOptimizer(guard=)`: a spike skips a step as an overflow does, and the loss scale never learns of it."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import SpikeGuard
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_tf import LossScaleOptimizer
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY, STEPS


def _bits(tensors):
    return [tf.convert_to_tensor(tensor).numpy().tobytes() for tensor in tensors]


INNERS = {
    "Keras 3": lambda: keras.optimizers.Adam(0.1),
    "tf_keras, new": lambda: tf_keras.optimizers.Adam(0.1),
    "tf_keras, legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
}


class Loop:
    """A loop over gradients of given norms."""

    def __init__(self, way="eager", inner="Keras 3", **options):
        self.variable = tf.Variable([0.5, -0.0])
        self.optimizer = LossScaleOptimizer(INNERS[inner](), policy=POLICY, **{"guard": GUARD, **options})
        self.optimizer.build([self.variable])
        self.step = self._step
        if way != "eager":
            self.step = tf.function(self._step, autograph=False, jit_compile=way == "XLA")

    def _step(self, norm):
        self.optimizer.minimize(lambda: self.variable[0] * norm, [self.variable])

    def bits(self):
        """Return everything that a skipped step must leave alone, except the states of scale and guard."""
        return _bits([self.variable, self.optimizer.iterations, *self.optimizer.weights])


def test_a_guard_that_refuses_nothing_changes_nothing():
    """Clipped steps are those of an optimizer without a guard, bit for bit."""
    ends = []
    for guard in (SpikeGuard(warmup=STEPS), None):
        loop = Loop("graph", guard=guard, global_clipnorm=0.5)
        for norm in NORMS:
            loop.step(tf.constant(norm))
        ends.append((loop.bits(), _bits(loop.optimizer.scale_state)))
    assert ends[0] == ends[1]


ROWS, BATCHES = 4, 30
SPIKES = [12, 13, 22]
OVERFLOWS = [5, 18]


def _data(without=()):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(BATCHES, ROWS, 3)).astype(np.float32)
    targets = inputs.sum(axis=2, keepdims=True) + 10.0
    inputs[SPIKES, 0] *= 1e4
    inputs[OVERFLOWS, -1] = np.inf
    kept = [n for n in range(BATCHES) if n not in without]
    return inputs[kept].reshape(-1, 3), targets[kept].reshape(-1, 1)


def _model(optimizer, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")], name="model")
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def _guarded(guard=GUARD):
    return LossScaleOptimizer(keras.optimizers.Adam(0.01), policy=POLICY, global_clipnorm=1.0, guard=guard)


def _fit(model, data, **options):
    model.fit(*data, batch_size=ROWS, verbose=0, shuffle=False, **options)


WAYS = {
    "graph": {"jit_compile": False},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "two replicas": {"jit_compile": False},
}


@functools.cache
def _clean_weights():
    """Return the weights after the good batches alone, without a guard."""
    model = _model(_guarded(None), jit_compile=False)
    _fit(model, _data([*SPIKES, *OVERFLOWS]))
    return model.get_weights()


@pytest.mark.parametrize("way", WAYS)
def test_fit_goes_as_if_the_bad_batches_had_not_been(way):
    """In every way to run, on two replicas, too, where a spike on either skips on both."""
    with STRATEGY.scope() if way == "two replicas" else tf.distribute.get_strategy().scope():
        model = _model(_guarded(), **WAYS[way])
    _fit(model, _data())
    optimizer = model.optimizer
    assert int(optimizer.guard_state.spikes) == len(SPIKES)
    assert int(optimizer.scale_state.skipped_steps) == len(OVERFLOWS)
    assert int(optimizer.scale_state.steps) == BATCHES - len(SPIKES)
    assert int(tf.convert_to_tensor(optimizer.iterations)) == BATCHES - len(SPIKES) - len(OVERFLOWS)
    if way == "two replicas":
        for variable in (*model.variables, *optimizer.variables):
            first, second = (copy.numpy() for copy in STRATEGY.experimental_local_results(variable.value))
            assert first.tobytes() == second.tobytes(), variable.path
    for ours, theirs in zip(model.get_weights(), _clean_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def _whole(model, folder):
    model.save(folder / "saved.keras")
    return keras.models.load_model(folder / "saved.keras")


def _weights(model, folder):
    model.save_weights(folder / "saved.weights.h5")
    other = _model(_guarded())
    other.optimizer.build(other.trainable_variables)
    other.load_weights(folder / "saved.weights.h5")
    return other


def _checkpoint(model, folder):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
    other = _model(_guarded())
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).expect_partial()
    return other


SAVED = {".weights.h5": _weights, "Checkpoint": _checkpoint}


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("way", SAVED)
def test_what_was_saved_without_a_guard_loads_into_one_with(tmp_path, way, recwarn):
    """Slots, scale and iterations continue, and the guard starts over; Keras's own files warn of it."""
    model = _model(_guarded(None), jit_compile=False)
    _fit(model, _data())
    other = SAVED[way](model, tmp_path)
    assert _bits([*other.variables, *other.optimizer.weights]) == _bits([*model.variables, *model.optimizer.weights])
    assert _bits(other.optimizer.scale_state) == _bits(model.optimizer.scale_state)
    assert float(other.optimizer.guard_state.norms) == 0.0
    warned = [each for each in recwarn if each.category is CheckpointWarning]
    assert [("no state of a spike guard" in str(each.message)) for each in warned] == [True] * (way == ".weights.h5")
    assert _whole(model, tmp_path).optimizer.guard is None


def test_without_a_guard_nothing_is_added():
    """Neither a variable nor an entry in the config, in the metrics or in the dict for other frameworks."""
    without, with_guard = _guarded(None), _guarded()
    assert len(with_guard.variables) == len(without.variables) + 5
    assert without.guard is without.guard_state is None
    assert without.get_config()["guard"] is None
    for holds in (without.metrics(), without.state_dict()):
        assert not {"guard", "spikes"} & holds.keys()


def test_the_config_goes_round():
    """Through JSON, and it is left as it is."""
    config = json.loads(json.dumps(_guarded().get_config()))
    again = LossScaleOptimizer.from_config(config)
    assert again.guard == GUARD
    assert again.get_config() == config
    with pytest.raises(PolicyError, match=r"guard=8\.0 must be a SpikeGuard"):
        _guarded(8.0)


@pytest.mark.parametrize("inner", ["tf_keras, new", "tf_keras, legacy"])
def test_a_checkpoint_around_tf_keras_continues(tmp_path, inner):
    """It holds the guard's state next to the scale's."""
    loop, other = Loop("graph", inner), Loop("graph", inner)
    for norm in NORMS[:12]:
        loop.step(tf.constant(norm))
    path = tf.train.Checkpoint(variable=loop.variable, optimizer=loop.optimizer).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(variable=other.variable, optimizer=other.optimizer).restore(path).assert_consumed()
    for norm in NORMS[12:]:
        for each in (loop, other):
            each.step(tf.constant(norm))
    assert other.bits() == loop.bits()
    assert _bits(other.optimizer.guard_state) == _bits(loop.optimizer.guard_state)
    assert int(loop.optimizer.metrics()["spikes"]) == EXPECTED.spiked.sum()
    assert float(loop.optimizer.loss_scale) == EXPECTED.loss_scale_after[-1]

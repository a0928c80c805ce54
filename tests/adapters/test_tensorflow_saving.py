"""A model that is saved in the middle of training and continues elsewhere, to the last bit, in each file format."""

from tests.adapters.tensorflow_devices import OPTIMIZERS_OF_V1, eager, traced  # noqa: I001
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_tf import LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3, hysteresis=2)
ROWS, STEPS = 4, 12
INPUTS = np.random.default_rng(0).normal(size=(STEPS * ROWS, 3)).astype(np.float32)
TARGETS = INPUTS.sum(axis=1, keepdims=True)
INPUTS[ROWS * np.array([1, 2, 5, 8])] = np.inf
INPUTS[ROWS * 4] *= 1e3  # a spike
GUARD = SpikeGuard(warmup=2, memory=4)


MAKERS = [
    *(
        each
        for name, each in vars(keras.optimizers).items()
        if isinstance(each, type) and not name.startswith(("Loss", "Optimizer"))
    ),
    tf_keras.optimizers.Adam,
    tf_keras.optimizers.legacy.Adam,
    lambda rate: tf_keras.optimizers.SGD(tf_keras.optimizers.schedules.CosineDecay(rate, 10), momentum=0.5),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_config_of_every_optimizer(make):
    """It makes the same wrapper around the same optimizer, though Keras 3 and tf_keras have some of the same name."""
    optimizer = LossScaleOptimizer(make(0.5), POLICY, global_clipnorm=1.0)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()


def _model(seed=0, guard=GUARD):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential(layers, name="model")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01, use_ema=True), POLICY, global_clipnorm=1.0, guard=guard)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def _fit(model, start=0, stop=STEPS):
    rows = slice(start * ROWS, stop * ROWS)
    model.fit(INPUTS[rows], TARGETS[rows], batch_size=ROWS, shuffle=False, verbose=0)


def _bits(model):
    """Return everything that is to continue: weights, slots, averages, and every field of the states."""
    optimizer = model.optimizer
    variables = [*model.variables, *optimizer.inner_optimizer.variables, *optimizer.scale_state]
    return [each.numpy().tobytes() for each in (*variables, *(optimizer.guard_state or ()))]


def _pickled(model, folder):
    return pickle.loads(pickle.dumps(model))


def _other(model):
    other = _model(seed=1)
    other.optimizer.build(other.trainable_variables)
    return other


def _checkpoint(model, folder, is_built=True):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
    other = _other(model) if is_built else _model(seed=1)
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    if is_built and model.optimizer.guard is not None:  # as that of the other one
        status.assert_existing_objects_matched()
    return other


def _checkpoint_before_build(model, folder):
    return _checkpoint(model, folder, is_built=False)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own variables, to NumPy
@pytest.mark.parametrize("way", [_checkpoint, _checkpoint_before_build, _pickled])
def test_training_continues(tmp_path, way):
    """As if it had not been interrupted."""
    model = _model()
    _fit(model, stop=STEPS // 2)
    other = way(model, tmp_path)
    assert (other.optimizer.policy, other.optimizer.guard) == (POLICY, GUARD)
    for each in (model, other):
        _fit(each, start=STEPS // 2)
    assert _bits(other) == _bits(model)
    assert int(other.optimizer.metrics()["skipped_steps"]) == 4
    assert int(other.optimizer.metrics()["spikes"]) >= 1


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_checkpoint_without_a_guard_loads_into_one_with(tmp_path):
    """Slots, scale and iterations continue, and the guard starts over."""
    model = _model(guard=None)
    _fit(model)
    other = _checkpoint(model, tmp_path)
    assert _bits(other)[: len(_bits(model))] == _bits(model)
    assert float(other.optimizer.guard_state.norms) == 0.0


WRAPPED = {
    "Keras 3": lambda: LossScaleOptimizer(keras.optimizers.Adam(0.1), POLICY, guard=GUARD),
    "tf_keras, new": lambda: LossScaleOptimizer(tf_keras.optimizers.Adam(0.1), POLICY, guard=GUARD),
    "tf_keras, legacy": lambda: LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.1), POLICY, guard=GUARD),
    **{each.__name__: lambda each=each: v1.LossScaleOptimizer(each(0.1), POLICY) for each in OPTIMIZERS_OF_V1},
}


@pytest.mark.parametrize("mode", [eager, traced])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_loop_of_ones_own_continues(tmp_path, name, mode):
    """From a `Checkpoint` of the variable and the optimizer, restored before and, in a graph, after its slots exist."""

    def made():
        variable, optimizer = tf.Variable([1.0, 2.0]), WRAPPED[name]()

        def step(factor):
            optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, var_list=[variable])

        if mode is traced:
            step(0.0)
        return variable, optimizer, mode(step)

    def bits(variable, optimizer, _):
        variables = getattr(optimizer, "inner_optimizer", optimizer).variables
        variables = variables() if callable(variables) else variables
        state = [*optimizer.scale_state, *(getattr(optimizer, "guard_state", None) or ())]
        return sorted(each.numpy().tobytes() for each in (variable, *variables, *state))

    saved, restored = made(), made()
    for factor in (1.0, np.inf, 1.0, 1.0):
        saved[2](tf.constant(factor))
    path = tf.train.Checkpoint(variable=saved[0], optimizer=saved[1]).save(tmp_path / "checkpoint")
    status = tf.train.Checkpoint(variable=restored[0], optimizer=restored[1]).restore(path)
    for factor in (1e3, 1.0, np.inf, 1.0, 1.0):
        for _, _, step in (saved, restored):
            step(tf.constant(factor))
        assert bits(*restored) == bits(*saved)
    status.assert_consumed()


@pytest.mark.parametrize("generation", [tf_keras.optimizers, tf_keras.optimizers.legacy], ids=["new", "legacy"])
def test_before_the_first_step(tmp_path, generation):
    """A wrapper that has done nothing yet has weights, variables and slot names, and can be saved."""

    def made():
        variable, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(generation.Adam(0.1), True, 16.0, 5)
        return variable, optimizer, tf.train.Checkpoint(variable=variable, optimizer=optimizer)

    (variable, fresh, saving), (other, restored, reading) = made(), made()
    assert len(fresh.variables) > len(fresh.weights)
    assert fresh.get_slot_names() == []
    reading.read(saving.write(tmp_path / "checkpoint")).assert_existing_objects_matched()
    fresh.minimize(lambda: tf.reduce_sum(variable**2), [variable])
    restored.minimize(lambda: tf.reduce_sum(other**2), [other])
    np.testing.assert_array_equal(other.numpy(), variable.numpy())


def test_keras_own_wrapper_refuses_our_config():
    """It lacks the policy, and would continue with a rule of its own."""
    with pytest.raises(ValueError, match="LossScaleOptimizer does not support"):
        keras.optimizers.LossScaleOptimizer.from_config(LossScaleOptimizer(keras.optimizers.SGD(0.1)).get_config())

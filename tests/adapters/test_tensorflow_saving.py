"""A model that is saved in the middle of training and continues elsewhere, to the last bit, in each file format."""

import pickle
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard
from lossscale_tf import LossScaleOptimizer

POLICIES = {
    "dynamic": DynamicScaling(init_scale=2.0**10, growth_interval=3, hysteresis=2),
    "fixed": FixedScaling(2.0**10),
}
ROWS, STEPS = 4, 12
INPUTS = np.random.default_rng(0).normal(size=(STEPS * ROWS, 3)).astype(np.float32)
TARGETS = INPUTS.sum(axis=1, keepdims=True)
INPUTS[ROWS * np.array([1, 2, 5, 8])] = np.inf
INPUTS[ROWS * 4] *= 1e3  # a spike
GUARD = SpikeGuard(warmup=2, memory=4)


OPTIMIZERS = [
    each
    for each in vars(keras.optimizers).values()
    if isinstance(each, type) and issubclass(each, keras.optimizers.Optimizer) and "Loss" not in each.__name__
]


@pytest.mark.parametrize("optimizer", [each for each in OPTIMIZERS if each is not keras.optimizers.Optimizer])
def test_a_config_of_every_optimizer_of_keras(optimizer):
    """It makes the same wrapper around the same optimizer."""
    config = LossScaleOptimizer(optimizer(0.5), 8.0).get_config()
    again = LossScaleOptimizer.from_config(config)
    assert type(again.inner_optimizer) is optimizer
    assert again.get_config() == config


def _model(policy, seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential(layers, name="model")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01, use_ema=True), policy, global_clipnorm=1.0, guard=GUARD)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def _fit(model, steps):
    rows = slice(steps.start * ROWS, steps.stop * ROWS)
    model.fit(INPUTS[rows], TARGETS[rows], batch_size=ROWS, shuffle=False, verbose=0)


def _bits(model):
    """Return everything that is to continue: weights, slots, averages, and every field of the states."""
    variables = [*model.variables, *model.optimizer.inner_optimizer.variables]
    return [each.numpy().tobytes() for each in variables] + [
        each.numpy() for each in (*model.optimizer.scale_state, *model.optimizer.guard_state)
    ]


def _whole(model, folder, policy):
    model.save(folder / "saved.keras")
    return keras.models.load_model(folder / "saved.keras")


def _weights(model, folder, policy):
    model.save_weights(folder / "saved.weights.h5")
    other = _model(policy, seed=1)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(folder / "saved.weights.h5")
    return other


def _checkpoint(model, folder, policy):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
    other = _model(policy, seed=1)
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_existing_objects_matched()
    return other


def _checkpoint_before_build(model, folder, policy):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
    other = _model(policy, seed=1)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    return other


WAYS = {
    ".keras": _whole,
    ".weights.h5": _weights,
    "Checkpoint": _checkpoint,
    "Checkpoint, before the optimizer is built": _checkpoint_before_build,
    "pickle": lambda model, folder, policy: pickle.loads(pickle.dumps(model)),
}
OTHERS = [(way, "fixed") for way in (".keras", "Checkpoint")]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own variables, to NumPy
@pytest.mark.parametrize(("way", "policy"), [*((way, "dynamic") for way in WAYS), *OTHERS])
def test_training_continues(tmp_path, way, policy):
    """As if it had not been interrupted."""
    save, policy = WAYS[way], POLICIES[policy]
    model = _model(policy)
    _fit(model, range(STEPS // 2))
    other = save(model, tmp_path, policy)
    assert (other.optimizer.policy, other.optimizer.guard) == (policy, GUARD)
    _fit(model, range(STEPS // 2, STEPS))
    _fit(other, range(STEPS // 2, STEPS))
    assert _bits(other) == _bits(model)
    assert int(other.optimizer.metrics()["skipped_steps"]) == 4
    assert int(other.optimizer.metrics()["spikes"]) >= 1


class Interrupted(keras.callbacks.Callback):
    """Raises in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        """Raise after the batch given."""
        if batch == 7:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_an_interrupted_fit_continues(tmp_path):
    """From what `BackupAndRestore` kept."""
    policy = POLICIES["dynamic"]
    (model := _model(policy)).fit(INPUTS, TARGETS, batch_size=ROWS, shuffle=False, verbose=0)
    backup = {"backup_dir": tmp_path / "backup", "save_freq": 6}
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        _model(policy).fit(
            INPUTS, TARGETS, callbacks=[keras.callbacks.BackupAndRestore(**backup), Interrupted()], **options
        )
    again = _model(policy, seed=1)
    again.optimizer.build(again.trainable_variables)
    rest = slice(6 * ROWS, None)
    again.fit(INPUTS[rest], TARGETS[rest], callbacks=[keras.callbacks.BackupAndRestore(**backup)], **options)
    assert _bits(again) == _bits(model)


INNERS = {
    "Keras 3": lambda: keras.optimizers.Adam(0.1),
    "tf_keras, new": lambda: tf_keras.optimizers.Adam(0.1),
    "tf_keras, legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_a_loop_of_ones_own_continues(tmp_path, inner, graph):
    """From a `Checkpoint` of the variable and the optimizer, restored before and, in a graph, after its slots exist."""

    def made():
        variable, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(inner(), POLICIES["dynamic"])
        if graph:
            optimizer.build([variable])

        def step(factor):
            optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, [variable])

        return variable, optimizer, tf.function(step, autograph=False) if graph else step

    (variable, optimizer, step), (other, restored, other_step) = made(), made()
    for factor in (1.0, np.inf, 1.0, 1.0):
        step(tf.constant(factor))
    path = tf.train.Checkpoint(variable=variable, optimizer=optimizer).save(tmp_path / "checkpoint")
    status = tf.train.Checkpoint(variable=other, optimizer=restored).restore(path)
    for factor in (1.0, np.inf, 1.0, 1.0):
        step(tf.constant(factor))
        other_step(tf.constant(factor))
        assert variable.numpy().tobytes() == other.numpy().tobytes()
        assert [float(field) for field in optimizer.scale_state] == [float(field) for field in restored.scale_state]
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


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_file_of_before_the_wrappers_were_one():
    """It loads as the class that saved it, and its state continues; Keras's own class refuses its config."""
    optimizer = keras.models.load_model(Path(__file__).parent / "tensorflow_saved.keras").optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert int(optimizer.iterations) == int(optimizer.metrics()["steps"]) == 3
    assert float(optimizer.loss_scale) == 512.0
    assert float(optimizer.metrics()["norm_mean"]) == 6.824281692504883
    assert optimizer.global_clipnorm == 1.0
    with pytest.raises(ValueError, match="LossScaleOptimizer does not support"):
        keras.optimizers.LossScaleOptimizer.from_config(optimizer.get_config())
    had_one_setting_more = {**optimizer.get_config(), "jit_compile": True}
    assert LossScaleOptimizer.from_config(had_one_setting_more).policy == optimizer.policy

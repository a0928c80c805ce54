"""Files of `lossscale_keras.LossScaleOptimizer`."""

import io
import json
import pickle
import warnings
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_from_dict
from lossscale_core.errors import CheckpointWarning, PolicyError
from lossscale_keras import LossScaleOptimizer
from tests.adapters.keras_loops import EACH_WRAPPER, assert_same, values_of

POLICY = DynamicScaling(growth_interval=3, hysteresis=2, cooldown=1)
DATA = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
BAD = np.full((8, 3), np.inf, np.float32)


def _fitted(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(DATA, DATA.sum(axis=1), batch_size=8, verbose=0)
    return model


def _trained(wrapper=LossScaleOptimizer, **settings):
    model = _fitted(wrapper(keras.optimizers.Adam(0.01, use_ema=True), policy=POLICY, **settings))
    model.fit(BAD, np.ones(8), batch_size=8, verbose=0)
    return model


def _continued(model):
    model.fit(DATA, DATA.sum(axis=1), batch_size=8, epochs=2, verbose=0, shuffle=False)
    return values_of(model.trainable_variables, model.optimizer.inner_optimizer.variables)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own variables, to NumPy
@EACH_WRAPPER
@pytest.mark.filterwarnings("error::lossscale_core.errors.CheckpointWarning")
def test_a_saved_model_continues_exactly(wrapper):
    """A model that is saved and loaded trains on with the same bits, policy, guard and norm."""
    model = _trained(wrapper, guard=SpikeGuard(), global_clipnorm=5.0)
    # Keras's pickle contains a `.keras` file.
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.optimizer) is wrapper
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.optimizer.state_dict() == model.optimizer.state_dict()
    assert_same(_continued(loaded), _continued(model))


def _stored(path):
    """Return the config of the optimizer and all arrays of a file, by name."""
    arrays, file = {}, zipfile.ZipFile(path)
    with h5py.File(io.BytesIO(file.read("model.weights.h5"))) as weights:
        weights.visititems(lambda name, item: arrays.update({name: np.asarray(item)} if hasattr(item, "dtype") else {}))
    return json.loads(file.read("config.json"))["compile_config"], arrays


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_each_backend_writes_equal_files(tmp_path):
    """Each backend loads a file of an early version from TensorFlow, takes the same steps and writes the same file."""
    path = Path(__file__).parent / "keras_saved.keras"
    model = keras.models.load_model(path)
    optimizer = model.optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert (int(optimizer.iterations), float(optimizer.loss_scale), optimizer.global_clipnorm) == (3, 512.0, 1.0)
    assert float(optimizer.metrics()["norm_mean"]) == 6.824281692504883
    model.save(tmp_path / "again.keras")
    (config, arrays), (config_again, again) = _stored(path), _stored(tmp_path / "again.keras")
    assert config_again == config
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    model.jit_compile = False
    data = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    model.fit(data, data.sum(axis=1), batch_size=8, verbose=0, shuffle=False)
    assert float(optimizer.loss_scale) == 8192.0
    weights = np.concatenate([values.ravel() for values in values_of(model.trainable_variables)])
    np.testing.assert_allclose(weights, [0.94133174, 0.9444577, -0.05668658], atol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@EACH_WRAPPER
def test_weights_files_load_by_name(tmp_path, wrapper):
    """A weights file has the state of the wrapper by name, so that a wrapper with a new guard can load it."""
    adam = lambda: keras.optimizers.Adam(0.01, use_ema=True)  # noqa: E731
    model, other = _trained(wrapper), _fitted(wrapper(adam(), policy=POLICY, guard=SpikeGuard()))
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert other.optimizer.state_dict().items() >= model.optimizer.state_dict().items()
    loaded, saved = (values_of(m.trainable_variables, m.optimizer.inner_optimizer.variables) for m in (other, model))
    assert_same(loaded, saved)
    # A file of the inner optimizer has no state of a loss scale.
    _fitted(adam()).save_weights(tmp_path / "plain.weights.h5")
    with warnings.catch_warnings(record=True) as warned:  # the other one is Keras's, about the variables of Adam
        warnings.simplefilter("always")
        model.load_weights(tmp_path / "plain.weights.h5")
    assert any("the loss scale starts over" in str(warning.message) for warning in warned)


def test_the_wrapper_continues_an_unwrapped_run():
    """If a loaded optimizer is wrapped, it has the same variables as before."""
    plain = _fitted(keras.optimizers.SGD(0.0, momentum=1.0))
    inner = plain.optimizer
    before = values_of(inner.variables)
    plain.compile(LossScaleOptimizer(inner, "none"), "mse", jit_compile=False)
    plain.fit(BAD, np.ones(8), batch_size=8, verbose=0)
    assert_same(values_of(inner.variables), before)
    plain.fit(DATA, DATA.sum(axis=1), batch_size=8, verbose=0)
    assert int(inner.iterations) == 16


@pytest.mark.promise(67, 68)
@EACH_WRAPPER
def test_a_config(wrapper):
    """The config is JSON without running state, and makes an equal wrapper around a new inner optimizer."""
    inner = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=3.0)
    optimizer = wrapper(inner, policy=DynamicScaling(hysteresis=2), guard=SpikeGuard(threshold=4.0))
    for _ in range(2):
        optimizer.apply([optimizer.scale_loss(keras.ops.full((1,), np.inf))], [keras.Variable(np.ones(1))])
    assert float(optimizer.loss_scale) == 2.0**15
    config = json.loads(json.dumps(optimizer.get_config()))
    copy = wrapper.from_config(config)
    assert config == copy.get_config() == optimizer.get_config()
    assert (copy.policy, copy.guard, copy.global_clipnorm) == (optimizer.policy, optimizer.guard, 3.0)
    assert float(copy.loss_scale) == 2.0**16
    assert copy.inner_optimizer is not inner
    with pytest.raises(PolicyError, match=r"policy\.toml"):  # a config, perhaps a stranger's, has no path to open
        wrapper.from_config({**config, "policy": "policy.toml"})


@pytest.mark.skipif(not hasattr(keras.optimizers, "OptimizerMap"), reason="older versions have no MultiOptimizer")
def test_a_config_works_on_each_backend():
    """A config names no classes of a single backend, so that the config works on each backend."""
    several = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), {"kernel": keras.optimizers.SGD()})
    config = LossScaleOptimizer(keras.optimizers.MultiOptimizer(several)).get_config()
    # On PyTorch, Keras has optimizer classes of its own.
    assert "keras.src.backend" not in json.dumps(config)
    assert LossScaleOptimizer.from_config(config).get_config() == config


def test_a_state_dict_is_portable():
    """The core and another wrapper can load a state dict that went through JSON."""
    model = _trained(guard=SpikeGuard())
    state = json.loads(json.dumps(model.optimizer.state_dict()))
    assert state_from_dict(state, POLICY).steps == 9
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), POLICY, guard=SpikeGuard())
    optimizer.apply([optimizer.scale_loss(keras.ops.ones(1))], [keras.Variable(np.ones(1))])
    optimizer.load_state_dict(state)
    assert optimizer.state_dict() == state
    # Loading clears the record of the last step.
    assert not bool(optimizer.last_step.applied)
    with pytest.warns(CheckpointWarning, match=r"the saved guard is dropped; pass guard=SpikeGuard\(\)"):
        LossScaleOptimizer(keras.optimizers.SGD(), POLICY).load_state_dict(state)

"""Keras 3's, tf_keras's and `tf.compat.v1`'s own loss scales against `from_tool` and the drop-ins."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale_tf
from lossscale import from_tool
from lossscale_core.errors import PolicyError
from lossscale_tf import v1
from tests.other_tools import check_scaler
from tests.strategies import overflow_traces

pytestmark = pytest.mark.filterwarnings("default")


def _gradient(finite):
    return tf.constant(1.0 if finite else np.inf)


def _keras_3(config, folder):
    """Return the step of Keras 3's wrapper, a function that returns its checkpoints, and the policies of its config."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), **config)
    optimizer.build([keras.Variable(1.0)])

    def step(finite):
        optimizer.apply([_gradient(finite)])
        return optimizer.dynamic_scale.numpy()

    def saved():
        return [{variable.path: variable for variable in (optimizer.dynamic_scale, optimizer.step_counter)}]

    return step, saved, [from_tool("keras3", optimizer.get_config())]


def _tf_keras(config, folder):
    """Return the same for the wrapper of `tf.keras.mixed_precision` since TensorFlow 2.4, which tf_keras contains."""
    variable, inner = tf.Variable(1.0), tf_keras.optimizers.legacy.SGD(0.1)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner, **config)
    drop_in = lossscale_tf.LossScaleOptimizer(keras.optimizers.SGD(), **config)

    def step(finite):
        optimizer.apply_gradients([(_gradient(finite), variable)])
        return optimizer.loss_scale

    def saved():
        return [{"current_loss_scale": optimizer.loss_scale, "good_steps": optimizer.dynamic_counter}]

    return step, saved, [from_tool("keras", optimizer.get_config()), drop_in.policy]


def _compat_v1(config, folder):
    """Return the same of `DynamicLossScale`, and the entries of its checkpoint as `tf.train` lists them."""
    names = {"initial_scale": "initial_loss_scale", "dynamic_growth_steps": "increment_period"}
    arguments = {names.get(name, name): value for name, value in config.items()}
    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(**arguments)

    def step(finite):
        loss_scale.update([_gradient(finite)])
        return loss_scale()

    def saved():
        reader = tf.train.load_checkpoint(tf.train.Checkpoint(loss_scale=loss_scale).save(folder / "checkpoint"))
        return [{name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}]

    return step, saved, [v1.DynamicLossScale(**arguments)]


INITIAL = {"initial_scale": st.integers(2, 20).map(lambda power: 2.0**power)}
WHOLE = st.fixed_dictionaries({"dynamic_growth_steps": st.integers(0, 5)}, optional=INITIAL)
ANY = st.fixed_dictionaries(
    {"dynamic_growth_steps": st.integers(-1, 5) | st.sampled_from([2.5, 10**10])},
    optional={**INITIAL, "multiplier": st.sampled_from([2.0, 4.0, 3.0])},
)
ORIGINALS = [("keras3", _keras_3, WHOLE), ("keras", _tf_keras, WHOLE), ("keras", _compat_v1, ANY)]


@pytest.mark.parametrize(("name", "make", "configs"), ORIGINALS)
@settings(max_examples=30)
@given(data=st.data(), grads_finite=overflow_traces(max_steps=30), stop=st.integers(0, 15))
def test_a_policy_has_the_originals_scales(name, make, configs, data, grads_finite, stop, tmp_path_factory):
    """The policy of a config, the drop-in's too, has the original's scales, also in a run that is resumed."""
    config = data.draw(configs)
    check_scaler(name, config, *make(config, tmp_path_factory.mktemp("saved")), grads_finite, stop)


@pytest.mark.parametrize(
    "make",
    [v1.FixedLossScale, v1.DynamicLossScale, v1.FixedLossScaleManager, v1.ExponentialUpdateLossScaleManager],
)
def test_an_argument_is_one_number(make):
    """A wrong value is refused by the name of its argument; an array or a list of one element is a number."""
    right = {name: 0.25 if name == "decr_ratio" else 4 for name in inspect.signature(make).parameters}
    for argument in right:
        for value in (None, True, "abc", [2, 3], 10**400, float("nan")):
            with pytest.raises(PolicyError, match=f"^{argument}="):
                make(**{**right, argument: value})
    for form in (float, np.float32, tf.constant, lambda number: [number], lambda number: np.array([number])):
        assert make(**{name: form(number) for name, number in right.items()}) == make(**right)


def test_checkpoints_of_tf_keras_load(tmp_path):
    """The inner optimizer gets the slots and the count of steps, which tf_keras's wrapper saved as its own."""
    variable = tf.Variable([1.0, 2.0])
    theirs = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam())
    for _ in range(3):
        theirs.apply_gradients([(tf.ones(2), variable)])
    path = tf.train.Checkpoint(optimizer=theirs).save(str(tmp_path / "theirs"))
    ours = lossscale_tf.LossScaleOptimizer(tf_keras.optimizers.Adam())
    ours.build([variable])
    status = tf.train.Checkpoint(optimizer=ours.inner_optimizer).restore(path)
    status.assert_existing_objects_matched().expect_partial()
    for loaded, original in zip(ours.inner_optimizer.variables, theirs.inner_optimizer.variables, strict=True):
        assert loaded.numpy().tolist() == original.numpy().tolist()
    assert int(ours.iterations) == 3

"""Keras 3's, tf_keras's and `tf.compat.v1`'s own loss scales against `from_tool` and the drop-ins."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale_tf
from lossscale import from_tool, state_from_tool
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import PolicyError
from lossscale_tf import v1
from tests.strategies import overflow_traces

SCALES = st.integers(2, 20).map(lambda power: 2.0**power)
pytestmark = pytest.mark.filterwarnings("default")


def _gradient(finite):
    return tf.constant(1.0 if finite else np.inf)


def _of_keras_3(config):
    """Return Keras 3's wrapper, a function that takes a step and returns the scale, and one that returns its state."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), **config)
    optimizer.build([keras.Variable(1.0)])

    def step(finite):
        optimizer.apply([_gradient(finite)])
        return optimizer.dynamic_scale.numpy()

    return optimizer, step, lambda: {v.path: v for v in (optimizer.dynamic_scale, optimizer.step_counter)}


def _of_tf_keras(config):
    """Return the same for the wrapper of `tf.keras.mixed_precision` since TensorFlow 2.4, which tf_keras contains."""
    variable, inner = tf.Variable(1.0), tf_keras.optimizers.legacy.SGD(0.1)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner, **config)

    def step(finite):
        optimizer.apply_gradients([(_gradient(finite), variable)])
        return optimizer.loss_scale

    def read_state():
        return {"current_loss_scale": optimizer.loss_scale, "good_steps": optimizer.dynamic_counter}

    return optimizer, step, read_state


@settings(max_examples=50)
@given(
    st.sampled_from([("keras3", _of_keras_3), ("keras", _of_tf_keras)]),
    st.fixed_dictionaries({"dynamic_growth_steps": st.integers(0, 5)}, optional={"initial_scale": SCALES}),
    overflow_traces(max_steps=30),
    st.integers(0, 15),
)
def test_keras(original, config, grads_finite, stop):
    """Each step has the original's scale, also in a run that continues from its state after `stop` steps."""
    name, make = original
    optimizer, step, read_state = make(config)
    policy = from_tool(name, config)
    assert from_tool(name, optimizer.get_config()) == policy
    states = [policy.init_state()]
    for index, finite in enumerate(grads_finite):
        if index == stop:
            states.append(state_from_tool(name, read_state(), policy))
        scale = float(step(finite))
        if not SMALLEST_SCALE < scale < LARGEST_SCALE:
            return
        states = [policy.update(state, finite) for state in states]
        assert [float(state.loss_scale) for state in states] == [scale] * len(states)


@settings(max_examples=30)
@given(
    st.fixed_dictionaries(
        {"increment_period": st.integers(-1, 5) | st.just(2.5)},
        optional={"initial_loss_scale": SCALES, "multiplier": st.sampled_from([2.0, 4.0, 3.0])},
    ),
    overflow_traces(max_steps=30),
)
def test_compat_v1(config, grads_finite):
    """`DynamicLossScale.update` changes the scale like the policy of the drop-in."""
    original, policy = tf.compat.v1.mixed_precision.DynamicLossScale(**config), v1.DynamicLossScale(**config)
    state = policy.init_state()
    for finite in grads_finite:
        original.update([_gradient(finite)])
        if not SMALLEST_SCALE < float(original()) < LARGEST_SCALE:
            return
        state = policy.update(state, finite)
        assert float(state.loss_scale) == pytest.approx(float(original()), rel=1e-5 if 3.0 in config.values() else 0.0)


def _keras_policy(**arguments):
    return lossscale_tf.LossScaleOptimizer(keras.optimizers.SGD(), **arguments).policy


@pytest.mark.parametrize("interval", [1, 3, 0, -2, 7.0, float("inf"), 10**10])
def test_the_drop_ins_take_an_interval_alike(interval):
    """An interval of any type means the same in `tf.compat.v1`, `tf.contrib`, Keras and `from_tool`."""
    policy = from_tool("keras", {"dynamic_growth_steps": interval})
    assert _keras_policy(dynamic_growth_steps=interval) == policy
    assert v1.DynamicLossScale(increment_period=interval).growth_interval == policy.growth_interval
    contrib = v1.ExponentialUpdateLossScaleManager(8.0, interval, interval)
    assert contrib.growth_interval == contrib.hysteresis == policy.growth_interval


def test_a_fraction_of_an_interval():
    """Keras rounds it down. `tf.contrib` counts to the fraction, so that it is rounded up."""
    assert _keras_policy(dynamic_growth_steps=2.5).growth_interval == 2
    assert v1.ExponentialUpdateLossScaleManager(8.0, 2.5).growth_interval == 3


def test_the_drop_in_has_the_policy_of_from_tool():
    """Each argument and each default gives the same policy."""
    fixed, dynamic = {"initial_scale": 64, "dynamic": False}, {"initial_scale": 64, "dynamic_growth_steps": 3}
    for arguments in ({}, {"initial_scale": None}, dynamic, fixed):
        assert _keras_policy(**arguments) == from_tool("keras", arguments)


ODD = [True, None, "abc", [2, 3], 10**400, float("nan")]
CALLS = {
    "loss_scale_value": lambda value: v1.FixedLossScale(value),
    "initial_loss_scale": lambda value: v1.DynamicLossScale(initial_loss_scale=value),
    "increment_period": lambda value: v1.DynamicLossScale(increment_period=value),
    "multiplier": lambda value: v1.DynamicLossScale(multiplier=value),
    "loss_scale": lambda value: v1.FixedLossScaleManager(value),
    "init_loss_scale": lambda value: v1.ExponentialUpdateLossScaleManager(value, 5),
    "incr_every_n_steps": lambda value: v1.ExponentialUpdateLossScaleManager(8.0, value),
    "decr_every_n_nan_or_inf": lambda value: v1.ExponentialUpdateLossScaleManager(8.0, 5, value),
    "incr_ratio": lambda value: v1.ExponentialUpdateLossScaleManager(8.0, 5, incr_ratio=value),
    "initial_scale": lambda value: _keras_policy(initial_scale=value),
    "dynamic_growth_steps": lambda value: _keras_policy(dynamic_growth_steps=value),
}


@pytest.mark.parametrize("argument", CALLS)
def test_an_argument_that_is_not_a_number_is_named(argument):
    """The error names the argument. A number in an array or a list of one element is accepted."""
    for odd in ODD:
        if odd is not None or argument not in ("initial_scale", "dynamic_growth_steps"):  # None is Keras's default
            with pytest.raises(PolicyError, match=f"^{argument}="):
                CALLS[argument](odd)
    numbers = [4, 4.0, np.float32(4), np.int64(4), [4], np.array([4]), tf.constant(4), tf.constant([4.0])]
    assert len({repr(CALLS[argument](number)) for number in numbers}) == 1


REFUSED = [
    (v1.FixedLossScale, {"loss_scale_value": 0.5}),
    (v1.FixedLossScaleManager, {"loss_scale": 0.5}),
    (v1.DynamicLossScale, {"multiplier": 0.5}),
    (v1.DynamicLossScale, {"initial_loss_scale": 0.1}),
    (v1.ExponentialUpdateLossScaleManager, {"init_loss_scale": 0.1, "incr_every_n_steps": 3}),
    (v1.ExponentialUpdateLossScaleManager, {"init_loss_scale": 8.0, "incr_every_n_steps": 3, "incr_ratio": 0.5}),
    (v1.ExponentialUpdateLossScaleManager, {"init_loss_scale": 8.0, "incr_every_n_steps": 3, "decr_ratio": 3.0}),
]


@pytest.mark.parametrize(("make", "arguments"), REFUSED)
def test_settings_that_no_policy_has_are_refused(make, arguments):
    """The error names the argument, as in `docs/migrating.md`."""
    with pytest.raises(PolicyError, match="|".join(arguments)):
        make(**arguments)


def test_a_checkpoint_on_disk(tmp_path):
    """`state_from_tool` reads the names that `tf.train.load_checkpoint` lists."""
    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(initial_loss_scale=8.0)
    for finite in (True, False, True, True):
        loss_scale.update([_gradient(finite)])
    path = tf.train.Checkpoint(loss_scale=loss_scale).save(tmp_path / "checkpoint")
    reader = tf.train.load_checkpoint(path)
    state = state_from_tool("keras", {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()})
    assert (state.loss_scale, state.growth_tracker) == (4.0, 2)


@pytest.mark.parametrize("make", [tf_keras.optimizers.Adam, lambda: tf_keras.optimizers.SGD(momentum=0.9)])
def test_a_checkpoint_of_tf_keras_restores_the_inner_optimizer(tmp_path, make):
    """It restores the slots and the count of steps, which tf_keras's wrapper saved as its own."""
    variable, theirs = tf.Variable([1.0, 2.0]), tf_keras.mixed_precision.LossScaleOptimizer(make())
    for _ in range(3):
        theirs.apply_gradients([(tf.ones(2), variable)])
    path = tf.train.Checkpoint(optimizer=theirs).save(str(tmp_path / "theirs"))
    ours = lossscale_tf.LossScaleOptimizer(make())
    ours.build([variable])
    status = tf.train.Checkpoint(optimizer=ours.inner_optimizer).restore(path)
    status.assert_existing_objects_matched().expect_partial()
    original, loaded = (
        {variable.name: variable.numpy().tolist() for variable in optimizer.variables}
        for optimizer in (theirs.inner_optimizer, ours.inner_optimizer)
    )
    assert loaded == original
    assert int(ours.iterations) == 3

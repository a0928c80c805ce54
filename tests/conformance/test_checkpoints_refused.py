"""Errors of a checkpoint have the same text in every framework."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf

import lossscale_jax
import lossscale_tf
from lossscale_core import DynamicScaling, FixedScaling, state_to_dict
from lossscale_core.errors import CheckpointError, CheckpointWarning, ScaleStateError
from tests.conformance.travelling import WRAPPERS
from tests.core.own_policies import AdditiveScaling

POLICY = DynamicScaling(growth_interval=100, hysteresis=2, max_overflow_streak=50)
SAVED = json.loads(json.dumps(state_to_dict(POLICY.update(POLICY.init_state(), False), POLICY)))
EVERYWHERE = pytest.mark.parametrize("take_over", WRAPPERS.values(), ids=WRAPPERS)


OTHERS = {
    "settings": (
        dataclasses.replace(POLICY, growth_interval=500, max_overflow_streak=None),
        r"^(?!.*hysteresis).*growth_interval was 100 and is 500.* max_overflow_streak was 50 and is None",
    ),
    "kind": (FixedScaling(8.0), "kind was 'dynamic' and is 'fixed'"),
}


@EVERYWHERE
@pytest.mark.parametrize(("policy", "message"), OTHERS.values(), ids=OTHERS)
def test_changed_settings_are_reported(take_over, policy, message):
    """A warning names each setting that differs, with both values; the counts of steps continue."""
    with pytest.warns(CheckpointWarning, match=message) as told:
        after = take_over(SAVED, policy)(1.0).saved
    assert {Path(each.filename).parents[1].name for each in told} == {"tests"}  # the line that loads the state
    assert after["steps"] == 2


LOST = (CheckpointError, KeyError, RuntimeError)  # torch's scaler has errors of its own
NEWER = r"version=2 .* must be 1.*newer.*upgrade lossscale"
REFUSED = {
    "nothing": (None, LOST, r"(not a|the) saved state|given None"),
    "empty": ({}, LOST, r"(not a|the) saved state|'scale'|is empty"),
    "a scale alone": ({"loss_scale": 1024.0}, LOST, "(not a|the) saved state|'scale'"),
    "a value that no state can hold": ({**SAVED, "loss_scale": float("nan")}, CheckpointError, "loss_scale=nan"),
    "a newer version": ({**SAVED, "version": 2}, CheckpointError, NEWER),
}


@EVERYWHERE
@pytest.mark.parametrize(("saved", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_state_is_refused(take_over, saved, error, message):
    """Each adapter names a damaged value, and refuses the format of a later release."""
    with pytest.raises(error, match=message):
        take_over(saved, POLICY)


def _minimize(optimizer, variable):
    optimizer.minimize(lambda: tf.reduce_sum(variable * variable), [variable])


@pytest.mark.parametrize("mode", [lambda step: step, tf.function(autograph=False)], ids=["eager", "graph"])
def test_keras_misses_a_restored_state(tmp_path, mode):
    """A wrapper warns if a checkpoint restored the bare optimizer only, but not after its own checkpoint."""
    variable, bare = tf.Variable([1.0, 2.0]), keras.optimizers.Adam()
    for _ in range(3):
        bare.apply_gradients([(tf.ones(2), variable)])
    path = tf.train.Checkpoint(variable=variable, optimizer=bare).save(str(tmp_path / "bare"))
    optimizer = lossscale_tf.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build([variable])
    checkpoint = tf.train.Checkpoint(variable=variable, optimizer=optimizer.inner_optimizer)
    checkpoint.restore(path).assert_existing_objects_matched()
    step = mode(lambda: _minimize(optimizer, variable))
    with pytest.warns(CheckpointWarning, match=r"has taken 3 steps before.*starts over at 2\*\*15"):
        step()
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "wrapped"))
    again = lossscale_tf.LossScaleOptimizer(keras.optimizers.Adam())
    again.build([variable])
    tf.train.Checkpoint(optimizer=again).restore(path).assert_existing_objects_matched()
    mode(lambda: _minimize(again, variable))()
    assert int(again.scale_state.steps) == 2


def test_v1_misses_a_restored_state():
    """The v1 wrapper warns if `global_step` shows steps that its own state has not counted."""
    variable, global_step = tf.Variable(1.0), tf.Variable(7, dtype=tf.int64)
    optimizer = lossscale_tf.v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "dynamic")
    with pytest.warns(CheckpointWarning, match="has taken 7 steps before"):
        optimizer.minimize(lambda: variable**2, global_step, [variable])


def test_v1_loads_in_a_graph():
    """In a graph, `load_state_dict` returns an operation that loads the state in a session."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = lossscale_tf.v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), POLICY)
        load = optimizer.load_state_dict(SAVED)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(load)
        assert state_to_dict(session.run(optimizer.scale_state), POLICY) == SAVED


def test_jax_loads_a_nested_state():
    """A state is loaded into a nested optimizer state; a state with other fields is refused."""
    optimizer, params = lossscale_jax.loss_scaled(optax.sgd(0.1), POLICY), jnp.ones(2)
    nested = {"ema": (params, [optimizer.init(params)])}
    loaded = lossscale_jax.load_scale_state(nested, SAVED, POLICY)
    assert state_to_dict(lossscale_jax.get_scale_state(loaded), POLICY) == SAVED
    assert [value.dtype for value in lossscale_jax.get_scale_state(loaded)] == [np.float32] + [np.int32] * 5
    with (
        pytest.raises(ScaleStateError, match=r"has 6 numbers .*, and a state of AdditiveScaling.* has 7"),
        pytest.warns(CheckpointWarning),
    ):
        lossscale_jax.load_scale_state(nested, SAVED, AdditiveScaling())

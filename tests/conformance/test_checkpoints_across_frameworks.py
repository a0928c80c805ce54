"""A run that began in one framework continues in another: its states are those of the uninterrupted run, bitwise."""

import itertools
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
from lossscale_core import DynamicScaling, policy_from_dict, state_to_dict
from lossscale_core.errors import CheckpointError, CheckpointWarning, ScaleStateError
from lossscale_torch import GradScaler
from tests.conformance.travelling import WRAPPERS
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling, policy_of_the_docs

SAVED_AT = 30
POLICY = DynamicScaling(growth_interval=4, hysteresis=2, refill_on_finite=False, cooldown=1, max_scale=2.0**48)
"""Of which every tracker is on its way at some step."""
FINITE = [bool(each) for each in np.random.default_rng(0).random(100) < 0.8]
NORMS = np.where(FINITE, 1.0, np.inf)


def _plain(saved):
    """Leave out the keys that torch's own scaler has besides."""
    return {name: saved[name] for name in state_to_dict(POLICY.init_state(), POLICY)}


@pytest.fixture(scope="module")
def uninterrupted():
    """Return the states of the run over all flags, on the host."""
    states = itertools.accumulate(FINITE, POLICY.update, initial=POLICY.init_state())
    return [state_to_dict(state, POLICY) for state in states][1:]


@pytest.fixture(scope="module", params=WRAPPERS)
def saved(request, uninterrupted, tmp_path_factory):
    """Return what a framework's wrapper saved in a file after some steps."""
    step = WRAPPERS[request.param](state_to_dict(POLICY.init_state(), POLICY), POLICY)
    for norm in NORMS[:SAVED_AT]:
        after = step(norm).saved
    file = tmp_path_factory.mktemp("saved") / "scaler.json"
    file.write_text(json.dumps(after))
    assert _plain(after) == uninterrupted[SAVED_AT - 1]
    return file


@pytest.mark.parametrize("target", WRAPPERS)
def test_the_next_states_are_the_same(uninterrupted, saved, target):
    """Loaded by another framework's wrapper, over the same overflows."""
    step = WRAPPERS[target](json.loads(saved.read_text()), POLICY)
    assert [_plain(step(norm).saved) for norm in NORMS[SAVED_AT:]] == uninterrupted[SAVED_AT:]
    assert len({state["loss_scale"] for state in uninterrupted[SAVED_AT:]}) > 2


FROZEN = json.loads(Path(__file__).with_name("version_1.json").read_text())
"""What each framework's first release of version 1 saved, and how its run continued; never to be written again."""


@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize("origin", FROZEN)
def test_version_1_continues_everywhere(origin, target):
    """What each framework saved in the first release is taken over by each, silently, and continues as it did."""
    frozen = FROZEN[origin]
    step = WRAPPERS[target](frozen["saved"], policy_from_dict(frozen["saved"]["policy"]))
    for finite in frozen["grads_finite"]:
        after = step(1.0 if finite else np.inf).saved
    assert {name: after[name] for name in frozen["after"]} == frozen["after"]


@pytest.mark.parametrize("target", WRAPPERS)
def test_edited_keys_of_torch_are_used(target):
    """A warning shows both numbers; the overflow leaves the scale, by the tolerance of the policy."""
    saved = GradScaler("cpu", policy=POLICY).state_dict()
    with pytest.warns(CheckpointWarning, match="loss_scale=65536.0, and torch's scale=64.0, which is used"):
        step = WRAPPERS[target]({**saved, "scale": 64.0, "loss_scale": 65536.0}, POLICY)
    assert step(np.inf).saved["loss_scale"] == 64.0


OWN = {"derived": AdditiveScaling(), "bare": BareAdditiveScaling(), "of the docs": policy_of_the_docs()}


@pytest.mark.parametrize("policy", OWN.values(), ids=OWN)
@pytest.mark.parametrize("framework", WRAPPERS)
def test_own_policies_keep_their_states(framework, policy):
    """The state after each step is the host's, bit for bit, the counter of its own included."""
    state = policy.init_state()
    step = WRAPPERS[framework](state_to_dict(state, policy), policy)
    for finite in FINITE[:10]:
        state = policy.update(state, finite)
        assert step(1.0 if finite else np.inf).saved.items() >= state_to_dict(state, policy).items()


SAVED = json.loads(json.dumps(state_to_dict(POLICY.update(POLICY.init_state(), False), POLICY)))


LOST = (CheckpointError, KeyError, RuntimeError)  # torch's scaler has errors of its own
REFUSED = {
    "nothing": (None, LOST, "(not a|the) saved state|given None"),
    "a value that no state can hold": ({**SAVED, "loss_scale": float("nan")}, CheckpointError, "loss_scale=nan"),
    "a newer version": ({**SAVED, "version": 2}, CheckpointError, "version=2 .* must be 1.*upgrade lossscale"),
}


@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize(("saved", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_state_is_refused(target, saved, error, words):
    """Each adapter names a damaged value, and refuses the format of a later release."""
    with pytest.raises(error, match=words):
        WRAPPERS[target](saved, POLICY)


def test_keras_misses_a_restored_state(tmp_path):
    """A wrapper warns if a checkpoint restored the bare optimizer only, in a graph too."""
    variable, bare = tf.Variable([1.0, 2.0]), keras.optimizers.Adam()
    bare.apply_gradients([(tf.ones(2), variable)])
    path = tf.train.Checkpoint(optimizer=bare).save(str(tmp_path / "bare"))
    optimizer = lossscale_tf.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build([variable])
    tf.train.Checkpoint(optimizer=optimizer.inner_optimizer).restore(path).assert_existing_objects_matched()
    step = tf.function(lambda: optimizer.minimize(lambda: tf.reduce_sum(variable**2), [variable]), autograph=False)
    with pytest.warns(CheckpointWarning, match=r"has taken 1 steps before.*starts over at 2\*\*15"):
        step()


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
    """A state is loaded into the state of optax's wrappers; a state with other fields is refused."""
    masked = optax.masked(optax.chain(lossscale_jax.loss_scaled(optax.sgd(0.1), POLICY)), True)
    nested = {"ema": [optax.inject_hyperparams(lambda unused: masked)(unused=0.0).init(jnp.ones(2))]}
    state = lossscale_jax.get_scale_state(lossscale_jax.load_scale_state(nested, SAVED, POLICY))
    assert state_to_dict(state, POLICY) == SAVED
    assert [value.dtype for value in state] == [np.float32] + [np.int32] * 5
    own = state_to_dict(AdditiveScaling().init_state())
    with pytest.raises(ScaleStateError, match=r"has 6 numbers .*, and a state of AdditiveScaling.* has 7"):
        lossscale_jax.load_scale_state(nested, own, AdditiveScaling())

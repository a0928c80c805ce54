"""A run that began in one framework continues in another: its states are those of the uninterrupted run, bitwise."""

import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from lossscale_core import DynamicScaling, policy_from_dict, state_to_dict
from lossscale_core.errors import CheckpointWarning
from lossscale_torch import GradScaler
from tests.conformance.travelling import WRAPPERS
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling, policy_of_the_docs

SAVED_AT = 100
POLICY = DynamicScaling(growth_interval=4, hysteresis=2, refill_on_finite=False, cooldown=1, max_scale=2.0**48)
"""Of which every tracker is on its way at some step."""
FINITE = [bool(each) for each in np.random.default_rng(0).random(300) < 0.8]
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
    """Return what a framework's wrapper saved in a file after step 100."""
    step = WRAPPERS[request.param](state_to_dict(POLICY.init_state(), POLICY), POLICY)
    for norm in NORMS[:SAVED_AT]:
        after = step(norm).saved
    file = tmp_path_factory.mktemp("saved") / "scaler.json"
    file.write_text(json.dumps(after))
    assert _plain(after) == uninterrupted[SAVED_AT - 1]
    return file


@pytest.mark.parametrize("target", WRAPPERS)
def test_the_next_states_are_those_of_the_uninterrupted_run(uninterrupted, saved, target):
    """Loaded by another framework's wrapper, over the same overflows: 200 states."""
    step = WRAPPERS[target](json.loads(saved.read_text()), POLICY)
    assert [_plain(step(norm).saved) for norm in NORMS[SAVED_AT:]] == uninterrupted[SAVED_AT:]
    assert len({state["loss_scale"] for state in uninterrupted[SAVED_AT:]}) > 2


FROZEN = json.loads(Path(__file__).with_name("version_1.json").read_text())
"""What each framework's first release of version 1 saved, and how its run continued; never to be written again."""


@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize("origin", FROZEN)
def test_a_frozen_checkpoint_of_version_1_continues_in_every_framework(origin, target):
    """What each framework saved in the first release is taken over by each, silently, and continues as it did."""
    frozen = FROZEN[origin]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = WRAPPERS[target](frozen["saved"], policy_from_dict(frozen["saved"]["policy"]))
    for finite in frozen["grads_finite"]:
        after = step(1.0 if finite else np.inf).saved
    assert {name: after[name] for name in frozen["after"]} == frozen["after"]


@pytest.mark.parametrize("target", WRAPPERS)
def test_every_framework_uses_an_edited_key_of_torch(target):
    """A warning shows both numbers; the overflow leaves the scale, by the tolerance of the policy."""
    saved = GradScaler("cpu", policy=POLICY).state_dict()
    with pytest.warns(CheckpointWarning, match="loss_scale=65536.0, and torch's scale=64.0, which is used"):
        step = WRAPPERS[target]({**saved, "scale": 64.0, "loss_scale": 65536.0}, POLICY)
    assert step(np.inf).saved["loss_scale"] == 64.0


OWN = {"derived": AdditiveScaling(), "bare": BareAdditiveScaling(), "of the docs": policy_of_the_docs()}


@pytest.mark.parametrize("policy", OWN.values(), ids=OWN)
@pytest.mark.parametrize("framework", WRAPPERS)
def test_a_policy_of_ones_own_goes_through_every_facade(framework, policy):
    """The state after each step is the host's, bit for bit, the counter of its own included."""
    state = policy.init_state()
    step = WRAPPERS[framework](state_to_dict(state, policy), policy)
    for finite in FINITE[:10]:
        state = policy.update(state, finite)
        assert step(1.0 if finite else np.inf).saved.items() >= state_to_dict(state, policy).items()

"""A policy of the user's own has the same states in every facade as on the host."""

import pytest

from lossscale_core import state_to_dict
from tests.conformance.travelling import WRAPPERS
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling, policy_of_the_docs

FLAGS = [True, True, False, True, True, True, True, False, False]
POLICIES = {"derived": AdditiveScaling(), "bare": BareAdditiveScaling(), "of the docs": policy_of_the_docs()}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("framework", WRAPPERS)
def test_a_policy_of_ones_own_goes_through_every_facade(framework, policy):
    """The state after each step is the host's, bit for bit, the counter of its own included."""
    state = policy.init_state()
    step = WRAPPERS[framework](state_to_dict(state, policy), policy)
    for finite in FLAGS:
        state = policy.update(state, finite)
        assert step(finite).items() >= state_to_dict(state, policy).items()

"""A policy of the user's own is accepted like the library's policies, without a change elsewhere."""

import dataclasses

import pytest

from lossscale_core import BaseScaling, DynamicScaling, as_policy, policy_to_dict
from lossscale_core.errors import PolicyError
from lossscale_core.testing import simulate
from tests.core.own_policies import AdditiveState, BareAdditiveScaling


def test_an_own_policy_is_simulated():
    """A trace has the scales of a user's policy, and a column for the policy's own counter."""
    trace = simulate(BareAdditiveScaling(), [True, True, False, True, True])
    assert trace.loss_scale_after.tolist() == [1024.0, 1088.0, 544.0, 544.0, 608.0]
    assert trace.additions.tolist() == [0, 1, 1, 1, 2]


def test_a_bare_policys_members_have_defaults():
    """`BaseScaling.of` returns a view with the members of a bare policy, and defaults for the other members."""
    policy = BareAdditiveScaling()
    assert as_policy(policy) is policy
    members = BaseScaling.of(policy)
    assert (members.kind, members.max_overflow_streak) == (None, None)
    assert (members.growth_factor, members.backoff_factor) == (1.0, 1.0)
    assert (members.state_type, members.bounds(), members.growth_interval) == (AdditiveState, (1.0, 2.0**15), 2)
    assert members.init_state() == policy.init_state()
    assert members.settings() == {"init_scale": 2.0**10, "growth_interval": 2, "min_scale": 1.0, "max_scale": 2.0**15}


def test_a_derived_policy_has_no_config():
    """A subclass without a `kind` of its own has no config, and does not take the kind of its base class."""
    derived = type("Eager", (DynamicScaling,), {})
    with pytest.raises(PolicyError, match="has no config"):
        policy_to_dict(derived())
    assert as_policy(policy_to_dict(DynamicScaling())) == DynamicScaling()


def test_a_setting_has_its_types_rule():
    """The declared type of a setting is its rule, and a type other than float, int and bool is refused."""

    @dataclasses.dataclass(frozen=True)
    class Weighted(BaseScaling):
        weight: "float" = -2.0
        is_eager: bool = False

    assert Weighted(weight=3).settings() == {"weight": 3.0, "is_eager": False}
    with pytest.raises(PolicyError, match="weight='much' must be a number from -2"):
        Weighted(weight="much")
    with pytest.raises(NotImplementedError, match="Weighted has no update"):
        Weighted().update(None, True)

    @dataclasses.dataclass(frozen=True)
    class Named(BaseScaling):
        label: str = "mine"

    with pytest.raises(TypeError, match="declare a setting as float, int or bool"):
        Named()

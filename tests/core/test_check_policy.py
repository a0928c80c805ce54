"""`check_policy`: right policies pass, and each wrong one gets a sentence that names the field and the step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, one_more, select
from lossscale_core.testing import check_policy, policies
from tests.core.own_policies import policy_of_the_docs
from tests.sweeping import IS_SWEEP

RULE = DynamicScaling(growth_interval=3)


@pytest.mark.parametrize("policy", [NoScaling(), FixedScaling(3.0), DynamicScaling(), RULE, policy_of_the_docs()])
def test_right_policies_pass(policy):
    check_policy(policy)


@settings(max_examples=100 if IS_SWEEP else 5)
@given(policies())
def test_the_librarys_policies_pass_with_any_settings(policy):
    check_policy(policy)


class Wrong:
    """DynamicScaling, with a change of each state."""

    def __init__(self, change):
        self.change = change

    def init_state(self):
        return RULE.init_state()

    def update(self, state, grads_finite, *, xp=None):
        return self.change(state, RULE.update(state, grads_finite, xp=xp), grads_finite, xp)


COUNT = itertools.count()


def _count_with_if(before, after, flag, xp):
    return after._replace(growth_tracker=after.growth_tracker if flag else before.growth_tracker * 0)


WRONG = {
    "a dtype": (
        lambda before, after, flag, xp: after._replace(growth_tracker=after.growth_tracker * 1.0),
        "growth_tracker is float64 of shape () on the host after step 1, but must stay int32 of shape ()",
    ),
    "a shape": (
        lambda before, after, flag, xp: after._replace(steps=np.array([after.steps])) if xp is np else after,
        "steps is int32 of shape (1,) on NumPy arrays after step 1, but must stay int32 of shape ()",
    ),
    "a count": (
        lambda before, after, flag, xp: after._replace(skipped_steps=before.skipped_steps),
        "skipped_steps is 0 after step 1, but must be 1",
    ),
    "a full counter": (
        lambda before, after, flag, xp: after._replace(steps=before.steps + 1),
        "steps is -2147483648 after step with full counters 2, but must be 2147483647",
    ),
    "a memory": (
        lambda before, after, flag, xp: after._replace(hysteresis_tracker=np.int32(next(COUNT))),
        "hysteresis_tracker is not computed from the state and the flag alone on the host after step 1",
    ),
    "an if": (
        _count_with_if,
        "update raised TypeError('a traced array has no truth value') on traced arrays after step 1",
    ),
    "another rule on arrays": (
        lambda before, after, flag, xp: after if xp is None else after._replace(loss_scale=before.loss_scale),
        "loss_scale is 65536.0 on NumPy arrays after step 1, but 32768.0 on the host",
    ),
    "a scale that falls to zero": (
        lambda before, after, flag, xp: after._replace(
            loss_scale=select(flag, before.loss_scale, before.loss_scale * 0.5, xp=xp)
        ),
        "loss_scale is 5.87747e-39 after 143 overflows in a row; keep it from 2**-126 to 2**126",
    ),
    "a scale without a bound above": (
        lambda before, after, flag, xp: after._replace(loss_scale=before.loss_scale * 1.125),
        "loss_scale is 9.18997e+37 after 648 finite steps in a row",
    ),
    "no state": (lambda before, after, flag, xp: tuple(after), "return the type of the state"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_policy_is_told_the_field_and_the_step(name):
    change, sentence = WRONG[name]
    with pytest.raises(AssertionError) as caught:
        check_policy(Wrong(change))
    assert sentence in str(caught.value)


def test_a_wrong_first_state_is_told_the_field():
    policy = Wrong(lambda before, after, flag, xp: after)
    policy.init_state = lambda: RULE.init_state()._replace(steps=0)
    with pytest.raises(AssertionError, match="steps of init_state is 0; return a NumPy scalar of int32"):
        check_policy(policy)
    policy.init_state = lambda: (1.0, 2.0)
    with pytest.raises(AssertionError, match="return a NamedTuple that begins as ScaleState"):
        check_policy(policy)


@pytest.mark.parametrize("convert", [lambda count: count, np.asarray])
def test_one_more_stops_at_the_largest_count(convert):
    """It keeps the dtype."""
    for count, after in ((0, 1), (7, 8), (2**31 - 2, 2**31 - 1), (2**31 - 1, 2**31 - 1)):
        more = one_more(convert(np.int32(count)))
        assert (more, more.dtype) == (after, np.int32)
    assert select(True, one_more(np.int32(1)), np.int32(0)) == 2

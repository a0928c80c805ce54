"""`check_policy`: right policies pass, and each wrong one gets a sentence that names the field and the step."""

import dataclasses
import itertools
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, settings

from lossscale_core import BaseScaling, DynamicScaling, FixedScaling, ScaleState, saturating_increment, select
from lossscale_core.testing import check_policy
from tests.core.own_policies import policy_of_the_docs
from tests.strategies import policies
from tests.sweeping import IS_SWEEP

RULE = DynamicScaling(growth_interval=3)
COUNT = itertools.count()


@settings(max_examples=100 if IS_SWEEP else 5)
@given(policies())
def test_the_librarys_policies_pass(policy):
    """The library's policies pass `check_policy` with any settings."""
    check_policy(policy)


@pytest.mark.parametrize("first", [np.int32(3), np.float32(3.5)])
def test_an_own_field_may_be_negative(first):
    """A policy's own field may have any finite value, because a checkpoint stores it as it is."""
    check_policy(_own("balance", first))


class Changed(BaseScaling):
    """DynamicScaling, with a change of its first state, of each state, or of a member."""

    adapts = True
    max_scale, growth_interval = 2.0**32, 3
    min_scale = 1.0

    def __init__(self, change=lambda before, after, flag, xp: after, first=lambda state: state, **members):
        self.change, self.first = change, first
        vars(self).update(members)

    def init_state(self):
        return self.first(RULE.init_state())

    def update(self, state, grads_finite, *, xp=None):
        return self.change(state, RULE.update(ScaleState(*state[:6]), grads_finite, xp=xp), grads_finite, xp)


def _first(**fields):
    """Return a policy with another first state."""
    return Changed(first=lambda state: state._replace(**fields))


def _set(**fields):
    """Return a policy that puts `made(before, after, xp)` into fields after each step."""
    return Changed(
        lambda old, new, flag, xp: new._replace(**{name: made(old, new, xp) for name, made in fields.items()})
    )


def _own(name, value):
    """Return a policy with a field of its own, which counts down."""
    state_type = namedtuple("Own", [*ScaleState._fields, name])
    return Changed(lambda old, new, flag, xp: state_type(*new, old[6] - 1), lambda state: state_type(*state, value))


def _overflow(field, made):
    """Return a policy that puts `made(before, xp)` into a field after an overflow only."""
    return Changed(
        lambda old, new, flag, xp: new._replace(**{field: select(flag, getattr(new, field), made(old, xp), xp=xp)})
    )


def _finite(field, made, **members):
    """Return a policy that puts `made(before, after, xp)` into a field after a finite step only."""

    def change(old, new, flag, xp):
        return new._replace(**{field: select(flag, made(old, new, xp), getattr(new, field), xp=xp)})

    return Changed(change, **members)


RIGHT = [
    *(FixedScaling(2.0**-126), FixedScaling(2.0**126), DynamicScaling(), RULE, Changed()),
    *(policy_of_the_docs(), dataclasses.replace(policy_of_the_docs(), init_scale=1.0)),
    DynamicScaling(growth_interval=2**31 - 1, hysteresis=2**31 - 1),
    DynamicScaling(cooldown=1000),
    DynamicScaling(min_scale=2.0**-126, max_scale=2.0**126, growth_interval=1),
    DynamicScaling(init_scale=3.0, min_scale=3.0, max_scale=3.0),
]


@pytest.mark.parametrize("policy", RIGHT)
def test_a_right_policy_passes(policy):
    """`check_policy` accepts a policy that keeps the rules, at the ends of the ranges too."""
    check_policy(policy)


STEP_1 = "after step 1 from the first state"
BROKEN = [
    # the state
    (Changed(first=tuple), "return a NamedTuple that begins as ScaleState"),
    (
        _first(loss_scale=np.float64(8.0)),
        "loss_scale of init_state is np.float64(8.0); return a finite NumPy scalar of f",
    ),
    (_first(steps=np.float32(0)), "steps of init_state is np.float32(0.0); return a finite NumPy scalar of int32"),
    (_first(loss_scale=np.float32("nan")), "loss_scale of init_state is np.float32(nan); return a finite"),
    (Changed(first=lambda state: state._replace(growth_tracker=np.int32(next(COUNT)))), "return equal states"),
    (_set(growth_tracker=lambda old, new, xp: new.growth_tracker * 1.0), f"float64 of shape () {STEP_1}, on the host"),
    (_set(steps=lambda old, new, xp: np.array([new.steps]) if xp is np else new.steps), "on NumPy arrays, but must"),
    (Changed(lambda old, new, flag, xp: tuple(new)), "return the type of the state"),
    (Changed(scales_losses=False), "loss_scale of init_state is 65536, but scales_losses is False"),
    (Changed(adapts=False), "loss_scale goes from 65536 to 1 in 3000 overflows, but adapts is False"),
    # the scale
    (_first(loss_scale=np.float32(2.0**40)), "loss_scale of init_state is 1.09951e+12; keep it in bounds()"),
    (_overflow("loss_scale", lambda old, xp: old.loss_scale * 0.5), "from 1 to 0.5 after"),
    (_overflow("loss_scale", lambda old, xp: old.loss_scale), "after 3000 overflows in a row, as before them"),
    (  # where growth is due
        _set(
            loss_scale=lambda old, new, xp: select(old.growth_tracker == 2, old.loss_scale * 2.0, new.loss_scale, xp=xp)
        ),
        "by an overflow after step",
    ),
    (  # it raises a scale below the bound to it
        _overflow(
            "loss_scale", lambda old, xp: select(old.loss_scale < 2.0, old.loss_scale**0, old.loss_scale * 0.5, xp=xp)
        ),
        "loss_scale goes from 0.25 to 1 by an overflow after step 1 below the lower bound",
    ),
    (
        _set(loss_scale=lambda old, new, xp: select(old.steps == 2500, new.loss_scale * 0.0, new.loss_scale, xp=xp)),
        "loss_scale is 0 after 2501 overflows in a row; keep it in bounds(), 1 to 4.29497e+09",
    ),
    (  # at the upper bound, every 2000 steps
        _finite(
            "loss_scale",
            lambda old, new, xp: select(old.growth_tracker >= 1999, old.loss_scale * 2.0, old.loss_scale, xp=xp),
            growth_interval=2000,
        ),
        "loss_scale goes from 4.29497e+09 to 8.58993e+09 after step 1 at the upper bound",
    ),
    (_set(loss_scale=lambda old, new, xp: new.loss_scale * np.float32("nan")), f"nan {STEP_1}; keep it finite"),
    (_finite("loss_scale", lambda old, new, xp: new.loss_scale * 2.0**100), "to 2.07692e+34 after step 3 from"),
    # the counters
    (_first(skipped_steps=np.int32(7)), "skipped_steps of init_state is 7, but counts from 0"),
    (_set(skipped_steps=lambda old, new, xp: old.skipped_steps), f"skipped_steps is 0 {STEP_1}, but must be 1"),
    (_set(steps=lambda old, new, xp: old.steps + 1), "steps is -2147483648 after step 2 with full counters, but"),
    (_finite("overflow_streak", lambda old, new, xp: old.overflow_streak), "is 2 after step 3 from the first state"),
    (_finite("growth_tracker", lambda old, new, xp: old.growth_tracker + 1), "growth_tracker wraps around after step"),
    (
        _overflow("hysteresis_tracker", lambda old, xp: old.hysteresis_tracker - 1),
        "hysteresis_tracker=-1 of the saved state must be a whole number from 0",
    ),
    # a checkpoint
    (_own("version", np.int32(7)), f"the state {STEP_1} is saved, but not restored: version=6"),
    # the same on the host and on arrays
    (
        _set(hysteresis_tracker=lambda old, new, xp: np.int32(next(COUNT))),
        "before; make update pure",
    ),
    (
        Changed(lambda old, new, flag, xp: new if flag else new._replace(growth_tracker=old.growth_tracker * 0)),
        "update raised TypeError('a traced array has no truth value') after step 1 from the first state, on traced",
    ),
    (
        _set(loss_scale=lambda old, new, xp: new.loss_scale * np.float32(0.5 if xp is np else 1.0)),
        "loss_scale is 16384.0 after step 1 from the first state, on NumPy arrays, but 32768.0 on the host",
    ),
    (Changed(lambda old, new, flag, xp: new._replace(steps=select(flag, new.steps, new.steps))), "select(..., xp=xp)"),
    (_set(loss_scale=lambda old, new, xp: np.maximum(new.loss_scale, np.float32(1.0))), "traced arrays"),
    (Changed(lambda old, new, flag, xp: new._replace(steps=new.steps + (flag & False))), "on array-api-strict"),
]


@pytest.mark.parametrize(("policy", "sentence"), BROKEN)
def test_a_wrong_policy_is_explained(policy, sentence):
    """`check_policy` names the field of a wrong policy, and the step at which the field breaks a rule."""
    with pytest.raises(AssertionError) as caught:
        check_policy(policy)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("convert", [lambda count: count, np.asarray])
def test_a_count_stops_at_its_largest(convert):
    """`saturating_increment` adds 1 to any int32 except the largest, and keeps the dtype."""
    for count in (-(2**31), -(2**31) + 1, -(2**31) + 2, -3, -1, 0, 7, 2**31 - 2, 2**31 - 1):
        after = min(count + 1, 2**31 - 1)
        more = saturating_increment(convert(np.int32(count)))
        assert (more, more.dtype) == (after, np.int32)
    assert select(True, saturating_increment(np.int32(1)), np.int32(0)) == 2

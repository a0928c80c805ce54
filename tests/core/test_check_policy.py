"""`check_policy`: right policies pass, and each wrong one gets a sentence that names the field and the step."""

import dataclasses
import itertools
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, settings

from lossscale_core import BaseScaling, DynamicScaling, FixedScaling, NoScaling, ScaleState, one_more, select
from lossscale_core.testing import check_policy
from tests.core.own_policies import policy_of_the_docs
from tests.strategies import policies
from tests.sweeping import IS_SWEEP

RULE = DynamicScaling(growth_interval=3)


@settings(max_examples=100 if IS_SWEEP else 5)
@given(policies())
def test_the_librarys_policies_pass_with_any_settings(policy):
    check_policy(policy)


class Wrong(BaseScaling):
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


RIGHT = [
    *(NoScaling(), FixedScaling(3.0), FixedScaling(2.0**-126), FixedScaling(2.0**126), DynamicScaling(), RULE),
    *(policy_of_the_docs(), dataclasses.replace(policy_of_the_docs(), init_scale=1.0), Wrong()),
    DynamicScaling(growth_interval=1, init_scale=2.0**32),
    DynamicScaling(growth_interval=2**31 - 1),
    DynamicScaling(hysteresis=2**31 - 1),
    DynamicScaling(cooldown=1000),
    DynamicScaling(hysteresis=2, refill_on_finite=False),
    DynamicScaling(hysteresis=3, refill_on_backoff=True, cooldown=1),
    DynamicScaling(hysteresis=2, refill_on_finite=False, refill_on_backoff=True),
    DynamicScaling(growth_factor=1.5, backoff_factor=0.8),
    DynamicScaling(min_scale=2.0**-126, max_scale=2.0**126, growth_interval=1),
    DynamicScaling(init_scale=3.0, min_scale=3.0, max_scale=3.0),
    DynamicScaling(max_overflow_streak=2, growth_interval=2),
]


@pytest.mark.parametrize("policy", RIGHT)
def test_right_policies_pass(policy):
    check_policy(policy)


COUNT = itertools.count()


def _overflowing(**fields):
    """Return a change of fields, given the state before and the namespace, after an overflow only."""

    def change(before, after, flag, xp):
        new = {name: select(flag, getattr(after, name), made(before, xp), xp=xp) for name, made in fields.items()}
        return after._replace(**new)

    return change


def _finite(**fields):
    """Return a change of fields, given the state before and after, after a finite step only."""

    def change(before, after, flag, xp):
        made = {name: make(before, after, xp) for name, make in fields.items()}
        return after._replace(**{name: select(flag, new, getattr(after, name), xp=xp) for name, new in made.items()})

    return change


def _where(condition, field, factor):
    """Return a change of one field by a factor on some arrays only."""
    return lambda before, after, flag, xp: (
        after._replace(**{field: getattr(after, field) * factor}) if condition(before, xp) else after
    )


BROKEN_STATES = {
    "a tuple": ({"first": tuple}, "return a NamedTuple that begins as ScaleState"),
    "float64": (
        {"first": lambda state: state._replace(loss_scale=np.float64(8.0))},
        "loss_scale of init_state is np.float64(8.0); return a finite NumPy scalar of float32",
    ),
    "NaN": (
        {"first": lambda state: state._replace(loss_scale=np.float32("nan"))},
        "loss_scale of init_state is np.float32(nan); return a finite",
    ),
    "another first state each time": (
        {"first": lambda state: state._replace(growth_tracker=np.int32(next(COUNT)))},
        "return equal states",
    ),
    "a dtype": (
        lambda before, after, flag, xp: after._replace(growth_tracker=after.growth_tracker * 1.0),
        "growth_tracker is float64 of shape () after step 1 from the first state, on the host, but must stay int32",
    ),
    "a shape": (
        lambda before, after, flag, xp: after._replace(steps=np.array([after.steps])) if xp is np else after,
        "steps is int32 of shape (1,) after step 1 from the first state, on NumPy arrays, but must stay int32 of",
    ),
    "no state": (lambda before, after, flag, xp: tuple(after), "return the type of the state"),
    "scales_losses": ({"scales_losses": False}, "loss_scale of init_state is 65536, but scales_losses is False"),
    "adapts": ({"adapts": False}, "loss_scale goes from 65536 to 1 in 3000 overflows, but adapts is False"),
}
BROKEN_BOUNDS = {
    "a first scale above": (
        {"first": lambda state: state._replace(loss_scale=np.float32(2.0**40))},
        "loss_scale of init_state is 1.09951e+12; keep it in bounds()",
    ),
    "an overflow that goes below": (
        _overflowing(loss_scale=lambda old, xp: old.loss_scale * 0.5),
        "from 1 to 0.5 after",
    ),
    "growth that is not clamped, rarely": (
        (
            _finite(
                loss_scale=lambda old, new, xp: select(
                    old.growth_tracker >= 1999, old.loss_scale * 2.0, old.loss_scale, xp=xp
                )
            ),
            {"growth_interval": 2000},
        ),
        "loss_scale goes from 4.29497e+09 to 8.58993e+09 after step 1 at the upper bound",
    ),
    "an overflow that grows where growth is due": (
        lambda before, after, flag, xp: after._replace(
            loss_scale=select(before.growth_tracker == 2, before.loss_scale * 2.0, after.loss_scale, xp=xp)
        ),
        "by an overflow after step",
    ),
    "an overflow that clamps from below": (
        _overflowing(
            loss_scale=lambda old, xp: select(
                old.loss_scale < 2.0, old.loss_scale * 0 + 1.0, old.loss_scale * 0.5, xp=xp
            )
        ),
        "loss_scale goes from 0.25 to 1 by an overflow after step 1 below the lower bound",
    ),
    "a scale that never falls": (
        _overflowing(loss_scale=lambda old, xp: old.loss_scale),
        "loss_scale is 65536 after 3000 overflows in a row, as before them",
    ),
    "a scale that becomes infinite": (
        _finite(loss_scale=lambda old, new, xp: new.loss_scale * 2.0**100),
        "loss_scale goes from 16384 to 2.07692e+34 after step 3 from the first state; keep it in bounds(), 1 to",
    ),
    "a scale of zero after many overflows": (
        _overflowing(
            loss_scale=lambda old, xp: select(
                old.overflow_streak < 1000, old.loss_scale * 0.5, old.loss_scale * 0.0, xp=xp
            )
        ),
        "loss_scale goes from 65536 to 0 after step",
    ),
}


Counting = namedtuple("Counting", [*ScaleState._fields, "good"])


BROKEN_COUNTERS = {
    "a counter of its own that wraps": (
        (
            lambda before, after, flag, xp: Counting(*after[:6], before.good + 1),
            {"first": lambda state: Counting(*state, np.int32(0))},
        ),
        "good wraps around after many overflows; use one_more",
    ),
    "a first count": (
        {"first": lambda state: state._replace(skipped_steps=np.int32(7))},
        "skipped_steps of init_state is 7, but counts from 0",
    ),
    "a count that stays": (
        lambda before, after, flag, xp: after._replace(skipped_steps=before.skipped_steps),
        "skipped_steps is 0 after step 1 from the first state, but must be 1",
    ),
    "a full counter": (
        lambda before, after, flag, xp: after._replace(steps=before.steps + 1),
        "steps is -2147483648 after step 2 with full counters, but must be 2147483647",
    ),
    "a streak that goes on": (
        _finite(overflow_streak=lambda old, new, xp: old.overflow_streak),
        "overflow_streak is 2 after step 3 from the first state, but must be 0",
    ),
    "a tracker that wraps": (
        _finite(growth_tracker=lambda old, new, xp: old.growth_tracker + 1),
        "growth_tracker wraps around after step",
    ),
    "a hysteresis_tracker that falls": (
        _overflowing(hysteresis_tracker=lambda old, xp: old.hysteresis_tracker - 1),
        "hysteresis_tracker is -2999 after 3000 overflows in a row, and falls without end",
    ),
}
BROKEN_ON_ARRAYS = {
    "a number of calls": (
        lambda before, after, flag, xp: after._replace(hysteresis_tracker=np.int32(next(COUNT))),
        "computed from the state and the flag alone after step 1 from the first state, on the host; make update pure",
    ),
    "an if on the flag": (
        lambda before, after, flag, xp: after._replace(
            growth_tracker=after.growth_tracker if flag else before.growth_tracker * 0
        ),
        "update raised TypeError('a traced array has no truth value') after step 1 from the first state, on traced",
    ),
    "another rule on NumPy": (
        _where(lambda before, xp: xp is np, "loss_scale", np.float32(0.5)),
        "loss_scale is 16384.0 after step 1 from the first state, on NumPy arrays, but 32768.0 on the host",
    ),
    "another rule on the host, late": (
        _where(lambda before, xp: xp is None and before.steps > 1000, "loss_scale", np.float32(1.0 - 2.0**-20)),
        "on NumPy arrays, but",
    ),
    "no xp": (
        lambda before, after, flag, xp: after._replace(steps=select(flag, after.steps, after.steps)),
        "use operators and select(..., xp=xp)",
    ),
    "a function of NumPy": (
        lambda before, after, flag, xp: after._replace(loss_scale=np.maximum(after.loss_scale, np.float32(1.0))),
        "traced arrays",
    ),
}
BROKEN = {**BROKEN_STATES, **BROKEN_BOUNDS, **BROKEN_COUNTERS, **BROKEN_ON_ARRAYS}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_policy_is_told_the_field_and_the_step(name):
    what, sentence = BROKEN[name]
    change, members = what if isinstance(what, tuple) else ((), what) if isinstance(what, dict) else (what, {})
    with pytest.raises(AssertionError) as caught:
        check_policy(Wrong(change, **members) if change else Wrong(**members))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("convert", [lambda count: count, np.asarray])
def test_one_more_stops_at_the_largest_count(convert):
    """Over the whole of int32, for a tracker is negative while a cooldown lasts; it keeps the dtype."""
    for count in (-(2**31), -(2**31) + 1, -(2**31) + 2, -3, -1, 0, 7, 2**31 - 2, 2**31 - 1):
        after = min(count + 1, 2**31 - 1)
        more = one_more(convert(np.int32(count)))
        assert (more, more.dtype) == (after, np.int32)
    assert select(True, one_more(np.int32(1)), np.int32(0)) == 2

"""`check_policy`: right policies pass, and each wrong one gets a sentence that names the field and the step."""

import dataclasses
import itertools
from collections import namedtuple

import numpy as np
import pytest

from lossscale_core import BaseScaling, DynamicScaling, FixedScaling, ScaleState, saturating_increment, select
from lossscale_core.testing import check_policy
from tests.core.own_policies import policy_of_the_docs

RULE = DynamicScaling(growth_interval=3)
COUNT = itertools.count()


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


def _set(field, made, *, after=None):
    """Return a policy that makes a field of its values before and after each step, or each step with this flag."""

    def change(old, new, flag, xp):
        kept = getattr(new, field)
        value = made(getattr(old, field), kept)
        if after is not None:
            value = select(flag, *((value, kept) if after else (kept, value)), xp=xp)
        return new._replace(**{field: value})

    return Changed(change)


def _scaled(made):
    """Return a policy that makes the loss scale of the states before and after a step."""
    return Changed(lambda old, new, flag, xp: new._replace(loss_scale=made(old, new, flag, xp)))


def _balanced():
    """Return a policy with a field of its own, which counts down."""
    state_type = namedtuple("Own", [*ScaleState._fields, "balance"])
    return Changed(
        lambda old, new, flag, xp: state_type(*new, old.balance - 1), lambda state: state_type(*state, np.float32(3.5))
    )


RIGHT = {
    "a fixed scale": FixedScaling(2.0**126),
    "a small interval": RULE,
    "without a dataclass": Changed(),
    "of the docs, at its bound": dataclasses.replace(policy_of_the_docs(), init_scale=1.0),
    "a negative field of its own": _balanced(),
    "large counts": DynamicScaling(growth_interval=2**31 - 1, hysteresis=2**31 - 1, cooldown=1000),
    "wide": DynamicScaling(min_scale=2.0**-126, max_scale=2.0**126, growth_interval=1),
    "narrow": DynamicScaling(init_scale=3.0, min_scale=3.0, max_scale=3.0),
}


@pytest.mark.parametrize("policy", RIGHT.values(), ids=RIGHT)
def test_a_right_policy_passes(policy):
    """`check_policy` accepts a policy that keeps the rules, at the ends of the ranges too."""
    check_policy(policy)


STEP_1 = "after step 1 from the first state"
BROKEN = [
    # the state
    (Changed(first=tuple), "return a NamedTuple that begins as ScaleState"),
    (_first(loss_scale=np.float64(8.0)), "loss_scale of init_state is np.float64(8.0); return a finite NumPy scalar"),
    (_first(loss_scale=np.float32("nan")), "loss_scale of init_state is np.float32(nan); return a finite"),
    (Changed(first=lambda state: state._replace(growth_tracker=np.int32(next(COUNT)))), "return equal states"),
    (_set("growth_tracker", lambda old, new: new * 1.0), f"float64 of shape () {STEP_1}, on the host"),
    (Changed(lambda old, new, flag, xp: tuple(new)), "return the type of the state"),
    (Changed(scales_losses=False), "loss_scale of init_state is 65536, but scales_losses is False"),
    (Changed(adapts=False), "loss_scale goes from 65536 to 1 in 3000 overflows, but adapts is False"),
    # the scale
    (_first(loss_scale=np.float32(2.0**40)), "loss_scale of init_state is 1.09951e+12; keep it in bounds()"),
    (_set("loss_scale", lambda old, new: old * 0.5, after=False), "from 1 to 0.5 after"),
    (_set("loss_scale", lambda old, new: old, after=False), "after 3000 overflows in a row, as before them"),
    (  # where growth is due
        _scaled(lambda old, new, _, xp: select(old.growth_tracker == 2, old.loss_scale * 2.0, new.loss_scale, xp=xp)),
        "by an overflow after step",
    ),
    (  # it raises a scale below the bound to it
        _scaled(
            lambda old, new, flag, xp: select(flag | (old.loss_scale > 1.0), new.loss_scale, old.loss_scale**0, xp=xp)
        ),
        "loss_scale goes from 0.25 to 1 by an overflow after step 1 below the lower bound",
    ),
    (
        _scaled(lambda old, new, _, xp: select(old.steps == 2500, new.loss_scale * 0.0, new.loss_scale, xp=xp)),
        "loss_scale is 0 after 2501 overflows in a row; keep it in bounds(), 1 to 4.29497e+09",
    ),
    (  # it doubles at the upper bound, too
        _scaled(
            lambda old, new, flag, xp: select(
                flag & (old.growth_tracker == 2), old.loss_scale * 2.0, new.loss_scale, xp=xp
            )
        ),
        "loss_scale goes from 4.29497e+09 to 8.58993e+09 after step 1 at the upper bound",
    ),
    (_set("loss_scale", lambda old, new: new * np.float32("nan")), f"nan {STEP_1}; keep it finite"),
    # the counters
    (_first(skipped_steps=np.int32(7)), "skipped_steps of init_state is 7, but counts from 0"),
    (_set("skipped_steps", lambda old, new: old), f"skipped_steps is 0 {STEP_1}, but must be 1"),
    (_set("steps", lambda old, new: old + 1), "steps is -2147483648 after step 2 with full counters, but"),
    (_set("overflow_streak", lambda old, new: old, after=True), "is 2 after step 3 from the first state"),
    (_set("growth_tracker", lambda old, new: old + 1, after=True), "growth_tracker wraps around after step"),
    (
        _set("hysteresis_tracker", lambda old, new: old - 1, after=False),
        "is saved, but not restored: hysteresis_tracker=-1 of the saved state must be a whole number from 0",
    ),
    # the same on the host and on arrays
    (_set("hysteresis_tracker", lambda old, new: np.int32(next(COUNT))), "before; make update pure"),
    (
        Changed(lambda old, new, flag, xp: new if flag else new._replace(growth_tracker=old.growth_tracker * 0)),
        "update raised TypeError('a traced array has no truth value') after step 1 from the first state, on traced",
    ),
    (
        _scaled(lambda old, new, _, xp: new.loss_scale * np.float32(0.5 if xp is np else 1.0)),
        "loss_scale is 16384.0 after step 1 from the first state, on NumPy arrays, but 32768.0 on the host",
    ),
    (Changed(lambda old, new, flag, xp: new._replace(steps=new.steps + (flag & False))), "on array-api-strict"),
]


@pytest.mark.parametrize(("policy", "sentence"), BROKEN)
def test_a_wrong_policy_is_explained(policy, sentence):
    """`check_policy` names the field of a wrong policy, and the step at which the field breaks a rule."""
    with pytest.raises(AssertionError) as caught:
        check_policy(policy)
    assert sentence in str(caught.value)


def test_a_count_stops_at_its_largest():
    """`saturating_increment` adds 1 to any int32 except the largest, and keeps the dtype."""
    for count in (-(2**31), -(2**31) + 1, -3, -1, 0, 7, 2**31 - 2, 2**31 - 1):
        more = saturating_increment(np.int32(count))
        assert (more, more.dtype) == (min(count + 1, 2**31 - 1), np.int32)

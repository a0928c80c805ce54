"""The values that a policy accepts as settings; `test_mistakes.py` has the values that it refuses."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScalingPolicy, SpikeGuard
from lossscale_core.adapters import check_setting
from lossscale_core.errors import PolicyError


def test_numbers_become_plain_python():
    """A setting that is a NumPy scalar or a whole float becomes the Python number of its type."""
    for number in (np.float16, np.float32):  # a comparison of a float16 with 2**126 would warn
        policy = DynamicScaling(init_scale=number(1024), growth_interval=np.int64(7), hysteresis=2.0)
        assert policy == DynamicScaling(init_scale=1024, growth_interval=7, hysteresis=2)
        assert [type(policy.init_scale), type(policy.growth_interval), type(policy.hysteresis)] == [float, int, int]
    assert check_setting("max_norm", np.array([2])) == 2.0


@pytest.mark.parametrize("policy", [NoScaling(), FixedScaling(3.0), DynamicScaling(hysteresis=2)], ids=repr)
def test_a_policy_is_a_frozen_value(policy):
    """A policy can be a dict key, a copy or a pickle, and cannot be changed in place."""
    assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert isinstance(policy, ScalingPolicy)
    with pytest.raises((AttributeError, TypeError)):
        policy.init_scale = 2.0


def test_the_defaults_are_an_interface():
    """The defaults of a policy and of a guard stay the same in each release."""
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1, "cooldown": 0}
    flags = {"refill_on_finite": True, "refill_on_backoff": False, "max_overflow_streak": None}
    scales = {"init_scale": 65536.0, "min_scale": 1.0, "max_scale": 4294967296.0}
    assert dataclasses.asdict(DynamicScaling()) == {**scales, **factors, **flags}
    assert dataclasses.asdict(SpikeGuard()) == {"threshold": 8.0, "memory": 128, "warmup": 16, "max_streak": None}


COUNTS = (1, 2**31 - 1)
RANGES = {
    DynamicScaling: {
        "init_scale": (2.0**-126, 2.0**126),
        "growth_factor": (1.0 + 2.0**-23, 2.0**126),
        "backoff_factor": (2.0**-126, 1.0 - 2.0**-24),
        **{"growth_interval": COUNTS, "hysteresis": COUNTS, "cooldown": (0, 2**31 - 1), "max_overflow_streak": COUNTS},
    },
    SpikeGuard: {"threshold": (1.0, 2.0**126), "memory": (1, 2**24), "warmup": (1, 2**24), "max_streak": COUNTS},
}


@pytest.mark.parametrize(("kind", "ranges"), RANGES.items())
def test_a_range_has_two_ends(kind, ranges):
    """A setting may have the smallest and the largest value of its range, which are exact in float32, but no other."""
    bounds = {} if kind is SpikeGuard else {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    for name, ends in ranges.items():
        for end, limit in zip(ends, (-math.inf, math.inf), strict=True):
            assert getattr(kind(**{**bounds, name: end}), name) == end
            beyond = math.nextafter(end, limit) if isinstance(end, float) else end + int(math.copysign(1, limit))
            with pytest.raises(PolicyError, match=name):
                kind(**{**bounds, name: beyond})

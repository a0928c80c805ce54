"""Policies, each with the flags of a run."""

import random
from typing import NamedTuple

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScalingPolicy
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE


class Scenario(NamedTuple):
    """A policy, and whether the gradients are finite at each step of a run."""

    policy: ScalingPolicy
    grads_finite: list[bool]


def _flags(seed: int, share_finite: float, steps: int = 48) -> list[bool]:
    rng = random.Random(seed)
    return [rng.random() < share_finite for _ in range(steps)]


# With factors of 2**9, 16 overflows lead from 2**16 to 2**-126, and 28 finite steps to 2**126; two more stay there.
_DOWN_AND_UP = [False] * 18 + [True] * 30
"""Flags that lower a scale to the smallest of any policy, and then raise it to the largest."""

SCENARIOS = {
    "none": Scenario(NoScaling(), _flags(0, 0.7)),
    "fixed": Scenario(FixedScaling(1024.0), _flags(1, 0.7)),
    "dynamic": Scenario(DynamicScaling(init_scale=1024.0, growth_interval=3), _flags(2, 0.7)),
    "unbounded": Scenario(
        DynamicScaling(
            growth_interval=1,
            growth_factor=2.0**9,
            backoff_factor=2.0**-9,
            min_scale=SMALLEST_SCALE,
            max_scale=LARGEST_SCALE,
        ),
        _DOWN_AND_UP,
    ),
    "hysteresis": Scenario(DynamicScaling(growth_interval=4, hysteresis=2), _flags(6, 0.7)),
    "hysteresis refilled by growth": Scenario(
        DynamicScaling(growth_interval=4, hysteresis=2, refill_on_finite=False), _flags(7, 0.7)
    ),
    "hysteresis refilled by backoff": Scenario(
        DynamicScaling(growth_interval=3, hysteresis=3, refill_on_finite=False, refill_on_backoff=True), _flags(8, 0.7)
    ),
    "cooldown": Scenario(DynamicScaling(growth_interval=3, cooldown=2, min_scale=2.0**10), _flags(9, 0.8)),
}
"""A run of each kind of policy, and runs that cover the other branches; all factors are powers of two."""

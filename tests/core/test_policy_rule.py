"""The update rule against an independent model in plain Python: on every short trace, and on random long ones."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given

from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from tests.strategies import overflow_traces, policies

FULL = 2**31 - 1


class Model(NamedTuple):
    """What the documents say, with ifs and Python numbers; scales are rounded to float32 after each change."""

    scale: float
    growth: int = 0
    hysteresis: int = 0
    steps: int = 0
    skipped: int = 0
    streak: int = 0


def _start(policy: Any) -> Model:
    if isinstance(policy, NoScaling):
        return Model(1.0)
    scale = _f32(policy.init_scale)
    if isinstance(policy, DynamicScaling):
        return Model(scale, growth=-policy.cooldown, hysteresis=policy.hysteresis)
    return Model(scale)


def _f32(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def _grow(policy: Any, scale: float) -> float:
    return min(_f32(scale * _f32(policy.growth_factor)), _f32(policy.max_scale))


def _back_off(policy: Any, scale: float) -> float:
    lowered = max(_f32(scale * _f32(policy.backoff_factor)), _f32(policy.min_scale))
    return min(lowered, scale)


def _step(policy: Any, m: Model, finite: bool) -> Model:
    streak = 0 if finite else m.streak + 1
    counted = m._replace(steps=m.steps + 1, skipped=m.skipped + (not finite), streak=streak)
    return _dynamic_step(policy, counted, finite) if isinstance(policy, DynamicScaling) else counted


def _dynamic_step(policy: DynamicScaling, m: Model, finite: bool) -> Model:
    if finite:
        if policy.refill_on_finite:
            m = m._replace(hysteresis=policy.hysteresis)
        if m.growth + 1 >= policy.growth_interval:
            return m._replace(scale=_grow(policy, m.scale), growth=0, hysteresis=policy.hysteresis)
        return m._replace(growth=m.growth + 1)
    m = m._replace(growth=-policy.cooldown, hysteresis=max(0, m.hysteresis - 1))
    if m.hysteresis > 0:
        return m
    refilled = policy.hysteresis if policy.refill_on_backoff else 0
    return m._replace(scale=_back_off(policy, m.scale), hysteresis=refilled)


def _agrees(state: Any, model: Model) -> bool:
    return tuple(float(value) for value in state) == tuple(map(float, model[: len(state)]))


SETTINGS = ("growth_interval", "hysteresis", "refill_on_finite", "refill_on_backoff", "cooldown")
SMALL_POLICIES = [
    NoScaling(),
    FixedScaling(8.0),
    *(
        DynamicScaling(init_scale=8.0, min_scale=2.0, max_scale=32.0, **dict(zip(SETTINGS, values, strict=True)))
        for values in itertools.product((1, 2, 3), (1, 2, 3), (True, False), (True, False), (0, 2))
    ),
]


@pytest.mark.parametrize("policy", SMALL_POLICIES, ids=repr)
def test_short_runs_agree_with_the_model(policy):
    """A policy agrees with the model on all 8190 runs of up to twelve steps."""
    level = [(policy.init_state(), _start(policy))]
    for _ in range(12):
        level = [
            (policy.update(state, finite), _step(policy, model, finite))
            for state, model in level
            for finite in (True, False)
        ]
        for state, model in level:
            assert _agrees(state, model), (state, model)
    assert len(level) == 2**12


@given(policies(), overflow_traces())
def test_long_runs_agree_with_the_model(policy, trace):
    """A policy with any valid settings agrees with the model bit for bit."""
    state, model = policy.init_state(), _start(policy)
    for finite in trace:
        state, model = policy.update(state, finite), _step(policy, model, finite)
        assert _agrees(state, model)


@pytest.mark.parametrize("tracker", [10, FULL])
def test_a_tracker_beyond_the_interval_grows(tracker):
    """A tracker beyond a lowered interval causes growth at the next finite step."""
    state = DynamicScaling().init_state()._replace(growth_tracker=np.int32(tracker))
    after = DynamicScaling(growth_interval=5).update(state, True)
    assert (float(after.loss_scale), int(after.growth_tracker)) == (2.0**17, 0)


@pytest.mark.parametrize("factor", [2.0, 4.0, 1000.0, 2.0**126])
def test_growth_at_the_bound_is_silent(factor):
    """Growth at the upper bound keeps the scale there, without an overflow or a warning of NumPy."""
    for bound in (2.0**-126, 1.0, 2.0**126):
        policy = DynamicScaling(
            init_scale=bound, growth_factor=factor, growth_interval=1, min_scale=2.0**-126, max_scale=bound
        )
        assert float(policy.update(policy.init_state(), True).loss_scale) == bound

"""The update rule against an independent model in plain Python."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

from lossscale_core import DynamicScaling
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


@settings(max_examples=200)
@given(policies(), overflow_traces())
def test_runs_agree_with_the_model(policy, trace):
    """A policy with any valid settings agrees with the model bit for bit."""
    state, model = policy.init_state(), _start(policy)
    for finite in trace:
        state, model = policy.update(state, finite), _step(policy, model, finite)
        assert state == model


@pytest.mark.parametrize("tracker", [10, FULL])
def test_a_tracker_beyond_the_interval_grows(tracker):
    """A tracker beyond a lowered interval causes growth at the next finite step."""
    state = DynamicScaling().init_state()._replace(growth_tracker=np.int32(tracker))
    after = DynamicScaling(growth_interval=5).update(state, True)
    assert (float(after.loss_scale), int(after.growth_tracker)) == (2.0**17, 0)


@pytest.mark.parametrize("factor", [2.0, 2.0**126])
def test_growth_at_the_bound_is_silent(factor):
    """Growth at the upper bound keeps the scale there, without an overflow or a warning of NumPy."""
    for bound in (2.0**-126, 1.0, 2.0**126):
        policy = DynamicScaling(
            init_scale=bound, growth_factor=factor, growth_interval=1, min_scale=2.0**-126, max_scale=bound
        )
        assert float(policy.update(policy.init_state(), True).loss_scale) == bound

"""`minimize`: a whole step, which is tried again at a lower loss scale, and undone in the model if it is skipped."""

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard, state_to_dict
from lossscale_core.errors import CallOrderError, OverflowStreakError, PolicyError
from lossscale_mlx import LossScaleOptimizer
from tests.adapters.mlx_training import batch, bits

HIGH = DynamicScaling(init_scale=2.0**32, growth_interval=1000)


def _network():
    """Return a network with running averages and dropout, the same each time."""
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm(8), nn.Dropout(0.5), nn.Linear(8, 2))
    mx.eval(model.parameters())
    return model


def _loss_fn(model, factor=1.0):
    x, y = batch()
    return lambda: mx.mean(mx.square(model(x * factor).astype(mx.float16) - y.astype(mx.float16)))


def test_the_applied_step_is_that_of_a_run_at_the_lower_scale():
    """Weights, moments, running averages and the random state agree bit for bit; each try is one update."""
    model, optimizer = _network(), LossScaleOptimizer(optim.Adam(0.1), HIGH)
    info = optimizer.minimize(model, _loss_fn(model), retries=32)
    tries = optimizer.scale_state.steps.item()
    assert info.applied.item()
    assert tries > 5
    assert optimizer.scale_state.skipped_steps.item() == tries - 1
    drawn = mx.random.uniform(shape=(4,))

    lower, plain = _network(), LossScaleOptimizer(optim.Adam(0.1), FixedScaling(info.loss_scale_used.item()))
    assert plain.minimize(lower, _loss_fn(lower)).applied.item()
    assert bits(lower) == bits(model)
    assert bits(plain.inner.state) == bits(optimizer.inner.state)
    assert bits(mx.random.uniform(shape=(4,))) == bits(drawn)


@pytest.mark.parametrize("retries", [0, 3])
def test_after_a_skip_the_model_is_as_before(retries):
    """Running averages included, which the forward pass of an infinite batch has made NaN."""
    model, optimizer = _network(), LossScaleOptimizer(optim.Adam(0.1), HIGH)
    before = bits(model)
    info = optimizer.minimize(model, _loss_fn(model, math.inf), retries=retries)
    assert not info.applied.item()
    assert bits(model) == before
    assert optimizer.scale_state.skipped_steps.item() == 1 + retries
    assert optimizer.step.item() == 0


def test_a_policy_that_does_not_adapt_and_a_spike_are_not_retried():
    """No other scale would help."""
    model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), FixedScaling(2.0**40))
    optimizer.minimize(model, _loss_fn(model), retries=5)
    assert optimizer.scale_state.steps.item() == 1
    weight = nn.Linear(2, 1, bias=False)
    guarded = LossScaleOptimizer(optim.SGD(0.0), DynamicScaling(init_scale=1.0), guard=SpikeGuard(warmup=2))
    calls = []

    def loss_fn(factor):
        calls.append(factor)
        return factor * mx.sum(weight(mx.ones((1, 2))))

    for factor in (1.0, 1.0, 1.0, 1000.0):
        guarded.minimize(weight, partial(loss_fn, factor), retries=5)
    assert guarded.last_step.spiked.item()
    assert calls == [1.0, 1.0, 1.0, 1000.0]


def test_only_the_last_try_raises():
    """The streak of the tries before it is no error."""
    policy = DynamicScaling(init_scale=2.0**32, max_overflow_streak=4)
    model = _network()
    LossScaleOptimizer(optim.SGD(0.1), policy).minimize(model, _loss_fn(model), retries=40)
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=4"):
        LossScaleOptimizer(optim.SGD(0.1), policy).minimize(model, _loss_fn(model, math.nan), retries=5)


def test_retries_need_a_value_that_compiled_functions_have_not():
    """An error says so, whether the state is an input or not; without retries nothing is evaluated."""
    for captures in (True, False):
        model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), HIGH)
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state] if captures else []

        def step(x, retries, model=model, optimizer=optimizer):
            optimizer.minimize(model, lambda: mx.sum(model(x)), retries=retries)
            return x

        with pytest.raises(CallOrderError, match=r"outside of mx\.compile, or leave retries out"):
            mx.compile(partial(step, retries=3), inputs=state, outputs=state)(mx.ones((5, 3)))
    model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), HIGH)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, mx.random.state]
    mx.compile(partial(step, retries=0, model=model, optimizer=optimizer), inputs=state, outputs=state)(mx.ones((5, 3)))


@pytest.mark.parametrize("retries", [-1, 1.5, "3"])
def test_retries_are_a_whole_number(retries):
    """From 0; before anything runs."""
    model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), HIGH)
    with pytest.raises(PolicyError, match="retries="):
        optimizer.minimize(model, _loss_fn(model), retries=retries)
    assert optimizer.state_dict() == state_to_dict(HIGH.init_state(), HIGH)

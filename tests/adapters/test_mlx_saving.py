"""Saving and resuming: MLX's own files continue a run bit for bit, and the plain dict is that of every framework."""

import json
import math
import warnings
from functools import partial

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from lossscale_core import DynamicScaling, SpikeGuard, TolerantScaling, state_to_dict
from lossscale_core.errors import CheckpointError, CheckpointWarning
from lossscale_mlx import LossScaleOptimizer
from tests.adapters.mlx_training import batch, bits, network, squared_error

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3, hysteresis=2, refill_on_finite=False, cooldown=1)
GUARD = SpikeGuard(warmup=2, memory=4)
OVERFLOWS = {2, 5, 6, 9}
SAVED_AT, STEPS = 6, 12
INNER = {
    "SGD": lambda: optim.SGD(0.1),
    "Adam": lambda: optim.Adam(optim.exponential_decay(0.1, 0.9), bias_correction=True),
    "MultiOptimizer": lambda: optim.MultiOptimizer([optim.Muon(0.01), optim.Lion(0.01)], [lambda _, w: w.ndim == 2]),
}


def _train(model, optimizer, steps):
    for n in steps:
        x, y = batch(n)
        x = x * (math.inf if n in OVERFLOWS else 1.0)
        _, grads = optimizer.value_and_grad(model, squared_error)(model, x, y)
        optimizer.update(model, grads)


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_files_of_mlx_continue_a_run_bit_for_bit(make, tmp_path):
    """`save_weights` and `save_safetensors` of the flattened state, with a guard and a schedule."""
    model, optimizer = network(), LossScaleOptimizer(make(), POLICY, guard=GUARD)
    _train(model, optimizer, range(SAVED_AT))
    model.save_weights(str(tmp_path / "model.safetensors"))
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), tree_flatten(optimizer.state, destination={}))
    _train(model, optimizer, range(SAVED_AT, STEPS))

    resumed, other = network(), LossScaleOptimizer(make(), POLICY, guard=GUARD)
    _train(resumed, other, [40])  # what is loaded replaces the state of a run that has begun
    resumed.load_weights(str(tmp_path / "model.safetensors"))
    other.state = tree_unflatten(mx.load(str(tmp_path / "optimizer.safetensors")))
    _train(resumed, other, range(SAVED_AT, STEPS))
    assert bits([resumed, other.state]) == bits([model, optimizer.state])


def test_the_plain_dict_is_that_of_the_core():
    """Plain numbers under the names of every framework, with the policy and the guard; JSON takes it."""
    model, optimizer = network(), LossScaleOptimizer(optim.SGD(0.1), POLICY, guard=GUARD)
    _train(model, optimizer, range(SAVED_AT))
    saved = json.loads(json.dumps(optimizer.state_dict()))
    assert saved == state_to_dict(optimizer.scale_state, POLICY, guard=optimizer.guard_state)
    other = LossScaleOptimizer(optim.SGD(0.1), POLICY, guard=GUARD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert bits([*other.scale_state, *other.guard_state]) == bits([*optimizer.scale_state, *optimizer.guard_state])


def test_a_step_that_is_compiled_continues_from_the_plain_dict():
    """The dict is read into the arrays that the compiled function takes, without another trace."""
    optimizer = LossScaleOptimizer(optim.SGD(0.5), POLICY)
    weight = {"w": mx.ones(2)}
    optimizer.init(weight)
    state = [weight, optimizer.state]
    traces = []

    @partial(mx.compile, inputs=state, outputs=state)
    def step(grad):
        traces.append(1)
        weight.update(optimizer.apply_gradients({"w": grad}, weight))

    step(mx.ones(2))
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scale": 2.0**20})
    step(mx.full(2, 2.0**20))
    assert optimizer.last_step.loss_scale_used.item() == 2.0**20
    assert len(traces) == 1


def test_what_differs_is_warned_about():
    """Another policy, a checkpoint without a guard, and a state of MLX without one."""
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY, guard=GUARD)
    without = LossScaleOptimizer(optim.SGD(0.1), TolerantScaling())
    with pytest.warns(CheckpointWarning) as caught:
        optimizer.load_state_dict(without.state_dict())
    assert len(caught) == 2
    assert "growth_interval was 2000 and is 3" in str(caught[0].message)
    assert "no state of a spike guard" in str(caught[1].message)
    with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
        optimizer.state = LossScaleOptimizer(optim.SGD(0.1), POLICY).state
    without = LossScaleOptimizer(optim.SGD(0.1), POLICY)
    with pytest.warns(CheckpointWarning, match="the saved guard is dropped"):
        without.state = optimizer.state
    with pytest.warns(CheckpointWarning, match="the saved guard is dropped"):
        without.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("policy", "becomes"),
    [("none", 1.0), (128.0, 128.0), (DynamicScaling(init_scale=8.0, max_scale=1024.0), 1024.0)],
    ids=str,
)
def test_a_state_of_another_policy_is_brought_within_the_bounds(policy, becomes):
    """An assigned state obeys the policy as a plain dict does, with a warning."""
    source = LossScaleOptimizer(optim.SGD(0.1), DynamicScaling())
    optimizer = LossScaleOptimizer(optim.SGD(0.1), policy)
    with pytest.warns(CheckpointWarning, match=r"loss_scale was 2\*\*16 and becomes"):
        optimizer.state = source.state
    assert optimizer.scale_state.loss_scale.item() == becomes
    optimizer.apply_gradients({"w": mx.ones(1)}, {"w": mx.ones(1)})
    assert optimizer.last_step.loss_scale_used.item() == becomes


def test_an_assigned_state_is_not_shared():
    """Steps of the one optimizer do not change the state of the other."""
    for make in INNER.values():
        (model, source), optimizer = (network(), LossScaleOptimizer(make(), POLICY)), LossScaleOptimizer(make(), POLICY)
        _train(model, source, range(4))
        kept = bits(source.state)
        optimizer.state = source.state
        assert bits(optimizer.state) == kept
        _train(model, optimizer, [4])
        assert bits(source.state) == kept
        optimizer.state = optimizer.state
        assert optimizer.step.item() == source.step.item() + 1


def test_a_state_of_the_wrapped_optimizer_alone_is_refused():
    """And the error says where to assign it."""
    plain = optim.Adam(0.1)
    plain.init({"w": mx.ones(2)})
    optimizer = LossScaleOptimizer(optim.Adam(0.1))
    with pytest.raises(CheckpointError, match=r"no inner_state, scale_state, last_step, but step.* to inner\.state"):
        optimizer.state = plain.state
    optimizer.inner.state = plain.state
    optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2)})
    assert optimizer.step.item() == 1


def test_moments_that_a_state_lacks_begin_at_zero_before_the_step():
    """So that a skipped step leaves them at zero."""
    optimizer = LossScaleOptimizer(optim.Adam(0.1), POLICY)
    weight = optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2)})
    inner_state = {name: optimizer.inner.state[name] for name in ("step", "learning_rate")}
    optimizer.state = {**optimizer.state, "inner_state": inner_state}
    optimizer.apply_gradients({"w": mx.full(2, math.nan)}, weight)
    assert optimizer.inner.state["w"]["m"].tolist() == [0.0, 0.0]


def _changed(name, value):
    return lambda state: {**state, name: value}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: None, "no inner_state, scale_state, last_step, but None"),
        (lambda state: {key: state[key] for key in ("scale_state", "last_step")}, "has no inner_state, but"),
        (_changed("scale_state", {"loss_scale": mx.array(4.0)}), "no growth_tracker"),
        (_changed("scale_state", {}), "no loss_scale"),
        (lambda state: {**state, "scale_state": {**state["scale_state"], "loss_scale": "x"}}, "loss_scale='x'"),
        (_changed("inner_state", {}), r"no inner_state\.step, inner_state\.learning_rate, but"),
        (
            _changed("inner_state", optim.MultiOptimizer([optim.SGD(0.1)]).state),
            r"no inner_state\.step",
        ),
        (_changed("last_step", None), "has no last_step, but"),
    ],
)
def test_what_is_no_state_is_refused(change, words):
    """The error names what is missing, and the optimizer keeps its own state."""
    optimizer = LossScaleOptimizer(optim.Adam(0.1), POLICY)
    optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2)})
    before = bits(optimizer.state)
    with pytest.raises(CheckpointError, match=words):
        optimizer.state = change(optimizer.state)
    assert bits(optimizer.state) == before


@pytest.mark.parametrize("saved", [None, {}, {"version": 99}, {"version": 1, "steps": 1}], ids=str)
def test_what_is_no_saved_state_is_refused(saved):
    """And the optimizer keeps its own."""
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY, guard=GUARD)
    before = bits(optimizer.state)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(saved)
    assert bits(optimizer.state) == before

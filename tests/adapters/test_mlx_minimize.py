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

        with pytest.raises(CallOrderError, match=r"minimize\(retries=.*no value in mx\.compile"):
            mx.compile(partial(step, retries=3), inputs=state, outputs=state)(mx.ones((5, 3)))
    model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), HIGH)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, mx.random.state]
    mx.compile(partial(step, retries=0, model=model, optimizer=optimizer), inputs=state, outputs=state)(mx.ones((5, 3)))


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": FixedScaling(8.0)},
        {"policy": "none"},
        {"policy": FixedScaling(8.0), "guard": SpikeGuard(max_streak=2)},
        {"policy": DynamicScaling(max_overflow_streak=3)},
    ],
    ids=str,
)
def test_compiled_functions_refuse_what_waits(settings):
    """Retries, also of a policy that never retries, and `check_overflow_streak`."""

    def retry(model, optimizer):
        optimizer.minimize(model, _loss_fn(model), retries=3)

    def check(model, optimizer):
        optimizer.minimize(model, _loss_fn(model))
        optimizer.check_overflow_streak()

    for call, words in (
        (retry, r"minimize\(retries=\.\.\.\) reads an array"),
        (check, r"check_overflow_streak\(\) reads"),
    ):
        model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), **settings)
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state]

        def step(x, model=model, optimizer=optimizer, call=call):
            call(model, optimizer)
            return x

        with pytest.raises(CallOrderError, match=words):
            mx.compile(step, inputs=state, outputs=state)(mx.array(1.0))


class _Memory(nn.Module):
    """A layer that writes what it has computed into a member, each kind in another way."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.calls = nn.Linear(3, 2), kind, 0
        kinds = {
            "tuple": (mx.zeros(2), [mx.zeros(2)]),
            "shape": mx.zeros((4, 2)),
            "dtype": mx.zeros(2),
            "list": [mx.zeros(2)],
        }
        self.seen = {**kinds, "dict": {}, "new": None, "array": mx.zeros(2)}[kind]
        self.pair = (nn.Linear(2, 2), nn.BatchNorm(2))
        self.freeze(recurse=False, keys=["seen"], strict=False)
        self._no_grad.add("seen")

    def __call__(self, x):
        self.calls += 1
        y = self.pair[1](self.pair[0](self.layer(x)))
        values = mx.stop_gradient(y) + mx.sum(x)
        mean = values[0]
        if self.kind == "list":
            self.seen.append(mean)
        elif self.kind == "dict":
            self.seen["key"] = values
        else:
            written = {"tuple": (mean, [2 * mean]), "shape": values, "dtype": mean.astype(mx.float16)}
            self.seen = written.get(self.kind, mean)
        return y


def _member(model):
    return bits({"seen": model.seen if model.seen is not None else []}), str(model.seen)


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("kind", ["tuple", "shape", "dtype", "list", "dict", "new", "array"])
def test_members_of_any_kind_are_undone_in_a_skipped_step_and_kept_in_an_applied_one(kind, retries):
    """Tuples, lists that grow, arrays that change shape or dtype, and members that a step makes."""
    mx.random.seed(0)
    model, optimizer = _Memory(kind), LossScaleOptimizer(optim.SGD(0.1), DynamicScaling(init_scale=8.0))
    modules = [id(each) for each in model.modules()]
    for factor in (math.inf, 1.0, math.inf, 2.0):
        seen, before = _member(model), bits(model)
        info = optimizer.minimize(model, lambda f=factor: mx.sum(mx.square(model(batch()[0] * f))), retries=retries)
        assert info.applied.item() == (factor < math.inf)
        assert [id(each) for each in model.modules()] == modules
        assert (_member(model) == seen) == (not info.applied.item())
        assert (bits(model) == before) == (not info.applied.item())


@pytest.mark.parametrize("kind", ["tuple", "shape", "dtype", "list", "dict", "new", "array"])
def test_a_compiled_step_undoes_members_that_keep_their_structure(kind):
    """For others it raises an error that names the member."""
    model, optimizer = _Memory(kind), LossScaleOptimizer(optim.SGD(0.1), DynamicScaling(init_scale=8.0))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x):
        optimizer.minimize(model, lambda: mx.sum(mx.square(model(x))))
        return x

    if kind not in ("tuple", "array"):
        with pytest.raises(CallOrderError, match=r"a new shape or type of seen.*mx\.compile; avoid it there"):
            step(mx.ones((5, 3)))
        return
    for factor in (math.inf, 1.0, math.inf, 2.0):
        seen = _member(model)
        step(batch()[0] * factor)
        assert (_member(model) == seen) == (factor == math.inf)


class _Odd(optim.Optimizer):
    """SGD whose state holds a tuple, a Python number, and an array that the first step makes."""

    def __init__(self):
        super().__init__()
        self.learning_rate = 0.5

    def init_single(self, parameter, state):
        state.update(pair=(mx.zeros_like(parameter), mx.zeros_like(parameter)), count=0)

    def apply_single(self, gradient, parameter, state):
        first, second = state["pair"]
        state.update(pair=(first + gradient, second - gradient), count=state["count"] + 1)
        state["late"] = state.get("late", 0.0) + gradient
        return parameter - self.learning_rate * state["late"]


def test_a_state_of_any_kind_is_undone_in_a_skipped_step():
    """Tuples, Python numbers, and arrays that a skipped step makes."""
    optimizer, plain = LossScaleOptimizer(_Odd(), 1.0), _Odd()
    weight, plain_weight = {"w": mx.ones(2)}, {"w": mx.ones(2)}
    for factor in (math.nan, 1.0, math.nan, 2.0):
        grads = {"w": mx.full(2, factor)}
        weight = optimizer.apply_gradients(grads, weight)
        if factor > 0:
            plain_weight = plain.apply_gradients(grads, plain_weight)
        assert bits(weight) == bits(plain_weight)
        assert str(optimizer.inner.state["w"]) == str(
            plain.state["w"] if "w" in plain.state else {"pair": (mx.zeros(2), mx.zeros(2)), "count": 0}
        )


def test_a_trainable_array_that_changes_its_shape_is_an_error():
    """Nothing is broadcast; the error names the array."""
    model = _Memory("shape")
    model._no_grad.remove("seen")
    for rows in (2, 5):
        optimizer = LossScaleOptimizer(optim.SGD(0.1))
        with pytest.raises(ValueError, match=r"seen"):
            optimizer.minimize(model, lambda rows=rows: mx.sum(model(mx.ones((rows, 3)))))
        assert optimizer.scale_state.steps.item() == 0
        model.seen = mx.zeros((4, 2))


@pytest.mark.parametrize("retries", [-1, 1.5, "3"])
def test_retries_are_a_whole_number(retries):
    """From 0; before anything runs."""
    model, optimizer = _network(), LossScaleOptimizer(optim.SGD(0.1), HIGH)
    with pytest.raises(PolicyError, match="retries="):
        optimizer.minimize(model, _loss_fn(model), retries=retries)
    assert optimizer.state_dict() == state_to_dict(HIGH.init_state(), HIGH)

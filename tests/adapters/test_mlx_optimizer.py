"""`LossScaleOptimizer` around the optimizers of MLX: a step is applied as without scaling, or skipped as a whole."""

import inspect
import math
import pickle
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, TolerantScaling, step_info
from lossscale_core.errors import OverflowStreakError, PolicyError
from lossscale_core.testing import policies, simulate
from lossscale_mlx import LossScaleOptimizer, all_finite, select
from tests.adapters.mlx_training import batch, bits, network, squared_error

OVERFLOWS = {2, 5, 6}
STEPS = 9
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _two_optimizers():
    return optim.MultiOptimizer([optim.Muon(0.01), optim.AdamW(0.01)], [lambda name, weight: weight.ndim == 2])


INNER = {
    "SGD": lambda: optim.SGD(0.1),
    "SGD, momentum": lambda: optim.SGD(optim.exponential_decay(0.1, 0.9), momentum=0.9, nesterov=True),
    "RMSprop": lambda: optim.RMSprop(0.01),
    "Adagrad": lambda: optim.Adagrad(0.1),
    "AdaDelta": lambda: optim.AdaDelta(0.1),
    "Adam": lambda: optim.Adam(optim.cosine_decay(0.1, 20), bias_correction=True),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optim.Adamax(0.01),
    "Lion": lambda: optim.Lion(0.01, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(beta_1=0.9),
    "Muon": lambda: optim.Muon(0.01),
    "MultiOptimizer": _two_optimizers,
}


def _train(optimizer, model, step, n):
    """Take step `n`; those of `OVERFLOWS` have an infinite input."""
    x, y = batch(n)
    step(model, optimizer, x * (math.inf if n in OVERFLOWS else 1.0), y)


def _scaled_step(model, optimizer, x, y):
    loss, grads = optimizer.value_and_grad(model, squared_error)(model, x, y)
    optimizer.update(model, grads)
    return loss


def _plain_step(model, optimizer, x, y):
    loss, grads = nn.value_and_grad(model, squared_error)(model, x, y)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_a_run_is_the_plain_run_without_the_skipped_steps(make):
    """Parameters, moments, step count and scheduled learning rate agree after each step, bit for bit."""
    model, plain_model = network(), network()
    optimizer, plain = LossScaleOptimizer(make(), POLICY), make()
    for n in range(STEPS):
        _train(optimizer, model, _scaled_step, n)
        if n not in OVERFLOWS:
            _train(plain, plain_model, _plain_step, n)
        assert bits(model) == bits(plain_model), n
        assert bits(optimizer.inner.state) == bits(plain.state), n
    expected = simulate(POLICY, [n not in OVERFLOWS for n in range(STEPS)])
    assert optimizer.scale_state.loss_scale.item() == expected.loss_scale_after[-1]
    assert optimizer.scale_state.skipped_steps.item() == len(OVERFLOWS)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_one_bad_number_in_one_gradient_skips_everything(bad):
    """Parameters with finite gradients stay the same, bit for bit, too."""
    model = network()
    optimizer = LossScaleOptimizer(optim.Adam(0.1), POLICY)
    _scaled_step(model, optimizer, *batch())
    before = bits([model, optimizer.inner.state])
    _, grads = optimizer.value_and_grad(model, squared_error)(model, *batch(1))
    grads["last"]["bias"] = mx.array([bad, 1.0])
    optimizer.update(model, grads)
    assert bits([model, optimizer.inner.state]) == before
    assert not optimizer.last_step.applied.item()


def test_plain_optimizers_lose_the_run():
    """One infinite input turns every weight into NaN without the wrapper, and none with it."""
    for wrap, lost in ((lambda inner: inner, True), (LossScaleOptimizer, False)):
        model = network()
        optimizer = wrap(optim.Adam(0.1))
        step = _plain_step if lost else _scaled_step
        for n in range(4):
            _train(optimizer, model, step, n)
        weights = [leaf for _, leaf in tree_flatten(model.parameters())]
        assert all(mx.any(mx.isnan(weight)).item() for weight in weights) == lost
        assert all_finite(weights).item() != lost


def test_the_outcome_of_a_step_is_that_of_the_cores_step_info():
    """`last_step` has the fields that `step_info` computes from the states before and after."""
    model = network()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY)
    assert not optimizer.last_step.applied.item()
    for n in range(STEPS):
        before = optimizer.scale_state
        _train(optimizer, model, _scaled_step, n)
        expected = step_info(before, optimizer.scale_state)
        assert [np.array(field).item() for field in optimizer.last_step] == [np.array(each).item() for each in expected]


def test_nothing_is_evaluated_in_a_step():
    """A traced step has no values: reading one raises, whether the optimizer is initialised or not."""
    for is_initialised in (True, False):
        model = network()
        inner = optim.Adam(optim.linear_schedule(0.1, 0.01, 10))
        optimizer = LossScaleOptimizer(inner, POLICY, max_norm=1.0, guard=SpikeGuard())
        if is_initialised:
            optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state]
        traced = []

        @partial(mx.compile, inputs=state, outputs=state)
        def step(x, y, model=model, optimizer=optimizer, traced=traced):
            traced.append(optimizer)
            loss = _scaled_step(model, optimizer, x, y)
            optimizer.metrics()
            return loss, optimizer.last_step.applied, optimizer.last_norm

        step(*batch())  # and nothing reads what it returns
        assert traced == [optimizer]

    def reads(x, optimizer=optimizer):
        return x * bool(optimizer.last_step.applied)  # as a wrapper that reads the flag would

    with pytest.raises(ValueError, match="Attempting to eval an array during function transformations"):
        mx.compile(reads, inputs=state)(mx.array(1.0))


def test_a_compiled_run_is_the_eager_one_bit_for_bit():
    """Over overflows, with a schedule; it is traced once, and the state is a tree of the same arrays."""

    def run(compiled):
        model = network()
        optimizer = LossScaleOptimizer(optim.Adam(optim.step_decay(0.1, 0.5, 2)), POLICY)
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state]
        traces = []

        def step(x, y):
            traces.append(1)
            return _scaled_step(model, optimizer, x, y), optimizer.last_step.applied

        step = partial(mx.compile, inputs=state, outputs=state)(step) if compiled else step
        history = []
        for n in range(STEPS):
            x, y = batch(n)
            loss, applied = step(x * (math.inf if n in OVERFLOWS else 1.0), y)
            mx.eval(loss, state)
            assert applied.item() == (n not in OVERFLOWS)
            history.append(bits([loss, model, optimizer.state]))
        return history, len(traces)

    (eager, _), (compiled, traces) = run(False), run(True)
    assert compiled == eager
    assert traces == 1


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "Lion"])
def test_float16_parameters_stay_float16_and_the_state_is_float32(name):
    """The wrapped optimizer sees all in float32; only the new parameters are rounded."""
    model = network()
    model.apply(lambda weight: weight.astype(mx.float16))
    optimizer = LossScaleOptimizer(INNER[name](), POLICY)
    optimizer.init(model.trainable_parameters())
    wide, plain = network(), INNER[name]()
    wide.apply(lambda weight: weight.astype(mx.float16).astype(mx.float32))
    plain.init(wide.trainable_parameters())
    assert bits(optimizer.inner.state) == bits(plain.state)
    for n in range(3):
        x, y = batch(n)
        scale = optimizer.scale_state.loss_scale
        _, grads = optimizer.value_and_grad(model, squared_error)(model, x.astype(mx.float16), y)
        assert {leaf.dtype for _, leaf in tree_flatten(grads)} == {mx.float16}
        optimizer.update(model, grads)
        plain.update(wide, tree_map(lambda grad, scale=scale: grad.astype(mx.float32) / scale, grads))
        assert bits(optimizer.inner.state) == bits(plain.state)
        wide.apply(lambda weight: weight.astype(mx.float16))
        assert bits(model) == bits(wide)
        wide.apply(lambda weight: weight.astype(mx.float32))


def test_keep_dtypes_gives_the_wrapped_optimizer_what_mlx_would():
    """Moments in float16, and a gradient that float16 cannot hold once it is unscaled is zero again."""
    weight = {"w": mx.ones(2, mx.float16)}
    grads = {"w": mx.array([2.0**-10, 1.0], mx.float16)}  # the first is 2**-26, unscaled
    policy = FixedScaling(2.0**16)
    for keep_dtypes, dtype, first in ((True, mx.float16, 0.0), (False, mx.float32, 2.0**-26)):
        optimizer = LossScaleOptimizer(optim.SGD(1.0, momentum=0.5), policy, keep_dtypes=keep_dtypes)
        after = optimizer.apply_gradients(grads, weight)
        assert after["w"].dtype == mx.float16
        assert optimizer.inner.state["w"]["v"].dtype == dtype
        assert optimizer.inner.state["w"]["v"][0].item() == first


def test_adam_divides_by_zero_in_float16():
    """The square of a small gradient is zero there, and so is epsilon; by default the moments are float32."""
    for keep_dtypes in (True, False):
        optimizer = LossScaleOptimizer(optim.Adam(0.01), FixedScaling(2.0**10), keep_dtypes=keep_dtypes)
        after = optimizer.apply_gradients(
            {"w": mx.array([1e-4 * 2.0**10, 0.0], mx.float16)}, {"w": mx.ones(2, mx.float16)}
        )
        assert optimizer.last_step.applied.item()
        assert mx.any(mx.isfinite(after["w"])).item() != keep_dtypes


def test_with_keep_dtypes_what_overflows_by_unscaling_is_skipped():
    """A scale below 1 makes a finite float16 gradient infinite in float16."""
    for keep_dtypes in (True, False):
        optimizer = LossScaleOptimizer(optim.SGD(1.0), FixedScaling(2.0**-4), keep_dtypes=keep_dtypes)
        optimizer.apply_gradients({"w": mx.array([2.0**14], mx.float16)}, {"w": mx.ones(1, mx.float16)})
        assert optimizer.last_step.overflowed.item() == keep_dtypes


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}], ids=["plain", "clipped"])
def test_large_finite_gradients_are_no_overflow(settings):
    """The largest float32 is applied, though its square and the norm overflow; a scale below 1 makes it infinite."""
    largest = float(np.finfo(np.float32).max)
    for scale, applied in ((1.0, True), (0.5, False)):
        optimizer = LossScaleOptimizer(optim.SGD(0.0), FixedScaling(scale), **settings)
        optimizer.apply_gradients(
            {"a": mx.array([largest] * 3), "b": mx.array([-largest])}, {"a": mx.ones(3), "b": mx.ones(1)}
        )
        assert optimizer.last_step.applied.item() == applied


LEAVES = st.lists(
    st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=4).map(lambda row: np.array(row, np.float32)),
    min_size=1,
    max_size=3,
)


@given(LEAVES, st.sampled_from(["float16", "bfloat16", "float32"]), st.floats(0.1, 1e4), st.integers(-8, 12))
def test_clipping_is_that_of_numpy(leaves, dtype, max_norm, exponent):
    """The norm is the one of the unscaled gradients in float64, and clipped gradients have at most this norm."""
    scale = 2.0**exponent
    grads = [mx.array(leaf).astype(getattr(mx, dtype)) for leaf in leaves]
    exact = np.concatenate([np.array(grad.astype(mx.float32), np.float64) for grad in grads]) / scale
    optimizer = LossScaleOptimizer(optim.SGD(1.0), FixedScaling(scale), max_norm=max_norm)
    after = optimizer.apply_gradients({"w": grads}, {"w": [mx.zeros(len(leaf)) for leaf in leaves]})
    norm = float(np.sqrt((exact**2).sum()))
    np.testing.assert_allclose(optimizer.last_norm.item(), norm, rtol=1e-5, atol=1e-30)
    expected = -exact * min(1.0, max_norm / norm if norm else 1.0)
    np.testing.assert_allclose(np.concatenate([np.array(each) for each in after["w"]]), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_the_norm_finds_a_bad_number_in_every_position(dtype, bad):
    """Among large, small and zero neighbours, the first, the last and one in between."""
    for neighbour in (0.0, 1e-7, 60000.0):
        for position in (0, 33, 66):
            values = np.full(67, neighbour, np.float32)
            values[position] = bad
            optimizer = LossScaleOptimizer(optim.SGD(1.0), POLICY, max_norm=1.0)
            after = optimizer.apply_gradients({"w": mx.array(values).astype(dtype)}, {"w": mx.ones(67)})
            assert optimizer.last_step.overflowed.item()
            assert optimizer.last_norm.item() == math.inf
            assert mx.all(after["w"] == 1.0).item()


@given(policies(), st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_states_are_those_of_the_host(policy, flags):
    """Whatever the policy, each step's state is the simulated one, and momentum SGD in NumPy follows applied steps."""
    optimizer = LossScaleOptimizer(optim.SGD(0.5, momentum=0.5), policy)
    parameters, weight, velocity = {"w": mx.array([1.0])}, np.float32(1.0), np.float32(0.0)
    state = policy.init_state()
    for finite in flags:
        gradient = optimizer.scale(mx.array([0.25])) if finite else mx.array([math.inf])
        if not math.isfinite(gradient.item()):
            finite = False
        parameters = optimizer.apply_gradients({"w": gradient}, parameters)
        state = policy.update(state, finite)
        assert [each.item() for each in optimizer.scale_state] == [each.item() for each in state]
        if finite:
            velocity = np.float32(0.5) * velocity + np.float32(0.25)
            weight = weight - np.float32(0.5) * velocity
        np.testing.assert_allclose(parameters["w"].item(), weight, rtol=1e-6)


def test_gradients_may_be_added_up_and_averaged():
    """The sum of scaled gradients is scaled alike; `mlx.nn.average_gradients` leaves the flag to the step."""
    model, plain_model = network(), network()
    optimizer, plain = LossScaleOptimizer(optim.Adam(0.1), POLICY), optim.Adam(0.1)
    differentiate = optimizer.value_and_grad(model, squared_error)
    plain_differentiate = nn.value_and_grad(plain_model, squared_error)
    sums = []
    for run in (differentiate, plain_differentiate):
        grads = [run(model if run is differentiate else plain_model, *batch(n))[1] for n in range(4)]
        total = tree_map(lambda *parts: sum(parts) / 4, *grads)
        sums.append(nn.average_gradients(total))
    optimizer.update(model, sums[0])
    plain.update(plain_model, sums[1])
    assert bits(model) == bits(plain_model)


def test_checkpointed_layers_give_the_same_gradients():
    """`mlx.nn.utils.checkpoint` recomputes the forward pass, and the scaled gradients are the same bits."""
    found = []
    for checkpointed in (False, True):
        model = network()
        optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY)
        forward = nn.utils.checkpoint(model) if checkpointed else model
        loss, grads = optimizer.value_and_grad(model, lambda x, y, f=forward: mx.mean(mx.square(f(x) - y)))(*batch())
        found.append(bits([loss, grads]))
    assert found[0] == found[1]


def test_value_and_grad_returns_what_the_loss_returns():
    """A loss, or a tuple that begins with it, not scaled, with keyword arguments; the gradients are scaled."""
    model = network()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY)
    x, y = batch()
    expected, plain = nn.value_and_grad(model, squared_error)(model, x, y)
    loss, grads = optimizer.value_and_grad(model, squared_error)(model, x=x, y=y)
    assert bits(loss) == bits(expected)
    assert bits(grads) == bits(tree_map(lambda grad: grad * POLICY.init_scale, plain))
    (loss, extra), _ = optimizer.value_and_grad(model, lambda m: (squared_error(m, x, y), {"rows": 5}["rows"] * y))(
        model
    )
    assert bits([loss, extra]) == bits([expected, 5 * y])


def test_batch_statistics_follow_applied_steps_by_select():
    """A skipped step in a loop of one's own: `select` takes what the forward pass has written back."""
    model = nn.Sequential(nn.BatchNorm(3), nn.Linear(3, 2))
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY)
    for n in range(3):
        before = model.parameters()
        kept = bits(before)
        x, y = batch(n)
        _, grads = optimizer.value_and_grad(model, squared_error)(model, x * (math.inf if n == 1 else 1.0), y)
        optimizer.update(model, grads)
        model.update(select(optimizer.last_step.applied, model.parameters(), before))
        assert (bits(model.parameters()) == kept) == (n == 1)


def test_the_learning_rate_is_that_of_the_wrapped_optimizer():
    """It may be read and set, and `step` counts applied steps."""
    model = network()
    optimizer = LossScaleOptimizer(optim.SGD(0.5), POLICY)
    assert optimizer.learning_rate.item() == 0.5
    optimizer.learning_rate = 0.25
    assert optimizer.inner.learning_rate.item() == 0.25
    for n in range(4):
        _train(optimizer, model, _scaled_step, n)
    assert optimizer.step.item() == 3


def test_frozen_parameters_are_left_alone():
    """They have no gradients and no state."""
    model = network()
    model.first.freeze()
    frozen = bits(model.first)
    optimizer = LossScaleOptimizer(optim.Adam(0.1), POLICY)
    for n in range(3):
        _train(optimizer, model, _scaled_step, n)
    assert bits(model.first) == frozen
    assert not [name for name, _ in tree_flatten(optimizer.state) if "first" in name]
    assert [name for name, _ in tree_flatten(optimizer.state) if "last.weight" in name]


@pytest.mark.parametrize(
    "grads", [{}, {"w": mx.zeros(3)}, {"w": mx.zeros(3, mx.float16)}, {"w": mx.zeros(0), "v": mx.zeros(1)}], ids=str
)
def test_no_gradients_and_zeros_are_finite(grads):
    """An empty tree, an empty array and zeros are a step of the policy and of the wrapped optimizer."""
    optimizer = LossScaleOptimizer(optim.SGD(0.1), POLICY, max_norm=1.0)
    assert bits(optimizer.apply_gradients(grads, grads)) == bits(grads)
    assert (optimizer.last_step.applied.item(), optimizer.last_norm.item(), optimizer.step.item()) == (True, 0.0, 1)


@pytest.mark.parametrize("max_norm", [math.inf, 1e300, 10.0], ids=str)
def test_a_norm_that_is_not_exceeded_clips_nothing(max_norm):
    """Not by a digit; with infinity the norm is measured only."""
    optimizer = LossScaleOptimizer(optim.SGD(1.0), FixedScaling(2.0), max_norm=max_norm)
    after = optimizer.apply_gradients({"w": mx.array([12.0, 16.0])}, {"w": mx.zeros(2)})
    assert after["w"].tolist() == [-6.0, -8.0]
    assert optimizer.last_norm.item() == 10.0


def test_clipping_leaves_integers_and_reduces_norms_beyond_float32():
    """Only floats are multiplied; the norm of a million large gradients is reduced to `max_norm`, too."""
    optimizer = LossScaleOptimizer(optim.SGD(1.0), 1.0, max_norm=1.0)
    after = optimizer.apply_gradients(
        {"i": mx.array([3]), "w": mx.array([10.0])}, {"i": mx.array([10]), "w": mx.zeros(1)}
    )
    assert (after["i"].item(), after["w"].item()) == (7, -1.0)
    after = optimizer.apply_gradients({"w": mx.full(1000000, 3e38)}, {"w": mx.zeros(1000000)})
    assert optimizer.last_step.applied.item()
    np.testing.assert_allclose(np.array(after["w"], np.float64), -1e-3, rtol=1e-5)
    after = optimizer.apply_gradients({"w": mx.array([3e30 + 4e30j])}, {"w": mx.zeros(1, mx.complex64)})
    np.testing.assert_allclose(np.array(after["w"]), [-0.6 - 0.8j], rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}], ids=["plain", "clipped"])
def test_gradients_that_do_not_fit_their_parameters_are_errors(settings):
    """None, another shape, and what is not an array of MLX; nothing has changed then."""
    optimizer = LossScaleOptimizer(optim.SGD(1.0), **settings)
    weight = {"v": mx.ones(2), "w": mx.ones(2)}
    before = bits(optimizer.state)
    for wrong in (None, mx.ones(1), mx.ones((2, 2)), np.ones(2), 1.0):
        with pytest.raises((TypeError, ValueError), match=r"\['w'\]|w="):
            optimizer.apply_gradients({"v": mx.ones(2), "w": wrong}, weight)
    assert bits(optimizer.state) == before


def test_the_step_of_several_optimizers_is_that_of_the_first():
    """As their learning rate is; in one that is nested, too."""
    parts = [optim.SGD(0.5), optim.MultiOptimizer([optim.SGD(0.25)])]
    for inner, rate in ((optim.MultiOptimizer(parts, [lambda name, _: name == "a"]), 0.5), (parts[1], 0.25)):
        optimizer = LossScaleOptimizer(inner)
        optimizer.apply_gradients({"a": mx.ones(1), "b": mx.ones(1)}, {"a": mx.ones(1), "b": mx.ones(1)})
        assert optimizer.learning_rate.item() == rate
        assert optimizer.step.item() == (1 if rate == 0.5 else 2)


def test_a_run_is_described_and_a_streak_is_an_error():
    """`metrics` and `diagnose` tell of it; `check_overflow_streak` raises, which a step does not call."""
    policy = DynamicScaling(init_scale=4.0, max_overflow_streak=4)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), policy)
    for _ in range(4):
        optimizer.check_overflow_streak()
        optimizer.apply_gradients({"w": mx.array([math.nan])}, {"w": mx.ones(1)})
    assert optimizer.metrics()["skipped_steps"].item() == 4
    assert optimizer.diagnose().startswith("skipping too often: 4 overflows in a row")
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=4"):
        optimizer.check_overflow_streak()


@pytest.mark.parametrize("policy", ["dynamic", "none", 128.0, TolerantScaling(), NoScaling()], ids=str)
def test_every_policy_is_taken(policy):
    """As `as_policy` takes it, under `policy=` and by its place."""
    for optimizer in (LossScaleOptimizer(optim.SGD(0.1), policy), LossScaleOptimizer(optim.SGD(0.1), policy=policy)):
        before = optimizer.scale_state.loss_scale.item()
        optimizer.apply_gradients({"w": mx.array([math.inf])}, {"w": mx.ones(1)})
        assert optimizer.scale_state.loss_scale.item() <= before
        assert optimizer.scale_state.skipped_steps.item() == 1


def test_the_default_policy_is_dynamic():
    """With the scale of the library's default."""
    assert LossScaleOptimizer(optim.SGD(0.1)).policy == DynamicScaling()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LossScaleOptimizer(optim.Adam), TypeError, "must be an optimizer of MLX; pass mlx.optimizers.Adam"),
        (lambda: LossScaleOptimizer(LossScaleOptimizer(optim.SGD(0.1))), PolicyError, "wrap the optimizer once"),
        (
            lambda: LossScaleOptimizer(optim.MultiOptimizer([LossScaleOptimizer(optim.SGD(0.1))])),
            PolicyError,
            "wrap the optimizer once",
        ),
        (lambda: LossScaleOptimizer(optim.SGD(0.1), "dynamo"), PolicyError, "dynamo"),
        (lambda: LossScaleOptimizer(optim.SGD(0.1), max_norm=-1.0), PolicyError, "max_norm=-1.0 must be"),
        (lambda: LossScaleOptimizer(optim.SGD(0.1), guard=8.0), PolicyError, "guard=8.0 must be a SpikeGuard"),
        (lambda: LossScaleOptimizer(optim.SGD(0.1), keep_dtypes=1), PolicyError, "keep_dtypes=1 must be True or False"),
        (lambda: LossScaleOptimizer(optim.SGD(0.1), maxnorm=1.0), TypeError, "did you mean 'max_norm'"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(make, error, words):
    """When the optimizer is made, and not at the first step."""
    with pytest.raises(error, match=words):
        make()


def test_the_class_is_found_where_users_import_it():
    """And is an optimizer of MLX, for code that asks."""
    assert pickle.loads(pickle.dumps(LossScaleOptimizer)) is LossScaleOptimizer
    assert LossScaleOptimizer.__module__ == "lossscale_mlx"
    assert isinstance(LossScaleOptimizer(optim.SGD(0.1)), optim.Optimizer)
    assert list(inspect.signature(LossScaleOptimizer).parameters)[:2] == ["inner", "policy"]

"""`loss_scaled`: atomic skips, clipping, accumulation, and optax's own wrappers around and inside it."""

import copy
import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

from lossscale_core import DynamicScaling, state_from_dict, state_to_dict, step_info
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_core.testing import overflow_traces, policies, simulate
from lossscale_jax import (
    LossScaledState,
    LossScaledTransformation,
    get_scale_state,
    load_scale_state,
    loss_scaled,
    scale,
    unscale,
)
from tests.adapters.jax_reading import late_gradients, reading_refused
from tests.jax_names import enable_x64
from tests.sweeping import few_examples

SCALE = 2.0**10
POLICY = DynamicScaling(init_scale=SCALE, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0]), "b": jnp.ones((2, 3))}
GRADS = {"w": jnp.array([1.0, -2.0, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}
BAD = {"w": jnp.array([1.0, jnp.nan, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}


def _times(grads, factor):
    return jax.tree.map(lambda grad: grad * factor, grads)


def _bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def _in_two(optimizer):
    """Return a step by `update` and `optax.apply_updates`."""

    def step(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _in_one(optimizer):
    """Return a step by `apply_gradients`."""
    return lambda params, opt_state, grads: optimizer.apply_gradients(grads, opt_state, params)


WAYS = pytest.mark.parametrize("way", [_in_two, _in_one])
WRAPS = pytest.mark.parametrize("wrap", [jax.jit, lambda step: step], ids=["jit", "eager"])


@WAYS
@WRAPS
def test_finite_steps_are_the_inner_optimizers(way, wrap):
    """Whatever the scale; to the last bit, except that XLA fuses an update with its addition where it can."""
    inner = optax.adam(0.1)
    optimizer = loss_scaled(inner, POLICY)
    step, plain = wrap(way(optimizer)), wrap(_in_two(inner))
    params, opt_state, expected, expected_state = PARAMS, optimizer.init(PARAMS), PARAMS, inner.init(PARAMS)
    for _ in range(5):
        params, opt_state = step(params, opt_state, _times(GRADS, get_scale_state(opt_state).loss_scale))
        expected, expected_state = plain(expected, expected_state, GRADS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    assert _bits(opt_state.inner_state) == _bits(expected_state)
    assert get_scale_state(opt_state).loss_scale == 2 * SCALE


@WAYS
@WRAPS
def test_a_skip_changes_nothing(way, wrap):
    """Parameters, down to the signs of their zeros, and the inner state stay; the scale backs off."""
    optimizer = loss_scaled(optax.adamw(0.1), POLICY)
    step = wrap(way(optimizer))
    params, opt_state = step(PARAMS, optimizer.init(PARAMS), _times(GRADS, SCALE))
    params = {**params, "w": jnp.array([0.0, -0.0, 1.0, -1.0])}
    after, after_state = step(params, opt_state, BAD)
    assert _bits(after) == _bits(params)
    assert _bits(after_state.inner_state) == _bits(opt_state.inner_state)
    info = step_info(get_scale_state(opt_state), get_scale_state(after_state))
    assert not info.applied
    assert info.loss_scale_after == SCALE / 2


@few_examples
@given(policies(), overflow_traces(max_steps=30))
def test_the_scale_follows_the_policy(policy, grads_finite):
    """State by state what the core simulates."""
    optimizer = loss_scaled(optax.sgd(0.0), policy)
    params = jnp.ones(2)

    def step(opt_state, finite):
        _, opt_state = optimizer.update(jnp.where(finite, jnp.ones(2), jnp.inf), opt_state, params)
        return opt_state, get_scale_state(opt_state).loss_scale

    _, scales = jax.lax.scan(step, optimizer.init(params), jnp.asarray(grads_finite, bool))
    np.testing.assert_array_equal(scales, simulate(policy, grads_finite).loss_scale_after)


def test_one_compilation_serves_the_run():
    """Also with everything donated."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    step = jax.jit(_in_one(optimizer), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    opt_state = optimizer.init(params)
    for n in range(6):
        params, opt_state = step(params, opt_state, BAD if n == 3 else GRADS)
    assert step._cache_size() == 1


@pytest.mark.parametrize("inner", [optax.adam, optax.lamb], ids=["adam", "lamb"])
def test_updates_take_the_memory_of_the_gradients(inner):
    """A compiled step in two calls needs hardly more temporary memory than one by `apply_gradients`."""
    optimizer = loss_scaled(inner(0.1), POLICY)
    params = [jnp.ones((64, 64))] * 4

    def loss(params, x):
        return jnp.tanh(x @ params[0] @ params[1] @ params[2] @ params[3]).sum()

    def temporary(way):
        def step(params, opt_state, x):
            return way(optimizer)(params, opt_state, jax.grad(loss)(params, x))

        compiled = (
            jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), jnp.ones((2, 64))).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(_in_two) <= 1.1 * temporary(_in_one)


def _momentum():
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(optax.linear_schedule(0.1, 0.0, 9), 0.9, True))


@pytest.mark.parametrize(
    ("inner", "settings"),
    [
        (functools.partial(optax.adam, 0.1), {"max_norm": 1.0}),
        (_momentum, {"accumulation_steps": 2, "drop": "micro_batch"}),
        (functools.partial(optax.lion, 0.1), {}),
    ],
    ids=["adam", "momentum", "lion"],
)
def test_compiled_updates_are_those_of_an_eager_step(inner, settings):
    """Whether they follow from the new state or need the old one, too; a skipped step leaves every bit."""
    optimizer = loss_scaled(inner(), POLICY, **settings)
    eager = compiled = (PARAMS, optimizer.init(PARAMS))
    step = jax.jit(_in_two(optimizer))
    for grads in (GRADS, BAD, GRADS, _times(GRADS, -2.0), BAD, BAD):
        before, compiled = compiled, step(*compiled, grads)
        eager = _in_two(optimizer)(*eager, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), compiled, eager)
        if grads is BAD and "accumulation_steps" not in settings:
            assert _bits((compiled[0], compiled[1].inner_state)) == _bits((before[0], before[1].inner_state))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_parameters(dtype):
    """Their gradients reach the inner optimizer in float32, and the parameters keep their dtype."""
    seen = []

    def record(updates, state, params=None):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(updates))
        return updates, state

    inner = optax.chain(optax.GradientTransformation(lambda params: (), record), optax.sgd(1.0))
    optimizer = loss_scaled(inner, 2.0**14)
    params = jnp.ones(2, dtype)
    for way in (_in_one, _in_two):
        after, _ = jax.jit(way(optimizer))(params, optimizer.init(params), jnp.full(2, 2.0**14, dtype))
        assert after.dtype == dtype
        assert after.tolist() == [0.0, 0.0]
    assert set(seen) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_half_parameters_with_a_stateful_optimizer(dtype, accumulation_steps):
    """One compilation, a scan, and a first step skipped without a trace: the inner state is float32 from birth."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=accumulation_steps)
    params = jnp.ones(2, dtype)
    step = jax.jit(_in_one(optimizer))
    start = params, optimizer.init(params)
    carry = step(*start, jnp.full(2, jnp.nan, dtype))
    assert _bits(carry[0]) == _bits(params)
    assert _bits(carry[1].inner_state) == _bits(start[1].inner_state)
    for _ in range(3):
        carry = step(*carry, jnp.ones(2, dtype))
    assert step._cache_size() == 1
    jax.lax.scan(lambda carry, grads: (step(*carry, grads), None), start, jnp.ones((4, 2), dtype))


def test_complex_parameters():
    """Clipped by both parts, and left alone by a skip down to the signs of zeros."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, max_norm=1.0)
    params = jnp.array([complex(-0.0, -0.0), 1.0])
    after, opt_state = jax.jit(_in_two(optimizer))(params, optimizer.init(params), jnp.array([jnp.nan, 1j]))
    assert _bits(after) == _bits(params)
    grads = jnp.array([complex(3e38, 3e38), 0.0])
    after, opt_state = jax.jit(_in_one(optimizer))(params, optimizer.init(params), grads)
    assert get_scale_state(opt_state).skipped_steps == 0
    assert jnp.isfinite(after).all()


@WAYS
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
def test_a_compiled_step_does_not_wait(way, settings):
    """It returns while the device still computes the gradients."""
    params = jnp.ones(4)
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    step, opt_state = jax.jit(way(optimizer)), optimizer.init(params)
    step(params, opt_state, params)
    grads = late_gradients()
    step(params, opt_state, grads)
    assert not grads.is_ready()


@WAYS
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
def test_an_eager_step_reads_nothing(way, settings, monkeypatch):
    """No array becomes a number of the host, whether it overflowed or not."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    carry = PARAMS, optimizer.init(PARAMS)
    with reading_refused(monkeypatch):
        for grads in (GRADS, BAD):
            carry = way(optimizer)(*carry, grads)
        with pytest.raises(AssertionError, match="the host read an array"):
            bool(get_scale_state(carry[1]).loss_scale > 0)


def test_with_x64_and_strict_promotion():
    """Master weights of float64, accumulated, and no dtype promoted by itself."""
    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        optimizer = loss_scaled(optax.scale(jnp.float64(-1.0)), POLICY, accumulation_steps=2, max_norm=100.0)
        params = jnp.ones(2, jnp.float64)
        opt_state = optimizer.init(params)
        step = jax.jit(_in_one(optimizer))
        for _ in range(2):
            params, opt_state = step(params, opt_state, jnp.full(2, SCALE, jnp.float64))
        assert params.dtype == jnp.float64
        assert params.tolist() == [0.0, 0.0]
        assert step._cache_size() == 1


def test_vmap_and_checkpoint():
    """An ensemble of optimizers, each with a scale of its own, also when recomputed."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)  # noqa: E731
    grads = jax.tree.map(lambda good, bad: jnp.stack([good, bad]), GRADS, BAD)
    step = jax.jit(jax.vmap(jax.checkpoint(_in_one(optimizer))))
    params, opt_state = step(stack(PARAMS), stack(optimizer.init(PARAMS)), grads)
    assert get_scale_state(opt_state).loss_scale.tolist() == [SCALE, SCALE / 2]
    assert _bits(jax.tree.map(lambda leaf: leaf[1], params)) == _bits(PARAMS)


def test_below_a_scale_of_one_the_unscaled_gradients_decide():
    """What becomes infinite by being unscaled is skipped, with clipping and without."""
    for max_norm in (None, 1.0):
        optimizer = loss_scaled(optax.sgd(1.0), 2.0**-20, max_norm=max_norm)
        step = jax.jit(_in_one(optimizer))
        for size, applied in ((1e30, True), (1e36, False)):
            before = optimizer.init(jnp.zeros(2))
            _, after = step(jnp.zeros(2), before, jnp.full(2, size))
            assert step_info(get_scale_state(before), get_scale_state(after)).applied == applied


@WAYS
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_optaxs(way, max_norm):
    """`max_norm` does what `clip_by_global_norm` inside does, which sees unscaled gradients."""
    inside = loss_scaled(optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(1.0)), POLICY)
    ours = loss_scaled(optax.sgd(1.0), POLICY, max_norm=max_norm)
    grads = _times(GRADS, SCALE)
    expected, _ = jax.jit(way(inside))(PARAMS, inside.init(PARAMS), grads)
    params, _ = jax.jit(way(ours))(PARAMS, ours.init(PARAMS), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    after, opt_state = jax.jit(way(ours))(PARAMS, ours.init(PARAMS), BAD)
    assert _bits(after) == _bits(PARAMS)
    assert get_scale_state(opt_state).skipped_steps == 1


@pytest.mark.parametrize("size", [1e30, 3e38])
def test_clipping_where_squares_overflow(size):
    """Gradients with squares that overflow are finite, and are clipped to the right norm."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, max_norm=1.0)
    params, opt_state = jax.jit(_in_one(optimizer))(jnp.zeros(4), optimizer.init(jnp.zeros(4)), jnp.full(4, size))
    assert get_scale_state(opt_state).skipped_steps == 0
    assert jnp.linalg.norm(params) <= 1.0 + 1e-6
    if size < 1e38:  # above, the norm itself exceeds float32, and the gradient is clipped to less
        np.testing.assert_allclose(params, -0.5, rtol=1e-6)


def _run(optimizer, batches, params=PARAMS):
    step = jax.jit(_in_one(optimizer))
    opt_state = optimizer.init(params)
    for grads in batches:
        params, opt_state = step(params, opt_state, _times(grads, get_scale_state(opt_state).loss_scale))
    return params, opt_state


def test_a_window_is_one_step():
    """The mean of its micro-batches, and one step of the policy."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=2)
    params, opt_state = _run(optimizer, [GRADS, _times(GRADS, 3.0)] * 3)
    expected, _ = _run(loss_scaled(optax.adam(0.1), POLICY), [_times(GRADS, 2.0)] * 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    assert get_scale_state(opt_state).steps == 3
    assert get_scale_state(opt_state).loss_scale == 2 * SCALE


def test_an_overflow_drops_the_window_and_nothing_else():
    """The next window starts clean, and the scale backs off once, at the window's end."""
    optimizer = loss_scaled(optax.sgd(1.0), POLICY, accumulation_steps=2)
    params, opt_state = _run(optimizer, [GRADS, BAD])
    assert _bits(params) == _bits(PARAMS)
    assert get_scale_state(opt_state).loss_scale == SCALE / 2
    params, opt_state = _run(optimizer, [BAD, BAD, GRADS, GRADS])
    expected, _ = _run(loss_scaled(optax.sgd(1.0), POLICY), [GRADS])
    assert _bits(params) == _bits(expected)
    assert get_scale_state(opt_state).skipped_steps == 1


def test_an_overflow_drops_the_micro_batch_only():
    """The others make the step, divided by their number; the scale backs off within the window."""
    optimizer = loss_scaled(optax.sgd(1.0), POLICY, accumulation_steps=3, drop="micro_batch")
    params, opt_state = _run(optimizer, [_times(GRADS, 2.0), BAD, _times(GRADS, 4.0)])
    expected, _ = _run(loss_scaled(optax.sgd(1.0), POLICY), [_times(GRADS, 3.0)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    assert get_scale_state(opt_state).loss_scale == SCALE / 2
    params, opt_state = _run(optimizer, [BAD] * 3)
    assert _bits(params) == _bits(PARAMS)
    assert get_scale_state(opt_state).skipped_steps == 3


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_finite_micro_batches_make_no_infinite_sum(drop):
    """What is applied is their mean, which is finite."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, accumulation_steps=2, drop=drop)
    params, opt_state = _run(optimizer, [jnp.full(2, 3e38)] * 2, jnp.zeros(2))
    np.testing.assert_allclose(params, -3e38, rtol=1e-6)
    assert get_scale_state(opt_state).skipped_steps == 0


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_the_window_says_what_stepped(drop):
    """Whether the last call moved the parameters, which `applied` cannot say in the middle of a window."""
    optimizer = loss_scaled(optax.sgd(1.0), POLICY, accumulation_steps=2, drop=drop)
    step = jax.jit(_in_one(optimizer))
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for grads in (GRADS, BAD, GRADS, GRADS, BAD, BAD, GRADS):
        before = params
        params, opt_state = step(params, opt_state, grads)
        assert opt_state.window.stepped == (_bits(before) != _bits(params))
    assert step._cache_size() == 1


def test_a_state_that_does_not_fit_is_refused():
    """One saved without accumulation, a scale state, and an optimizer state where a scale state belongs."""
    plain, windowed = loss_scaled(optax.sgd(1.0), POLICY), loss_scaled(optax.sgd(1.0), POLICY, accumulation_steps=2)
    with pytest.raises(PolicyError, match="made without accumulation and without a guard"):
        windowed.update(GRADS, plain.init(PARAMS), PARAMS)
    with pytest.raises(PolicyError, match="made with accumulation"):
        plain.update(GRADS, windowed.init(PARAMS), PARAMS)
    with pytest.raises(ScaleStateError, match="ScaleState is not a state of loss_scaled"):
        plain.update(GRADS, get_scale_state(plain.init(PARAMS)), PARAMS)
    with pytest.raises(TypeError, match=r"LossScaledState is not a scale state.* get_scale_state\(opt_state\)"):
        scale(jnp.ones(()), plain.init(PARAMS))


def test_multi_steps_inside_completes_its_window_later():
    """optax's own accumulation, wrapped: an overflow costs it one micro-batch."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    params, opt_state = _run(loss_scaled(inner, POLICY), [GRADS, BAD, _times(GRADS, 3.0)])
    expected, _ = _run(loss_scaled(optax.sgd(1.0), POLICY), [_times(GRADS, 2.0)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    assert get_scale_state(opt_state).skipped_steps == 1


def _nested():
    scaled = loss_scaled(optax.sgd(1.0), POLICY)
    return {
        "chain": optax.chain(optax.identity(), scaled),
        "multi_transform": optax.multi_transform({"a": scaled, "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}),
        "inject_hyperparams": optax.inject_hyperparams(lambda rate: loss_scaled(optax.sgd(rate), POLICY))(rate=1.0),
        "masked": optax.masked(scaled, {"w": True, "b": False}),
    }


@pytest.mark.parametrize("name", _nested())
def test_the_scale_is_found_however_deep(name):
    """In every wrapper of optax, before and after steps under jit."""
    optimizer = _nested()[name]
    opt_state = optimizer.init(PARAMS)
    step = jax.jit(_in_two(optimizer))
    assert get_scale_state(opt_state).loss_scale == SCALE
    params, opt_state = step(PARAMS, opt_state, _times(GRADS, SCALE))
    np.testing.assert_allclose(params["w"], PARAMS["w"] - GRADS["w"])
    _, opt_state = step(params, opt_state, BAD)
    assert get_scale_state(opt_state).loss_scale == SCALE / 2


def test_flax_nnx_keeps_the_state_in_variables():
    """What was found before a step stays what it was, and a skipped one is seen."""
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, loss_scaled(optax.adam(1e-2), POLICY), wrt=nnx.Param)
    for size in (1.0, jnp.inf, 1.0):
        before = get_scale_state(optimizer.opt_state)
        optimizer.update(module, nnx.grad(lambda module, size=size: module(jnp.full((1, 2), size)).sum())(module))
        after = get_scale_state(optimizer.opt_state)
        assert step_info(before, after).applied == np.isfinite(size)
    assert POLICY.update(after, jnp.asarray(True)).steps == 4


def test_none_or_several_scales_are_an_error():
    """The message lists where they are."""
    scaled = loss_scaled(optax.sgd(1.0), POLICY)
    several = optax.multi_transform({"a": scaled, "b": scaled}, {"w": "a", "b": "b"}).init(PARAMS)
    with pytest.raises(ScaleStateError, match=r"2 scale states, at .*\['a'\].*\['b'\]"):
        get_scale_state(several)
    with pytest.raises(ScaleStateError, match="wrap the optimizer in loss_scaled"):
        get_scale_state(optax.sgd(1.0).init(PARAMS))


def test_extra_args_reach_the_inner_optimizer():
    """Through a chain, too; an inner optimizer that knows none gets none."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda update: update * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = optax.chain(loss_scaled(inner, 1.0), loss_scaled(optax.scale(1.0), 1.0))
    updates, _ = jax.jit(optimizer.update)(GRADS, optimizer.init(PARAMS), PARAMS, value=3.0, unknown=1.0)
    np.testing.assert_allclose(updates["w"], 3.0 * GRADS["w"])


def test_it_is_an_optax_transformation():
    """So that chains and `isinstance` take it as such: two functions, and a third next to them."""
    optimizer = loss_scaled(optax.sgd(1.0), POLICY)
    assert isinstance(optimizer, LossScaledTransformation)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    init, update = optimizer
    assert (init, update) == (optimizer.init, optimizer.update)
    assert optax.with_extra_args_support(optimizer) is optimizer


@pytest.mark.parametrize("max_norm", [float("inf"), 1e300, np.array(8.0), jnp.float32(8.0)])
def test_a_large_max_norm_clips_nothing(max_norm):
    """As in PyTorch and TensorFlow; it may be an array of one number."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", max_norm=max_norm)
    params, _ = optimizer.apply_gradients(jnp.full(2, 3.0), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
    assert params.tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("grad", [3.0, 0.0])
def test_a_max_norm_of_zero_makes_all_gradients_zero(grad):
    """As in torch and optax; a gradient of zero does not become NaN."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", max_norm=0.0)
    params, state = optimizer.apply_gradients(jnp.full(2, grad), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
    assert params.tolist() == [0.0, 0.0]
    assert int(state.scale_state.skipped_steps) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": -0.5}, "max_norm=-0.5 must be a number from 0"),
        ({"max_norm": float("nan")}, "max_norm=nan must be a number from 0"),
        ({"max_norm": 1.0, "axis_name": "data"}, "reduce the gradients over the axis first"),
        ({"accumulation_steps": 2, "axis_name": "data"}, "reduce the gradients over the axis first"),
        ({"accumulation_steps": 0}, "accumulation_steps=0 must be an integer of at least 1"),
        ({"accumulation_steps": 1.5}, r"accumulation_steps=1\.5"),
        ({"keep_dtypes": "float16"}, "keep_dtypes=.float16. must be True or False"),
        ({"drop": "batch"}, "drop='batch' must be 'window' or 'micro_batch'"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    """Each is refused before anything is lost."""
    with pytest.raises(PolicyError, match=message):
        loss_scaled(optax.sgd(1.0), POLICY, **settings)


@pytest.mark.parametrize("inner", [optax.sgd, None, optax.GradientTransformation])
def test_an_optimizer_that_is_not_made_is_refused(inner):
    """The message says what to pass."""
    with pytest.raises(TypeError, match=r"pass one that is made, such as optax\.adamw"):
        loss_scaled(inner, POLICY)


def test_wrapping_twice_is_refused():
    """Gradients would be unscaled twice."""
    with pytest.raises(PolicyError, match="loss-scaled already"):
        loss_scaled(optax.chain(loss_scaled(optax.sgd(1.0), POLICY)), POLICY).init(PARAMS)


def test_a_scaled_loss_from_the_optimizer_state():
    """The whole loop as a user writes it, in float16."""
    inputs = jnp.arange(8.0).reshape(4, 2) / 8
    targets = inputs @ jnp.array([1.0, -1.0])
    optimizer = loss_scaled(optax.adam(0.05), DynamicScaling(init_scale=2.0**30, growth_interval=50))

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            predictions = inputs.astype(jnp.float16) @ params.astype(jnp.float16)
            value = jnp.mean((predictions.astype(jnp.float32) - targets) ** 2)
            return scale(value, get_scale_state(opt_state)), value

        grads, value = jax.grad(loss, has_aux=True)(params)
        return *optimizer.apply_gradients(grads, opt_state, params), value

    params = jnp.zeros(2)
    opt_state = optimizer.init(params)
    for _ in range(200):
        params, opt_state, value = step(params, opt_state)
    assert value < 1e-3
    assert get_scale_state(opt_state).skipped_steps > 5


@pytest.mark.parametrize(
    "rebuild",
    [copy.copy, copy.deepcopy, lambda optimizer: jax.tree.map(lambda leaf: leaf, optimizer)],
    ids=["copy", "deepcopy", "pytree"],
)
def test_a_rebuilt_optimizer_has_everything(rebuild):
    """flax 0.11 takes an optimizer apart into a pytree's leaves and puts it together again."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    rebuilt = rebuild(optimizer)
    assert type(rebuilt) is type(optimizer)
    opt_state = rebuilt.init(PARAMS)
    for way in ("update", "apply_gradients"):
        expected = getattr(optimizer, way)(GRADS, opt_state, PARAMS)
        assert _bits(getattr(rebuilt, way)(GRADS, opt_state, PARAMS)) == _bits(expected)


def test_an_optimizer_with_another_update_has_no_apply_gradients():
    """It cannot apply what it does not know, and says so."""
    replaced = loss_scaled(optax.adam(0.1), POLICY)._replace(update=optax.sgd(0.1).update)
    with pytest.raises(AttributeError, match="no attribute 'apply_gradients'"):
        replaced.apply_gradients(GRADS, None, PARAMS)


def test_a_state_is_saved_and_loaded():
    """Through the core's plain dict and through a pickle; the rest continues bit for bit."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    params, opt_state = _run(optimizer, [GRADS, GRADS, BAD])
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    restored = jax.tree.map(jnp.asarray, state_from_dict(saved, POLICY))
    assert _bits(restored) == _bits(get_scale_state(opt_state))
    again = pickle.loads(pickle.dumps(jax.device_get(opt_state)))
    assert isinstance(again, LossScaledState)
    step = jax.jit(_in_one(optimizer))
    expected, result = step(params, opt_state, GRADS), step(params, opt_state._replace(scale_state=restored), GRADS)
    assert _bits(expected) == _bits(result)


_WINDOWS = {
    drop: loss_scaled(
        optax.sgd(1.0), DynamicScaling(init_scale=8.0, growth_interval=2), accumulation_steps=3, drop=drop
    )
    for drop in ("window", "micro_batch")
}
_WINDOW_STEPS = {drop: jax.jit(_in_one(optimizer)) for drop, optimizer in _WINDOWS.items()}  # compiled once


@given(st.lists(st.booleans(), max_size=8))
def test_accumulation_equals_its_definition(finite):
    """Against a plain loop over windows of three, for both ways to drop."""
    for drop, step in _WINDOW_STEPS.items():
        batches = [jnp.float32(n + 1 if is_finite else jnp.nan) for n, is_finite in enumerate(finite)]
        params = jnp.float32(0.0)
        opt_state = _WINDOWS[drop].init(params)
        for batch in batches:
            scale = get_scale_state(opt_state).loss_scale
            params, opt_state = step(params, opt_state, batch * scale)
        expected = 0.0
        for start in range(0, len(batches) // 3 * 3, 3):
            good = [float(batch) for batch in batches[start : start + 3] if np.isfinite(batch)]
            if len(good) == 3 or (drop == "micro_batch" and good):
                expected -= sum(good) / len(good)
        np.testing.assert_allclose(params, expected, rtol=1e-6)


def _dropping_wrappers():
    scaled = loss_scaled(optax.adam(0.1), POLICY)
    skips_large = functools.partial(optax.skip_large_updates, max_squared_norm=1e30)
    return {
        "apply_if_finite": optax.apply_if_finite(scaled, 100),
        "skip_not_finite": optax.MultiSteps(scaled, 1, should_skip_update_fn=optax.skip_not_finite),
        "skip_large_updates": optax.MultiSteps(scaled, 2, should_skip_update_fn=skips_large),
        "MultiSteps": optax.MultiSteps(scaled, 2).gradient_transformation(),
        "in a chain": optax.chain(optax.identity(), optax.apply_if_finite(optax.chain(scaled), 100)),
    }


@pytest.mark.parametrize("name", _dropping_wrappers())
def test_a_wrapper_that_hides_overflows_is_refused(name):
    """After 50 of them the scale would still be at its start, and a NaN stays in the sum of `MultiSteps` for good."""
    opt_state = _dropping_wrappers()[name].init(PARAMS)
    for find in (get_scale_state, jax.jit(get_scale_state)):
        with pytest.raises(ScaleStateError, match=r"drops.* overflows before they can lower the loss scale; leave"):
            find(opt_state)
    with pytest.raises(ScaleStateError, match="wraps loss_scaled and drops"):
        load_scale_state(opt_state, state_to_dict(POLICY.init_state(), POLICY), POLICY)


def test_the_same_wrappers_may_stand_inside():
    """They receive finite values there, and the scale backs off once for each overflow."""
    skipping = optax.MultiSteps(optax.adam(0.1), 1, should_skip_update_fn=optax.skip_not_finite)
    for inner in (optax.apply_if_finite(optax.adam(0.1), 3), skipping.gradient_transformation()):
        _, opt_state = _run(loss_scaled(inner, POLICY), [BAD, BAD, GRADS])
        assert get_scale_state(opt_state).loss_scale == SCALE / 4


def test_a_nan_of_the_optimizers_own_is_still_found():
    """What `jax_debug_nans` is for: the step that is taken is checked."""
    optimizer = loss_scaled(optax.stateless(lambda updates, _: jax.tree.map(jnp.log, updates)), POLICY)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        optimizer.update(_times(GRADS, -SCALE), optimizer.init(PARAMS), PARAMS)


def _dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


HALVES = {"h": jnp.ones(3, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2)}


def test_updates_and_state_of_half_parameters_are_float32():
    """By default nothing that the inner optimizer keeps or returns is in half precision."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    updates, opt_state = jax.jit(optimizer.update)(HALVES, optimizer.init(HALVES), HALVES)
    assert set(jax.tree.leaves(_dtypes((updates, opt_state.inner_state[0].mu)))) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
@pytest.mark.parametrize("inner", [optax.adam(0.1, eps=1e-4), optax.sgd(0.5, momentum=0.5)], ids=["adam", "sgd"])
@WRAPS
def test_dtypes_are_optaxs_if_asked(wrap, inner, settings):
    """With `keep_dtypes` updates and state are of the dtypes that they have without us, from the first state on."""
    optimizer = loss_scaled(inner, POLICY, keep_dtypes=True, **settings)
    plain, opt_state = inner.init(HALVES), optimizer.init(HALVES)
    expected, plain = inner.update(HALVES, plain, HALVES)
    for grads in (HALVES, {**HALVES, "h": jnp.full(3, jnp.inf, jnp.float16)}, HALVES, HALVES):
        assert _dtypes(opt_state.inner_state) == _dtypes(plain)
        updates, opt_state = wrap(optimizer.update)(_times(grads, 8.0), opt_state, HALVES)
        assert _dtypes(updates) == _dtypes(expected)
    assert get_scale_state(opt_state).skipped_steps == 1


def test_kept_dtypes_take_the_same_steps():
    """Powers of two are exact in float16: the parameters are those of the optimizer alone."""
    inner = optax.sgd(0.5, momentum=0.5)
    optimizer, step = loss_scaled(inner, 8.0, keep_dtypes=True), jax.jit(_in_two(inner))
    params, opt_state, expected, plain = HALVES, optimizer.init(HALVES), HALVES, inner.init(HALVES)
    for _ in range(3):
        params, opt_state = jax.jit(_in_two(optimizer))(params, opt_state, _times(HALVES, 8.0))
        expected, plain = step(expected, plain, HALVES)
    assert _bits(params) == _bits(expected)
    assert _bits(opt_state.inner_state) == _bits(plain)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 2.0**30}, {"accumulation_steps": 1}])
@WRAPS
def test_kept_dtypes_below_a_scale_of_one(wrap, settings):
    """What is too large for float16 once unscaled is an overflow there, and not in float32."""
    grads, params = jnp.full(2, 2.0**14, jnp.float16), jnp.zeros(2, jnp.float16)
    for keep_dtypes in (True, False):
        optimizer = loss_scaled(optax.sgd(1.0), 2.0**-4, keep_dtypes=keep_dtypes, **settings)
        _, opt_state = wrap(optimizer.update)(grads, optimizer.init(params), params)
        assert get_scale_state(opt_state).skipped_steps == keep_dtypes


def _scanned(optimizer, params, opt_state, grads):
    """Return the optimizer state after one step under `lax.scan`, which refuses dtypes that change."""
    step = _in_one(optimizer)
    xs = jax.tree.map(lambda grad: grad[None], grads)
    return jax.lax.scan(lambda carry, grads: (step(*carry, grads), None), (params, opt_state), xs)[0][1]


@pytest.mark.parametrize(
    "inner", [optax.inject_hyperparams(optax.adam)(lambda count: 0.1), optax.adamw(0.1, weight_decay=0.1)]
)
def test_the_inner_optimizer_sees_half_parameters_in_float32(inner):
    """Hyperparameters that follow the parameters' dtype, and weight decay, are not rounded to half precision."""
    optimizer = loss_scaled(inner, POLICY)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), HALVES)
    for params in (HALVES, {"b": HALVES["b"]}):
        grads = _times(params, 8.0)
        start = optimizer.init(params)
        opt_state = _scanned(optimizer, params, start, grads)
        expected = inner.update(
            unscale(grads, get_scale_state(start)), start.inner_state, {name: wide[name] for name in params}
        )
        assert _bits(opt_state.inner_state) == _bits(expected[1])
        updates, _ = jax.jit(optimizer.update)(grads, start, params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), updates, expected[0])


def test_a_restored_scale_moves_to_the_mesh_as_a_new_one_does():
    """It stays on a device where its place was given, and is otherwise as free as the one before it."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    opt_state = optimizer.init(PARAMS)
    saved = state_to_dict(get_scale_state(opt_state), POLICY)
    step = jax.jit(_in_one(optimizer))
    for each in (opt_state, load_scale_state(opt_state, saved, POLICY)):
        step(PARAMS, each, GRADS)
    assert step._cache_size() == 1
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step(jax.device_put(PARAMS, everywhere), load_scale_state(opt_state, saved, POLICY), GRADS)
    placed = load_scale_state(jax.device_put(opt_state, jax.devices()[3]), saved, POLICY)
    assert get_scale_state(placed).loss_scale.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("inner", [optax.sgd, optax.adam, optax.adamw])
@pytest.mark.parametrize("spoilt", [jnp.inf, jnp.nan])
def test_values_that_a_skipped_update_drops_have_no_effect(inner, spoilt):
    """Its derivative is zero and not NaN, and `checkify` reports no division by zero."""

    def stepped(learning_rate, spoilt):
        optimizer = loss_scaled(inner(learning_rate), POLICY)
        params = {"w": jnp.ones(3)}
        updates, _ = optimizer.update({"w": jnp.array([1.0, spoilt, 2.0])}, optimizer.init(params), params)
        return optax.apply_updates(params, updates)["w"].sum()

    assert jax.jit(jax.grad(stepped))(0.1, spoilt) == 0.0
    assert jax.jit(jax.grad(stepped))(0.1, 1.0) != 0.0
    error, _ = jax.jit(checkify.checkify(stepped, errors=checkify.float_checks))(0.1, jnp.inf)
    assert error.get() is None

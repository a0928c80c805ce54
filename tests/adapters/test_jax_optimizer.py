"""`loss_scaled`: atomic skips, clipping, accumulation, and optax's own wrappers around and inside it."""

import copy

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling, SpikeGuard, state_to_dict, step_info
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from lossscale_jax._gradients import check
from tests.adapters.jax_reading import bits, reading_refused
from tests.jax_names import enable_x64

SCALE = 2.0**10
POLICY = DynamicScaling(init_scale=SCALE, growth_interval=3)
PARAMS = {"w": jnp.array([1.0, -0.0, 0.0, 2.0]), "b": jnp.ones((2, 3))}
GRADS = {"w": jnp.array([1.0, -2.0, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}
BAD = {"w": jnp.array([1.0, jnp.nan, 0.5, 4.0]), "b": jnp.full((2, 3), 0.25)}


def _times(grads, factor):
    return jax.tree.map(lambda grad: grad * factor, grads)


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
def test_a_skip_changes_nothing(way, wrap):
    """Parameters, down to the signs of their zeros, and the inner state stay; the scale backs off."""
    optimizer = loss_scaled(optax.adamw(0.1), POLICY)
    step = wrap(way(optimizer))
    params, opt_state = step(PARAMS, optimizer.init(PARAMS), _times(GRADS, SCALE))
    params = {**params, "w": jnp.array([0.0, -0.0, 1.0, -1.0])}
    after, after_state = step(params, opt_state, BAD)
    assert bits(after) == bits(params)
    assert bits(after_state.inner_state) == bits(opt_state.inner_state)
    info = step_info(get_scale_state(opt_state), get_scale_state(after_state))
    assert not info.applied
    assert info.loss_scale_after == SCALE / 2


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

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), jnp.ones((2, 64)))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(_in_two) <= 1.1 * temporary(_in_one)


def test_complex_parameters():
    """Clipped by both parts, and left alone by a skip down to the signs of zeros."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, max_norm=1.0)
    params = jnp.array([complex(-0.0, -0.0), 1.0])
    after, opt_state = jax.jit(_in_two(optimizer))(params, optimizer.init(params), jnp.array([jnp.nan, 1j]))
    assert bits(after) == bits(params)
    grads = jnp.array([complex(3e38, 3e38), 0.0])
    after, opt_state = jax.jit(_in_one(optimizer))(params, optimizer.init(params), grads)
    assert get_scale_state(opt_state).skipped_steps == 0
    assert jnp.isfinite(after).all()


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


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_without_gradients_is_applied(max_norm):
    """As where all parameters are frozen: nothing is no overflow, and its norm is 0."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, max_norm=max_norm)
    before = optimizer.init({})
    _, after = optimizer.apply_gradients({}, before, {})
    assert step_info(get_scale_state(before), get_scale_state(after)).applied


def test_below_a_scale_of_one_the_unscaled_gradients_decide():
    """What becomes infinite by being unscaled is skipped, with clipping and without."""
    for max_norm in (None, 1.0):
        optimizer = loss_scaled(optax.sgd(1.0), 2.0**-20, max_norm=max_norm)
        step = jax.jit(_in_one(optimizer))
        for size, applied in ((1e30, True), (1e36, False)):
            before = optimizer.init(jnp.zeros(2))
            _, after = step(jnp.zeros(2), before, jnp.full(2, size))
            assert step_info(get_scale_state(before), get_scale_state(after)).applied == applied


@pytest.mark.parametrize("size", [1e30, 3e38])
def test_clipping_where_squares_overflow(size):
    """Gradients with squares that overflow are finite, and are clipped to the right norm."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, max_norm=1.0)
    params, opt_state = jax.jit(_in_one(optimizer))(jnp.zeros(4), optimizer.init(jnp.zeros(4)), jnp.full(4, size))
    assert get_scale_state(opt_state).skipped_steps == 0
    assert jnp.linalg.norm(params) <= 1.0 + 1e-6
    if size < 1e38:  # above, the norm itself exceeds float32, and the gradient is clipped to less
        np.testing.assert_allclose(params, -0.5, rtol=1e-6)


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float64"), ("float32", "float64")])
def test_a_norm_is_right_wherever_squares_overflow(dtypes, skip):
    """In units of a power of two, for every dtype and loss scale; an element that overflows once unscaled is found."""
    for exponent in (0, 62, 66, 100, 126, 500, 1020):
        for scale in (2.0**-20, 1.0, 1000.0, 2.0**126):
            with enable_x64():
                grads = [jnp.asarray([3.0, -4.0], dtype) * 2.0**exponent for dtype in dtypes]
                compiled = jax.jit(lambda grads, by: check(grads, 1.0 / by, with_norm=True, skip=skip))
                finite, norm = compiled(grads, jnp.float32(scale))
                with np.errstate(all="ignore"):
                    each = np.concatenate([np.asarray(grad) / np.asarray(scale, grad.dtype) for grad in grads])
                    exact = np.hypot.reduce(each.astype(max(dtypes)))
                assert finite == np.isfinite(each).all()
                np.testing.assert_allclose(norm, exact, rtol=1e-6)


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_finite_micro_batches_make_no_infinite_sum(drop):
    """What is applied is their mean, which is finite."""
    optimizer = loss_scaled(optax.sgd(1.0), 1.0, accumulation_steps=2, drop=drop)
    params, opt_state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
    for _ in range(2):
        params, opt_state = jax.jit(_in_one(optimizer))(params, opt_state, jnp.full(2, 3e38))
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
        assert opt_state.window.stepped == (bits(before) != bits(params))
    assert step._cache_size() == 1


def test_a_state_that_does_not_fit_is_refused():
    """One made with other settings, a scale state, and a guard that is not one."""
    plain, windowed, guarded = (
        loss_scaled(optax.sgd(1.0), POLICY, **settings)
        for settings in ({}, {"accumulation_steps": 2}, {"guard": SpikeGuard()})
    )
    for optimizer, opt_state, message in (
        (windowed, plain.init(PARAMS), "made without accumulation and without a guard"),
        (guarded, plain.init(PARAMS), "do not fit a state made without accumulation and without a guard"),
        (plain, windowed.init(PARAMS), "made with accumulation"),
        (plain, guarded.init(PARAMS), r"guard=None do not fit .* with a guard"),
    ):
        with pytest.raises(PolicyError, match=message):
            optimizer.update(GRADS, opt_state, PARAMS)
    with pytest.raises(ScaleStateError, match="ScaleState is not a state of loss_scaled"):
        plain.update(GRADS, get_scale_state(plain.init(PARAMS)), PARAMS)
    with pytest.raises(PolicyError, match=r"guard=8\.0 must be a SpikeGuard"):
        loss_scaled(optax.sgd(1.0), POLICY, guard=8.0)


PARTS = {
    "multi_transform": lambda scaled: optax.multi_transform({"a": scaled, "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}),
    "masked": lambda scaled: optax.masked(scaled, {"w": True, "b": False}),
}


@pytest.mark.parametrize("wrap", PARTS.values(), ids=PARTS)
def test_the_scale_is_found_however_deep(wrap):
    """In wrappers of optax that show it some of the parameters, before and after steps under jit."""
    optimizer = wrap(loss_scaled(optax.sgd(1.0), POLICY))
    opt_state = optimizer.init(PARAMS)
    step = jax.jit(_in_two(optimizer))
    assert get_scale_state(opt_state).loss_scale == SCALE
    params, opt_state = step(PARAMS, opt_state, _times(GRADS, SCALE))
    np.testing.assert_allclose(params["w"], PARAMS["w"] - GRADS["w"])
    _, opt_state = step(params, opt_state, BAD)
    assert get_scale_state(opt_state).loss_scale == SCALE / 2


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


@pytest.mark.parametrize("max_norm", [float("inf"), 1e300, jnp.float32(8.0), 0.0])
@pytest.mark.parametrize("size", [3.0, 0.0])
def test_a_large_max_norm_clips_nothing_and_one_of_zero_all(max_norm, size):
    """As in PyTorch and TensorFlow; a gradient of zero does not become NaN."""
    optimizer = loss_scaled(optax.sgd(1.0), "none", max_norm=max_norm)
    params, _ = optimizer.apply_gradients(jnp.full(2, size), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
    assert params.tolist() == [-size if max_norm else 0.0] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": float("nan")}, "max_norm=nan must be a number from 0"),
        ({"max_norm": 1.0, "axis_name": "data"}, "reduce the gradients over the axis first"),
        ({"accumulation_steps": 2, "axis_name": "data"}, "reduce the gradients over the axis first"),
        (
            {"accumulation_steps": 0},
            r"accumulation_steps=0 must be a whole number from 1 to .*; pass 1, or leave it out",
        ),
        ({"keep_dtypes": "float16"}, "keep_dtypes=.float16. must be True or False"),
        ({"skip": True}, "skip=True must be 'cond' or 'select'"),
        ({"drop": "batch"}, "drop='batch' must be 'window' or 'micro_batch'; leave it out for the default"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    """Each is refused before anything is lost."""
    with pytest.raises(PolicyError, match=message):
        loss_scaled(optax.sgd(1.0), POLICY, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 1.0}, "'clip_norm' is called max_norm in loss_scaled; write max_norm=1.0"),
        ({"scale_window": 100}, r"scale_window is a setting of a policy; .*DynamicScaling\(growth_interval=100\)"),
        ({"every_k_schedule": 4}, "'every_k_schedule' is called accumulation_steps in loss_scaled"),
    ],
)
def test_the_names_of_other_tools_are_known(settings, message):
    """The error has the name that a setting has here."""
    with pytest.raises(TypeError, match=message):
        loss_scaled(optax.sgd(1.0), **settings)


def test_wrapping_twice_is_refused():
    """Gradients would be unscaled twice."""
    with pytest.raises(PolicyError, match="loss-scaled already"):
        loss_scaled(optax.chain(loss_scaled(optax.sgd(1.0), POLICY)), POLICY).init(PARAMS)


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
    assert rebuilt.policy == POLICY
    opt_state = rebuilt.init(PARAMS)
    for way in ("update", "apply_gradients"):
        expected = getattr(optimizer, way)(GRADS, opt_state, PARAMS)
        assert bits(getattr(rebuilt, way)(GRADS, opt_state, PARAMS)) == bits(expected)


LOOKAHEAD = optax.LookaheadParams.init_synced(PARAMS)


@WAYS
@WRAPS
@pytest.mark.parametrize("skip", ["cond", "select"])
def test_lookahead_takes_gradients_of_its_fast_parameters(way, wrap, skip):
    """Their structure is not that of the parameters, but that of its updates is; those of another one are refused."""
    optimizer, plain = loss_scaled(optax.lookahead(optax.sgd(0.5), 2, 0.5), POLICY, skip=skip), optax.sgd(0.5)
    step = wrap(way(optimizer))
    carry = step(LOOKAHEAD, optimizer.init(LOOKAHEAD), _times(GRADS, SCALE))
    expected = optax.apply_updates(PARAMS, plain.update(GRADS, plain.init(PARAMS))[0])
    assert bits(carry[0].fast) == bits(expected)
    params, opt_state = step(*carry, BAD)
    assert bits((params, opt_state.inner_state)) == bits((carry[0], carry[1].inner_state))
    params, _ = step(params, opt_state, _times(GRADS, SCALE / 2))
    assert bits(params.fast) == bits(params.slow) != bits(PARAMS)  # after two applied steps
    for wrong in (LOOKAHEAD, {"w": GRADS["w"]}, {**GRADS, "w": jnp.ones(3)}):
        with pytest.raises((ValueError, TypeError)):
            step(LOOKAHEAD, optimizer.init(LOOKAHEAD), wrong)


DROPPING = {
    "apply_if_finite": lambda scaled: optax.apply_if_finite(scaled, 100),
    "skip_not_finite": lambda scaled: optax.MultiSteps(scaled, 1, should_skip_update_fn=optax.skip_not_finite),
    "MultiSteps": lambda scaled: optax.MultiSteps(scaled, 2).gradient_transformation(),
    "in a chain": lambda scaled: optax.chain(optax.identity(), optax.apply_if_finite(optax.chain(scaled), 100)),
}


@pytest.mark.parametrize("wrap", DROPPING.values(), ids=DROPPING)
def test_a_wrapper_that_hides_overflows_is_refused(wrap):
    """After 50 of them the scale would still be at its start, and a NaN stays in the sum of `MultiSteps` for good."""
    opt_state = wrap(loss_scaled(optax.adam(0.1), POLICY)).init(PARAMS)
    for find in (get_scale_state, jax.jit(get_scale_state)):
        with pytest.raises(
            ScaleStateError, match=r"drops overflows before they can lower the loss scale, .*; put it inside"
        ):
            find(opt_state)
    with pytest.raises(ScaleStateError, match="wraps loss_scaled and"):
        load_scale_state(opt_state, state_to_dict(POLICY.init_state(), POLICY), POLICY)


def _dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


HALVES = {"h": jnp.ones(3, jnp.float16), "b": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2)}


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


@pytest.mark.parametrize("settings", [{}, {"max_norm": 2.0**30}, {"accumulation_steps": 1}])
@WRAPS
def test_kept_dtypes_below_a_scale_of_one(wrap, settings):
    """What is too large for float16 once unscaled is an overflow there, and not in float32."""
    grads, params = jnp.full(2, 2.0**14, jnp.float16), jnp.zeros(2, jnp.float16)
    for keep_dtypes in (True, False):
        optimizer = loss_scaled(optax.sgd(1.0), 2.0**-4, keep_dtypes=keep_dtypes, **settings)
        _, opt_state = wrap(optimizer.update)(grads, optimizer.init(params), params)
        assert get_scale_state(opt_state).skipped_steps == keep_dtypes


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

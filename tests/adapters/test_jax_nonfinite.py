"""`on_nonfinite_update` and `on_nonfinite_loss`: finite gradients that write NaN, and losses that are NaN already."""

import functools
import json
import pickle

import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_core import (
    DynamicScaling,
    SpikeGuard,
    check_nonfinite_streak,
    count_nonfinite,
    diagnose,
    init_nonfinite_state,
    state_to_dict,
    step_info,
)
from lossscale_core.errors import NonfiniteStreakError, NonfiniteUpdateError, PolicyError
from lossscale_jax import (
    CountedLossScaledState,
    LossCheckedGradients,
    ScaledGradients,
    get_scale_state,
    init_state,
    load_scale_state,
    loss_scaled,
    retrying_value_and_grad,
    scale,
    select,
    value_and_grad,
)
from lossscale_jax.testing import check_train_step
from tests.adapters.jax_reading import late_gradients, reading_refused
from tests.jax_names import enable_x64

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
DEVICES = 8
BAD_STEP = 2
SETTINGS = [
    {},
    {"max_norm": 1.0},
    {"guard": SpikeGuard()},
    {"keep_dtypes": True, "max_norm": 1.0, "guard": SpikeGuard()},
    {"accumulation_steps": 2, "max_norm": 1.0},
    {"accumulation_steps": 2, "drop": "micro_batch", "guard": SpikeGuard()},
]


def _bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def _muon():
    """Return a Muon with a Newton-Schulz iteration in float16, without the norm that keeps it small."""

    def orthogonal(gradient):
        x = gradient.astype(jnp.float16)
        for _ in range(2):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        return x.astype(gradient.dtype)

    def update(grads, momentum, _):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda m: -0.01 * orthogonal(m), momentum), momentum

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _with_rate():
    """Return an optimizer with a learning rate that is far too large for large gradients."""

    def update(grads, state, _):
        return jax.tree.map(lambda g: -jnp.where(jnp.abs(g) > 1e3, 1e9, 0.1) * g, grads), state

    return optax.GradientTransformation(lambda _: (), update)


CAUSES = {
    "the second moment of Adam": (optax.adam(0.1), jnp.float32, 1e21, {}),
    "Newton-Schulz in float16": (_muon(), jnp.float32, 1e4, {}),
    "a state in float16": (optax.adam(0.1, eps=1e-4), jnp.float16, 1e4, {"keep_dtypes": True}),
    "a learning rate that overflows float16 weights": (_with_rate(), jnp.float16, 2e3, {}),
}
WAYS = ["apply_gradients", "update"]


def _gradients(size, params, opt_state):
    """Return scaled gradients in the parameters' dtype; unscaled, the first are of this size, the others small."""
    first = {name: jnp.full(leaf.shape, 0.01).at[0].set(size) for name, leaf in params.items()}
    scaled = jax.tree.map(lambda leaf: leaf * get_scale_state(opt_state).loss_scale, first)
    return optax.tree.cast_like(scaled, params)


def _step(optimizer, way, **extra):
    def step(params, opt_state, size):
        grads = _gradients(size, params, opt_state)
        if way == "apply_gradients":
            return optimizer.apply_gradients(grads, opt_state, params, **extra)
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return optax.tree.cast_like(optax.apply_updates(wide, updates), params), opt_state

    return step


def _step_with_loss(optimizer, way, params, opt_state, value, size):
    return _step(optimizer, way, value=value)(params, opt_state, size)


def _without_counts(opt_state):
    return opt_state[:4]


def _check_undone(make, dtype, size, way, transform, settings):
    """Take five steps, a bad one among them, and compare each with a run that does not have it."""
    params = {"w": jnp.ones((4, 4), dtype), "b": jnp.zeros((4, 4), dtype)}
    ends = []
    for has_bad_step in (True, False):
        optimizer = loss_scaled(make, 2.0**2, on_nonfinite_update="skip", **settings)
        step, now, opt_state = transform(_step(optimizer, way)), params, optimizer.init(params)
        for n in range(5):
            if n == BAD_STEP:
                if not has_bad_step:
                    continue
                before = _bits((now, _without_counts(opt_state)))
                now, opt_state = step(now, opt_state, jnp.float32(size))
                assert _bits((now, _without_counts(opt_state))) == before
                assert (opt_state.nonfinite_state.updates, opt_state.nonfinite_state.update_streak) == (1, 1)
            else:
                now, opt_state = step(now, opt_state, jnp.float32(0.25))
        assert opt_state.nonfinite_state == (has_bad_step, 0, 0, 0)
        assert _bits(now) != _bits(params)
        assert get_scale_state(opt_state).skipped_steps == 0
        ends.append(_bits((now, _without_counts(opt_state))))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", ["cond", "select"])
def test_a_bad_step_is_as_if_it_had_not_been(cause, way, skip):
    """Bit for bit, whatever made NaN or infinity of finite gradients."""
    make, dtype, size, settings = CAUSES[cause]
    _check_undone(make, dtype, size, way, jax.jit, {**settings, "skip": skip})


@pytest.mark.parametrize("cause", CAUSES)
def test_an_eager_bad_step_is_undone(cause):
    """Operation by operation, and with a guard that accepted its norm."""
    make, dtype, size, settings = CAUSES[cause]
    _check_undone(make, dtype, size, "apply_gradients", lambda step: step, {**settings, "guard": SpikeGuard()})


@pytest.mark.parametrize("cause", CAUSES)
def test_ignored_it_stays(cause):
    """What the option is for: by default the scaler says applied, and the weights or the state are not finite."""
    make, dtype, size, settings = CAUSES[cause]
    params = {"w": jnp.ones((4, 4), dtype)}
    optimizer = loss_scaled(make, 2.0**2, **settings)
    step, opt_state = jax.jit(_step(optimizer, "apply_gradients")), optimizer.init(params)
    params, opt_state = step(params, opt_state, jnp.float32(size))
    assert get_scale_state(opt_state).skipped_steps == 0
    floats = [leaf for leaf in jax.tree.leaves((params, opt_state)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    assert not all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("way", WAYS)
def test_the_defaults_add_no_operation(way, settings):
    """The jaxpr is the same text with the default as an argument and without; the two reactions change it."""
    params = {"w": jnp.ones(8), "half": jnp.ones((8, 2), jnp.float16)}
    texts = []
    for more in (
        {},
        {"on_nonfinite_update": "ignore", "on_nonfinite_loss": "back_off"},
        {"on_nonfinite_update": "skip"},
    ):
        optimizer = loss_scaled(optax.adamw(0.1), POLICY, **settings, **more)
        opt_state = optimizer.init(params)
        texts.append(str(jax.make_jaxpr(getattr(optimizer, way))(params, opt_state, params)))
        counted = isinstance(opt_state, CountedLossScaledState)
        assert counted == ("skip" in more.values())
    assert texts[0] == texts[1] != texts[2]


def test_by_default_value_and_grad_has_four_results():
    """And the same jaxpr; with "hold" a fifth one."""

    def loss(weights):
        return (weights**2).sum()

    arguments = init_state(POLICY), jnp.ones(3)
    plain, default, holding = (
        value_and_grad(loss, **more) for more in ({}, {"on_nonfinite_loss": "back_off"}, {"on_nonfinite_loss": "hold"})
    )
    assert str(jax.make_jaxpr(plain)(*arguments)) == str(jax.make_jaxpr(default)(*arguments))
    assert isinstance(plain(*arguments), ScaledGradients)
    assert len(plain(*arguments)) == 4
    assert plain(*arguments).loss_finite is None
    result = holding(*arguments)
    assert isinstance(result, LossCheckedGradients)
    assert _bits(result[:4]) == _bits(plain(*arguments))
    assert bool(result.loss_finite)


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_arrays_that_were_infinite_before_are_left_alone(skip):
    """A mask of infinities as a parameter; the other parameters are still checked."""
    params = {"mask": jnp.array([0.0, -jnp.inf]), "w": jnp.ones(2)}
    labels = {"mask": "frozen", "w": "trained"}
    frozen = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(0.1)}, labels)
    optimizer = loss_scaled(frozen, 1.0, on_nonfinite_update="skip", skip=skip)
    step, opt_state = jax.jit(optimizer.apply_gradients, donate_argnums=(1, 2)), optimizer.init(params)
    for n, size in enumerate((1.0, 1e21, 1.0)):
        before = jax.device_get((params, opt_state))
        params, opt_state = step({"mask": jnp.zeros(2), "w": jnp.full(2, size)}, opt_state, params)
        assert (_bits(params) == _bits(before[0])) == (n == 1)
    assert opt_state.nonfinite_state == (1, 0, 0, 0)
    assert np.asarray(params["mask"]).tolist() == [0.0, -np.inf]


@pytest.mark.parametrize("jitted", [True, False])
def test_optimizers_that_hold_infinity_from_the_start(jitted):
    """`lbfgs` and `reduce_on_plateau` step as without the option, bit for bit."""

    def loss(weights):
        return ((weights - 3.0) ** 2).sum()

    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    for inner in (plateau, optax.lbfgs()):
        ends = []
        for reaction in ("ignore", "skip"):
            optimizer = loss_scaled(inner, 1.0, on_nonfinite_update=reaction)

            def step(weights, opt_state, optimizer=optimizer, inner=inner):
                value, grads = jax.value_and_grad(loss)(weights)
                line_search = {"grad": grads, "value_fn": loss} if inner is not plateau else {}
                return optimizer.apply_gradients(grads, opt_state, weights, value=value, **line_search)

            step = jax.jit(step) if jitted else step
            weights, opt_state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
            for _ in range(3):
                weights, opt_state = step(weights, opt_state)
            ends.append(_bits((weights, opt_state.inner_state)))
        assert ends[0] == ends[1]
        assert opt_state.nonfinite_state == (0, 0, 0, 0)


def test_a_cause_that_lasts_is_an_error():
    """Adam with `eps=0` and a gradient of zero makes NaN at every step, which is undone at every step."""
    optimizer = loss_scaled(optax.adam(0.1, eps=0.0), POLICY, on_nonfinite_update="skip")
    params = jnp.ones(2)
    step, opt_state = jax.jit(optimizer.apply_gradients), optimizer.init(params)
    for _ in range(19):
        params, opt_state = step(jnp.array([0.0, 1.0]), opt_state, params)
        check_nonfinite_streak(POLICY, opt_state.nonfinite_state)
    params, opt_state = step(jnp.array([0.0, 1.0]), opt_state, params)
    with pytest.raises(NonfiniteStreakError, match=r"the last 20 updates in a row .* look for eps=0"):
        check_nonfinite_streak(POLICY, opt_state.nonfinite_state)
    assert params.tolist() == [1.0, 1.0]
    assert get_scale_state(opt_state).steps == 0
    text = diagnose(POLICY, opt_state.scale_state, nonfinite=opt_state.nonfinite_state)
    assert "20 updates were undone" in text


def test_an_overflow_is_not_an_update():
    """It lowers the scale, and neither counts nor ends a streak; the outcome of a step has its cause."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip")
    params = {"w": jnp.ones(2)}
    step, opt_state = jax.jit(_step(optimizer, "update")), optimizer.init(params)
    streaks, infos = [], []
    for size in (1e21, jnp.inf, jnp.nan, 1e21, 1.0):
        before = opt_state
        params, opt_state = step(params, opt_state, jnp.float32(size))
        counts = before.nonfinite_state, opt_state.nonfinite_state
        streaks.append(int(counts[1].update_streak))
        undone = counts[1].updates > counts[0].updates
        infos.append(step_info(before.scale_state, opt_state.scale_state, nonfinite_update=undone))
    assert streaks == [1, 1, 1, 2, 0]
    assert [bool(info.applied) for info in infos] == [False] * 4 + [True]
    assert [bool(info.overflowed) for info in infos] == [False, True, True, False, False]
    assert [bool(info.nonfinite_update) for info in infos] == [True, False, False, True, False]
    assert opt_state.scale_state.loss_scale == 2.0**8
    assert opt_state.scale_state.steps == 3


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_a_window_is_dropped_if_its_step_is_undone(drop, skip):
    """The next one starts clean; an overflow in the same call still lowers the scale."""
    settings = {"accumulation_steps": 2, "drop": drop, "skip": skip, "guard": SpikeGuard()}
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip", **settings)
    params = {"w": jnp.ones(2)}
    step, opt_state = jax.jit(_step(optimizer, "apply_gradients")), optimizer.init(params)
    start = _bits((params, opt_state.inner_state, opt_state.guard_state))
    for size in (1.0, 1e22):
        params, opt_state = step(params, opt_state, jnp.float32(size))
    assert _bits((params, opt_state.inner_state, opt_state.guard_state)) == start
    assert not opt_state.window.stepped
    assert opt_state.nonfinite_state == (1, 1, 0, 0)
    assert opt_state.scale_state.steps == (0 if drop == "window" else 1)
    for size in (1.0, 1.0):
        params, opt_state = step(params, opt_state, jnp.float32(size))
    assert opt_state.window.stepped
    assert opt_state.nonfinite_state == (1, 0, 0, 0)
    if drop == "micro_batch":
        scale_before = opt_state.scale_state.loss_scale
        for size in (1e22, jnp.inf):
            params, opt_state = step(params, opt_state, jnp.float32(size))
        assert opt_state.nonfinite_state == (2, 1, 0, 0)
        assert opt_state.scale_state.loss_scale < scale_before


def test_raise_names_the_array():
    """A parameter or a part of the inner state, once it was written; the step before it raises nothing."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="raise")
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    params, opt_state = _step(optimizer, "update")(params, optimizer.init(params), jnp.float32(1.0))
    params, opt_state = _step(optimizer, "apply_gradients")(params, opt_state, jnp.inf)  # an overflow is skipped
    for way in WAYS:
        with pytest.raises(
            NonfiniteUpdateError, match=r"^inner_state\[0\]\.nu\['b'\] became NaN or infinite in a step"
        ):
            _step(optimizer, way)(params, opt_state, jnp.float32(1e21))
    large = loss_scaled(optax.sgd(1e9), POLICY, on_nonfinite_update="raise")
    half = {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(NonfiniteUpdateError, match=r"^params\['w'\] became NaN"):
        large.apply_gradients({"w": jnp.ones(2)}, large.init(half), half)
    masked = {"w": jnp.array([1.0, -jnp.inf])}
    small = loss_scaled(optax.sgd(0.1), POLICY, on_nonfinite_update="raise")
    small.apply_gradients({"w": jnp.ones(2)}, small.init(masked), masked)


def test_raise_is_refused_in_a_compiled_step():
    """The error names what works there; without `jit` the same step raises for its reason."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="raise")
    params = {"w": jnp.ones(2)}
    for way in WAYS:
        step = jax.jit(_step(optimizer, way))
        with pytest.raises(
            PolicyError, match=r"cannot raise in a compiled step; pass 'skip', and .*check_nonfinite_st"
        ):
            step(params, optimizer.init(params), jnp.float32(1e21))
        with jax.disable_jit(), pytest.raises(NonfiniteUpdateError, match="inner_state"):
            step(params, optimizer.init(params), jnp.float32(1e21))


def _mesh():
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def _own_parts(size, victim):
    """Return a gradient for each device's part of the parameters, a huge one on one device."""
    return jnp.where(jnp.arange(DEVICES) == victim, size, 0.25).astype(jnp.float32)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("skip", ["cond", "select"])
def test_one_bad_device_undoes_the_step_on_all(check_vma, skip):
    """Where each of eight devices owns a part of parameters and state; bit for bit as without that step."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, axis_name="data", skip=skip, on_nonfinite_update="skip")
    specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), optimizer.init(jnp.ones(DEVICES)))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=_mesh(),
        in_specs=(P("data"), specs, P("data")),
        out_specs=(P("data"), specs),
        check_vma=check_vma,
    )
    def step(params, opt_state, grads):
        return optimizer.apply_gradients(grads * opt_state.scale_state.loss_scale, opt_state, params)

    ends = []
    for sizes in ((0.25, 1e21, 0.25, 0.25), (0.25, 0.25, 0.25)):
        params, opt_state = jnp.ones(DEVICES), optimizer.init(jnp.ones(DEVICES))
        for n, size in enumerate(sizes):
            before = _bits((params, _without_counts(opt_state)))
            params, opt_state = step(params, opt_state, _own_parts(size, victim=3 + n))
            assert (_bits((params, _without_counts(opt_state))) == before) == (size > 1.0)
        ends.append(_bits((params, _without_counts(opt_state))))
        for leaf in opt_state.nonfinite_state:
            assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert ends[0] == ends[1]


def test_pmap_undoes_the_step_on_all_devices():
    """Where each device has its own gradients and reduces them itself."""
    mean = optax.GradientTransformation(lambda _: (), lambda grads, state, _: (lax.pmean(grads, "data"), state))
    inner = optax.chain(mean, optax.adam(0.1))
    optimizer = loss_scaled(inner, 1.0, axis_name="data", on_nonfinite_update="skip")
    step = jax.pmap(optimizer.apply_gradients, axis_name="data")
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), tree)  # noqa: E731
    params, opt_state = stack(jnp.ones(2)), stack(optimizer.init(jnp.ones(2)))
    for size in (1.0, 1e22, 1.0):
        before = _bits(params)
        grads = jnp.full((DEVICES, 2), 0.1).at[5].set(size)
        params, opt_state = step(grads, opt_state, params)
        assert (_bits(params) == before) == (size > 1.0)
    assert opt_state.nonfinite_state.updates.tolist() == [1] * DEVICES


@pytest.mark.parametrize("way", WAYS)
def test_sharded_arrays_have_one_decision(way):
    """Under sharded `jit`, with donated buffers and one compilation."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip")
    place = functools.partial(jax.device_put, device=NamedSharding(_mesh(), P("data")))
    params = place({"w": jnp.ones(DEVICES)})
    opt_state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        grads = jax.tree.map(lambda leaf: leaf * opt_state.scale_state.loss_scale, grads)
        if way == "apply_gradients":
            return optimizer.apply_gradients(grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for n, size in enumerate((0.25, 1e21, 0.25)):
        before = _bits((params, opt_state.inner_state))
        params, opt_state = step(params, opt_state, place({"w": _own_parts(size, victim=n)}))
        assert (_bits((params, opt_state.inner_state)) == before) == (size > 1.0)
    assert opt_state.nonfinite_state == (1, 0, 0, 0)
    assert step._cache_size() == 1


def test_devices_that_may_differ_are_refused():
    """Parameters that differ between the devices without an axis over which to combine the decision."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, on_nonfinite_update="skip")
    opt_state = optimizer.init(jnp.ones(1))

    @functools.partial(jax.shard_map, mesh=_mesh(), in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    def step(params, opt_state):
        return optimizer.apply_gradients(jnp.ones(1), opt_state, params)

    with pytest.raises(ValueError, match=r"the parameters differ along mesh axis 'data' .* pass axis_name='data' to"):
        step(jnp.ones(DEVICES), opt_state)


def test_in_a_scan_of_an_ensemble():
    """Under `scan` and `vmap` each member has counters of its own."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip")
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)  # noqa: E731
    step = jax.vmap(_step(optimizer, "apply_gradients"))
    sizes = jnp.array([[1.0, 1e21], [1.0, 1.0], [1e21, 1e21]])
    start = stack(({"w": jnp.ones(2)}, optimizer.init({"w": jnp.ones(2)})))
    (_, opt_state), _ = jax.jit(lambda carry: lax.scan(lambda carry, size: (step(*carry, size), None), carry, sizes))(
        start
    )
    assert opt_state.nonfinite_state.updates.tolist() == [1, 2]
    assert opt_state.nonfinite_state.update_streak.tolist() == [1, 1]


def test_with_x64_strict_promotion_and_debugging_flags():
    """A gradient with a square in float64 is not an error, and our own infinities are not taken for one."""
    with enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.debug_infs(True), jax.debug_nans(True):
        inner = optax.scale(jnp.float64(-1.0))
        optimizer = loss_scaled(inner, 1.0, on_nonfinite_update="skip", on_nonfinite_loss="hold")
        params = jnp.ones(2, jnp.float64)
        step = jax.jit(optimizer.apply_gradients)
        params, opt_state = step(jnp.full(2, 1e100), optimizer.init(params), params, value=jnp.float64(1.0))
        assert params[0] != 1.0
        assert opt_state.nonfinite_state == (0, 0, 0, 0)
        assert {leaf.dtype.name for leaf in opt_state.nonfinite_state} == {"int32"}


def test_nothing_waits(monkeypatch):
    """A compiled step returns while its gradients are computed, and an eager step reads no array."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip", on_nonfinite_loss="hold")
    params = jnp.ones(4)
    step, opt_state = jax.jit(optimizer.apply_gradients), optimizer.init(params)
    step(params, opt_state, params, value=jnp.float32(1.0))
    grads = late_gradients()
    step(grads, opt_state, params, value=jnp.float32(1.0))
    assert not grads.is_ready()
    with reading_refused(monkeypatch):
        optimizer.apply_gradients(params, opt_state, params, value=jnp.float32(1.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_a_loss_that_is_not_finite_keeps_the_scale(way, transform):
    """Bit for bit as without that step, whether its gradients are finite or not; an overflow still lowers the scale."""
    ends = []
    for steps in (
        [(1.0, 1.0), (jnp.nan, jnp.nan), (jnp.inf, 1.0), (jnp.inf, jnp.inf), (1.0, jnp.inf), (1.0, 1.0)],
        [(1.0, 1.0), (1.0, jnp.inf), (1.0, 1.0)],
    ):
        optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_loss="hold", guard=SpikeGuard())
        params = {"w": jnp.ones(2)}
        step = transform(functools.partial(_step_with_loss, optimizer, way))
        opt_state, streaks = optimizer.init(params), []
        for value, size in steps:
            params, opt_state = step(params, opt_state, jnp.float32(value), jnp.float32(size))
            streaks.append(int(opt_state.nonfinite_state.loss_streak))
        ends.append(_bits((params, _without_counts(opt_state))))
    assert ends[0] == ends[1]
    assert opt_state.nonfinite_state == (0, 0, 0, 0)
    assert opt_state.scale_state.loss_scale == 2.0**9


def test_losses_are_counted_and_limited():
    """`max_overflow_streak` limits them too, and the diagnosis distinguishes them from overflows."""
    policy = DynamicScaling(init_scale=2.0**10, max_overflow_streak=3)
    optimizer = loss_scaled(optax.sgd(0.1), policy, on_nonfinite_loss="hold")
    params = {"w": jnp.ones(2)}
    opt_state = optimizer.init(params)
    for _ in range(3):
        check_nonfinite_streak(policy, opt_state.nonfinite_state)
        before = opt_state
        params, opt_state = _step(optimizer, "update", value=jnp.nan)(params, opt_state, jnp.nan)
        held = opt_state.nonfinite_state.losses > before.nonfinite_state.losses
        info = step_info(before.scale_state, opt_state.scale_state, nonfinite_loss=held)
        assert (bool(info.applied), bool(info.overflowed), bool(info.nonfinite_loss)) == (False, False, True)
    assert opt_state.nonfinite_state == (0, 0, 3, 3)
    assert _bits(opt_state.scale_state) == _bits(optimizer.init(params).scale_state)
    with pytest.raises(NonfiniteStreakError, match=r"the last 3 losses .* reaches max_overflow_streak=3"):
        check_nonfinite_streak(policy, opt_state.nonfinite_state)
    assert "3 losses were NaN or infinite" in diagnose(
        policy, opt_state.scale_state, nonfinite=opt_state.nonfinite_state
    )


@pytest.mark.parametrize("value", [None, jnp.ones(2)], ids=["missing", "not a scalar"])
def test_holding_needs_the_loss(value):
    """The error shows the call."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, on_nonfinite_loss="hold")
    params = {"w": jnp.ones(2)}
    extra = {} if value is None else {"value": value}
    for way in WAYS:
        with pytest.raises(TypeError, match=r"on_nonfinite_loss='hold' needs the loss, .* params, value=loss\)"):
            _step(optimizer, way, **extra)(params, optimizer.init(params), 1.0)


def test_the_wrapped_optimizer_still_gets_the_loss():
    """As `value`, which optimizers of optax take."""
    optimizer = loss_scaled(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), 1.0, on_nonfinite_loss="hold"
    )
    params = jnp.ones(2)
    _, opt_state = optimizer.apply_gradients(params, optimizer.init(params), params, value=jnp.float32(0.5))
    assert opt_state.inner_state[1].best_value == 0.5
    _, after = optimizer.apply_gradients(params, opt_state, params, value=jnp.nan)
    assert _bits(after.inner_state) == _bits(opt_state.inner_state)


def test_a_micro_batch_with_a_loss_that_is_not_finite_is_left_out():
    """It does not count as a step of the policy; whole windows cannot be held."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2, drop="micro_batch", on_nonfinite_loss="hold")
    params = {"w": jnp.ones(2)}
    opt_state = optimizer.init(params)
    for value in (1.0, jnp.nan):
        params, opt_state = _step(optimizer, "apply_gradients", value=value)(params, opt_state, 1.0 * value)
    assert opt_state.window.stepped
    np.testing.assert_allclose(params["w"], [0.9, 0.999], rtol=1e-6)
    assert opt_state.scale_state.steps == 1
    assert opt_state.nonfinite_state == (0, 0, 1, 1)
    with pytest.raises(
        PolicyError, match="cannot drop a window for the loss of a micro-batch; pass drop='micro_batch'"
    ):
        loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2, on_nonfinite_loss="hold")


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_on_one_device_holds_all(check_vma):
    """The flag is combined over `axis_name`; one NaN of eight."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, axis_name="data", on_nonfinite_loss="hold")
    specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), optimizer.init(jnp.ones(DEVICES)))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=_mesh(),
        in_specs=(P("data"), specs, P("data")),
        out_specs=(P("data"), specs),
        check_vma=check_vma,
    )
    def step(params, opt_state, losses):
        return optimizer.apply_gradients(params, opt_state, params, value=losses[0])

    params, opt_state = jnp.ones(DEVICES), optimizer.init(jnp.ones(DEVICES))
    losses = jnp.ones(DEVICES)
    for bad in (losses.at[3].set(jnp.nan), losses, losses.at[7].set(jnp.inf)):
        before = _bits((params, _without_counts(opt_state)))
        params, opt_state = step(params, opt_state, bad)
        assert (_bits((params, _without_counts(opt_state))) == before) == (bad is not losses)
    assert opt_state.nonfinite_state == (0, 0, 2, 1)


def test_losses_of_devices_that_may_differ_are_refused():
    """The error names the remedy, which works."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, on_nonfinite_loss="hold")
    params = jnp.ones(2)

    def step(reduce, losses):
        value = lax.pmean(losses[0], "data") if reduce else losses[0]
        return optimizer.apply_gradients(params, optimizer.init(params), params, value=value)[1].nonfinite_state

    def on_devices(reduce):
        return jax.jit(jax.shard_map(functools.partial(step, reduce), mesh=_mesh(), in_specs=P("data"), out_specs=P()))

    losses = jnp.ones(DEVICES).at[3].set(jnp.nan)
    with pytest.raises(ValueError, match=r"the losses differ along .* pass value=jax.lax.pmean\(loss, 'data'\)"):
        on_devices(False)(losses)
    assert on_devices(True)(losses) == (0, 0, 1, 1)


def _loss(weight, x):
    """Return a loss with float16 gradients that overflow above a scale of about 2**12."""
    return jnp.sum(weight.astype(jnp.float16) * x.astype(jnp.float16) * jnp.float16(8)).astype(jnp.float32)


@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_value_and_grad_tells_the_loss_from_an_overflow(transform):
    """One line updates the policy: a NaN loss leaves the state as it was, an overflow lowers the scale."""
    policy = DynamicScaling(init_scale=2.0**20)

    @transform
    def step(weights, state, x):
        result = value_and_grad(_loss, on_nonfinite_loss="hold")(state, weights, x)
        weights = select(result.grads_finite, weights - 0.1 * result.grads, weights)
        return weights, select(result.loss_finite, policy.update(state, result.grads_finite), state), result

    state, weights = init_state(policy), jnp.ones(4)
    for bad in (jnp.nan, jnp.inf):
        after, held, result = step(weights, state, jnp.full(4, bad))
        assert (bool(result.grads_finite), bool(result.loss_finite)) == (False, False)
        assert _bits((after, held)) == _bits((weights, state))
    after, lowered, result = step(weights, state, jnp.full(4, 1.5))
    assert (bool(result.grads_finite), bool(result.loss_finite)) == (False, True)
    assert lowered.loss_scale == 2.0**19
    constant = value_and_grad(lambda weights: weights.sum() + jnp.inf, on_nonfinite_loss="hold")(state, weights)
    assert bool(jnp.isfinite(constant.grads).all())
    assert not constant.grads_finite


def test_value_and_grad_combines_the_loss_over_an_axis():
    """All of eight devices hold where one loss is NaN; without the axis the error names it."""

    def on_devices(**axis):
        def step(xs):
            return value_and_grad(_loss, on_nonfinite_loss="hold", **axis)(init_state(1.0), jnp.ones(4), xs)[3:]

        return jax.jit(jax.shard_map(step, mesh=_mesh(), in_specs=P("data"), out_specs=P()))

    xs = jnp.ones(4 * DEVICES)
    assert [bool(flag) for flag in on_devices(axis_name="data")(xs)] == [True, True]
    assert [bool(flag) for flag in on_devices(axis_name="data")(xs.at[9].set(jnp.nan))] == [False, False]
    with pytest.raises(ValueError, match="axis_name='data'"):
        on_devices()(xs)


@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_retries_stop_at_once(transform):
    """A loss that is NaN is tried once, and the scale stays; an overflow is retried as before."""
    policy = DynamicScaling(init_scale=2.0**20)
    state, weights = init_state(policy), jnp.ones(4)
    tries = []

    def loss(weights, x):
        value = _loss(weights, x)
        jax.debug.callback(lambda _: tries.append(1), value)
        return value

    for reaction, x, count in (("back_off", jnp.nan, 9), ("hold", jnp.nan, 1), ("hold", 1.5, 9)):
        tries.clear()
        differentiate = transform(retrying_value_and_grad(loss, policy, retries=8, on_nonfinite_loss=reaction))
        gradients, after = differentiate(state, weights, jnp.full(4, x))
        jax.effects_barrier()
        assert len(tries) == count
        assert (after.loss_scale == 2.0**20) == (count == 1)
        assert bool(gradients.grads_finite) == (x == 1.5)
    plain = retrying_value_and_grad(_loss, policy, retries=8)(state, weights, jnp.full(4, 1.5))
    assert _bits((gradients[:4], after)) == _bits(plain)


def test_a_saved_state_continues():
    """Through the plain dict, flax, and a pickle; with counters from zero where they were not saved."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip", guard=SpikeGuard())
    params = {"w": jnp.ones(2)}
    begun = opt_state = optimizer.init(params)
    for size in (1.0, 1e21):
        params, opt_state = _step(optimizer, "update")(params, opt_state, jnp.float32(size))
    counters = opt_state.nonfinite_state
    assert counters == (1, 1, 0, 0)
    saved = state_to_dict(opt_state.scale_state, POLICY, guard=opt_state.guard_state, nonfinite=counters)
    restored = load_scale_state((begun,), json.loads(json.dumps(saved)), POLICY)[0]
    for name in ("scale_state", "guard_state", "nonfinite_state"):
        assert _bits(getattr(restored, name)) == _bits(getattr(opt_state, name))
    del saved["nonfinite"]
    assert load_scale_state(opt_state, saved, POLICY).nonfinite_state == (0, 0, 0, 0)
    assert _bits(pickle.loads(pickle.dumps(jax.device_get(opt_state)))) == _bits(opt_state)
    again = flax.serialization.from_state_dict(begun, flax.serialization.to_state_dict(opt_state))
    assert _bits(again) == _bits(opt_state)


def test_a_run_changes_its_setting():
    """A state without counters continues with them, from Orbax or flax as it was saved, and the other way round."""
    plain = loss_scaled(optax.adam(0.1), POLICY)
    skipping = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip")
    params = {"w": jnp.ones(2)}
    opt_state = plain.init(params)
    assert opt_state._fields == ("scale_state", "inner_state", "window")
    assert opt_state.nonfinite_state is None
    with pytest.raises(PolicyError, match=r"'skip' and .* do not fit a state made without counters"):
        skipping.update(params, opt_state, params)
    counted = skipping.init(params)._replace(**opt_state._asdict())
    with pytest.raises(PolicyError, match=r"'ignore' and .* do not fit a state made with counters"):
        plain.update(params, counted, params)
    _, counted = skipping.update(params, counted, params)
    assert isinstance(counted, CountedLossScaledState)
    assert get_scale_state((counted,)).steps == 1


def test_a_step_is_exported():
    """`jax.export` writes and reads the counters."""
    inner = optax.GradientTransformation(lambda _: (), lambda grads, state, _: (grads, state))
    optimizer = loss_scaled(inner, POLICY, on_nonfinite_update="skip", on_nonfinite_loss="hold")
    params = jnp.ones(2)
    step = jax.jit(lambda opt_state: optimizer.apply_gradients(params, opt_state, params, value=jnp.nan)[1])
    exported = jax.export.deserialize(jax.export.export(step)(optimizer.init(params)).serialize())
    assert exported.call(optimizer.init(params)).nonfinite_state == (0, 0, 1, 1)


def test_the_check_of_train_steps_accepts_both():
    """Planned overflows are neither."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip", on_nonfinite_loss="hold")

    @jax.jit
    def step(carry, x):
        params, opt_state = carry

        def scaled_loss(params):
            value = ((params * x - 1.0) ** 2).sum()
            return scale(value, get_scale_state(opt_state)), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        return optimizer.apply_gradients(grads, opt_state, params, value=value)[::1]

    check_train_step(step, (jnp.ones(3), optimizer.init(jnp.ones(3))), [jnp.arange(3.0)] * 6)


@pytest.mark.parametrize(("name", "value"), [("on_nonfinite_update", "warn"), ("on_nonfinite_loss", True)])
def test_other_reactions_are_refused(name, value):
    """The error names the allowed values."""
    with pytest.raises(PolicyError, match=f"{name}={value!r} must be"):
        loss_scaled(optax.sgd(0.1), POLICY, **{name: value})
    if name == "on_nonfinite_loss":
        with pytest.raises(PolicyError, match=f"{name}={value!r} must be"):
            value_and_grad(_loss, on_nonfinite_loss=value)


def test_the_counters_are_those_of_the_core():
    """Step by step, with both reactions."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, on_nonfinite_update="skip", on_nonfinite_loss="hold")
    params, expected = {"w": jnp.ones(2)}, init_nonfinite_state()
    step = jax.jit(functools.partial(_step_with_loss, optimizer, "update"))
    opt_state = optimizer.init(params)
    for value, size in [(1.0, 1e21), (jnp.nan, 1e21), (1.0, jnp.inf), (1.0, 1e21), (jnp.inf, 1.0), (1.0, 1.0)]:
        params, opt_state = step(params, opt_state, jnp.float32(value), jnp.float32(size))
        finite = bool(np.isfinite(value))
        stepped = finite and bool(np.isfinite(size))
        expected = count_nonfinite(expected, loss_finite=finite, stepped=stepped, update_finite=size < 1e20)
        assert opt_state.nonfinite_state == expected
    assert expected[:3] == (2, 0, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_update_needs_the_parameters(compiled):
    """Finite updates in float32 may be infinite as float16 weights; the message shows the call."""
    optimizer = loss_scaled(optax.sgd(1e4), "none", on_nonfinite_update="skip")
    params = jnp.ones(2, jnp.float16)
    grads, opt_state = jnp.full(2, 6e4, jnp.float16), optimizer.init(params)
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    with pytest.raises(TypeError, match=r"params is missing, .*; call optimizer\.update\(grads, opt_state, params\)"):
        update(grads, opt_state)
    updates, opt_state = update(grads, opt_state, params)
    assert optax.apply_updates(params, updates).tolist() == [1.0, 1.0]
    assert int(opt_state.nonfinite_state.updates) == 1

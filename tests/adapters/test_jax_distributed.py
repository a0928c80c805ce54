"""Steps over eight devices: an overflow on one device skips the step on all devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_jax import all_finite, get_scale_state, init_state, loss_scaled, scale, select, value_and_grad
from tests.adapters.jax_reading import step_of
from tests.core.guarded_run import GUARD
from tests.jax_names import reshard, vary

STEPS = 100
DEVICES = 8
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ADAM = optax.adam(1e-2)
MEAN = optax.GradientTransformation(lambda _: (), lambda grads, state, _=None: (lax.pmean(grads, "data"), state))
REDUCING = optax.chain(MEAN, ADAM)
PARAMS = {"w": jnp.full((8, 8), 0.1), "b": jnp.zeros(8)}
VICTIMS = np.minimum(np.random.default_rng(0).integers(0, 2 * DEVICES, STEPS), DEVICES)
"""The device that overflows at each step; DEVICES means that no device overflows."""
EXPECTED = simulate(POLICY, list(VICTIMS == DEVICES))


def _mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,))


def _batch(victim):
    """Return two inputs per device, with an infinity in an input of the victim."""
    images = np.linspace(0.1, 1.0, 2 * DEVICES * 8, dtype=np.float32).reshape(2 * DEVICES, 8)
    if victim < DEVICES:
        images[2 * victim, 0] = np.inf
    return images


def _loss(params, images):
    return jnp.mean((images @ params["w"] + params["b"] - 1.0) ** 2)


def _run(step, params, opt_state, place=lambda images: images):
    """Train; check at each step that a skip leaves the parameters unchanged, and that the scale follows the policy."""
    for n, victim in enumerate(VICTIMS):
        before = jax.device_get(params)
        params, opt_state = step(params, opt_state, place(_batch(victim)))
        state = get_scale_state(opt_state)
        assert np.ravel(state.loss_scale)[0] == EXPECTED.loss_scale_after[n]
        same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True)]
        assert all(same) == (victim < DEVICES)
    return params, opt_state


def _step_of(optimizer, way="apply_gradients", mark=lambda params: params, gather=lambda params: params):
    """Return a step by the optimizer; `mark` and `gather` change the parameters before and in the loss."""

    def step(params, opt_state, images):
        loss = lambda params: scale(_loss(gather(params), images), get_scale_state(opt_state))  # noqa: E731
        return step_of(optimizer, way)(params, opt_state, jax.grad(loss)(mark(params)))

    return step


def _step_by_hand(params, opt_state, images):
    """Take a step with `value_and_grad` and `select`."""
    state, old = opt_state.scale_state, (params, opt_state.inner_state)
    _, _, grads, finite = value_and_grad(_loss, axis_name="data")(state, params, images)
    updates, inner_state = REDUCING.update(grads, opt_state.inner_state)
    params, inner_state = select(finite, (optax.apply_updates(params, updates), inner_state), old)
    return params, opt_state._replace(scale_state=POLICY.update(state, finite), inner_state=inner_state)


@functools.cache
def _single_device_run():
    optimizer = loss_scaled(ADAM, POLICY)
    return _run(jax.jit(_step_of(optimizer)), PARAMS, optimizer.init(PARAMS))[0]


def _check_equal_copies(tree):
    for leaf in jax.tree.leaves(tree):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def _assert_close(params, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, expected)


def _shard_map(step, check_vma=True):
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
    return jax.jit(jax.shard_map(step, mesh=_mesh(), check_vma=check_vma, **specs))


def _pmap(step):
    mapped = jax.pmap(step, axis_name="data", in_axes=(None, None, 0), out_axes=None)
    return lambda params, opt_state, images: mapped(params, opt_state, images.reshape(DEVICES, 2, 8))


_of = functools.partial(loss_scaled, REDUCING, POLICY, axis_name="data")
_varying = functools.partial(_step_of, mark=lambda params: vary(params, "data"))
MAPPED = {
    "value_and_grad in shard_map": lambda: _shard_map(_step_by_hand),
    "value_and_grad in shard_map without check_vma": lambda: _shard_map(_step_by_hand, check_vma=False),
    "value_and_grad in pmap": lambda: _pmap(_step_by_hand),
    # The updates vary over fewer axes than the gradients, because the optimizer inside reduces them.
    "apply_gradients in shard_map": lambda: _shard_map(_varying(_of())),
    "apply_gradients in pmap": lambda: _pmap(_step_of(_of())),
    "update in shard_map by select": lambda: _shard_map(_varying(_of(skip_by="select"), "update")),
}


@pytest.mark.parametrize("make_step", MAPPED.values(), ids=MAPPED)
def test_devices_decide_together(make_step):
    """With `axis_name`, all devices take the same steps as one device with the whole batch, and stay equal."""
    params, opt_state = _run(make_step(), PARAMS, _of().init(PARAMS))
    _check_equal_copies((params, opt_state))
    _assert_close(params, _single_device_run())


@pytest.mark.parametrize(("axis_type", "way"), [(AxisType.Auto, "apply_gradients"), (AxisType.Explicit, "update")])
def test_sharded_jit(axis_type, way):
    """Data and parameters that are sharded over a mesh need no `axis_name`, because their reductions are global."""
    mesh, optimizer = _mesh(axis_type), loss_scaled(ADAM, POLICY, max_norm=1e3)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    # The matrix product of two arrays sharded alike needs one of them whole.
    whole = lambda p: reshard(p, P()) if axis_type is AxisType.Explicit else p  # noqa: E731
    step = jax.jit(_step_of(optimizer, way, gather=functools.partial(jax.tree.map, whole)))
    with jax.set_mesh(mesh):
        params = jax.tree.map(place, PARAMS)
        params, opt_state = _run(step, params, jax.jit(optimizer.init)(params), place)
    assert params["w"].sharding.spec[0] == "data"
    _check_equal_copies(get_scale_state(opt_state))
    _assert_close(params, _single_device_run())


def test_a_sharded_run_compiles_once():
    """The first state has the shardings that a step returns."""
    mesh = _mesh()
    shardings = {"rows": NamedSharding(mesh, P("data")), "all": NamedSharding(mesh, P())}
    params = jax.device_put({"rows": jnp.ones((8, 4)), "all": jnp.ones(3)}, shardings)
    optimizer = loss_scaled(ADAM, POLICY, max_norm=1.0, accumulation_steps=2)
    opt_state, step = optimizer.init(params), jax.jit(optimizer.apply_gradients, donate_argnums=(1, 2))
    for _ in range(3):
        params, opt_state = step(jax.tree.map(jnp.ones_like, params), opt_state, params)
    assert step._cache_size() == 1
    assert get_scale_state(opt_state).loss_scale.sharding == NamedSharding(mesh, P())


def test_rows_of_parameters_in_shard_map():
    """If each device owns a row of the weights, only the flag must be combined."""
    optimizer, start = loss_scaled(ADAM, POLICY, axis_name="data"), jnp.ones((8, 8))
    specs = P("data"), jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), optimizer.init(start))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=_mesh(), in_specs=(*specs, P("data")), out_specs=specs)
    def step(rows, opt_state, inputs):
        grads = jax.grad(lambda rows: scale(jnp.sum((rows - inputs) ** 2), get_scale_state(opt_state)))(rows)
        return optimizer.apply_gradients(grads, opt_state, rows)

    _run(step, start, optimizer.init(start), lambda images: images[::2])


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_check_one_norm(check_vma):
    """With `axis_name` the guard compares the norm over all devices; a spike on one device skips the step on all."""
    optimizer = loss_scaled(REDUCING, POLICY, axis_name="data", guard=GUARD)

    def step(params, opt_state, norms):
        return optimizer.apply_gradients(norms * get_scale_state(opt_state).loss_scale, opt_state, params)

    step, params = _shard_map(step, check_vma), jnp.array([0.5])
    opt_state, expected = optimizer.init(params), GUARD.init_state()
    for n in range(24):
        before, norms = params, np.ones(DEVICES, np.float32)
        norms[n % DEVICES] = {10: 50.0, 11: 50.0, 12: np.inf, 20: 1e3}.get(n, 2.0)
        params, opt_state = step(params, opt_state, norms)
        accepted, expected = GUARD.check(expected, np.sqrt(np.sum(norms**2)))
        np.testing.assert_allclose(opt_state.guard_state, expected, rtol=1e-5)
        assert get_scale_state(opt_state).skipped_steps == (n >= 12)
        assert (params != before) == accepted
    _check_equal_copies((params, opt_state))
    assert expected.spikes == 3


def _mesh_of_two():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_all_finite_over_axes():
    """`all_finite` combines the flag over several axes."""
    specs = {"mesh": _mesh_of_two(), "in_specs": P("data", "model"), "out_specs": P()}
    check = jax.jit(jax.shard_map(lambda x: all_finite(x, axis_name=("data", "model")), **specs))
    assert check(jnp.ones((4, 2)))
    assert not check(jnp.ones((4, 2)).at[3, 1].set(jnp.nan))


def test_a_forgotten_axis_name():
    """Without `axis_name`, `shard_map` raises an error if the devices would decide differently."""
    optimizer = loss_scaled(ADAM, POLICY)
    with pytest.raises(ValueError, match=r"differ along mesh axis 'data'.*axis_name='data'"):
        _shard_map(_varying(optimizer))(PARAMS, optimizer.init(PARAMS), _batch(DEVICES))


@pytest.mark.parametrize("axis_name", [None, "data", ("model",)])
def test_a_forgotten_second_axis(axis_name):
    """A batch that is split over two axes needs both names."""

    def step(axis_name):
        differentiated = value_and_grad(_loss, axis_name=axis_name)
        specs = {"in_specs": (P(), P(), P(("data", "model"))), "out_specs": P()}
        grads_of = lambda state, *args: differentiated(state, *args).grads  # noqa: E731
        return jax.jit(jax.shard_map(grads_of, mesh=_mesh_of_two(), **specs))

    arguments = init_state(POLICY), PARAMS, jnp.asarray(_batch(DEVICES))
    with pytest.raises(ValueError, match=r"losses differ along mesh axis .*, with every axis to combine"):
        step(axis_name)(*arguments)
    _assert_close(step(("data", "model"))(*arguments), jax.grad(_loss)(*arguments[1:]))

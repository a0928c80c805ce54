"""An overflow on one of eight devices skips the step on all devices, in 200 steps with random overflows."""

import contextlib
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
from tests.jax_names import reshard, vary

STEPS = 200
DEVICES = 8
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ADAM = optax.adam(1e-2)
MEAN = optax.GradientTransformation(lambda _: (), lambda grads, state, _=None: (lax.pmean(grads, "data"), state))


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


def _params():
    return {"w": jnp.full((8, 8), 0.1), "b": jnp.zeros(8)}


def _check_replicated(tree):
    for leaf in jax.tree.leaves(tree):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


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


def _single_device_run():
    optimizer = loss_scaled(ADAM, POLICY)

    @jax.jit
    def step(params, opt_state, images):
        grads = jax.grad(lambda params: scale(_loss(params, images), get_scale_state(opt_state)))(params)
        return optimizer.apply_gradients(grads, opt_state, params)

    return _run(step, _params(), optimizer.init(_params()))


def _assert_close(params, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_value_and_grad(check_vma):
    """With `axis_name`, gradients are averaged, flags are combined, and the states of all devices stay equal."""
    mesh = _mesh()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()), check_vma=check_vma
    )
    def step(params, carry, images):
        opt_state, scale_state = carry
        out = value_and_grad(_loss, axis_name="data")(scale_state, params, images)
        updates, new_opt_state = ADAM.update(out.grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = select(out.grads_finite, new, (params, opt_state))
        return params, (opt_state, POLICY.update(scale_state, out.grads_finite))

    params, carry = _params(), (ADAM.init(_params()), init_state(POLICY))
    for n, victim in enumerate(VICTIMS):
        params, carry = step(params, carry, _batch(victim))
        assert carry[1].loss_scale == EXPECTED.loss_scale_after[n]
    _check_replicated((params, carry))
    _assert_close(params, _single_device_run()[0])


@pytest.mark.parametrize(("way", "skip_by"), [("apply_gradients", "cond"), ("update", "cond"), ("update", "select")])
def test_shard_map_with_unreduced_gradients(way, skip_by):
    """`axis_name` combines the flags, and the optimizer inside reduces the gradients.

    The updates then vary over fewer axes than the gradients.
    """
    optimizer = loss_scaled(optax.chain(MEAN, ADAM), POLICY, axis_name="data", skip_by=skip_by)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=_mesh(), in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    def step(params, opt_state, images):
        own = vary(params, "data")
        grads = jax.grad(lambda params: scale(_loss(params, images), get_scale_state(opt_state)))(own)
        return step_of(optimizer, way)(params, opt_state, grads)

    params, opt_state = _run(step, _params(), optimizer.init(_params()))
    _check_replicated((params, opt_state))
    _assert_close(params, _single_device_run()[0])


@pytest.mark.parametrize("call", ["value_and_grad", "apply_gradients"])
def test_pmap(call):
    """With `axis_name`, an overflow on one device skips the step on all devices, and their copies stay equal."""
    inner = optax.chain(MEAN, ADAM)
    optimizer = loss_scaled(inner, POLICY, axis_name="data")

    @functools.partial(jax.pmap, axis_name="data")
    def step(params, opt_state, images):
        state, old = opt_state.scale_state, (params, opt_state.inner_state)
        if call == "apply_gradients":
            grads = jax.grad(lambda params: scale(_loss(params, images), state))(params)
            return optimizer.apply_gradients(grads, opt_state, params)
        _, _, grads, finite = value_and_grad(_loss, axis_name="data")(state, params, images)
        updates, inner_state = inner.update(grads, opt_state.inner_state)
        params, inner_state = select(finite, (optax.apply_updates(params, updates), inner_state), old)
        return params, opt_state._replace(scale_state=POLICY.update(state, finite), inner_state=inner_state)

    start = jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), (_params(), optimizer.init(_params())))
    params, opt_state = _run(step, *start, lambda images: images.reshape(DEVICES, 2, 8))
    assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves((params, opt_state)))
    _assert_close(jax.tree.map(lambda leaf: leaf[0], params), _single_device_run()[0])


@pytest.mark.parametrize(
    ("axis_type", "way", "max_norm"),
    [
        *((AxisType.Auto, "apply_gradients", None), (AxisType.Auto, "update", 1e3)),
        *((AxisType.Explicit, "apply_gradients", 1e3), (AxisType.Explicit, "update", None)),
    ],
)
def test_sharded_jit(axis_type, way, max_norm):
    """Data and parameters that are sharded over a mesh need no `axis_name`, because their reductions are global."""
    mesh = _mesh(axis_type)
    optimizer = loss_scaled(ADAM, POLICY, max_norm=max_norm)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))

    @jax.jit
    def step(params, opt_state, images):
        # The matrix product of two arrays sharded alike needs one of them whole.
        whole = lambda p: reshard(p, P()) if axis_type is AxisType.Explicit else p  # noqa: E731
        gathered = functools.partial(jax.tree.map, whole)
        grads = jax.grad(lambda params: scale(_loss(gathered(params), images), get_scale_state(opt_state)))(params)
        return step_of(optimizer, way)(params, opt_state, grads)

    with jax.set_mesh(mesh):
        params = jax.tree.map(place, _params())
        params, opt_state = _run(step, params, jax.jit(optimizer.init)(params), place)
    assert params["w"].sharding.spec[0] == "data"
    _check_replicated(get_scale_state(opt_state))
    _assert_close(params, _single_device_run()[0])


def test_parameters_sharded_inside_shard_map():
    """If each device owns a row of the weights, only the flag must be combined."""
    optimizer = loss_scaled(ADAM, POLICY, axis_name="data")
    start = jnp.ones((8, 8))
    state_specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), optimizer.init(start))
    specs = P("data"), state_specs

    @jax.jit
    @functools.partial(jax.shard_map, mesh=_mesh(), in_specs=(*specs, P("data")), out_specs=specs)
    def step(rows, opt_state, inputs):
        grads = jax.grad(lambda rows: scale(jnp.sum((rows - inputs) ** 2), get_scale_state(opt_state)))(rows)
        return optimizer.apply_gradients(grads, opt_state, rows)

    _run(step, start, optimizer.init(start), lambda images: images[::2])


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"accumulation_steps": 2}])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_one_compilation_serves_a_sharded_run(settings, axis_type):
    """The first state has the shardings that a step returns, so a run compiles once."""
    mesh = _mesh(axis_type)
    is_explicit = axis_type is AxisType.Explicit
    named = [None] if is_explicit else []  # there, the specs that a step returns name every dimension
    shardings = {"rows": NamedSharding(mesh, P("data", *named)), "all": NamedSharding(mesh, P(*named))}
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        params = jax.device_put({"rows": jnp.ones((8, 4)), "all": jnp.ones(3)}, shardings)
        optimizer = loss_scaled(ADAM, POLICY, **settings)
        opt_state = optimizer.init(params)
        step = jax.jit(optimizer.apply_gradients, donate_argnums=(1, 2))
        for _ in range(3):
            params, opt_state = step(jax.tree.map(jnp.ones_like, params), opt_state, params)
    assert step._cache_size() == 1
    assert get_scale_state(opt_state).loss_scale.sharding == NamedSharding(mesh, P())


def test_parameters_on_several_meshes():
    """If parameters are on several meshes, the state stays on the default device."""
    meshes = [jax.sharding.Mesh(jax.devices()[n : n + 4], "data") for n in (0, 4)]
    params = [jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data"))) for mesh in meshes]
    state = loss_scaled(ADAM, POLICY).init(params).scale_state
    assert state.loss_scale.devices() == {jax.devices()[0]}


def _mesh_of_two():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_all_finite_over_axes():
    """`all_finite` combines the flag over several axes."""
    specs = {"mesh": _mesh_of_two(), "in_specs": P("data", "model"), "out_specs": P()}
    check = jax.jit(jax.shard_map(lambda x: all_finite(x, axis_name=("data", "model")), **specs))
    assert check(jnp.ones((4, 2)))
    assert not check(jnp.ones((4, 2)).at[3, 1].set(jnp.nan))


@pytest.mark.parametrize("call", ["value_and_grad", "update"])
def test_a_forgotten_axis_name_is_an_error(call):
    """Without `axis_name`, `shard_map` raises an error if the devices would decide differently or sum the gradients."""
    optimizer = loss_scaled(ADAM, POLICY)

    def step(params, opt_state, images):
        own = vary(params, "data")
        if call == "value_and_grad":
            return value_and_grad(_loss)(get_scale_state(opt_state), own, images).grads_finite
        grads = jax.grad(_loss)(own, images)
        return optimizer.update(grads, opt_state, own)[1].scale_state.loss_scale

    mapped = jax.shard_map(step, mesh=_mesh(), in_specs=(P(), P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"differ along mesh axis 'data'.*axis_name='data'"):
        mapped(_params(), optimizer.init(_params()), _batch(DEVICES))


@pytest.mark.parametrize("axis_name", [None, "data", "model", ("data",)])
def test_a_forgotten_second_axis_is_an_error(axis_name):
    """A batch that is split over two axes needs both names."""

    def step(axis_name):
        differentiated = value_and_grad(_loss, axis_name=axis_name)
        specs = {"in_specs": (P(), P(), P(("data", "model"))), "out_specs": P()}
        return jax.shard_map(lambda state, *args: differentiated(state, *args).grads, mesh=_mesh_of_two(), **specs)

    arguments = init_state(POLICY), _params(), jnp.asarray(_batch(DEVICES))
    with pytest.raises(ValueError, match=r"losses differ along mesh axis .*, with every axis to combine"):
        step(axis_name)(*arguments)
    grads = step(("data", "model"))(*arguments)
    _assert_close(grads, jax.grad(_loss)(*arguments[1:]))

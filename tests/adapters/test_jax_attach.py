"""`attach` adds the gradients of a loss within the graph, bit for bit those of a loss that is returned."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling, FixedScaling
from lossscale_jax import (
    attach,
    get_scale_state,
    init_state,
    loss_scaled,
    retrying_value_and_grad,
    scale,
    unscale,
    value_and_grad,
)
from tests.jax_names import enable_x64

SCALES = [1.0, 2.0**8, 2.0**16]
WIDTH = 8
DEVICES = 8
KEYS = jax.random.split(jax.random.key(0), 6)
X = jax.random.normal(KEYS[0], (DEVICES, 4, WIDTH))
NAMES = ("up", "router", "down", "other")
PARAMS = {name: jax.random.normal(key, (WIDTH, WIDTH)) / 3 for name, key in zip(NAMES, KEYS[1:], strict=False)}


def _state(loss_scale):
    return init_state(FixedScaling(loss_scale))


class _Attached:
    """Adds a loss by `attach`."""

    def __init__(self, state):
        self.state = state
        self.total = 0.0

    def __call__(self, x, aux_loss):
        return attach(x, aux_loss, self.state)


class _Returned(_Attached):
    """Adds a loss to the main loss, as it would be without `attach`."""

    def __call__(self, x, aux_loss):
        self.total += jnp.sum(aux_loss)
        return x


WAYS_TO_ADD = [_Attached, _Returned]


def _router_loss(hidden, router):
    probabilities = jax.nn.softmax(hidden @ router)
    return 0.1 * probabilities.mean(0) * probabilities.max(0)  # of shape (WIDTH,): its sum is meant


def _plain(params, x, add):
    hidden = jnp.tanh(x @ params["up"])
    hidden = add(hidden, _router_loss(hidden, params["router"]))
    return jnp.square(hidden @ params["down"]).mean() + add.total


def _several(params, x, add):
    hidden = jnp.tanh(x @ params["up"])
    hidden = add(hidden, _router_loss(hidden, params["router"]))
    hidden = jnp.tanh(hidden @ params["down"])
    hidden = add(hidden, 0.5 * jnp.square(hidden).mean())
    hidden = add(hidden, _router_loss(hidden, params["other"]))
    return jnp.square(hidden).mean() + add.total


def _remat(params, x, add, **options):
    def layer(weights, hidden):
        own = type(add)(add.state)  # what a function under checkpoint returns is all that may leave it
        hidden = jnp.tanh(hidden @ weights["up"])
        return own(hidden, _router_loss(hidden, weights["router"])), own.total

    hidden, total = jax.checkpoint(layer, **options)(params, x)
    return jnp.square(hidden @ params["down"]).mean() + total


def _scanned(params, x, add, wrap=lambda layer: layer):
    def layer(carry, weight):
        own = type(add)(add.state)
        hidden, total = carry
        hidden = jnp.tanh(hidden @ weight)
        return (own(hidden, _router_loss(hidden, params["router"])), total + own.total), None

    stacked = jnp.stack([params["up"], params["down"], params["other"]])
    (hidden, total), _ = lax.scan(wrap(layer), (x, 0.0), stacked)
    return jnp.square(hidden).mean() + total


def _branching(params, x, add):
    def branch(hidden):
        own = type(add)(add.state)
        return own(hidden, _router_loss(hidden, params["router"])), own.total

    hidden, total = lax.cond(x[0, 0] > -100.0, branch, lambda hidden: (hidden, jnp.float32(0.0)), x @ params["up"])
    return jnp.square(hidden).mean() + total


def _mapped(params, x, add, of_example=True):
    """Attach within `vmap` a loss of each example, or one that is the same for all and counts for each."""

    def example(x):
        own = type(add)(add.state)
        hidden = jnp.tanh(x @ params["up"])
        aux_loss = _router_loss(hidden[None] if of_example else params["down"], params["router"])
        return jnp.square(own(hidden, aux_loss)).mean(), own.total

    losses, totals = jax.vmap(example)(x)
    return losses.mean() + jnp.sum(jnp.asarray(totals))


MODELS = {
    "plain": _plain,
    "several": _several,
    "checkpoint": _remat,
    "checkpoint that saves": functools.partial(_remat, policy=jax.checkpoint_policies.everything_saveable),
    "scan": _scanned,
    "scan of checkpoints": functools.partial(_scanned, wrap=jax.checkpoint),
    "cond": _branching,
    "vmap": _mapped,
    "vmap of a loss that all share": functools.partial(_mapped, of_example=False),
}


def _grads(model, state, params, x, add):
    """Return unscaled gradients."""
    return unscale(jax.grad(lambda params: scale(model(params, x, add(state)), state))(params), state)


def _assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- the gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_the_sum(name, transform):
    """In every bit, at every scale."""

    def grads(state, add):
        return transform(functools.partial(_grads, MODELS[name], add=add))(state, PARAMS, X[0])

    expected = grads(_state(1.0), _Returned)
    assert all(np.any(leaf) for key, leaf in expected.items() if key in ("up", "router"))
    for loss_scale in SCALES:
        _assert_same(grads(_state(loss_scale), _Attached), expected)


def _mesh(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("of_data", [True, False])
def test_under_shard_map_each_device_adds_its_own(check_vma, of_data):
    """Gradients that are averaged over the devices are those of the mean of all losses, attached ones too."""

    def model(params, x, add):
        hidden = jnp.tanh(x[0] @ params["up"])
        aux_loss = _router_loss(hidden if of_data else params["down"], params["router"])
        hidden = add(hidden, aux_loss)
        return jnp.square(hidden).mean() + add.total

    def grads(loss_scale, add):
        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=_mesh(), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
        )
        def step(state, params, x):
            return value_and_grad(lambda params: model(params, x, add(state)), axis_name="data")(state, params).grads

        return step(_state(loss_scale), PARAMS, X)

    expected = grads(1.0, _Returned)
    for loss_scale in SCALES:
        _assert_same(grads(loss_scale, _Attached), expected)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / DEVICES, *(
        _grads(model, _state(1.0), PARAMS, x[None], _Returned) for x in X
    ))  # fmt: skip
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), expected, mean)


@pytest.mark.parametrize("check_vma", [True, False])
def test_around_shard_map_the_losses_of_all_devices_are_summed(check_vma):
    """Where the gradient is taken outside: the losses of all devices, and one that they share counts on each."""

    def grads(loss_scale, add):
        state = _state(loss_scale)

        def losses(params, x, state):
            own = add(state)
            hidden = own(jnp.tanh(x[0] @ params["up"]), jnp.square(params["router"]).mean())
            return (jnp.square(hidden).mean() + own.total)[None]

        sharded = jax.shard_map(
            losses, mesh=_mesh(), in_specs=(P(), P("data"), P()), out_specs=P("data"), check_vma=check_vma
        )
        return unscale(jax.jit(jax.grad(lambda params: scale(sharded(params, X, state).sum(), state)))(PARAMS), state)

    for loss_scale in SCALES:
        _assert_same(grads(loss_scale, _Attached), grads(1.0, _Returned))


def test_pmap():
    """As under `shard_map`."""

    def grads(loss_scale, add):
        def step(state, params, x):
            return value_and_grad(lambda params: _plain(params, x, add(state)), axis_name="data")(state, params).grads

        return jax.pmap(step, axis_name="data", in_axes=(None, None, 0))(_state(loss_scale), PARAMS, X)

    for loss_scale in SCALES:
        _assert_same(grads(loss_scale, _Attached), grads(1.0, _Returned))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_are_sharded_under_jit(kind):
    """They are one array, and a loss counts once."""
    mesh = _mesh(kind)

    def model(params, x, add):  # without a product over the sharded axis, which JAX 0.7 refuses
        hidden = jnp.tanh(x * params["up"][0])
        hidden = add(hidden, jnp.square(hidden * params["router"][0]).mean())
        return jnp.square(hidden).mean() + add.total

    def grads(loss_scale, add):
        x = jax.device_put(X.reshape(-1, WIDTH), NamedSharding(mesh, P("data")))
        with jax.set_mesh(mesh):
            return jax.jit(functools.partial(_grads, model, add=add))(_state(loss_scale), PARAMS, x)

    for loss_scale in SCALES:
        _assert_same(grads(loss_scale, _Attached), grads(1.0, _Returned))


@pytest.mark.parametrize(
    "aux_loss",
    [
        lambda w: w.sum(),
        lambda w: w[0],
        lambda w: w.reshape(2, 1, -1),
        lambda w: w.astype(jnp.bfloat16),
        lambda w: w.astype(jnp.bfloat16).sum(),
        lambda w: w[:0],
    ],
    ids=["scalar", "row", "three axes", "bfloat16", "bfloat16 scalar", "empty"],
)
@pytest.mark.parametrize("loss_scale", [*SCALES, 2.0**17])
def test_a_loss_of_any_shape_and_dtype(aux_loss, loss_scale):
    """Its sum is meant, in float32: a scale of 2**17 is not infinite."""
    state, w = _state(loss_scale), PARAMS["up"]
    attached = jax.grad(lambda w: scale(jnp.sum(attach(0 * w, aux_loss(w), state)), state))(w)
    expected = jax.grad(lambda w: jnp.sum(aux_loss(w).astype(jnp.float32)))(w)
    _assert_same(unscale(attached, state), expected)


def test_a_loss_in_float16_overflows_where_a_main_loss_would():
    """Its gradient, the loss scale, is a float16 number, as `scale` finds it."""

    def grad(loss_scale, add):
        state = _state(loss_scale)
        w = PARAMS["up"].astype(jnp.float16)
        return unscale(jax.grad(lambda w: scale(add(state)(0 * w, w).sum().astype(jnp.float32), state))(w), state)

    _assert_same(grad(2.0**15, _Attached), jnp.ones((WIDTH, WIDTH)))
    assert not np.isfinite(grad(2.0**16, _Attached)).any()
    of_main_loss = jax.grad(lambda w: scale(w.sum(), _state(2.0**16)))(PARAMS["up"].astype(jnp.float16))
    assert not np.isfinite(of_main_loss).any()


@pytest.mark.parametrize("aux_loss", [0.5, 1, True, np.float32(2), jnp.int32(3), jnp.float32(jnp.nan)])
def test_a_loss_that_is_constant_changes_nothing(aux_loss):
    """Such as a Python number, where a layer has no loss of its own."""
    _assert_same(jax.grad(lambda x: attach(x, aux_loss, _state(4.0)).sum())(X), jnp.ones_like(X))


def test_a_loss_in_float64():
    """It stays so, and so do its gradients."""
    with enable_x64(True):
        w = jnp.full(3, 1e-30, jnp.float64)
        grads = jax.grad(lambda w: attach(w * 1e-60, w**2, _state(2.0**8)).sum())(w)
        assert grads.dtype == jnp.float64
        np.testing.assert_allclose(grads, 2.0**9 * 1e-30 + 1e-60, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_the_result_is_x(dtype):
    """Of any float dtype, empty or not, alone or in a pytree with other arrays."""
    x = {"hidden": jnp.ones((2, 3), dtype), "empty": jnp.ones((0, 3)), "count": jnp.arange(3), "key": KEYS[0]}
    result = attach(x, 1.0, _state(4.0))
    _assert_same([result["hidden"], result["count"]], [x["hidden"], x["count"]])
    assert [leaf.dtype for leaf in jax.tree.leaves(result)] == [leaf.dtype for leaf in jax.tree.leaves(x)]

    def loss(w):
        tree = attach({"hidden": w * x["hidden"].real, "count": x["count"]}, w**2, _state(4.0))
        return tree["hidden"].astype(jnp.float32).sum()

    assert jax.grad(loss)(1.0) == 6.0 + 2 * 4.0


def test_float16_in_which_nothing_flushes_or_overflows():
    """The gradients are the same at each scale."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), PARAMS)
    x = X[0].astype(jnp.float16)

    def loss(params, state, add):
        hidden = params["up"] * x[0]
        hidden = add(hidden, (hidden * params["router"]).astype(jnp.float32) / 4)
        return (hidden * params["down"]).astype(jnp.float32).sum() / 8 + add.total

    for loss_scale in (1.0, 2.0**4, 2.0**8):
        state = _state(loss_scale)
        _assert_same(
            _grads(lambda params, _, add, state=state: loss(params, state, add), state, params, None, _Attached),
            _grads(lambda params, _, add, state=state: loss(params, state, add), _state(1.0), params, None, _Returned),
        )


# -- with the rest of the library --------------------------------------------------------------------------------------


@pytest.mark.parametrize("argnums", [0, (0, 1), (1,)])
def test_value_and_grad_of_several_arguments(argnums):
    """The value is the main loss alone."""

    def fun(params, x, state, add):
        return _plain(params, x, add(state))

    state = _state(2.0**8)
    found, expected = (value_and_grad(fun, argnums)(state, PARAMS, X[0], state, add) for add in WAYS_TO_ADD)
    _assert_same(found.grads, expected.grads)
    assert found.grads_finite
    assert found.value < expected.value


def test_retries_are_refused():
    """The state that `attach` was given would keep the scale of the first try; a fixed scale has one try."""

    def fun(params, state):
        return _plain(params, X[0], _Attached(state))

    for policy in (DynamicScaling(), FixedScaling(2.0**8)):
        differentiate = retrying_value_and_grad(fun, policy, retries=3)
        state = init_state(policy)
        if isinstance(policy, DynamicScaling):
            with pytest.raises(ValueError, match="fun attaches a loss, and a retry lowers the loss scale"):
                differentiate(state, PARAMS, state)
        else:
            assert differentiate(state, PARAMS, state).gradients.grads_finite


def test_a_compiled_step_reads_the_present_scale():
    """It is compiled once."""
    policy = DynamicScaling(init_scale=2.0**4, growth_interval=1)
    optimizer = loss_scaled(optax.sgd(0.1), policy)
    traces = []

    def step(params, opt_state, add):
        traces.append(add)
        state = get_scale_state(opt_state)
        grads = jax.grad(lambda params: scale(_several(params, X[0], add(state)), state))(params)
        return optimizer.apply_gradients(grads, opt_state, params)

    results = []
    for add in WAYS_TO_ADD:
        params, opt_state = PARAMS, optimizer.init(PARAMS)
        compiled = jax.jit(functools.partial(step, add=add))
        for _ in range(5):
            params, opt_state = compiled(params, opt_state)
        assert get_scale_state(opt_state).loss_scale == 2.0**9
        results.append(params)
    assert traces == WAYS_TO_ADD
    _assert_same(*results)


def test_micro_batches_are_divided_by_the_user():
    """As the loss is: `loss_scaled` takes the mean of the micro-batches, of attached losses too."""
    results = []
    for add in WAYS_TO_ADD:
        optimizer = loss_scaled(optax.sgd(0.1), DynamicScaling(init_scale=2.0**8), accumulation_steps=4)
        params, opt_state = PARAMS, optimizer.init(PARAMS)
        for x in X[:4]:
            state = get_scale_state(opt_state)
            grads = jax.grad(lambda params, x=x, state=state, add=add: scale(_plain(params, x, add(state)), state))(
                params
            )
            params, opt_state = optimizer.apply_gradients(grads, opt_state, params)
        assert int(opt_state.window.stepped) == 1
        results.append(params)
    _assert_same(*results)


def test_an_overflow_of_an_attached_loss_skips_the_step():
    """The main loss is finite, and so is every value of the forward pass that it returns."""
    optimizer = loss_scaled(optax.adam(1e-2), "dynamic")

    @jax.jit
    def step(params, opt_state):
        state = get_scale_state(opt_state)

        def loss(params):
            hidden = attach(X[0] @ params["up"], jnp.sqrt(0.0 * params["router"]), state)
            return scale(jnp.square(hidden).mean(), state)

        return optimizer.apply_gradients(jax.grad(loss)(params), opt_state, params)

    params, opt_state = step(PARAMS, optimizer.init(PARAMS))
    _assert_same(params, PARAMS)
    assert get_scale_state(opt_state).skipped_steps == 1


class Experts(nn.Module):
    """A layer of flax linen that holds no state of loss scaling."""

    attach: object = staticmethod(lambda x, aux_loss: x)

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(4, name="router")(x)
        x = nn.Dense(WIDTH, name="expert")(x)
        return self.attach(x, 0.1 * jnp.square(logits).mean())


@pytest.mark.parametrize("lifted", [lambda module: module, nn.remat], ids=["plain", "remat"])
def test_a_linen_module_takes_it_as_an_attribute(lifted):
    """It is made within the loss, where the state is."""
    variables = Experts().init(KEYS[0], X[0])

    def loss(variables, add):
        return jnp.square(lifted(Experts)(attach=add).apply(variables, X[0])).mean()

    state = _state(2.0**8)
    attached = functools.partial(attach, state=state)
    grads = jax.jit(lambda variables: value_and_grad(lambda v: loss(v, attached))(state, variables).grads)(variables)
    assert np.any(grads["params"]["router"]["kernel"])
    assert not np.any(jax.grad(loss)(variables, lambda x, aux_loss: x)["params"]["router"]["kernel"])


def test_an_nnx_module_takes_it_in_its_call():
    """A module outlives a step, and so must not keep a state."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.router, self.expert = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, attach):
            return attach(self.expert(x), 0.1 * jnp.square(self.router(x)).mean())

    model = Layer(nnx.Rngs(0))

    @nnx.jit
    def grads(model, state):
        attached = functools.partial(attach, state=state)
        return nnx.grad(lambda model: scale(jnp.square(model(X[0], attached)).mean(), state))(model)

    def expected(model):
        return jnp.square(model.expert(X[0])).mean() + 0.1 * jnp.square(model.router(X[0])).mean()

    _assert_same(
        unscale(nnx.to_pure_dict(grads(model, _state(2.0**8))), _state(2.0**8)),
        nnx.to_pure_dict(nnx.jit(nnx.grad(expected))(model)),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attach(X, 1.0, optax.EmptyState()), r"call attach\(x, aux_loss, state\), with a state"),
        (lambda: attach(X, 1.0, loss_scaled(optax.sgd(1.0), "dynamic").init(PARAMS)), "get_scale_state"),
        (lambda: attach(jnp.arange(3), 1.0, _state(1.0)), "x holds no array of floats"),
        (lambda: attach({}, 1.0, _state(1.0)), "x holds no array of floats"),
        (lambda: attach(X, "float32", _state(1.0)), "is not a number"),
        (lambda: attach(X, KEYS[0], _state(1.0)), "is not a number"),
        (lambda: attach(X, 1j * X, _state(1.0)), "is not real; attach its real part"),
    ],
)
def test_what_cannot_be_attached_is_refused(call, message):
    """Each error says what to pass."""
    with pytest.raises((TypeError, AttributeError), match=message):
        call()


# -- what cannot hold, as the docstring says ---------------------------------------------------------------------------


def _router_grad(loss, state=None):
    return jax.grad(lambda router: loss(PARAMS | {"router": router}, state or _state(2.0**8)))(PARAMS["router"])


def _hidden(params, state):
    return attach(X[0] @ params["up"], jnp.square(params["router"]).mean(), state)


def test_a_result_that_no_gradient_passes_loses_the_loss():
    """Discarded, detached, or not needed by the loss."""
    x = X[0] @ PARAMS["up"]
    for use in (lambda _: x, lax.stop_gradient, lambda hidden: (hidden > 0).astype(jnp.float32)):
        assert not np.any(_router_grad(lambda params, state, use=use: scale(use(_hidden(params, state)).sum(), state)))


def test_a_function_that_is_pulled_back_twice_counts_it_twice():
    """As with two losses of one forward pass; returned as a loss, it would belong to one of them."""
    state = _state(4.0)
    _, pull = jax.vjp(lambda router: _hidden(PARAMS | {"router": router}, state).sum(), PARAMS["router"])
    once, again = pull(4.0)[0], pull(4.0)[0]
    expected = 4.0 * jax.grad(lambda router: jnp.square(router).mean())(PARAMS["router"])
    _assert_same([once, again], [expected, expected])
    _assert_same(jax.jacrev(lambda router: _hidden(PARAMS | {"router": router}, state)[0])(PARAMS["router"])[0], once)


def test_a_main_loss_that_is_not_scaled_leaves_it_too_large():
    """By the loss scale."""
    found = _router_grad(lambda params, state: _hidden(params, state).sum())
    _assert_same(found, 2.0**8 * jax.grad(lambda router: jnp.square(router).mean())(PARAMS["router"]))


def test_the_gradient_within_a_penalty_includes_it():
    """Times the loss scale: compute the penalty with a state of scale 1, or of a function without it."""

    def slope(x, state):
        return jax.grad(lambda x: attach(3.0 * x, x**2, state).sum())(x)

    assert slope(1.0, _state(1.0)) == 3.0 + 2.0
    assert slope(1.0, _state(2.0**8)) == 3.0 + 2.0**8 * 2.0


def test_forward_mode_is_refused():
    """JAX does so for each `custom_vjp`; forward mode over reverse mode works, at a scale of 1."""

    def loss(router):
        return _hidden(PARAMS | {"router": router}, _state(1.0)).sum()

    router = PARAMS["router"]
    for transform in (lambda: jax.jvp(loss, (router,), (router,)), lambda: jax.jacfwd(loss)(router)):
        with pytest.raises(TypeError, match=r"forward-mode autodiff.*custom_vjp"):
            transform()
    _, product = jax.jvp(jax.grad(loss), (router,), (router,))
    np.testing.assert_allclose(product, 2 * router / router.size, rtol=1e-6)

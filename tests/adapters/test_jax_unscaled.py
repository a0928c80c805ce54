"""The range report names gradients that do not follow the loss scale, and names none of a right model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lossscale_core import FixedScaling
from lossscale_jax import attach, init_state, range_report, scale

WIDTH = 8
KEYS = jax.random.split(jax.random.key(0), 6)
X = jax.random.normal(KEYS[0], (6, WIDTH))
NAMES = ("up", "down", "router")
PARAMS = {name: jax.random.normal(key, (WIDTH, WIDTH)) / 3 for name, key in zip(NAMES, KEYS[1:], strict=False)}
STATE = init_state(FixedScaling(2.0**8))


def _half(array):
    return array.astype(jnp.float16)


def _dense(params, name, x):
    return _half(x) @ _half(params[name])


def _mse(out):
    return jnp.square(out.astype(jnp.float32) - 1.0).mean()


def _router_loss(params, hidden):
    return 0.1 * jnp.square(_dense(params, "router", hidden).astype(jnp.float32)).mean()


def _mlp(params, x, between=lambda hidden: hidden):
    return _dense(params, "down", between(jnp.tanh(_dense(params, "up", x))))


def _attached(params, x, state=STATE):
    return _mse(_mlp(params, x, lambda hidden: attach(hidden, _router_loss(params, hidden), state)))


# -- right models ------------------------------------------------------------------------------------------------------


def _dropout(params, x):
    keep = jax.random.bernoulli(KEYS[5], 0.5, (6, WIDTH))
    return _mse(_mlp(params, x, lambda hidden: jnp.where(keep, 2 * hidden, 0)))


def _batch_norm(params, x):
    def normalized(hidden):
        hidden = hidden.astype(jnp.float32)
        return (hidden - hidden.mean(0)) * lax.rsqrt(hidden.var(0) + 1e-5)

    return _mse(_mlp(params, x, normalized))


def _shared(params, x):
    return _mse(_dense(params, "up", _dense(params, "up", x)))


def _embedding(params, _):
    return _mse(_dense(params, "down", _half(params["up"])[jnp.arange(12) % 5]))


def _tiny(params, x):
    """Compute gradients most of which flush to zero at any scale that fits."""
    return 1e-6 * _mse(_mlp(params, x * jnp.logspace(-6, 0, 6)[:, None])) + _half(params["router"]).sum()


def _several_terms(params, x):
    hidden = _mlp(params, x)
    return _mse(hidden) + 1e-3 * optax.tree.norm(params, squared=True) + _router_loss(params, hidden)


def _frozen(params, x):
    return _mse(_mlp(params | {"up": lax.stop_gradient(params["up"])}, x))


def _remat(params, x):
    layer = jax.checkpoint(lambda params, x: attach(_mlp(params, x), _router_loss(params, x), STATE))
    return _mse(layer(params, x))


def _scan(params, x):
    def layer(hidden, weight):
        hidden = jnp.tanh(hidden @ _half(weight))
        return attach(hidden, _router_loss(params, hidden), STATE), None

    return _mse(lax.scan(layer, _half(x), jnp.stack([params["up"], params["down"]]))[0])


def _loops(params, x):
    hidden = lax.cond(x[0, 0] > -9, lambda x: attach(x, _router_loss(params, x), STATE), lambda x: x, _mlp(params, x))
    return _mse(lax.fori_loop(0, 3, lambda _, hidden: jnp.float16(1.5) * hidden, hidden))


def _penalty(params, x):
    slope = jax.grad(lambda x: _mlp(params, x).astype(jnp.float32).sum())(x)
    return _mse(_mlp(params, x)) + jnp.square(optax.safe_norm(slope, 1e-6, axis=-1) - 1).mean()


def _masked(params, x):
    scores = jnp.where(jnp.tri(6, dtype=bool), _mlp(params, x) @ _half(x).T, -jnp.inf)
    return _mse(jax.nn.softmax(scores) @ _half(x))


def _where_of_a_root(params, x):
    """Guard the root as one must: with two `where`."""
    out = _mlp(params, x).astype(jnp.float32)
    return jnp.where(out > 0, jnp.sqrt(jnp.where(out > 0, out, 1.0)), 0.0).mean()


def _jitted_before(params, x):
    return _mse(_jitted_layer(params, x, STATE))


@jax.jit
def _jitted_layer(params, x, state):
    return attach(_mlp(params, x), _router_loss(params, x), state)


def _vmapped(params, x):
    def example(x):
        return attach(_dense(params, "up", x[None]), _router_loss(params, x[None]), STATE)

    return _mse(jax.vmap(example)(x))


def _mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def _sharded(params, x, check_vma=True):
    def layer(params, x):
        return attach(_mlp(params, x), _router_loss(params, x), STATE)

    spec = P("data")
    return _mse(
        jax.shard_map(layer, mesh=_mesh(), in_specs=(P(), spec), out_specs=spec, check_vma=check_vma)(params, x)
    )


@jax.custom_vjp
def _scaled_backward(hidden):
    """Multiply gradients by a constant, as a learning rate of a layer's own does."""
    return hidden


_scaled_backward.defvjp(lambda hidden: (hidden, None), lambda _, gradient: (0.5 * gradient,))


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x, add):
        x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(nn.Dense(WIDTH, dtype=jnp.float16)(x))
        return add(nn.Dense(WIDTH, dtype=jnp.float16)(x), jnp.square(nn.Dense(4, name="router")(x)).mean())


def _linen(params, x):
    variables = _Linen().init(KEYS[1], x, lambda x, _: x)
    kernel = params["up"]
    variables["params"]["Dense_0"]["kernel"] = kernel
    add = functools.partial(attach, state=STATE)
    return _mse(_Linen().apply(variables, x, add, mutable=["batch_stats"])[0])


RIGHT = {
    "mlp": lambda params, x: _mse(_mlp(params, x)),
    "float32": lambda params, x: jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).mean(),
    "bfloat16": lambda params, x: _mse(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16)),
    "dropout": _dropout,
    "batch norm": _batch_norm,
    "shared weights": _shared,
    "embedding": _embedding,
    "attach": _attached,
    "attach in remat": _remat,
    "attach in scan": _scan,
    "attach in cond": _loops,
    "attach in jit": _jitted_before,
    "attach in vmap": _vmapped,
    "attach in shard_map": _sharded,
    "attach in shard_map without check_vma": functools.partial(_sharded, check_vma=False),
    "attach in linen": _linen,
    "tiny gradients": _tiny,
    "several terms": _several_terms,
    "frozen weights": _frozen,
    "double backward": _penalty,
    "mask of -inf": _masked,
    "where of a root": _where_of_a_root,
    "scaled backward": lambda params, x: _mse(_mlp(params, x, _scaled_backward)),
    "loss of zero": lambda params, x: 0.0 * _mse(_mlp(params, x)),
}


@pytest.mark.parametrize("weight", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("name", RIGHT)
def test_no_gradient_of_a_right_model_is_named(name, weight):
    """At any magnitude of its loss, and whatever the scale of the state that `attach` holds."""
    if "jit" in name:
        jax.grad(RIGHT[name])(PARAMS, X)  # what was traced before the report is not traced again
    report = range_report(lambda params, x: weight * RIGHT[name](params, x), PARAMS, X)
    assert report.init_scale is not None
    assert report.unscaled_gradients == ()


@pytest.mark.parametrize("weight", [1.0, 1e-4])
@pytest.mark.parametrize("name", ["mlp", "batch norm", "embedding", "attach", "several terms"])
def test_no_gradient_of_a_right_model_in_float16_is_named(name, weight):
    """Parameters and gradients are of float16, too."""
    params = jax.tree.map(_half, PARAMS)
    report = range_report(lambda params, x: weight * RIGHT[name](params, x), params, _half(X))
    assert report.init_scale is not None
    assert report.unscaled_gradients == ()


@pytest.mark.parametrize("weight", 2.0 ** np.linspace(-42, -36, 25))
@pytest.mark.parametrize("size", [1, 64])
def test_gradients_near_the_smallest_number_of_float16(weight, size):
    """Rounding makes some of them larger at half the scale."""
    factors = jnp.ones(1) if size == 1 else jax.random.normal(KEYS[1], (size,))

    def loss(params):
        tiny = (_half(params["tiny"]).astype(jnp.float32) * factors).sum() * weight
        return tiny + _half(params["other"]).astype(jnp.float32).sum()

    params = {"tiny": jnp.ones(size), "other": jnp.ones(3)}
    assert range_report(loss, params).unscaled_gradients == ()


def test_sparse_gradients_of_a_right_model():
    """Of which only the elements are compared."""
    weights = sparse.BCOO.fromdense(jnp.eye(WIDTH))

    def loss(weights, x):
        return _mse(_half(sparse.bcoo_dot_general(weights, x.T, dimension_numbers=(((1,), (0,)), ((), ())))))

    value, _ = sparse.value_and_grad(loss)(weights, X)
    assert np.isfinite(value)
    report = range_report(lambda data: loss(sparse.BCOO((data, weights.indices), shape=weights.shape), X), weights.data)
    assert report.unscaled_gradients == ()


def test_the_scale_of_the_state_does_not_matter_in_a_report():
    """Attached losses are scaled by the report, so that their overflow is found as well; nothing stays changed."""

    def fun(params, state):
        return 1e-3 * _mse(attach(_dense(params, "up", X), 50.0 * _half(params["router"]).sum(), state))

    reports = [range_report(fun, PARAMS, init_state(FixedScaling(each))) for each in (1.0, 2.0**20)]
    assert reports[0] == reports[1]
    assert reports[0].overflows_above == 2.0**10
    grads = [jax.grad(_attached)(PARAMS, X, init_state(FixedScaling(each)))["router"] for each in (1.0, 2.0**4)]
    np.testing.assert_array_equal(2.0**4 * grads[0], grads[1])


def test_a_report_leaves_no_trace_in_functions_under_jit():
    """Neither a scale nor a tracer of the report stays in what JAX keeps of them."""

    @jax.jit
    def layer(params, x, state):
        return attach(_mlp(params, x), _router_loss(params, x), state)

    def fun(params, state):
        return _mse(layer(params, X, state))

    state = init_state(FixedScaling(4.0))
    assert range_report(fun, PARAMS, state).unscaled_gradients == ()
    after = jax.grad(fun)(PARAMS, state)["router"]
    jax.clear_caches()
    np.testing.assert_array_equal(after, jax.grad(fun)(PARAMS, state)["router"])


# -- wrong models ------------------------------------------------------------------------------------------------------


def _hook(of_gradient):
    """Return an identity that changes the gradient in its backward pass, with another argument that it may use."""

    @jax.custom_vjp
    def identity(hidden, other):
        return hidden

    def backward(residuals, gradient):
        hidden, other = residuals
        return of_gradient(hidden, other, gradient)

    identity.defvjp(lambda hidden, other: (hidden, (hidden, other)), backward)
    return identity


def _zeros(gradient, other):
    return gradient, jnp.zeros_like(other)


def _adds_router_loss(hidden, router, gradient):
    def loss(hidden, router):
        return 0.1 * jnp.square(_dense({"router": router}, "router", hidden).astype(jnp.float32)).mean()

    of_hidden, of_router = jax.grad(loss, (0, 1))(hidden, router)
    return gradient + of_hidden, of_router


HOOKS = {
    "router loss": _adds_router_loss,
    "constant": lambda _, other, gradient: _zeros(gradient + jnp.float16(1e-3), other),
    "weight decay": lambda _, other, gradient: (gradient, 1e-2 * other),
    "clamp": lambda _, other, gradient: _zeros(jnp.clip(gradient, -1e-2, 1e-2), other),
    "norm": lambda _, other, gradient: _zeros(
        _half(gradient.astype(jnp.float32) / jnp.maximum(jnp.linalg.norm(gradient.astype(jnp.float32)), 1e-6)), other
    ),
    "sign": lambda _, other, gradient: _zeros(jnp.sign(gradient), other),
    "unscaled constant of router": lambda _, other, gradient: (gradient, jnp.full_like(other, 1e-8)),
}
NAMED = {
    "router loss": ({"['router']", "['up']"}, "inside"),
    "constant": ({"['up']"}, "inside"),
    "weight decay": ({"['router']"}, "inside"),
    "clamp": ({"['up']"}, "nonlinear"),
    "norm": ({"['up']"}, "nonlinear"),
    "sign": ({"['up']"}, "nonlinear"),
    "unscaled constant of router": ({"['router']"}, "inside"),
}


@pytest.mark.parametrize("within", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_gradients_of_a_wrong_model_are_named(name, within):
    """All of them, and no others."""
    hook = _hook(HOOKS[name])

    @within
    def loss(params, x):
        return _mse(_mlp(params, x, lambda hidden: hook(hidden, params["router"])))

    report = range_report(loss, PARAMS, X)
    names, cause = NAMED[name]
    assert {(each.name, each.cause) for each in report.unscaled_gradients} == {(each, cause) for each in names}
    assert "not follow the loss scale, first [" in str(report)


def test_a_scan_with_layers_that_add_an_unscaled_loss():
    """A multi-token-prediction loss in each layer."""
    hook = _hook(_adds_router_loss)

    def loss(params, x):
        def layer(hidden, weight):
            return hook(jnp.tanh(hidden @ _half(weight)), params["router"]), None

        return _mse(lax.scan(layer, _half(x), jnp.stack([params["up"], params["down"]]))[0])

    report = range_report(loss, PARAMS, X)
    assert [each.name for each in report.unscaled_gradients] == ["['down']", "['router']", "['up']"]


def test_a_scale_attached_by_hand_is_named():
    """A loss that is added with the scale of a state, and not by `attach`, stays as it is while the report searches."""
    hook = _hook(lambda _, other, gradient: (gradient, 2.0**8 * 0.1 * other))
    report = range_report(lambda params: _mse(_mlp(params, X, lambda h: hook(h, params["router"]))), PARAMS)
    assert [each.name for each in report.unscaled_gradients] == ["['router']"]


def test_a_loss_that_is_scaled_already_is_followed():
    """By mistake, or as another tool does it; all gradients still grow with the scale of the report."""
    report = range_report(lambda params: scale(_mse(_mlp(params, X)), STATE), PARAMS)
    assert report.unscaled_gradients == ()


def test_nothing_is_looked_for_where_no_scale_fits():
    """An overflow is reported first."""
    hook = _hook(HOOKS["constant"])
    report = range_report(
        lambda params: _mse(_mlp(params, X, lambda h: hook(jnp.float16(6e4) * h * 10, params["router"]))), PARAMS
    )
    assert (report.init_scale, report.unscaled_gradients) == (None, ())


def test_the_gradient_within_a_penalty_that_attaches():
    """It cannot hold, and the report is made all the same."""

    def loss(params):
        slope = jax.grad(lambda x: _attached(params, x))(X)
        return jnp.square(slope).mean()

    assert range_report(loss, PARAMS).forward_finite

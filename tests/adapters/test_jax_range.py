"""`range_report` on real float16 functions: its predictions are right, its names too, and it changes nothing."""

import random
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from lossscale_core import DynamicScaling
from lossscale_jax import init_state, range_report, value_and_grad

WIDTH = 8
KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (6, WIDTH))


def _weights(*names):
    """Return square matrices in float32, as master weights are."""
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 3 for name, key in zip(names, KEYS[1:], strict=False)}


def _dense(params, name, x):
    with jax.named_scope(name):
        return x.astype(jnp.float16) @ params[name].astype(jnp.float16)


def _attention(params, x, mask=None):
    scores = _dense(params, "query", x) @ _dense(params, "key", x).T / 3
    scores = scores if mask is None else jnp.where(mask, -jnp.inf, scores)
    return _dense(params, "out", jax.nn.softmax(scores) @ _dense(params, "value", x))


def _mlp(params, x):
    return _dense(params, "down", jnp.tanh(_dense(params, "up", x)))


@jax.jit
def _normalized(params, x):
    hidden = _dense(params, "up", x).astype(jnp.float32)
    hidden = (hidden - hidden.mean(-1, keepdims=True)) * lax.rsqrt(hidden.var(-1, keepdims=True) + 1e-5)
    return _dense(params, "down", jax.nn.relu(hidden.astype(jnp.float16)))


def _embedded(params, x):
    tokens = jnp.arange(12) % 5
    return _dense(params, "down", params["up"].astype(jnp.float16)[tokens])


def _layers(params, x):
    """Run a layer with a scope of its own, by `scan`, for each matrix."""

    def layer(hidden, weight):
        with jax.named_scope("layer"):
            return jnp.tanh(hidden @ weight.astype(jnp.float16)), hidden.sum()

    with jax.named_scope("layers"):
        return lax.scan(params["remat"](layer), x.astype(jnp.float16), params["stacked"])[0]


def _scanned(params, x):
    return _layers({"remat": lambda layer: layer, "stacked": jnp.stack([params["up"], params["down"]])}, x)


def _checkpointed(params, x):
    return _layers({"remat": jax.checkpoint, "stacked": jnp.stack([params["up"], params["down"]])}, x)


@jax.custom_vjp
def _amplified(x):
    return x


_amplified.defvjp(lambda x: (x, x), lambda x, gradient: (gradient * 16 + 0 * x,))


def _custom(params, x):
    return _dense(params, "down", _amplified(_dense(params, "up", x)))


def _looping(params, x):
    """Run a loop as often as the data decide, which no gradient passes, and a branch and a loop that one does."""
    turns = lax.while_loop(lambda state: state[1] < 20, lambda state: (state[0] + 1, state[1] * 2), (0, x[0, 0] ** 2))
    x = _amplified(x)  # of the data alone
    hidden = lax.cond(turns[0] > 0, lambda x: 3 * x, lambda x: x / 0, _dense(params, "up", x))
    return lax.fori_loop(0, 3, lambda _, x: jnp.float16(1.5) * x, hidden)


class Network(nn.Module):
    """A flax model with batch norm."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, dtype=jnp.float16, name="up")(x)
        x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16, name="norm")(x)
        return nn.Dense(WIDTH, dtype=jnp.float16, name="down")(nn.relu(x))


def _network(name):
    """Return a function of parameters and inputs, and the parameters."""
    if name == "linen":
        variables = Network().init(KEYS[1], X)

        def apply(params, x):
            return Network().apply(variables | {"params": params}, x, mutable=["batch_stats"])[0]

        return apply, variables["params"]
    functions = {
        "attention": (_attention, ("query", "key", "value", "out")),
        "mlp": (_mlp, ("up", "down")),
        "layer norm": (_normalized, ("up", "down")),
        "embedding": (_embedded, ("up", "down")),
        "scan": (_scanned, ("up", "down")),
        "remat": (_checkpointed, ("up", "down")),
        "custom_vjp": (_custom, ("up", "down")),
        "loops": (_looping, ("up",)),
    }
    function, names = functions[name]
    return function, _weights(*names)


NETWORKS = ["attention", "mlp", "layer norm", "embedding", "scan", "remat", "custom_vjp", "loops", "linen"]


def _loss_of(network, weight=1.0):
    def loss_fn(params, x):
        out = network(params, x)
        return weight * jnp.square((out - jnp.linspace(-2, 2, WIDTH, dtype=jnp.float16)).astype(jnp.float32)).mean()

    return loss_fn


def _is_finite(pull, exponent):
    gradients = jax.tree.leaves(pull(jnp.float32(2.0**exponent)))
    return all(np.isfinite(gradient).all() for gradient in gradients)


def _largest_finite_scale(loss_fn, params):
    """Return the largest power of two at which every gradient is finite, by bisection."""
    pull = jax.vjp(lambda params: loss_fn(params, X), params)[1]
    lowest, highest = -20, 60
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        lowest, highest = (middle, highest) if _is_finite(pull, middle) else (lowest, middle)
    return 2.0**lowest


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e3])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_limit_is_the_one_that_bisection_finds(name, weight):
    """Within one power of two, on each network and with each weight of the loss."""
    network, params = _network(name)
    loss_fn = _loss_of(network, weight)
    report = range_report(loss_fn, params, X)
    assert report.forward_finite
    np.testing.assert_allclose(report.loss, loss_fn(params, X), rtol=1e-2)
    assert 0.5 <= report.overflows_above / _largest_finite_scale(loss_fn, params) <= 2.0
    policy = DynamicScaling()
    assert report.init_scale == max(policy.min_scale, min(report.overflows_above / 2, policy.max_scale))


def test_an_nnx_module_is_measured_as_well():
    """With batch norm: the parameters are differentiated, and the other state is an argument that it changes."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float16, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.up(x))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, x):
        model = nnx.merge(graph, params, rest)
        return jnp.square(model(x).astype(jnp.float32)).mean(), nnx.state(model)

    report = range_report(loss_fn, params, rest, X, has_aux=True)
    gradients = [record for record in report.backward if record.operation == "gradient"]
    assert len(gradients) == 4
    assert any("norm" in record.module and "scale" in record.module for record in gradients)
    assert (
        0.5
        <= report.overflows_above
        / _largest_finite_scale(lambda p, x: loss_fn(p, jax.tree.map(jnp.array, rest), x)[0], params)
        <= 2.0
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_parameters_and_gradients_of_few_bits_are_measured(dtype):
    """The largest number of float8 decides the limit, which is far below that of float16."""
    x = jnp.ones(4, dtype)
    report = range_report(lambda x: (x.astype(jnp.float32) * 2).sum(), x)
    largest = float(jnp.finfo(dtype).max)
    assert report.overflows_above == 2.0 ** np.floor(np.log2(largest / 2))
    assert {record.dtype for record in report.backward} == {jnp.dtype(dtype).name}


def test_a_step_with_the_scale_is_applied():
    """And is not with four times the limit."""
    network, params = _network("attention")
    loss_fn = _loss_of(network)
    report = range_report(loss_fn, params, X)
    for loss_scale, applied in ((report.init_scale, True), (4 * report.overflows_above, False)):
        state = init_state(DynamicScaling(init_scale=loss_scale))
        assert value_and_grad(loss_fn)(state, params, X).grads_finite == applied


def test_a_loss_in_float16_is_lifted_before_it_is_scaled():
    """As `scale` lifts it: the loss scale enters the backward pass of the model as a float16 number."""
    report = range_report(lambda x: jnp.square(x).sum(), jnp.full(4, 0.25, jnp.float16))
    assert report.overflows_above == 2.0**15
    assert report.overflows_first.operation == "convert_element_type"


def test_random_keys_pass_through_a_scan():
    """Dropout within it draws the masks that it draws without a report."""

    def loss_fn(x, key):
        def layer(hidden, key):
            keep = jax.random.bernoulli(key, 0.5, hidden.shape)
            return jnp.where(keep, 2 * hidden, 0), None

        hidden, _ = lax.scan(layer, x.astype(jnp.float16), jax.random.split(key, 3))
        return hidden.astype(jnp.float32).sum()

    x = jnp.ones((16, WIDTH))
    report = range_report(loss_fn, x, KEYS[0])
    assert report.loss == loss_fn(x, KEYS[0])
    assert report.overflows_above == 2.0**12


# -- names -------------------------------------------------------------------------------------------------------------


def test_operations_are_named_by_their_scopes_in_both_passes():
    """Without the names of JAX's transformations, and gradients by their paths."""
    network, params = _network("attention")
    report = range_report(_loss_of(network), params, X)
    for records in (report.forward, report.backward):
        named = {record.module for record in records if record.operation == "dot_general"}
        assert named >= {"query", "key", "value", "out"}
    gradients = [record.module for record in report.backward if record.operation == "gradient"]
    assert gradients == ["['key']", "['out']", "['query']", "['value']"]
    first = report.overflows_first
    assert f"first in {first.module} ({first.operation})" in str(report)


def test_a_double_backward_has_the_names_of_its_scopes():
    """What a gradient penalty computes, and the gradients of that."""
    network, params = _network("mlp")

    def penalty(params, x):
        slope = jax.grad(lambda x: network(params, x).astype(jnp.float32).sum())(x)
        return jnp.square(jnp.linalg.norm(slope, axis=-1) - 1).mean()

    report = range_report(penalty, params, X)
    for records in (report.forward, report.backward):
        assert {r.module for r in records if r.operation == "dot_general"} == {"up", "down"}


def test_operations_without_a_scope_are_named_by_their_line():
    """The caller's own, and not that of a library that it called."""
    report = range_report(lambda x: jax.nn.softmax(x).astype(jnp.float32).sum(), jnp.ones(4, jnp.float16))
    line = test_operations_without_a_scope_are_named_by_their_line.__code__.co_firstlineno + 2
    assert {r.module for r in (*report.forward, *report.backward)} == {
        f"test_jax_range.py:{line} (<lambda>)",
        "the leaf",
    }


@pytest.mark.parametrize("name", ["scan", "remat"])
def test_the_iterations_of_a_scan_have_numbers(name):
    """The layers of a scan have their numbers, and the backward pass those of the forward pass, in reverse."""
    network, params = _network(name)
    report = range_report(_loss_of(network), params, X)
    assert [r.module for r in report.forward if r.operation == "tanh"] == ["layers[0]/layer", "layers[1]/layer"]
    products = [r.module for r in report.backward if r.operation == "dot_general" and r.scaled]
    assert products == ["layers[1]/layer"] * 2 + ["layers[0]/layer"] * 2


def test_what_the_backward_pass_computes_again_is_not_scaled():
    """Under `jax.checkpoint` it computes the forward pass again, which no loss scale multiplies."""
    network, params = _network("remat")
    report = range_report(_loss_of(network), params, X)
    assert [r.scaled for r in report.backward if r.operation == "tanh"] == [False, False]
    assert not any(record.scaled for record in report.forward)


def test_flax_modules_give_their_names():
    """The path of the modules around an operation."""
    network, params = _network("linen")
    report = range_report(_loss_of(network), params, X)
    assert {r.module for r in report.backward if r.operation == "dot_general"} == {"Network/up", "Network/down"}
    assert any(record.module == "Network/norm" for record in report.backward)


# -- no scale fits -----------------------------------------------------------------------------------------------------


def test_an_overflow_of_the_forward_pass_is_named():
    """No scale fits, and the report says where infinity comes from rather than where it goes."""
    network, params = _network("mlp")

    def loud(params, x):
        with jax.named_scope("loud"):
            return network(params, x) * jnp.float16(6e4) * jnp.float16(10)

    report = range_report(_loss_of(loud), params, X)
    assert not report.forward_finite
    assert report.overflows_above is None
    assert report.init_scale is None
    assert (report.overflows_first.module, report.overflows_first.operation) == ("loud", "mul")
    assert "forward: overflows in loud (mul); the loss is" in str(report)
    assert "backward: not run, since the loss" in str(report)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's own, where it makes the constant
def test_a_constant_that_float16_cannot_hold_is_named_where_it_is_given():
    """JAX makes it infinite before any operation sees it."""
    network, params = _network("mlp")

    def loud(params, x):
        with jax.named_scope("loud"):
            return network(params, x) * 1e6

    report = range_report(_loss_of(loud), params, X)
    assert (report.overflows_first.module, report.overflows_first.operation) == ("loud", "mul")
    assert "and loud (mul) is the first to be given infinity or NaN" in str(report)


def test_a_scale_below_one_fits_where_one_overflows():
    """The loss is finite, and the weight in front of it is large."""
    network, params = _network("mlp")
    report = range_report(_loss_of(network, 1e9), params, X)
    assert report.forward_finite
    assert 0.5 <= report.overflows_above / _largest_finite_scale(_loss_of(network, 1e9), params) <= 2.0
    assert report.init_scale == report.overflows_above / 2 < 1.0


def test_a_gradient_that_is_not_finite_at_any_scale_is_not_taken_for_an_overflow():
    """The root of zero has an infinite slope, and what is given infinity is named."""
    network, params = _network("mlp")
    report = range_report(lambda params, x: jnp.sqrt(0.0 * _loss_of(network)(params, x)), params, X)
    assert report.forward_finite
    assert (report.overflows_above, report.loss_scale) == (None, 1.0)
    assert "not finite even at a loss scale of 1; test_jax_range.py" in str(report)


def test_an_infinity_that_is_meant_is_not_an_overflow():
    """The mask of an attention holds -inf, and every scale up to the limit fits."""
    _, params = _network("attention")
    mask = jnp.triu(jnp.ones((6, 6), bool), 1)
    report = range_report(_loss_of(lambda params, x: _attention(params, x, mask)), params, X)
    assert any(record.nonfinite for record in report.forward)
    assert report.forward_finite
    assert report.overflows_above > 1.0


# -- what is not finite before anything is computed --------------------------------------------------------------------


def _first_sentence(fun, *args):
    return str(range_report(fun, *args)).splitlines()[0]


def _with(array, value, index=0):
    return array.at[(index,) * array.ndim].set(value)


def test_an_input_weight_or_label_that_is_not_finite_is_named_before_anything_else():
    """By the name of the argument, and by its path within it."""
    network, params = _network("mlp")

    def loss_fn(params, x, y):
        return jnp.square(network(params, x).astype(jnp.float32) - y).mean()

    y = jnp.zeros((4, 6, WIDTH))
    assert _first_sentence(loss_fn, params, _with(X, jnp.nan), y) == (
        f"before the forward pass: x holds NaN in 1 of its {X.size} elements"
    )
    assert _first_sentence(loss_fn, params, X, _with(y, jnp.inf)) == (
        f"before the forward pass: y holds infinity in 1 of its {y.size} elements"
    )
    broken = params | {"down": _with(params["down"], jnp.nan)}
    report = range_report(loss_fn, broken, X, y)
    assert str(report).splitlines()[0] == (
        f"before the forward pass: params['down'] holds NaN in 1 of its {params['down'].size} elements"
    )
    assert str(report).splitlines()[-1] == "replace NaN and infinity there first"


def test_a_constant_that_the_function_refers_to_is_named():
    """By its name there; an argument that the loss does not need is not looked at."""
    y = np.full(4, np.nan, np.float32)
    unused = jnp.full(3, jnp.nan)
    sentence = _first_sentence(lambda w, unused: jnp.square(w.astype(jnp.float16) - y).mean(), jnp.ones(4), unused)
    assert sentence == "before the forward pass: y of fun holds NaN in 4 of its 4 elements"


def test_a_mask_of_infinity_is_not_named_where_it_does_no_harm():
    """A scale fits."""
    mask = jnp.where(jnp.tri(6, dtype=bool), 0.0, -jnp.inf)

    def loss_fn(x, mask):
        return jnp.square(jax.nn.softmax((x @ x.mT).astype(jnp.float16) + mask)).sum()

    assert _first_sentence(loss_fn, X, mask).startswith("forward: finite")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_report_says_what_needs_no_scaling(dtype):
    """Without float16 the limit is infinite, or very large."""
    report = range_report(lambda w: jnp.square((X.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)).mean(), X.T)
    assert report.overflows_above == np.inf if dtype is jnp.float32 else report.overflows_above > 2.0**60
    assert str(report).endswith("use NoScaling()")


# -- what it takes and what it leaves alone ----------------------------------------------------------------------------


def test_arguments_are_those_of_the_function():
    """Several to differentiate, others of any type, and what a function returns next to its loss."""

    def loss_fn(name, first, flag, second):
        assert name == "name"
        assert flag is True
        out = (first["w"] * second).astype(jnp.float16)
        return out.astype(jnp.float32).sum(), {"out": out}

    report = range_report(
        loss_fn, "name", {"w": jnp.ones(3)}, True, np.ones(3, np.float32), argnums=(1, 3), has_aux=True
    )
    assert [r.module for r in report.backward if r.operation == "gradient"] == ["[0]['w']", "[1]"]
    assert report.overflows_above == 2.0**15


def test_nothing_is_changed():
    """Arguments, and the states of the random number generators that a trace draws from."""
    network, params = _network("mlp")
    before = jax.tree.map(np.array, params)

    @jax.jit
    def loss_fn(params, x):
        return _loss_of(network)(params, x) * (1 + random.random() * np.random.rand())

    states = random.getstate(), np.random.get_state()[1].tolist()
    report = range_report(jax.jit(loss_fn, donate_argnums=0), params, X)
    assert report.overflows_above > 1.0
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_it_works_under_the_flags_that_look_for_nan():
    """An overflow that the search meets is not a mistake."""
    network, params = _network("mlp")
    with jax.debug_nans(True), jax.debug_infs(True):
        assert range_report(_loss_of(network, 1e3), params, X).overflows_above < 2.0**16


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_runs_on_several_devices_is_measured_as_one_operation(kind):
    """Data that are sharded, and a function under `shard_map`."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))

    def loss_fn(params, x):
        with jax.named_scope("sharded"):
            out = jax.shard_map(
                lambda x: x.astype(jnp.float16) * 3, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
            )(x * params)
        return out.astype(jnp.float32).sum()

    report = range_report(loss_fn, jnp.ones(WIDTH), sharded)
    assert ("shard_map", "sharded") in {(r.operation, r.module) for r in report.forward}
    assert 1.0 < report.overflows_above < np.inf


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (lambda x: x, r"a loss of shape \(3,\)"),
        (lambda x: (x.sum(), 0), "pass has_aux=True"),
        (lambda x: "loss", "fun returned a str"),
    ],
)
def test_what_is_not_a_loss_is_refused(fun, message):
    """The loss is one number, as for `jax.grad`."""
    with pytest.raises(TypeError, match=message):
        range_report(fun, jnp.ones(3))


def _attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v).astype(jnp.float32).sum()


def test_a_range_report_of_jaxs_attention_in_float16():
    """JAX asks for an algorithm that a CPU refuses within `jit`; the report runs the product as JAX does eagerly."""
    q, k, v = (4 * jax.random.normal(key, (1, 6, 2, 8), jnp.float16) for key in jax.random.split(jax.random.key(0), 3))
    report = range_report(_attend, q, k, v, argnums=(0, 1, 2))
    assert {record.operation for record in report.forward} >= {"dot_general"}
    assert report.loss == pytest.approx(float(_attend(q, k, v)), rel=1e-2)
    for factor, is_finite in ((0.5, True), (2.0, False)):
        seed = jnp.float32(factor * report.overflows_above)
        grads = jax.vjp(_attend, q, k, v)[1](seed)
        assert all(bool(jnp.isfinite(each).all()) for each in grads) == is_finite


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_line_of_progress(capsys):
    """It counts on stderr beyond a thousand operations, and says nothing before."""
    network, params = _network("mlp")
    range_report(_loss_of(network), params, X)
    assert capsys.readouterr().err == ""
    range_report(
        lambda x: lax.fori_loop(0, 1100, lambda _, x: x * jnp.float16(1), x).astype(jnp.float32), jnp.float16(1)
    )
    assert "range_report: 1000 operations" in capsys.readouterr().err


def test_it_costs_at_most_thirty_gradients():
    """Of a small function, taken without `jit`, as the report takes them, once its operations are compiled."""
    network, params = _network("attention")
    loss_fn = _loss_of(network)

    def seconds(function):
        measured = []
        for _ in range(5):
            start = time.thread_time()  # that of other processes does not count
            function()
            measured.append(time.thread_time() - start)
        return min(measured)

    assert seconds(lambda: range_report(loss_fn, params, X)) <= 30 * seconds(lambda: jax.grad(loss_fn)(params, X))

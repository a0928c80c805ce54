"""`check_train_step` accepts correct steps, and names the leaves that a wrong step changes when it is skipped."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lossscale_core import DynamicScaling
from lossscale_jax import get_last_step, get_scale_state, init_state, loss_scaled, scale, select, value_and_grad
from lossscale_jax.testing import check_train_step

POLICY = DynamicScaling(init_scale=2.0**10)
ADAM = optax.adam(1e-2)
OPTIMIZER = loss_scaled(ADAM, POLICY, max_norm=0.1)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 8), "b": jnp.zeros(())}
BATCHES = list(jax.random.normal(jax.random.key(0), (6, 4, 8)))


def _loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)


def _scaled_grads(params, state, batch):
    return jax.grad(lambda params: scale(_loss(params, batch), state))(params)


def _with_optimizer(state, batch):
    params, opt_state = state
    grads = _scaled_grads(params, get_scale_state(opt_state), batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": _loss(params, batch)}


def _by_hand(follow):
    """Return a step that calls `select`, and `follow` for an average and a count."""

    def step(state, batch):
        params, inner, scale_state, average, count = state
        _, _, grads, finite = value_and_grad(_loss)(scale_state, params, batch)
        updates, new_inner = ADAM.update(grads, inner, params)
        new = optax.apply_updates(params, updates)
        new_average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new)
        average, count = follow(finite, (new_average, count + 1), (average, count))
        params, inner = select(finite, (new, new_inner), (params, inner))
        return params, inner, POLICY.update(scale_state, finite), average, count

    return step


def _start():
    return PARAMS, ADAM.init(PARAMS), init_state(POLICY), PARAMS, jnp.int32(0)


@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_correct_steps_pass(transform):
    """Steps with `loss_scaled`, with `select`, and with a function among the leaves pass the check."""
    check_train_step(transform(_with_optimizer), (PARAMS, OPTIMIZER.init(PARAMS)), BATCHES)
    check_train_step(transform(_by_hand(select)), _start(), BATCHES)
    with_function = lambda state, batch: (*_with_optimizer(state[:2], batch)[0], jax.nn.relu)  # noqa: E731
    check_train_step(with_function, (PARAMS, OPTIMIZER.init(PARAMS), jax.nn.relu), BATCHES)


def test_an_average_and_a_count_outside_of_the_select():
    """The message names the step and the leaves; `may_move` allows a count of batches."""
    step = jax.jit(_by_hand(lambda finite, new, old: new))
    message = r"step 0 was to be skipped, but \[3\]\['b'\] went from 0.0 to nan, .*"
    with pytest.raises(AssertionError, match=rf"{message}, \[4\] went from 0 to 1"):
        check_train_step(step, _start(), BATCHES)
    with pytest.raises(AssertionError, match=rf"{message}; a skipped"):
        check_train_step(step, _start(), BATCHES, may_move=["[4]"])
    counts = jax.jit(_by_hand(lambda finite, new, old: (select(finite, new[0], old[0]), new[1])))
    with pytest.raises(AssertionError, match=r"\[4\] went from 0 to 1.*counts of batches pass may_move=\['\[4\]'\]"):
        check_train_step(counts, _start(), BATCHES)
    check_train_step(counts, _start(), BATCHES, may_move=["[4]"])


def test_an_overflow_that_the_policy_never_receives():
    """If the policy never receives an overflow, the check fails."""

    def step(state, batch):
        params, scale_state = state
        _, _, grads, finite = value_and_grad(_loss)(scale_state, params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return select(finite, (new, POLICY.update(scale_state, finite)), state)

    with pytest.raises(AssertionError, match=r"step 0 .* \[1\].skipped_steps is 0 after it and was 0.*; pass every"):
        check_train_step(jax.jit(step), (PARAMS, init_state(POLICY)), BATCHES)


def test_a_window_of_micro_batches():
    """A step of a whole window passes; for a step of one micro-batch, the message asks for a whole window."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=2)

    def micro_step(state, batch):
        params, opt_state = state
        return optimizer.apply_gradients(_scaled_grads(params, get_scale_state(opt_state), batch), opt_state, params)

    start = PARAMS, optimizer.init(PARAMS)
    check_train_step(jax.jit(lambda state, batch: micro_step(micro_step(state, batch), batch)), start, BATCHES)
    with pytest.raises(AssertionError, match="check a function that takes all micro-batches of a window"):
        check_train_step(jax.jit(micro_step), start, BATCHES)


def test_numpy_parameters_in_float64_pass():
    """NumPy parameters in float64 pass without x64, where the step returns float32 arrays."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in PARAMS.items()}
    check_train_step(_with_optimizer, (params, OPTIMIZER.init(params)), BATCHES)


def _mapped(function):
    return lambda params, state, batch: jax.tree.map(function, _scaled_grads(params, state, batch))


def _clipped(params, state, batch):
    return optax.clip_by_global_norm(0.1).update(_scaled_grads(params, state, batch), optax.EmptyState())[0]


def _decayed(params, state, batch):
    return jax.tree.map(lambda grad, param: grad + 1e-3 * param, _scaled_grads(params, state, batch), params)


OPTIMIZERS = {
    "sgd": loss_scaled(optax.sgd(0.1), POLICY),
    "adam": loss_scaled(ADAM, POLICY),
    "clipping": loss_scaled(optax.sgd(0.1), POLICY, max_norm=0.1),
}
UNSCALED = r"do not grow with the loss scale: differentiate scale\(loss, state\)"
HIDDEN = "a function such as nan_to_num or zero_nans makes the overflow finite before it is checked"
DECAYED = r"at step 1 loss scales of 1 and 2\*\*-20 gave different results: \[.*\['w'\] differs"
CHANGED = {
    "nothing": (_scaled_grads, None, OPTIMIZERS),
    "a loss that is not scaled": (lambda params, state, batch: jax.grad(_loss)(params, batch), UNSCALED, OPTIMIZERS),
    "nan_to_num": (_mapped(jnp.nan_to_num), HIDDEN, OPTIMIZERS),
    "zeros": (_mapped(jnp.zeros_like), HIDDEN, OPTIMIZERS),
    "clipped": (_clipped, r"at step 1 loss scales of 1 and 2\*\*10 gave different results", ["sgd"]),
    "decay": (_decayed, DECAYED, OPTIMIZERS),
}


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, row in CHANGED.items() for name in row[2]])
def test_scaled_gradients_that_are_changed(what, name):
    """The message names the change of the scaled gradients as the cause."""
    grads_of, message, _ = CHANGED[what]
    optimizer = OPTIMIZERS[name]

    def step(state, batch):
        params, opt_state = state
        return optimizer.apply_gradients(grads_of(params, get_scale_state(opt_state), batch), opt_state, params)

    with pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext():
        check_train_step(jax.jit(step), (PARAMS, optimizer.init(PARAMS)), BATCHES)


def test_a_loss_scale_without_a_count_is_an_ordinary_value():
    """A loss scale that a step stores for its log must not change in a skipped step."""

    def step(state, batch):
        (params, opt_state), _ = _with_optimizer((state["params"], state["opt_state"]), batch)
        return {"params": params, "opt_state": opt_state, "loss_scale": get_scale_state(opt_state).loss_scale}

    start = {"params": PARAMS, "opt_state": OPTIMIZER.init(PARAMS), "loss_scale": jnp.float32(1.0)}
    with pytest.raises(AssertionError, match=r"step 0 was to be skipped, but \['loss_scale'\] went from 1.0 to inf"):
        check_train_step(jax.jit(step), start, BATCHES)


def test_arguments_that_cannot_be_checked():
    """Too few batches, a missing scale state, and a result of another structure raise an error."""
    state = (PARAMS, OPTIMIZER.init(PARAMS))
    with pytest.raises(ValueError, match="4 batches are too few; pass at least 5"):
        check_train_step(_with_optimizer, state, BATCHES[:4])
    with pytest.raises(ValueError, match="holds no scale state"):
        check_train_step(_with_optimizer, PARAMS, BATCHES)
    with pytest.raises(ValueError, match="returned another structure"):
        check_train_step(lambda state, batch: None, state, BATCHES)


# -- `select` restores the statistics that a forward pass changes, as in docs/jax.md and the examples ------------------

SAMPLES = [(x, x[:, 0]) for x in jax.random.normal(jax.random.key(1), (6, 32, 2))]


class Network(nnx.Module):
    """BatchNorm and a linear layer."""

    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(2, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        """Return a number for each row."""
        return self.out(self.bn(x))[:, 0]


def _modules():
    network = Network(nnx.Rngs(0))
    return network, nnx.Optimizer(network, loss_scaled(optax.adam(0.1), POLICY), wrt=nnx.Param)


@nnx.jit
def _selecting(modules, batch):
    network, optimizer = modules
    old = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    _naive(modules, batch)
    applied = get_last_step(optimizer.opt_state).applied
    new = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    nnx.update(network, select(applied, new, old))


def _network_grads(network, state, batch):
    x, y = batch
    return nnx.grad(lambda network: scale(jnp.mean((network(x) - y) ** 2), state))(network)


def _naive(modules, batch):
    network, optimizer = modules
    optimizer.update(network, _network_grads(network, get_scale_state(optimizer.opt_state), batch))


def _functional(step, split, merge):
    """Return a step on the values that `split` returns for the modules."""

    @jax.jit
    def functional(state, batch):
        modules = merge(state)
        step(modules, batch)
        return split(modules)

    return functional


def test_a_step_over_modules_may_return_something():
    """A step that changes modules in place may return the modules, metrics, both, or None."""

    def returning(result):
        def step(modules, batch):
            _selecting(modules, batch)
            return result(modules)

        return nnx.jit(step)

    for result in (lambda modules: None, lambda modules: (modules, 1.0), lambda modules: (jnp.float32(1.0), modules)):
        check_train_step(returning(result), _modules(), SAMPLES, may_move=["[1].step"])
        with pytest.raises(AssertionError, match=r"but \[1\]\.step went from 0 to 1;"):
            check_train_step(returning(result), _modules(), SAMPLES)
    with pytest.raises(AssertionError, match=r"but \[0\]\.bn\.mean changed"):
        check_train_step(nnx.jit(_naive), _modules(), SAMPLES, may_move=["[1].step"])


def test_split_modules_are_checked():
    """The messages name the leaves of split modules like the leaves of modules, but with brackets for dicts."""
    graph, _ = nnx.split(_modules())
    pure = lambda modules: nnx.to_pure_dict(nnx.state(modules))  # noqa: E731
    for split, merge, count, message in [
        (nnx.split, lambda state: nnx.merge(*state), "[1][1].step", r"\[1\]\[0\]\.bn\.mean changed"),
        (pure, lambda state: nnx.merge(graph, state), "[1]['step']", r"\[0\]\['bn'\]\['mean'\] changed"),
    ]:
        check_train_step(_functional(_selecting, split, merge), split(_modules()), SAMPLES, may_move=[count])
        with pytest.raises(AssertionError, match=message):
            check_train_step(_functional(_naive, split, merge), split(_modules()), SAMPLES, may_move=[count])

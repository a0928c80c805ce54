"""`check_train_step` accepts correct steps, and names the leaves that a wrong step changes when it is skipped."""

import re

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
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 8), "b": jnp.zeros(())}
BATCHES = list(jax.random.normal(jax.random.key(0), (6, 4, 8)))
OPTIMIZERS = {
    "sgd": loss_scaled(optax.sgd(0.1), POLICY),
    "adam": loss_scaled(ADAM, POLICY),
    "clipping": loss_scaled(optax.sgd(0.1), POLICY, max_norm=0.1),
    "windows": loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=2),
}


def _loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)


def _scaled_grads(params, state, batch):
    return jax.grad(lambda params: scale(_loss(params, batch), state))(params)


# -- steps with `loss_scaled`, and with gradients that are changed before the step -------------------------------------


def _start(name, **others):
    """Return the state before the first step: parameters, the state of an optimizer, and other values."""
    return {"params": PARAMS, "opt_state": OPTIMIZERS[name].init(PARAMS), **others}


def _step(name, grads_of=_scaled_grads):
    """Return a step that keeps the other values."""

    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        grads = grads_of(params, get_scale_state(opt_state), batch)
        params, opt_state = OPTIMIZERS[name].apply_gradients(grads, opt_state, params)
        return {**state, "params": params, "opt_state": opt_state}

    return step


def _mapped(function):
    return lambda params, state, batch: jax.tree.map(function, _scaled_grads(params, state, batch))


def _clipped(params, state, batch):
    return optax.clip_by_global_norm(0.1).update(_scaled_grads(params, state, batch), optax.EmptyState())[0]


def _decayed(params, state, batch):
    return jax.tree.map(lambda grad, param: grad + 1e-3 * param, _scaled_grads(params, state, batch), params)


def _with_metrics(state, batch):
    return _step("adam")(state, batch), {"loss": _loss(state["params"], batch)}


def _storing_the_scale(state, batch):
    state = _step("adam")(state, batch)
    return {**state, "loss_scale": get_scale_state(state["opt_state"]).loss_scale}


def _window(state, batch):
    return _step("windows")(_step("windows")(state, batch), batch)


# -- steps by hand -----------------------------------------------------------------------------------------------------


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


def _without_overflows(state, batch):
    params, scale_state = state
    _, _, grads, finite = value_and_grad(_loss)(scale_state, params, batch)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return select(finite, (new, POLICY.update(scale_state, finite)), state)


# -- steps on modules of flax nnx; `select` restores the statistics that a forward pass changes, as in docs/jax.md -----


class Network(nnx.Module):
    """BatchNorm and a linear layer."""

    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        """Return a number for each row."""
        return self.out(self.bn(x))[:, 0]


def _modules():
    network = Network(nnx.Rngs(0))
    return network, nnx.Optimizer(network, loss_scaled(optax.adam(0.1), POLICY), wrt=nnx.Param)


def _naive(modules, batch):
    network, optimizer = modules
    loss = lambda network: jnp.mean((network(batch) - batch[:, 0]) ** 2)  # noqa: E731
    state = get_scale_state(optimizer.opt_state)
    optimizer.update(network, nnx.grad(lambda network: scale(loss(network), state))(network))


def _selecting(modules, batch):
    network, optimizer = modules
    old = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    _naive(modules, batch)
    new = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    nnx.update(network, select(get_last_step(optimizer.opt_state).applied, new, old))


def _returning(step, result_of=lambda modules: None):
    """Return a compiled step that changes modules in place and returns something."""

    def returning(modules, batch):
        step(modules, batch)
        return result_of(modules)

    return nnx.jit(returning)


def _functional(step, split, merge):
    """Return a compiled step on the values that `split` returns for the modules."""

    @jax.jit
    def functional(state, batch):
        modules = merge(state)
        step(modules, batch)
        return split(modules)

    return functional


MODULES = _modules()
GRAPH, _ = nnx.split(MODULES)
SPLIT = nnx.split, lambda state: nnx.merge(*state)
PURE = lambda modules: nnx.to_pure_dict(nnx.state(modules)), lambda state: nnx.merge(GRAPH, state)
RESULTS = {
    "None": lambda modules: None,
    "first": lambda modules: (modules, 1.0),
    "last": lambda modules: (jnp.float32(1.0), modules),
}
HAND = PARAMS, ADAM.init(PARAMS), init_state(POLICY), PARAMS, jnp.int32(0)
IN_FLOAT64 = {name: np.asarray(leaf, np.float64) for name, leaf in PARAMS.items()}
FOLLOW_ALL, FOLLOW_COUNT = lambda _, new, old: new, lambda finite, new, old: (select(finite, new[0], old[0]), new[1])
CORRECT = {
    **{name: (jax.jit(_step(name)), _start(name)) for name in ("sgd", "adam", "clipping")},
    "eager": (_step("adam"), _start("adam")),
    "metrics": (jax.jit(_with_metrics), _start("adam")),
    "a function": (_step("adam"), _start("adam", activation=jax.nn.relu)),
    "NumPy's float64": (_step("clipping"), {**_start("clipping"), "params": IN_FLOAT64}),
    "a window": (jax.jit(_window), _start("windows")),
    "by hand": (jax.jit(_by_hand(select)), HAND),
    "a count of batches": (jax.jit(_by_hand(FOLLOW_COUNT)), HAND, "[4]"),
    **{f"modules, {name}": (_returning(_selecting, of), MODULES, "[1].step") for name, of in RESULTS.items()},
    "split modules": (_functional(_selecting, *SPLIT), SPLIT[0](MODULES), "[1][1].step"),
    "split modules, pure": (_functional(_selecting, *PURE), PURE[0](MODULES), "[1]['step']"),
}
"""Steps that pass: the step, the state before it, and leaves that it may change."""
CHANGED = "step 0 was to be skipped, but "
AVERAGE = CHANGED + "[3]['b'] went from 0.0 to nan, "
UNSCALED = "step 0 had an infinite loss scale, but… do not grow with the loss scale: differentiate scale(loss, state)"
HIDDEN = "a function such as nan_to_num or zero_nans makes the overflow finite before it is checked"
NEVER = "step 0 …[1].skipped_steps is 0 after it and was 0…; pass every"
WINDOW = "check a function that takes all micro-batches of a window"
CHANGES = {
    UNSCALED: [lambda params, state, batch: jax.grad(_loss)(params, batch)],
    HIDDEN: [_mapped(jnp.nan_to_num), _mapped(jnp.zeros_like)],
}
WRONG = [
    *(
        (words, jax.jit(_step(name, grads_of)), _start(name))
        for words, changes in CHANGES.items()
        for grads_of in changes
        for name in ("sgd", "adam", "clipping")
    ),
    ("at step 1 loss scales of 1 and 2**10 gave different results", jax.jit(_step("sgd", _clipped)), _start("sgd")),
    ("1 and 2**-20 gave different results: ['params']['w'] d", jax.jit(_step("sgd", _decayed)), _start("sgd")),
    (CHANGED + "['loss_scale'] went from 1.0 to inf", jax.jit(_storing_the_scale), _start("adam", loss_scale=1.0)),
    (WINDOW, jax.jit(_step("windows")), _start("windows")),
    (AVERAGE + "…, [4] went from 0 to 1", jax.jit(_by_hand(FOLLOW_ALL)), HAND),
    (AVERAGE + "…; a skipped", jax.jit(_by_hand(FOLLOW_ALL)), HAND, "[4]"),
    ("[4] went from 0 to 1…batches pass may_move=['[4]']", jax.jit(_by_hand(FOLLOW_COUNT)), HAND),
    (NEVER, jax.jit(_without_overflows), (PARAMS, init_state(POLICY))),
    (CHANGED + "[0].bn.mean changed", _returning(_naive), MODULES, "[1].step"),
    *((CHANGED + "[1].step went from 0 to 1;", _returning(_selecting, of), MODULES) for of in RESULTS.values()),
    ("[1][0].bn.mean changed", _functional(_naive, *SPLIT), SPLIT[0](MODULES), "[1][1].step"),
    ("[0]['bn']['mean'] changed", _functional(_naive, *PURE), PURE[0](MODULES), "[1]['step']"),
]
"""Steps that fail: the message, with … for any words, the step, the state before it, and leaves that it may change."""


@pytest.mark.parametrize("row", CORRECT.values(), ids=CORRECT)
def test_correct_steps_pass(row):
    """Steps pass if a skip changes nothing, or only what `may_move` allows."""
    step, state, *may_move = row
    check_train_step(step, state, BATCHES, may_move=may_move)


@pytest.mark.parametrize("row", WRONG)
def test_wrong_steps_fail(row):
    """The message names the step, the leaves that it changed, and the likely cause."""
    words, step, state, *may_move = row
    with pytest.raises(AssertionError, match=re.escape(words).replace("…", ".*")):
        check_train_step(step, state, BATCHES, may_move=may_move)

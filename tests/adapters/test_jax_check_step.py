"""`check_train_step` accepts correct steps, and names the leaves that a wrong step changes when it is skipped."""

import functools
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


def _hidden(params, state, batch):
    return jax.tree.map(jnp.nan_to_num, _scaled_grads(params, state, batch))


def _clipped(params, state, batch):
    return optax.clip_by_global_norm(0.1).update(_scaled_grads(params, state, batch), optax.EmptyState())[0]


def _in_float16(params, state, batch):
    return jax.tree.map(lambda grad: (0.01 * grad).astype(jnp.float16), _scaled_grads(params, state, batch))


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


def _by_hand(state, batch, follow=select, counts_overflows=True):
    """Return the state after a step that calls `select`, and `follow` for a count."""
    params, before, count = state
    _, _, grads, finite = value_and_grad(_loss)(before, params, batch)
    new = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
    after = POLICY.update(before, finite)
    after = after if counts_overflows else select(finite, after, before)
    return select(finite, new, params), after, follow(finite, count + 1, count)


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
HAND = PARAMS, init_state(POLICY), jnp.int32(0)
IN_FLOAT64 = {name: np.asarray(leaf, np.float64) for name, leaf in PARAMS.items()}
COUNTING = jax.jit(functools.partial(_by_hand, follow=lambda _, new, old: new))
CORRECT = {
    "clipping": (jax.jit(_step("clipping")), _start("clipping")),
    "metrics": (jax.jit(_with_metrics), _start("adam")),
    "gradients that flush to zero": (_step("sgd", _in_float16), _start("sgd")),
    "a function": (_step("adam"), _start("adam", activation=jax.nn.relu)),
    "NumPy's float64": (_step("clipping"), {**_start("clipping"), "params": IN_FLOAT64}),
    "a window": (jax.jit(_window), _start("windows")),
    "by hand": (jax.jit(_by_hand), HAND),
    "a count of batches": (COUNTING, HAND, "[2]"),
    "modules": (nnx.jit(_selecting), MODULES, "[1].step"),
    "split modules": (_functional(_selecting, *SPLIT), SPLIT[0](MODULES), "[1][1].step"),
    "split modules, pure": (_functional(_selecting, *PURE), PURE[0](MODULES), "[1]['step']"),
}
"""Steps that pass: the step, the state before it, and leaves that it may change."""
CHANGED = "step 0 was to be skipped, but "
UNSCALED = "step 0 had an infinite loss scale, but… do not grow with the loss scale: differentiate scale(loss, state)"
HIDDEN = "a function such as nan_to_num or zero_nans makes the overflow finite before it is checked"
NEVER = "step 0 …[1].skipped_steps is 0 after it and was 0…; pass every"
WINDOW = "check a function that takes all micro-batches of a window"
WRONG = [
    (UNSCALED, jax.jit(_step("clipping", lambda params, _, batch: jax.grad(_loss)(params, batch))), _start("clipping")),
    (HIDDEN, jax.jit(_step("adam", _hidden)), _start("adam")),
    ("at step 1 loss scales of 1 and 2**10 gave different results", jax.jit(_step("sgd", _clipped)), _start("sgd")),
    ("1 and 2**-20 gave different results: ['params']['w'] d", jax.jit(_step("sgd", _decayed)), _start("sgd")),
    (CHANGED + "['loss_scale'] went from 1.0 to inf", jax.jit(_storing_the_scale), _start("adam", loss_scale=1.0)),
    (WINDOW, jax.jit(_step("windows")), _start("windows")),
    (CHANGED + "[2] went from 0 to 1…batches pass may_move=['[2]']", COUNTING, HAND),
    (NEVER, jax.jit(functools.partial(_by_hand, counts_overflows=False)), HAND),
    (CHANGED + "[0].bn.mean changed", nnx.jit(_naive), MODULES, "[1].step"),
    (CHANGED + "[1].step went from 0 to 1;", nnx.jit(_selecting), MODULES),
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

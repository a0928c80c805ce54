"""Statistics that a forward pass moves: the documented lines put them back, and `check_train_step` names them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lossscale_core import DynamicScaling, step_info
from lossscale_jax import get_scale_state, loss_scaled, scale, select
from lossscale_jax.testing import check_train_step
from tests.adapters.pages import code_of

POLICY = DynamicScaling(init_scale=2.0**10)
IMAGES = np.random.default_rng(0).standard_normal((6, 128, 64), dtype=np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, (6, 128))
BATCHES = list(zip(IMAGES, LABELS, strict=True))


class Network(nnx.Module):
    """A layer with BatchNorm before and after it."""

    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(64, rngs=rngs)
        self.linear = nnx.Linear(64, 10, rngs=rngs)
        self.out = nnx.BatchNorm(10, rngs=rngs)

    def __call__(self, images):
        """Return the logits."""
        return self.out(self.linear(self.bn(images)))


def _modules(**settings):
    network = Network(nnx.Rngs(0))
    return network, nnx.Optimizer(network, loss_scaled(optax.sgd(0.1), POLICY, **settings), wrt=nnx.Param)


def _loss(network, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(images), labels).mean()


def _scaled_grads(network, optimizer, batch):
    state = get_scale_state(optimizer.opt_state)
    return nnx.grad(lambda network: scale(_loss(network, batch), state))(network)


def _naive(modules, batch):
    network, optimizer = modules
    optimizer.update(network, _scaled_grads(network, optimizer, batch))


def _documented(modules, batch):
    network, optimizer = modules
    before = get_scale_state(optimizer.opt_state)
    old = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    optimizer.update(network, _scaled_grads(network, optimizer, batch))
    applied = step_info(before, get_scale_state(optimizer.opt_state)).applied
    new = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    nnx.update(network, select(applied, new, old))


def _functional(step, split, merge):
    """Return a step over what `split` makes of the modules."""

    @jax.jit
    def functional(state, batch):
        modules = merge(state)
        step(modules, batch)
        return split(modules)

    return functional


def test_a_step_over_modules_may_return_something():
    """The modules, with metrics or without; or metrics alone, in whatever form. The page's own step returns nothing."""

    def returning(result):
        def step(modules, batch):
            _documented(modules, batch)
            return result(modules)

        return nnx.jit(step)

    for result in (
        lambda modules: modules,
        lambda modules: (modules, {"loss": 1.0}),
        lambda modules: jnp.float32(1.0),
        lambda modules: (jnp.float32(1.0), {"loss": 1.0}),
    ):
        check_train_step(returning(result), _modules(), BATCHES, may_move=["[1].step"])
        with pytest.raises(AssertionError, match=r"but \[1\]\.step went from 0 to 1;"):
            check_train_step(returning(result), _modules(), BATCHES)


def test_a_module_and_an_optimizer_state_are_checked():
    """The step changes the module in place and returns the optimizer state, an ordinary pytree."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)

    @nnx.jit
    def step(training, batch):
        network, opt_state = training
        before = get_scale_state(opt_state)
        grads = nnx.grad(lambda network: scale(_loss(network, batch), before))(network)
        updates, opt_state = optimizer.update(grads, opt_state, nnx.state(network, nnx.Param))
        nnx.update(network, optax.apply_updates(nnx.state(network, nnx.Param), updates))
        return network, opt_state

    network = Network(nnx.Rngs(0))
    with pytest.raises(AssertionError, match=r"\[0\]\.bn\.mean changed, .*\.var changed; .*; select it"):
        check_train_step(step, (network, optimizer.init(nnx.state(network, nnx.Param))), BATCHES)


def test_split_modules_are_checked():
    """What `nnx.split` and `nnx.to_pure_dict` return is named alike, but for the brackets of dicts."""
    graph, _ = nnx.split(_modules())
    pure = lambda modules: nnx.to_pure_dict(nnx.state(modules))  # noqa: E731
    for split, merge, count, message in [
        (nnx.split, lambda state: nnx.merge(*state), "[1][1].step", r"\[1\]\[0\]\.bn\.mean changed"),
        (pure, lambda state: nnx.merge(graph, state), "[1]['step']", r"\[0\]\['bn'\]\['mean'\] changed"),
    ]:
        check_train_step(_functional(_documented, split, merge), split(_modules()), BATCHES, may_move=[count])
        with pytest.raises(AssertionError, match=message):
            check_train_step(_functional(_naive, split, merge), split(_modules()), BATCHES, may_move=[count])


class Equinox(eqx.Module):
    """A linear layer and BatchNorm, with a function among the leaves."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    activation: object = jax.nn.relu

    def __call__(self, image, state):
        """Return the outputs of an image, and the state."""
        outputs, state = self.norm(self.linear(image), state)
        return self.activation(outputs), state


def _equinox(follow):
    """Return the step of docs/jax.md, with what it calls for `select`, and its state at the start."""

    def make(key):
        return Equinox(eqx.nn.Linear(64, 10, key=key), eqx.nn.BatchNorm(10, "batch", mode="batch"))

    model, model_state = eqx.nn.make_with_state(make)(jax.random.key(0))
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    names = globals() | {"optimizer": optimizer, "select": follow}
    exec(code_of("docs/jax.md", "BatchNorm and other state of a model", 2), names)
    start = model, model_state, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return lambda training, batch: names["equinox_step"](*training, *batch), start


def test_the_state_of_equinox_is_kept():
    """The check passes the documented step, and names the state of one that forgets it."""
    step, start = _equinox(select)
    check_train_step(step, start, BATCHES)
    forgetful, start = _equinox(lambda applied, new, old: new)
    with pytest.raises(AssertionError, match=r"step 0 was to be skipped, but \[1\]\[<flat index 0>\]"):
        check_train_step(forgetful, start, BATCHES)

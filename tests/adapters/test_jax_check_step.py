"""`check_train_step` passes steps that follow loss scaling, and names what the others move on a skipped step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling
from lossscale_jax import get_scale_state, init_state, loss_scaled, scale, select, value_and_grad
from lossscale_jax.testing import check_train_step
from tests.adapters.pages import code_of, split_loop

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
    """Return a step that selects by hand, with what `follow` makes of an average and a count."""

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
def test_steps_that_follow_pass(transform):
    """With `loss_scaled`, and by hand with `select`."""
    check_train_step(transform(_with_optimizer), (PARAMS, OPTIMIZER.init(PARAMS)), BATCHES)
    check_train_step(transform(_by_hand(select)), _start(), BATCHES)


def test_the_step_of_the_page_passes():
    """That of docs/jax.md, as it stands there."""
    names = {}
    exec(split_loop(code_of("docs/jax.md", "Around an optimizer"))[0], names)
    batches = [(batch, batch[:, 0]) for batch in jax.random.normal(jax.random.key(1), (6, 4, 2))]
    start = names["params"], names["opt_state"]
    check_train_step(lambda state, batch: names["step"].__wrapped__(*state, *batch), start, batches)


def test_an_average_and_a_count_outside_of_the_select():
    """The message names the step and the leaves; if the count counts batches, the caller says so."""
    step = jax.jit(_by_hand(lambda finite, new, old: new))
    moved = r"step 0 was to be skipped, but \[3\]\['b'\] went from 0.0 to nan, .*"
    with pytest.raises(AssertionError, match=rf"{moved}, \[4\] went from 0 to 1"):
        check_train_step(step, _start(), BATCHES)
    with pytest.raises(AssertionError, match=rf"{moved}; a skipped"):
        check_train_step(step, _start(), BATCHES, may_move=["[4]"])


def test_gradients_that_are_clipped_before_they_are_unscaled():
    """Then the loss scale makes a difference."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)

    def step(state, batch):
        params, opt_state = state
        grads = _scaled_grads(params, get_scale_state(opt_state), batch)
        grads, _ = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with pytest.raises(AssertionError, match=r"at step 1 a loss scale of 1 and one of 2\*\*10 gave different results"):
        check_train_step(jax.jit(step), (PARAMS, optimizer.init(PARAMS)), BATCHES)


def test_an_overflow_that_the_policy_never_receives():
    """The scale would never fall."""

    def step(state, batch):
        params, scale_state = state
        _, _, grads, finite = value_and_grad(_loss)(scale_state, params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return select(finite, (new, POLICY.update(scale_state, finite)), state)

    with pytest.raises(
        AssertionError, match=r"step 0 .* \[1\].skipped_steps is 0 after it and was 0 before; pass every"
    ):
        check_train_step(jax.jit(step), (PARAMS, init_state(POLICY)), BATCHES)


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_a_window_of_micro_batches(drop):
    """The step to check takes all of them; one that takes a single one does not count each overflow, and is told."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=2, drop=drop)

    def micro_step(state, batch):
        params, opt_state = state
        return optimizer.apply_gradients(_scaled_grads(params, get_scale_state(opt_state), batch), opt_state, params)

    start = PARAMS, optimizer.init(PARAMS)
    check_train_step(jax.jit(lambda state, batch: micro_step(micro_step(state, batch), batch)), start, BATCHES)
    if drop == "window":
        with pytest.raises(AssertionError, match="check a function that takes all micro-batches of a window"):
            check_train_step(jax.jit(micro_step), start, BATCHES)


def _changed(change, optimizer=OPTIMIZER, factor=None):
    """Return a step that changes scaled gradients, or those of a loss that another factor multiplies."""

    def step(state, batch):
        params, opt_state = state
        by = get_scale_state(opt_state) if factor is None else init_state(factor)
        return optimizer.apply_gradients(change(_scaled_grads(params, by, batch)), opt_state, params)

    return step


INNERS = [optax.sgd(0.1), optax.adam(0.1)]


@pytest.mark.parametrize("settings", [{}, {"max_norm": 0.1}], ids=["plain", "clipped"])
@pytest.mark.parametrize("inner", INNERS, ids=["sgd", "adam"])
def test_a_loss_that_is_not_scaled(inner, settings):
    """The message says to scale it: not to select what moved, nor to pass a step to the policy, which is done."""
    optimizer = loss_scaled(inner, POLICY, **settings)
    start = PARAMS, optimizer.init(PARAMS)
    with pytest.raises(AssertionError, match=r"do not grow with the loss scale: differentiate scale\(loss, state\)"):
        check_train_step(jax.jit(_changed(lambda grads: grads, optimizer, factor=1.0)), start, BATCHES)
    check_train_step(jax.jit(_changed(lambda grads: grads, optimizer)), start, BATCHES)


@pytest.mark.parametrize("inner", INNERS, ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "change",
    [lambda grads: jax.tree.map(jnp.nan_to_num, grads), lambda grads: jax.tree.map(jnp.zeros_like, grads)],
    ids=["nan_to_num", "zeros"],
)
def test_an_overflow_that_is_made_finite(change, inner):
    """The gradients grow with the scale, and so the loss is scaled."""
    optimizer = loss_scaled(inner, POLICY)
    with pytest.raises(AssertionError, match="makes the overflow finite before it is checked, such as nan_to_num"):
        check_train_step(jax.jit(_changed(change, optimizer)), (PARAMS, optimizer.init(PARAMS)), BATCHES)


def test_numpy_parameters_in_float64_pass():
    """Without x64, where the step returns float32 arrays."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in PARAMS.items()}
    check_train_step(_with_optimizer, (params, OPTIMIZER.init(params)), BATCHES)


@pytest.mark.parametrize("inner", INNERS, ids=["sgd", "adam"])
def test_decay_that_is_added_to_scaled_gradients(inner):
    """It is divided by the loss scale, and so has almost no effect in training."""
    optimizer = loss_scaled(inner, POLICY)

    def step(state, batch, decay=1e-3):
        params, opt_state = state
        grads = _scaled_grads(params, get_scale_state(opt_state), batch)
        grads = jax.tree.map(lambda grad, param: grad + decay * param, grads, params)
        return optimizer.apply_gradients(grads, opt_state, params)

    start = PARAMS, optimizer.init(PARAMS)
    with pytest.raises(AssertionError, match=r"at step 1 .* gave different results: \[.*\['w'\] differs"):
        check_train_step(jax.jit(step), start, BATCHES)
    check_train_step(jax.jit(lambda state, batch: step(state, batch, 0.0)), start, BATCHES)


def test_what_cannot_be_checked_is_refused():
    """Too few batches, no scale state, and a step that returns something else."""
    state = (PARAMS, OPTIMIZER.init(PARAMS))
    with pytest.raises(ValueError, match="4 batches are too few; pass at least 5"):
        check_train_step(_with_optimizer, state, BATCHES[:4])
    with pytest.raises(ValueError, match="holds no scale state"):
        check_train_step(_with_optimizer, PARAMS, BATCHES)
    with pytest.raises(ValueError, match="returned another structure"):
        check_train_step(lambda state, batch: None, state, BATCHES)

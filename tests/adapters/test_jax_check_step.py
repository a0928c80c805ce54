"""`check_train_step` passes steps that follow loss scaling, and names what the others move on a skipped step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_jax import (
    attach,
    get_scale_state,
    init_state,
    loss_scaled,
    scale,
    select,
    unscale,
    value_and_grad,
)
from lossscale_jax.testing import TrainStepError, check_train_step
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
    check_train_step(lambda state, batch: names["step"](*state, *batch), start, batches)


def test_an_average_outside_of_the_select():
    """The message names the step and the leaf."""
    step = jax.jit(_by_hand(lambda finite, new, old: (new[0], select(finite, new[1], old[1]))))
    with pytest.raises(TrainStepError, match=r"step 0 was to be skipped, but \[3\]\['b'\] went from 0.0 to nan"):
        check_train_step(step, _start(), BATCHES)


def test_a_count_outside_of_the_select():
    """A schedule that follows it would move; if it counts batches, the caller says so."""
    step = jax.jit(_by_hand(lambda finite, new, old: (select(finite, new[0], old[0]), new[1])))
    with pytest.raises(TrainStepError, match=r"step 0 was to be skipped, but \[4\] went from 0 to 1"):
        check_train_step(step, _start(), BATCHES)
    check_train_step(step, _start(), BATCHES, may_move=["[4]"])


def test_a_step_without_a_skip():
    """The parameters themselves move."""

    def step(state, batch):
        params, scale_state = state
        grads = unscale(_scaled_grads(params, scale_state, batch), scale_state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, POLICY.update(scale_state, jnp.isfinite(grads["w"]).all())

    with pytest.raises(TrainStepError, match=r"\[0\]\['b'\] went from 0.0 to nan, \[0\]\['w'\] changed"):
        check_train_step(jax.jit(step), (PARAMS, init_state(POLICY)), BATCHES)


def test_gradients_that_are_clipped_before_they_are_unscaled():
    """Then the loss scale makes a difference."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)

    def step(state, batch):
        params, opt_state = state
        grads = _scaled_grads(params, get_scale_state(opt_state), batch)
        grads, _ = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with pytest.raises(TrainStepError, match=r"at step 1 a loss scale of 1 and one of 1024 gave different results"):
        check_train_step(jax.jit(step), (PARAMS, optimizer.init(PARAMS)), BATCHES)


def test_an_overflow_that_the_policy_never_receives():
    """The scale would never fall."""

    def step(state, batch):
        params, scale_state = state
        _, _, grads, finite = value_and_grad(_loss)(scale_state, params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return select(finite, (new, POLICY.update(scale_state, finite)), state)

    with pytest.raises(TrainStepError, match=r"step 0 overflowed, but \[1\].skipped_steps went from 0 to 0"):
        check_train_step(jax.jit(step), (PARAMS, init_state(POLICY)), BATCHES)


# -- gradients that do not come from the loss --------------------------------------------------------------------------


@jax.custom_vjp
def _unscaled(x, aux_loss):
    """Add the gradients of a loss as they are, without the loss scale."""
    return x


_unscaled.defvjp(lambda x, aux_loss: (x, None), lambda _, gradient: (gradient, jnp.float32(1.0)))

ROUTED = {**PARAMS, "router": jnp.linspace(0.5, 1.0, 8)}
ADDED_BY = {
    "attach": attach,
    "unscaled": lambda x, aux_loss, state: _unscaled(x, aux_loss),
    "by hand": lambda x, aux_loss, state: _unscaled(x, aux_loss * state.loss_scale),
}


def _routed_loss(params, batch, state, add):
    hidden = batch * params["w"]
    hidden = add(hidden, 0.1 * jnp.square(hidden @ params["router"]).mean(), state)
    return jnp.mean((hidden.sum(-1) + params["b"] - 1.0) ** 2)


def _with_router(add, optimizer=OPTIMIZER, wrap=lambda function: function):
    def step(state, batch):
        params, opt_state = state
        scale_state = get_scale_state(opt_state)

        @wrap
        def loss(params):
            return scale(_routed_loss(params, batch, scale_state, add), scale_state)

        return optimizer.apply_gradients(jax.grad(loss)(params), opt_state, params)

    return step, (ROUTED, optimizer.init(ROUTED))


def _by_value_and_grad(add, axis_name=None):
    def step(state, batch):
        params, inner, scale_state = state
        loss = functools.partial(_routed_loss, batch=batch, state=scale_state, add=add)
        _, _, grads, finite = value_and_grad(loss, axis_name=axis_name)(scale_state, params)
        updates, new_inner = ADAM.update(grads, inner, params)
        new = select(finite, (optax.apply_updates(params, updates), new_inner), (params, inner))
        return *new, POLICY.update(scale_state, finite)

    return step, (ROUTED, ADAM.init(ROUTED), init_state(POLICY))


def _under_pmap(add):
    step, state = _by_value_and_grad(add, "data")
    mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
    return lambda state, batch: mapped(state, jnp.stack([batch, 2 * batch])), state


def _under_shard_map(add):
    step, state = _by_value_and_grad(add, "data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)), state


def _decayed(add):
    """Decay weights in the optimizer, where it is right."""
    return _with_router(add, loss_scaled(optax.adamw(1e-2, weight_decay=0.1), POLICY, guard=SpikeGuard()))


STEPS = {
    "loss_scaled": _with_router,
    "checkpoint": functools.partial(_with_router, wrap=jax.checkpoint),
    "jit within": functools.partial(_with_router, wrap=jax.jit),
    "weight decay": _decayed,
    "value_and_grad": _by_value_and_grad,
    "value_and_grad without jit": _by_value_and_grad,
    "pmap": _under_pmap,
    "shard_map": _under_shard_map,
}


@pytest.mark.parametrize(
    ("name", "add"),
    [(name, add) for name in STEPS for add in ADDED_BY if add != "by hand" or "map" not in name],
)
def test_a_loss_that_is_added_without_its_scale_is_named(name, add):
    """The error names the parameters that get its gradients; `attach` passes, and so does a loss scaled by hand."""
    if name == "pmap" and jax.__version_info__ < (0, 8):
        pytest.skip("before JAX 0.8 a pmap with in_axes=None cannot be compiled within jit")
    step, state = STEPS[name](ADDED_BY[add])
    step = step if "without jit" in name else jax.jit(step)
    step(state, BATCHES[0])  # it is compiled before the check, which must not matter
    if add != "unscaled":
        check_train_step(step, state, BATCHES)
        return
    with pytest.raises(
        TrainStepError, match=r"at step 1 the loss was multiplied by zero, and \['router'\], \['w'\] have"
    ):
        check_train_step(step, state, BATCHES)


def test_weight_decay_that_is_written_into_scaled_gradients():
    """It misses the loss scale, too."""

    def step(state, batch):
        params, opt_state = state
        grads = _scaled_grads(params, get_scale_state(opt_state), batch)
        grads = jax.tree.map(lambda g, p: g + 1e-4 * p, grads, params)
        return OPTIMIZER.apply_gradients(grads, opt_state, params)

    with pytest.raises(TrainStepError, match=r"\['w'\] has a gradient other than zero"):
        check_train_step(jax.jit(step), (PARAMS, OPTIMIZER.init(PARAMS)), BATCHES)


def test_a_step_that_does_not_run_without_jit_is_checked_otherwise():
    """And a warning says so."""

    def step(state, batch):
        lax.scan(lambda carry, x: (carry, x), 0.0, batch[:0])  # JAX refuses a scan of no elements without jit
        return _with_optimizer(state, batch)

    with pytest.warns(UserWarning, match=r"the step does not run without jax.jit \(ValueError: zero-length scan"):
        check_train_step(jax.jit(step), (PARAMS, OPTIMIZER.init(PARAMS)), BATCHES)


def test_a_check_leaves_nothing_in_the_step():
    """The step compiles once, before the check, and what the check looks at is not in it."""
    step, state = _with_router(attach)
    step = jax.jit(step)
    expected = step(state, BATCHES[0])
    text = step.lower(state, BATCHES[0]).as_text()
    check_train_step(step, state, BATCHES)
    assert step._cache_size() == 1
    assert "callback" not in text
    assert step.lower(state, BATCHES[0]).as_text() == text
    jax.tree.map(np.testing.assert_array_equal, step(state, BATCHES[0]), expected)


def test_what_cannot_be_checked_is_refused():
    """Too few batches, no scale state, and a step that returns something else."""
    state = (PARAMS, OPTIMIZER.init(PARAMS))
    with pytest.raises(ValueError, match="4 batches are too few; pass at least 5"):
        check_train_step(_with_optimizer, state, BATCHES[:4])
    with pytest.raises(ValueError, match="holds no scale state"):
        check_train_step(_with_optimizer, PARAMS, BATCHES)
    with pytest.raises(ValueError, match="returned another structure"):
        check_train_step(lambda state, batch: None, state, BATCHES)

"""Micro-batches: `optax.microbatch` of scaled gradients, and which micro-batch of a window overflowed."""

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling
from lossscale_jax import all_finite, get_scale_state, init_state, loss_scaled, overflow_report, scale, value_and_grad

needs_microbatch = pytest.mark.skipif(not hasattr(optax, "microbatch"), reason="optax 0.2.6 has no optax.microbatch")

POLICY = DynamicScaling(init_scale=2.0**10)
X = jax.random.normal(jax.random.key(0), (8, 2))
Y = X @ jnp.array([1.0, -1.0])
PARAMS = jnp.zeros(2)
BAD = [jnp.inf, -jnp.inf, jnp.nan]


def _loss(params, x, y):
    return jnp.mean((x @ params - y) ** 2)


def _stepper(optimizer, accumulator="MEAN", size=2):
    """Return a compiled step, of which `optax.microbatch` differentiates `size` samples at a time."""

    @jax.jit
    def step(params, opt_state, x, y):
        scaled_loss = lambda params, x, y: scale(_loss(params, x, y), get_scale_state(opt_state))  # noqa: E731
        how = optax.microbatching.AccumulationType[accumulator]
        grads = optax.microbatch(jax.grad(scaled_loss), (1, 2), size, how)(params, x, y)
        return optimizer.apply_gradients(grads, opt_state, params)

    return step


@needs_microbatch
@pytest.mark.parametrize("accumulator", ["MEAN", "RUNNING_MEAN"])
def test_a_split_batch_gives_the_step_of_the_whole_batch(accumulator):
    """Up to rounding, which is that of a mean of means."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    params, opt_state = _stepper(optimizer, accumulator)(PARAMS, optimizer.init(PARAMS), X, Y)
    assert jnp.allclose(params, -0.1 * jax.grad(_loss)(PARAMS, X, Y), rtol=1e-5)
    assert int(get_scale_state(opt_state).steps) == 1


@needs_microbatch
def test_the_default_is_a_sum():
    """Its gradients are larger by the number of micro-batches."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    params, _ = _stepper(optimizer, "SUM")(PARAMS, optimizer.init(PARAMS), X, Y)
    assert jnp.allclose(params, -0.4 * jax.grad(_loss)(PARAMS, X, Y), rtol=1e-5)


@needs_microbatch
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("accumulator", ["MEAN", "RUNNING_MEAN", "SUM"])
def test_an_overflow_in_any_micro_batch_skips_the_step(accumulator, bad):
    """The sum keeps it, and the scale backs off once."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    step, start = _stepper(optimizer, accumulator), optimizer.init(PARAMS)
    for sample in range(len(X)):
        params, opt_state = step(PARAMS, start, X.at[sample, 0].set(bad), Y)
        state = get_scale_state(opt_state)
        assert (params == PARAMS).all()
        assert (int(state.steps), int(state.skipped_steps), float(state.loss_scale)) == (1, 1, 2.0**9)


@needs_microbatch
@pytest.mark.parametrize(("drop", "applied"), [("window", False), ("micro_batch", True)])
def test_a_split_batch_is_one_micro_batch_of_a_window(drop, applied):
    """With `accumulation_steps` around it, an overflow costs the window or the whole split batch."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2, drop=drop)
    step, halves = _stepper(optimizer), [(X[:4], Y[:4]), (X[4:], Y[4:])]
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for x, y in halves:
        params, opt_state = step(params, opt_state, x, y)
    assert jnp.allclose(params, -0.1 * jax.grad(_loss)(PARAMS, X, Y), rtol=1e-5)

    params, opt_state = step(PARAMS, optimizer.init(PARAMS), halves[0][0].at[3, 1].set(jnp.inf), halves[0][1])
    params, opt_state = step(params, opt_state, *halves[1])
    expected = -0.1 * jax.grad(_loss)(PARAMS, *halves[1]) if applied else PARAMS
    assert jnp.allclose(params, expected, rtol=1e-5)
    assert int(get_scale_state(opt_state).skipped_steps) == 1


@needs_microbatch
def test_flags_are_combined_by_or():
    """So `grads_finite` of a `value_and_grad` within it is of no use; `all_finite` of the gradients is."""
    differentiate = optax.microbatch(value_and_grad(_loss), argnums=(2, 3), microbatch_size=2)
    result = differentiate(init_state(POLICY), PARAMS, X.at[0, 0].set(jnp.inf), Y)
    assert bool(result.grads_finite)
    assert not bool(all_finite(result.grads))


@pytest.mark.parametrize("bad", [None, *range(4)])
def test_a_bad_micro_batch_is_seen_as_it_passes(bad):
    """By `all_finite` of its scaled gradients, also in the middle of a window, when the policy receives nothing."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=4)

    @jax.jit
    def step(params, opt_state, x, y):
        grads = jax.grad(lambda params: scale(_loss(params, x, y), get_scale_state(opt_state)))(params)
        return *optimizer.apply_gradients(grads, opt_state, params), all_finite(grads), grads

    params, opt_state, reported = PARAMS, optimizer.init(PARAMS), []
    x = X if bad is None else X.at[2 * bad].set(jnp.inf)
    for n in range(4):
        rows = slice(2 * n, 2 * n + 2)
        params, opt_state, finite, grads = step(params, opt_state, x[rows], Y[rows])
        assert int(get_scale_state(opt_state).skipped_steps) == (bad is not None and n == 3)
        reported += [] if finite else [(n, overflow_report(grads)[0].nan)]
    assert reported == ([] if bad is None else [(bad, 2)])

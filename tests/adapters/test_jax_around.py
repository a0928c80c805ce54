"""The table of docs/jax.md: each transformation inside of `loss_scaled` and around it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from lossscale_core import DynamicScaling, state_to_dict
from lossscale_core.errors import ScaleStateError
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import bits, step_of

SCALE = 2.0**10
POLICY = DynamicScaling(init_scale=SCALE)
PARAMS = {"w": jnp.array([1.0, -0.0, 2.0])}
GRADS = {"w": jnp.array([3.0, -2.0, 6.0])}
SGD = optax.sgd(0.5)


def _multi_steps(skip=None):
    return lambda inner: optax.MultiSteps(inner, 1, should_skip_update_fn=skip).gradient_transformation()


def _large(updates, *arguments):
    return optax.skip_large_updates(updates, *arguments, max_squared_norm=1e30)


def _lookahead(inner):
    return optax.lookahead(inner, 3, 0.5)


def _schedule_free(inner):
    return optax.contrib.schedule_free(inner, 0.5)


def _before(transformation):
    return lambda inner: optax.chain(transformation, inner)


def _after(transformation):
    return lambda inner: optax.chain(inner, transformation)


def _in_a_chain(inner):
    return optax.chain(optax.identity(), optax.apply_if_finite(optax.chain(inner), 5))


def _refused(optimizer, params):
    opt_state = optimizer.init(params)
    for read in (get_scale_state, lambda state: load_scale_state(state, state_to_dict(POLICY.init_state()), POLICY)):
        with pytest.raises(ScaleStateError, match=r"wraps loss_scaled and drops overflows before .*; put it inside"):
            read(opt_state)


def _clips_scaled_gradients(optimizer, params):
    updates, _ = optimizer.update(_times(GRADS, SCALE), optimizer.init(params), params)
    assert float(jnp.linalg.norm(updates["w"])) == pytest.approx(0.5 / SCALE)


def _hides(bad):
    def check(optimizer, params):
        grads = {"w": GRADS["w"].at[0].set(bad)}
        _, opt_state = optimizer.update(grads, optimizer.init(params), params)
        state = get_scale_state(opt_state)
        assert (int(state.steps), int(state.skipped_steps)) == (1, 0)

    return check


def _counts_a_skip(optimizer, params):
    grads = {"w": GRADS["w"].at[0].set(jnp.inf)}
    before = optimizer.init(params)
    _, after = optimizer.update(grads, before, params)
    assert int(get_scale_state(after).skipped_steps) == 1
    counts = [
        [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if re.search(r"count|since", str(path[-1]))]
        for state in (before, after)
    ]
    assert bits(counts[0]) != bits(counts[1])


ROWS = {
    "`optax.apply_if_finite`": [
        (lambda inner: optax.apply_if_finite(inner, 5), _refused),
        (_in_a_chain, _refused),
    ],
    "`optax.MultiSteps(..., should_skip_update_fn=optax.skip_not_finite)`, or `skip_large_updates`": [
        (_multi_steps(optax.skip_not_finite), _refused),
        (_multi_steps(_large), _refused),
    ],
    "`optax.MultiSteps` without `should_skip_update_fn`": [(_multi_steps(), _refused)],
    "`optax.clip_by_global_norm` in a chain before it": [
        (_before(optax.clip_by_global_norm(1.0)), _clips_scaled_gradients)
    ],
    "`optax.zero_nans`, `optax.clip` in a chain before it": [
        (_before(optax.zero_nans()), _hides(jnp.nan)),
        (_before(optax.clip(1.0)), _hides(jnp.inf)),
    ],
    "`optax.lookahead` or `contrib.schedule_free` around it, `optax.ema` in a chain after it": [
        (_lookahead, _counts_a_skip),
        (_schedule_free, _counts_a_skip),
        (_after(optax.ema(0.5)), _counts_a_skip),
    ],
}
EACH = [(row, wrap, check) for row, pairs in ROWS.items() for wrap, check in pairs]


def _times(grads, factor):
    return jax.tree.map(lambda leaf: leaf * factor, grads)


def _params_of(wrap):
    """Return the parameters in the form that the wrapped optimizer needs."""
    return optax.LookaheadParams.init_synced(PARAMS) if wrap is _lookahead else PARAMS


@pytest.mark.parametrize(("row", "wrap", "check"), EACH)
def test_around(row, wrap, check):
    """A transformation around `loss_scaled` has the effect that the page names."""
    check(wrap(loss_scaled(SGD, POLICY)), _params_of(wrap))


@pytest.mark.parametrize("skip_by", ["cond", "select"])
def test_lookahead_inside_with_accumulation(skip_by):
    """A window of two equal micro-batches is one step; an overflow in a micro-batch leaves everything unchanged."""
    optimizer = loss_scaled(_lookahead(SGD), POLICY, accumulation_steps=2, skip_by=skip_by)
    params = _params_of(_lookahead)
    step = jax.jit(step_of(optimizer, "apply_gradients"))
    plain = _lookahead(SGD)
    expected, _ = plain.update(GRADS, plain.init(params), params)
    first = step(params, optimizer.init(params), _times(GRADS, SCALE))
    assert bits(first[0]) == bits(params)
    stepped = step(*first, _times(GRADS, SCALE))
    jax.tree.map(np.testing.assert_allclose, stepped[0], optax.apply_updates(params, expected))
    skipped = step(*step(*stepped, _times(GRADS, jnp.inf)), _times(GRADS, SCALE))
    assert bits((skipped[0], skipped[1].inner_state)) == bits((stepped[0], stepped[1].inner_state))
    with pytest.raises(ValueError, match="the gradients lack"):  # gradients belong to the fast parameters
        step(params, optimizer.init(params), params)


@pytest.mark.parametrize(("method", "skip_by"), [("update", "cond"), ("update", "select"), ("apply_gradients", "cond")])
@pytest.mark.parametrize(("row", "wrap", "check"), EACH)
def test_inside(row, wrap, check, method, skip_by):
    """A step equals a step of the wrapped optimizer alone, and a skipped step leaves all bits unchanged."""
    plain, optimizer, params = wrap(SGD), loss_scaled(wrap(SGD), POLICY, skip_by=skip_by), _params_of(wrap)
    step = jax.jit(step_of(optimizer, method))
    expected, _ = plain.update(GRADS, plain.init(params), params)
    stepped = step(params, optimizer.init(params), _times(GRADS, SCALE))
    jax.tree.map(np.testing.assert_allclose, stepped[0], optax.apply_updates(params, expected))
    for bad in (jnp.inf, jnp.nan):
        skipped = step(*stepped, {"w": GRADS["w"].at[0].set(bad)})
        assert bits((skipped[0], skipped[1].inner_state)) == bits((stepped[0], stepped[1].inner_state))
        assert int(get_scale_state(skipped[1]).skipped_steps) == 1

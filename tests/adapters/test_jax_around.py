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
from tests.adapters.jax_reading import bits, step_of, times

SCALE = 2.0**10
POLICY = DynamicScaling(init_scale=SCALE)
PARAMS = {"w": jnp.array([1.0, -0.0, 2.0])}
GRADS = {"w": jnp.array([3.0, -2.0, 6.0])}
SGD = optax.sgd(0.5)


def _lookahead(inner):
    return optax.lookahead(inner, 3, 0.5)


def _before(transformation):
    return lambda inner: optax.chain(transformation, inner)


def _with(value):
    """Return gradients with another first element."""
    return {"w": GRADS["w"].at[0].set(value)}


def _refused(optimizer, params):
    opt_state = optimizer.init(params)
    for read in (get_scale_state, lambda state: load_scale_state(state, state_to_dict(POLICY.init_state()), POLICY)):
        with pytest.raises(ScaleStateError, match=r"wraps loss_scaled and drops overflows before .*; put it inside"):
            read(opt_state)


def _clips_scaled_gradients(optimizer, params):
    updates, _ = optimizer.update(times(GRADS, SCALE), optimizer.init(params), params)
    assert float(jnp.linalg.norm(updates["w"])) == pytest.approx(0.5 / SCALE)


def _hides(bad):
    def check(optimizer, params):
        state = get_scale_state(optimizer.update(_with(bad), optimizer.init(params), params)[1])
        assert (int(state.steps), int(state.skipped_steps)) == (1, 0)

    return check


def _counts_a_skip(optimizer, params):
    before = optimizer.init(params)
    _, after = optimizer.update(_with(jnp.inf), before, params)
    assert int(get_scale_state(after).skipped_steps) == 1
    counts = [
        [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if re.search(r"count|since", str(path[-1]))]
        for state in (before, after)
    ]
    assert bits(counts[0]) != bits(counts[1])


AROUND = {
    "apply_if_finite": (lambda inner: optax.chain(optax.apply_if_finite(optax.chain(inner), 5)), _refused),
    "MultiSteps": (lambda inner: optax.MultiSteps(inner, 1).gradient_transformation(), _refused),
    "clip_by_global_norm before": (_before(optax.clip_by_global_norm(1.0)), _clips_scaled_gradients),
    "zero_nans before": (_before(optax.zero_nans()), _hides(jnp.nan)),
    "clip before": (_before(optax.clip(1.0)), _hides(jnp.inf)),
    "lookahead": (_lookahead, _counts_a_skip),
    "schedule_free": (lambda inner: optax.contrib.schedule_free(inner, 0.5), _counts_a_skip),
    "ema after": (lambda inner: optax.chain(inner, optax.ema(0.5)), _counts_a_skip),
}
"""Transformations, and checks of their effects around `loss_scaled`."""


def _params_of(wrap):
    """Return the parameters in the form that the wrapped optimizer needs."""
    return optax.LookaheadParams.init_synced(PARAMS) if wrap is _lookahead else PARAMS


@pytest.mark.parametrize(("wrap", "check"), AROUND.values(), ids=AROUND)
def test_around(wrap, check):
    """A transformation around `loss_scaled` has the effect that the page names."""
    check(wrap(loss_scaled(SGD, POLICY)), _params_of(wrap))


@pytest.mark.parametrize(
    ("method", "micro_batches", "skip_by"),
    [("update", 1, "cond"), ("update", 1, "select"), ("apply_gradients", 2, "cond")],
)
@pytest.mark.parametrize("wrap", [wrap for wrap, _ in AROUND.values()], ids=AROUND)
def test_inside(wrap, method, micro_batches, skip_by):
    """A step equals a step of the wrapped optimizer alone, and a skipped step leaves all bits unchanged."""
    plain, params = wrap(SGD), _params_of(wrap)
    optimizer = loss_scaled(wrap(SGD), POLICY, accumulation_steps=micro_batches, skip_by=skip_by)
    step = jax.jit(step_of(optimizer, method))

    def after(params, opt_state, grads):
        for _ in range(micro_batches):
            params, opt_state = step(params, opt_state, grads)
        return params, opt_state

    expected, _ = plain.update(GRADS, plain.init(params), params)
    stepped = after(params, optimizer.init(params), times(GRADS, SCALE))
    jax.tree.map(np.testing.assert_allclose, stepped[0], optax.apply_updates(params, expected))
    for bad in (jnp.inf, jnp.nan):
        skipped = after(*stepped, _with(bad))
        assert bits((skipped[0], skipped[1].inner_state)) == bits((stepped[0], stepped[1].inner_state))
        assert int(get_scale_state(skipped[1]).skipped_steps) == 1

"""What is logged of a loop in JAX where its state is read, and the errors that say what to do."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling, ScaleWatch, diagnose, state_to_dict
from lossscale_core.adapters import check_overflow_streak
from lossscale_core.errors import ScaleStateError
from lossscale_jax import (
    get_scale_state,
    init_state,
    loss_scaled,
    scale,
    select,
    unscale,
    value_and_grad,
)


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _events(caplog):
    return [(record.event, record.steps) for record in caplog.records if record.name == "lossscale"]


def _stuck(policy, transform):
    """Return the scale state after thirty NaNs."""
    optimizer = loss_scaled(optax.sgd(0.1), policy)
    params = jnp.ones(2)
    opt_state = optimizer.init(params)
    step = transform(optimizer.apply_gradients)
    for _ in range(30):
        params, opt_state = step(jnp.full(2, jnp.nan), opt_state, params)
    return get_scale_state(opt_state)


@pytest.mark.parametrize("transform", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_a_pure_loop_logs_through_its_own_watch_alone(transform, caplog):
    """The steps are pure and say nothing, nor do `diagnose`, a saved state and a check; a `ScaleWatch` says it once."""
    policy, watch = DynamicScaling(max_overflow_streak=1000), ScaleWatch()
    state = _stuck(policy, transform)
    check_overflow_streak(policy, state)
    diagnose(policy, state)
    state_to_dict(state, policy)
    assert _events(caplog) == []
    for _ in range(2):
        watch.log(policy, state)
    assert _events(caplog) == [("floor", 30)]


def test_a_watch_of_ones_own_keeps_runs_apart(caplog):
    """Two runs under one policy, each with a `ScaleWatch`, are both logged."""
    policy = DynamicScaling(growth_interval=6)
    state = _stuck(policy, jax.jit)
    for watch in (ScaleWatch(), ScaleWatch()):
        watch.log(policy, state)
        watch.log(policy, state)
    assert _events(caplog) == [("floor", 30)] * 2


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_its_packages_the_import_says_what_to_install(missing):
    """In place of the name of a module alone, which is still there."""
    code = f"import sys; sys.modules['{missing}'] = None; import lossscale_jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        f"lossscale_jax needs jax and optax, and {missing} is not installed; "
        'run: pip install "lossscale[jax]"' in result.stderr
    )
    assert f"import of {missing} halted" in result.stderr
    assert "direct cause" in result.stderr


STATE, OPTIMIZER, PARAMS = init_state("dynamic"), loss_scaled(optax.sgd(0.1), "dynamic"), {"w": jnp.ones(2)}


def _loss(params):
    return params["w"].sum()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scale(STATE, jnp.ones(())), TypeError, r"^ArrayImpl is not a scale state.*call scale\(loss, state\)"),
        (lambda: scale(1.0, 2.0), TypeError, "^float is not a scale state, since it has no loss_scale"),
        (lambda: unscale(STATE, PARAMS), TypeError, r"^dict is not a scale state.*call unscale\(grads, state\)"),
        (lambda: unscale(PARAMS, DynamicScaling()), TypeError, "^DynamicScaling is not a scale state.*init_state"),
        (
            lambda: select(PARAMS, PARAMS, True),
            TypeError,
            r"grads_finite=\{.*must be a bool of shape \(\); call select\(grads_finite, new, old\)",
        ),
        (lambda: select(True, jnp.ones(2), PARAMS), ValueError, "a leaf that is not an array must not change"),
        (lambda: value_and_grad(_loss)(PARAMS, STATE), TypeError, r"^dict is not .*call value_and_grad\(fun\)\(state"),
        (lambda: loss_scaled("dynamic", optax.sgd(0.1)), TypeError, "inner='dynamic' .*and the policy after it"),
        (lambda: get_scale_state(PARAMS), ScaleStateError, r"the optimizer state \(dict\) holds no scale state"),
        (
            lambda: OPTIMIZER.update(OPTIMIZER.init(PARAMS), PARAMS),
            ScaleStateError,
            "dict is not .*after the gradients",
        ),
    ],
    ids=[
        *(
            "scale-swapped",
            "scale-by-number",
            "unscale-swapped",
            "unscale-by-policy",
            "select-flag-last",
            "select-unlike",
        ),
        *("state-second", "inner-second"),
        *("scale-state-of-params", "update-swapped"),
    ],
)
def test_an_argument_in_the_wrong_place(call, error, message):
    """One sentence says what was given, and how the call goes."""
    with pytest.raises(error, match=message):
        call()

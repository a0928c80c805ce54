"""What is logged of a loop in JAX where its state is read, and the errors that say what to do."""

import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest

from lossscale_core import DynamicScaling
from lossscale_core.errors import ScaleStateError
from lossscale_jax import get_scale_state, init_state, loss_scaled, scale, select, unscale, value_and_grad


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

"""Likely mistakes with the JAX functions raise an error that says what to do."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling, ScaleWatch, SpikeGuard, check_limits, diagnose, state_to_dict
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import get_scale_state, init_state, loss_scaled, scale, select, value_and_grad
from lossscale_jax.testing import check_train_step

POLICY = DynamicScaling(max_overflow_streak=3)
PARAMS = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)}
STATE, SGD, COUNT = init_state(POLICY), optax.sgd(0.1), jnp.int32(5)
OPTIMIZER = loss_scaled(SGD, POLICY)
TWICE = loss_scaled(optax.chain(OPTIMIZER), POLICY)
SEVERAL = optax.multi_transform({"a": OPTIMIZER, "b": OPTIMIZER}, {"weight": "a", "bias": "b"})
LOOKAHEAD, PAIRS = loss_scaled(optax.lookahead(SGD, 3, 0.5), POLICY), optax.LookaheadParams.init_synced(PARAMS)
WINDOW, GUARDED = loss_scaled(SGD, POLICY, accumulation_steps=2), loss_scaled(SGD, POLICY, guard=SpikeGuard())
OPT_STATE = OPTIMIZER.init(PARAMS)


def _losses(params):
    """Return a loss for each of three samples."""
    return params["weight"].sum(axis=0) ** 2


def _mean(params):
    return _losses(params).mean()


def _grad_of(fun, **options):
    return partial(value_and_grad(fun, **options), STATE, PARAMS)


def _step(grads):
    return partial(OPTIMIZER.update, grads, OPT_STATE, PARAMS)


def _swapped(gradient):
    """Return a step whose gradients and parameters are swapped; the parameters have an untrained count."""
    opt_state = OPTIMIZER.init({"weight": jnp.ones(3)})
    arguments = {"weight": jnp.ones(3), "count": COUNT}, opt_state, {"weight": jnp.ones(3), "count": gradient}
    return partial(OPTIMIZER.apply_gradients, *arguments)


def _wrapped(**settings):
    return partial(loss_scaled, SGD, POLICY, **settings)


def _selected(new, old):
    return partial(select, jnp.asarray(True), new, old)


def _checked(step, state, count=6):
    return partial(check_train_step, step, state, [0.0] * count)


NO_GRADIENT = r"a loss of dtype (bool|key<fry>) has no gradient; pass a float"
AS_GRAD = r".*; pass what jax\.grad returns for these parameters"
WITHOUT = "made without accumulation and without a guard"
MISTAKES = {
    TypeError: [
        (_grad_of(_losses), r"^fun returned .* of shape \(3,\); return a scalar loss, such as jnp\.mean\(loss\)"),
        (_grad_of(lambda params: (_mean(params), 1)), r"^fun returned \(.*, 1\); .* has_aux=True"),
        (_grad_of(_mean, has_aux=True), r"^fun returned .*; .* or with has_aux=True a pair"),
        (partial(scale, True, STATE), NO_GRADIENT),
        (partial(scale, jax.random.key(0), STATE), NO_GRADIENT),
    ],
    ValueError: [
        (partial(OPTIMIZER.apply_gradients, PARAMS, OPT_STATE, None), "call .*grads, state, params"),
        # gradients that do not fit the parameters: the first difference
        (_step({"weight": jnp.ones((2, 3))}), r"^the gradients lack \['bias'\], which the parameters have" + AS_GRAD),
        (partial(WINDOW.update, {}, WINDOW.init(PARAMS)), "^the gradients hold no array" + AS_GRAD),
        (partial(LOOKAHEAD.update, PAIRS, LOOKAHEAD.init(PAIRS), PAIRS), "^the gradients lack"),
        (_step(PARAMS | {"a": COUNT}), r"^the gradients have \['a'\], which the parameters lack" + AS_GRAD),
        (_step(PARAMS | {"bias": jnp.ones(2)}), r"have shape \(2,\) at \['bias'\], and .* shape \(3,\)" + AS_GRAD),
        (_step((jnp.ones(()), PARAMS)), r"^the gradients lack \['bias'\], " + AS_GRAD),
        (_swapped(None), "which the parameters lack"),
        (_swapped(np.zeros((), jax.dtypes.float0)), "hold no floats at"),
        # leaves that `select` would broadcast or drop
        (_selected({"w": jnp.ones(2)}, {"w": jnp.ones(())}), r"\['w'\] is float32\[2\] in new and float32\[\] in old"),
        (_selected([jax.nn.relu], [jax.nn.gelu]), "a leaf that is not an array must not change: pass arrays"),
        (_selected(jnp.ones(2), jnp.ones(2, jnp.float16)), r"the leaf is float32\[2\] in new and float16\[2\] in old"),
        # steps that cannot be checked
        (_checked(None, OPT_STATE, 4), "4 batches are too few; pass at least 5"),
        (_checked(None, PARAMS), "holds no scale state"),
        (_checked(lambda state, batch: None, OPT_STATE), "returned another structure"),
    ],
    ScaleStateError: [
        (partial(get_scale_state, SEVERAL.init(PARAMS)), r"2 scale states, at .*\['a'\].*\['b'\].*; pass the part"),
        (partial(OPTIMIZER.update, OPT_STATE, PARAMS), "dict .*as the second argument"),
    ],
    PolicyError: [
        (partial(WINDOW.update, PARAMS, OPT_STATE), f"accumulation_steps=2 and guard=None do not .* {WITHOUT}; pass"),
        (partial(GUARDED.update, PARAMS, OPT_STATE), f"not fit a state {WITHOUT}; pass .* take the missing part from"),
        (partial(TWICE.init, PARAMS), "inner is loss-scaled already; wrap the optimizer once"),
        # settings that make no sense
        (_wrapped(max_norm=float("nan")), "max_norm=nan must be a number from 0"),
        (_wrapped(max_norm=1.0, axis_name="data"), "need reduced gradients, unlike axis_name; reduce the"),
        (_wrapped(accumulation_steps=2, axis_name="data"), "reduce the gradients over the axis first and leave axis_n"),
        (_wrapped(accumulation_steps=0), "=0 must be a whole number from 1 to .*; pass 1, or leave it out"),
        (_wrapped(skip_by=True), "skip_by=True must be 'cond' or 'select'; leave it out for the default"),
        (_wrapped(guard=8.0), r"guard=8\.0 must be a SpikeGuard"),
    ],
}
ROWS = [(error, *row) for error, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(("error", "call", "message"), ROWS)
def test_the_message_says_what_to_do(error, call, message):
    """The message of a mistake says what was passed, and shows the right call, name or value."""
    with pytest.raises(error, match=message):
        call()


def test_a_traced_state_has_no_value():
    """Functions that read a state or a flag raise an error in a traced function, and say where to call them."""
    readers = [lambda state: diagnose(POLICY, state), lambda state: ScaleWatch().log(POLICY, state)]
    for read in (*readers, state_to_dict, lambda state: check_limits(POLICY, state)):
        with pytest.raises(TypeError, match=r"^the state is traced, .* call this outside of it, with the state"):
            jax.jit(read)(STATE)
    with pytest.raises(TypeError, match=r"^grads_finite is traced .* on the host; pass .* init_state\(policy\)"):
        jax.jit(lambda finite: POLICY.update(POLICY.init_state(), finite))(jnp.asarray(False))


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_an_import_without_its_packages(missing):
    """A missing package raises an error with the command to install it; its cause is the original error."""
    code = f"import sys; sys.modules['{missing}'] = None; import lossscale_jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    hint = f'needs jax and optax, and {missing} is not installed; run: pip install "lossscale[jax]"'
    assert f"lossscale_jax {hint}" in result.stderr

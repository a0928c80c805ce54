"""Likely mistakes with the JAX functions raise an error that says what to do."""

import functools
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from lossscale_core import DynamicScaling, ScaleWatch, SpikeGuard, check_limits, diagnose, state_to_dict
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import get_last_step, get_scale_state, init_state, loss_scaled, scale, value_and_grad

POLICY = DynamicScaling(max_overflow_streak=3)
PARAMS = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)}
STATE, OPTIMIZER = init_state(POLICY), loss_scaled(optax.sgd(0.1), POLICY)


def _losses(params):
    """Return a loss for each of three samples."""
    return params["weight"].sum(axis=0) ** 2


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (_losses, {}, r"^fun returned .* of shape \(3,\); return a scalar loss, such as jnp\.mean\(loss\)"),
        (lambda params: (_losses(params).mean(), 1), {}, r"^fun returned \(.*, 1\); .* has_aux=True"),
        (lambda params: _losses(params).mean(), {"has_aux": True}, r"^fun returned .*; .* or with has_aux=True a pair"),
    ],
)
def test_a_function_must_return_a_scalar_loss(fun, options, message):
    """Without `has_aux`, `fun` returns a scalar; with `has_aux`, a pair that begins with a scalar."""
    for transform in (lambda function: function, jax.jit):
        with pytest.raises(TypeError, match=message):
            transform(value_and_grad(fun, **options))(STATE, PARAMS)


# -- values of traced arrays -------------------------------------------------------------------------------------------


def test_a_traced_state_or_flag_has_no_value():
    """Functions that read a state or a flag raise an error in a traced function, and say where to call them."""
    readers = [lambda state: diagnose(POLICY, state), lambda state: ScaleWatch().log(POLICY, state)]
    for read in (*readers, state_to_dict, lambda state: check_limits(POLICY, state)):
        with pytest.raises(TypeError, match=r"^the state is traced, .* call this outside of it, with the state"):
            jax.jit(read)(init_state(POLICY))
    with pytest.raises(TypeError, match=r"^grads_finite is traced .* on the host; pass .* init_state\(policy\)"):
        jax.jit(lambda finite: POLICY.update(POLICY.init_state(), finite))(jnp.asarray(False))


# -- gradients that do not fit the parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("method", ["update", "apply_gradients"])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"weight": jnp.ones((2, 3))}, r"^the gradients lack \['bias'\], which the parameters have"),
        (PARAMS | {"scale": jnp.ones(1)}, r"^the gradients have \['scale'\], which the parameters lack"),
        (PARAMS | {"bias": jnp.ones(2)}, r"have shape \(2,\) at \['bias'\], and the param.* shape \(3,\)"),
        ((jnp.ones(()), PARAMS), r"^the gradients lack \['bias'\], "),
        (None, "^the gradients hold no array"),
    ],
)
def test_gradients_of_another_structure(grads, message, method, compiled):
    """The message names the first difference, and says what to pass; with accumulation, too."""
    for steps in (1, 2):
        optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=steps)
        step = getattr(optimizer, method)
        with pytest.raises(ValueError, match=message + r".*; pass what jax\.grad returns for these parameters"):
            (jax.jit(step) if compiled else step)(grads, optimizer.init(PARAMS), PARAMS)


def test_gradients_without_untrained_parameters():
    """None may replace the gradient of an untrained array or a function, as in Equinox and optax."""

    class Model(eqx.Module):
        weight: jax.Array
        count: jax.Array
        activation: Callable

    model = Model(jnp.ones(3), jnp.int32(5), jax.nn.relu)
    optimizer = loss_scaled(optax.adamw(0.1), POLICY)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(lambda model: model.weight.sum() * 2.0**16)(model)
    step = functools.partial(optimizer.update, params=model)
    for update in (optimizer.update(grads, opt_state, model), jax.jit(step)(grads, opt_state)):
        assert get_last_step(update[1]).applied
        assert float(eqx.apply_updates(model, update[0]).weight[0]) < 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_that_sums_the_gradients_of_samples(compiled):
    """The gradients have one more dimension than the updates; the updates of a skipped step are zero."""
    optimizer = loss_scaled(optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0), POLICY)
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), PARAMS)
    updates, state = update(grads, optimizer.init(PARAMS), PARAMS)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
    assert bool(updates["bias"].any())
    updates, state = update({**grads, "bias": grads["bias"].at[0].set(jnp.inf)}, state, PARAMS)
    assert not any(map(jnp.any, jax.tree.leaves(updates)))
    assert int(get_scale_state(state).skipped_steps) == 1


# -- mistakes that would be silent -------------------------------------------------------------------------------------


def test_swapped_gradients_and_parameters():
    """Swapped arguments raise an error if their structures or dtypes differ."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    params = {"weight": jnp.ones(3), "count": jnp.int32(5)}
    opt_state = optimizer.init({"weight": jnp.ones(3)})
    pairs = (None, "which the parameters lack"), (np.zeros((), jax.dtypes.float0), "hold no floats at")
    for gradient, words in pairs:
        with pytest.raises(ValueError, match=words):
            optimizer.apply_gradients(params, opt_state, {"weight": jnp.ones(3), "count": gradient})


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["eager", "jit"])
def test_an_error_of_the_wrapped_optimizer_is_its_own(wrap):
    """The wrapped optimizer's own errors are raised unchanged, for a wrong state or for missing parameters."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    other = optimizer.init(PARAMS)._replace(inner_state=optax.sgd(0.1, momentum=0.5).init(PARAMS)[:1])
    with pytest.raises(ValueError, match="number of updates and states has to be the same in chain"):
        wrap(optimizer.update)(PARAMS, other, PARAMS)
    decayed = loss_scaled(optax.adamw(0.1), POLICY)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        wrap(decayed.update)(PARAMS, decayed.init(PARAMS))


_wrapped = functools.partial(functools.partial, loss_scaled, optax.sgd(0.1), POLICY)
MADE = {
    "plain": OPTIMIZER,
    "window": loss_scaled(optax.sgd(0.1), POLICY, accumulation_steps=2),
    "guard": loss_scaled(optax.sgd(0.1), POLICY, guard=SpikeGuard()),
}
TWICE = loss_scaled(optax.chain(OPTIMIZER), POLICY)
SEVERAL = optax.multi_transform({"a": OPTIMIZER, "b": OPTIMIZER}, {"weight": "a", "bias": "b"})
WITHOUT = "made without accumulation and without a guard"


def _step_of(optimizer, state_of):
    return lambda: MADE[optimizer].update(PARAMS, MADE[state_of].init(PARAMS), PARAMS)


MISTAKES = {
    ValueError: [
        (lambda: OPTIMIZER.apply_gradients(PARAMS, OPTIMIZER.init(PARAMS), None), "call .*grads, state, params")
    ],
    TypeError: [
        (lambda: scale(1.0, OPTIMIZER.init(PARAMS)), r"is not a state.*with its scale_state"),
        (lambda: value_and_grad(sum)(PARAMS, STATE), r"is not a state.*call value_and_grad\(fun\)\(state"),
        (lambda: loss_scaled("dynamic", optax.sgd(0.1)), "inner='dynamic' .*and the policy after it"),
        (lambda: scale("1.0", STATE), r"'1\.0' is not a loss; call scale\(loss, state\)"),
        (lambda: value_and_grad(STATE), r"fun=.* must be a function that returns a loss; call value_and_grad\(fun\)"),
    ],
    ScaleStateError: [
        (lambda: get_scale_state(PARAMS), r"state \(dict\) holds no scale state; wrap the optimizer"),
        (lambda: get_scale_state(SEVERAL.init(PARAMS)), r"2 scale states, at .*\['a'\].*\['b'\].*; pass the part that"),
        (lambda: OPTIMIZER.update(OPTIMIZER.init(PARAMS), PARAMS), "dict .*as the second argument"),
    ],
    PolicyError: [
        (_step_of("window", "plain"), f"accumulation_steps=2 and guard=None do not .* {WITHOUT}; pass"),
        (_step_of("guard", "plain"), f"do not fit a state {WITHOUT}; pass .* take the missing part from a"),
        (_step_of("plain", "window"), "made with accumulation and without a guard"),
        (_step_of("plain", "guard"), "guard=None do not fit .* with a guard"),
        (lambda: TWICE.init(PARAMS), "inner is loss-scaled already; wrap the optimizer once"),
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
def test_the_message_says_what_is_right(error, call, message):
    """The message of a mistake says what was passed, and shows the right call, name or value."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_its_packages_the_import_says_what_to_install(missing):
    """A missing package raises an error with the command to install it; its cause is the original error."""
    code = f"import sys; sys.modules['{missing}'] = None; import lossscale_jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = f'needs jax and optax, and {missing} is not installed; run: pip install "lossscale[jax]"'
    assert f"lossscale_jax {said}" in result.stderr
    assert f"import of {missing} halted" in result.stderr
    assert "direct cause" in result.stderr


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"max_norm": 1.0}])
@pytest.mark.parametrize("method", ["update", "apply_gradients"])
def test_eager_steps_on_numpy_float64(method, settings):
    """Without x64, eager steps on float64 NumPy arrays compute in float32, and overflows are skipped."""
    params, optimizer = {"weight": np.ones(2)}, loss_scaled(optax.adam(0.1), POLICY, **settings)
    opt_state = optimizer.init(params)
    for size in (1.0, 1.0, np.inf, np.inf):
        grads = {"weight": np.full(2, size)}
        result, opt_state = getattr(optimizer, method)(grads, opt_state, params)
        assert result["weight"].dtype == jnp.float32
    assert int(get_scale_state(opt_state).skipped_steps) == 2 // settings.get("accumulation_steps", 1)

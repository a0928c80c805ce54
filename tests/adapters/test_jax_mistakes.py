"""Likely mistakes with the JAX functions: the error of each says what to do in one sentence."""

import functools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from lossscale_core import DynamicScaling, ScaleWatch, SpikeGuard, diagnose, state_to_dict
from lossscale_core.adapters import check_overflow_streak
from lossscale_core.errors import PolicyError, ScaleStateError
from lossscale_jax import all_finite, get_scale_state, init_state, loss_scaled, scale, value_and_grad

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
        (lambda params: (_losses(params), 1), {"has_aux": True}, r"^fun returned \(.* of shape \(3,\), 1\)"),
        (lambda params: (_losses(params).mean(), 1), {}, r"^fun returned \(.*, 1\); .* has_aux=True"),
        (lambda params: None, {}, "^fun returned None; return a scalar loss"),
        (lambda params: _losses(params).mean(), {"has_aux": True}, r"^fun returned .*; .* or with has_aux=True a pair"),
    ],
    ids=["vector", "vector-with-aux", "aux-without-flag", "nothing", "flag-without-aux"],
)
def test_what_a_function_must_return(fun, options, message):
    """The loss is a scalar, and stands first in a pair with `has_aux`: eagerly and compiled."""
    for transform in (lambda function: function, jax.jit):
        with pytest.raises(TypeError, match=message):
            transform(value_and_grad(fun, **options))(STATE, PARAMS)


# -- values that are not there yet -------------------------------------------------------------------------------------


def test_values_that_are_not_there_yet():
    """A state or a flag has no value while a step is compiled; the error says where to read it."""
    readers = [lambda state: diagnose(POLICY, state), lambda state: ScaleWatch().log(POLICY, state)]
    for read in (*readers, state_to_dict, lambda state: check_overflow_streak(POLICY, state)):
        with pytest.raises(TypeError, match=r"^the state is traced, .* call this outside of it, with the state"):
            jax.jit(read)(init_state(POLICY))
    with pytest.raises(
        TypeError, match=r"^grads_finite is traced, .* on the host; pass .* adapter's init_state\(policy\)"
    ):
        jax.jit(lambda finite: POLICY.update(POLICY.init_state(), finite))(jnp.asarray(False))


# -- gradients that are not those of the parameters --------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("method", ["update", "apply_gradients"])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"weight": jnp.ones((2, 3))}, r"^the gradients lack \['bias'\], which the parameters have"),
        (PARAMS | {"scale": jnp.ones(1)}, r"^the gradients have \['scale'\], which the parameters lack"),
        (
            PARAMS | {"bias": jnp.ones(2)},
            r"^the gradients have shape \(2,\) at \['bias'\], and the param.* shape \(3,\)",
        ),
        ((jnp.ones(()), PARAMS), r"^the gradients lack \['bias'\], "),
        (None, "^the gradients hold no array"),
    ],
    ids=["fewer", "more", "another-shape", "a-pair", "nothing"],
)
def test_gradients_of_another_structure(grads, message, method, compiled):
    """The sentence names what differs, and says what to pass; also where gradients are accumulated."""
    for steps in (1, 2):
        optimizer = loss_scaled(optax.adam(0.1), POLICY, accumulation_steps=steps)
        step = getattr(optimizer, method)
        with pytest.raises(ValueError, match=message + r".*; pass what jax\.grad returns for these parameters"):
            (jax.jit(step) if compiled else step)(grads, optimizer.init(PARAMS), PARAMS)


def test_gradients_that_leave_out_what_is_not_trained():
    """Equinox has None in place of a gradient, which works as in optax."""

    class Model(eqx.Module):
        weight: jax.Array
        count: jax.Array

    model = Model(jnp.ones(3), jnp.int32(5))
    optimizer = loss_scaled(optax.adam(0.1), POLICY)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(lambda model: model.weight.sum() * 2.0**16)(model)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    assert int(get_scale_state(opt_state).skipped_steps) == 0
    assert float(eqx.apply_updates(model, updates).weight[0]) < 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_that_sums_the_gradients_of_samples(compiled):
    """Its updates have another shape than the gradients, and are zero where a step is skipped."""
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

HALVES = {"weight": jnp.ones(3, jnp.float16)}
ADAM = optax.adam(0.1)
NAN_OF_ZERO = r"makes NaN of a float16 gradient of zero.*eps=1e-4.* or leave keep_dtypes out"


INITS = {
    "eager": lambda optimizer, params: optimizer.init(params),
    "jit": lambda optimizer, params: jax.jit(optimizer.init)(params),
    "shapes": lambda optimizer, params: jax.eval_shape(optimizer.init, params),
}
DEEP = {"matrix": jnp.ones((256, 256), jnp.float16), "vector": jnp.ones(3, jnp.float16), "wide": jnp.ones(3)}
FREEZE_VECTORS = optax.stateless_with_tree_map(lambda update, _: update if update.ndim > 1 else jnp.zeros_like(update))


@pytest.mark.parametrize(
    ("inner", "params"),
    [
        (ADAM, HALVES),
        (optax.rmsprop(0.1, eps=1e-9), HALVES),
        (optax.radam(0.1), HALVES),  # divides by the second moment from its sixth step on
        (optax.chain(optax.adafactor(0.1, eps=0.0, clipping_threshold=None, momentum=None), FREEZE_VECTORS), DEEP),
        (optax.partition({"a": optax.sgd(0.1), "b": ADAM}, {"matrix": "a", "vector": "b", "wide": "a"}), DEEP),
        (optax.masked(ADAM, {"matrix": False, "vector": True, "wide": True}), DEEP),
        (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), HALVES),
        (ADAM, jnp.ones((), jnp.float16)),
    ],
    ids=["adam", "rmsprop", "sixth step", "factored", "one group", "mask", "injected", "scalar"],
)
def test_an_eps_that_is_zero_in_float16(inner, params):
    """The first gradient of zero would make the parameters NaN for good: also in a later step, or in one group."""
    refused = loss_scaled(inner, POLICY, keep_dtypes=True)
    for init in INITS.values():
        with pytest.raises(PolicyError, match=NAN_OF_ZERO):
            init(refused, params)
        init(refused, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
        init(loss_scaled(inner, POLICY), params)


@pytest.mark.parametrize("made", [optax.adam(0.1, eps=1e-4), optax.adafactor(0.1, eps=1e-2)], ids=["adam", "adafactor"])
def test_the_question_does_not_grow_with_the_model(made):
    """A billion elements in 181 leaves: 16 steps of one small leaf, or of one for each way to factor, in 1 MiB."""
    programs, steps = [], []

    def update(grads, state, params):
        programs.append([leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((grads, state, params))])
        jax.debug.callback(lambda _: steps.append(len(jax.tree.leaves(grads))), jax.tree.leaves(params)[0].sum())
        return made.update(grads, state, params)

    inner = optax.GradientTransformation(made.init, update)
    halves = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((10**9,), (1000, 1000, 1000), (4096, 4096))]
    params = [*halves * 60, jax.ShapeDtypeStruct((10**9,), jnp.float32)]
    jax.eval_shape(loss_scaled(inner, POLICY, keep_dtypes=True).init, params)
    jax.effects_barrier()
    assert steps in ([1] * 16, [2] * 16)
    assert len(programs) == 2  # traced for the dtypes of the state, and for the loop
    assert max(map(sum, programs)) < 2**20


@pytest.mark.parametrize(
    "inner",
    [optax.adam(0.1, eps=1e-4), optax.scale(-0.1), optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())],
)
def test_optimizers_that_keep_float16_finite(inner):
    """They are accepted, and so is one that cannot be asked because it needs the loss, which reaches this one alone."""
    optimizer = loss_scaled(inner, POLICY, keep_dtypes=True)
    grads = {"weight": jnp.zeros(3, jnp.float16)}
    params, _ = optimizer.apply_gradients(grads, optimizer.init(HALVES), HALVES, value=jnp.float32(1.0))
    assert bool(jnp.isfinite(params["weight"]).all())


def test_gradients_and_parameters_in_each_others_place():
    """Where structures or dtypes tell: a parameter that is not trained has no gradient."""
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    params = {"weight": jnp.ones(3), "count": jnp.int32(5)}
    opt_state = optimizer.init({"weight": jnp.ones(3)})
    for gradient, words in (
        (None, r"have \['count'\], which the parameters lack"),
        (
            np.zeros((), jax.dtypes.float0),
            r"hold no floats at \['count'\], and the parameter does; gradients come first",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.apply_gradients(params, opt_state, {"weight": jnp.ones(3), "count": gradient})


RESTORED = {
    "list": lambda state: state._replace(inner_state=list(state.inner_state)),
    "dict": lambda state: state._replace(inner_state={str(n): each for n, each in enumerate(state.inner_state)}),
    "list within": lambda state: state._replace(inner_state=(list(state.inner_state[0]), *state.inner_state[1:])),
    "dict within": lambda state: state._replace(inner_state=(state.inner_state[0]._asdict(), state.inner_state[1])),
    "scale_state": lambda state: state._replace(scale_state=state.scale_state._asdict()),
    "scale_state as a list": lambda state: state._replace(scale_state=list(state.scale_state)),
    "window": lambda state: state._replace(window=state.window._asdict()),
    "guard_state": lambda state: state._replace(guard_state=list(state.guard_state)),
}


@pytest.mark.parametrize("part", RESTORED)
def test_a_state_restored_without_its_types(part):
    """The sentence names the part and says how to restore it; also where the scale state is looked for."""
    settings = {"accumulation_steps": 2, "guard": SpikeGuard()} if part in ("window", "guard_state") else {}
    optimizer = loss_scaled(optax.adam(0.1), POLICY, **settings)
    opt_state = RESTORED[part](optimizer.init(PARAMS))
    name = "inner_state" if part in ("list", "dict") or "within" in part else part.split()[0]
    message = rf"{name} is a (list|dict|tuple), (not as|with .* than) init made.*; restore the checkpoint into"
    for step in (optimizer.update, jax.jit(optimizer.apply_gradients)):
        with pytest.raises(ScaleStateError, match=message):
            step(PARAMS, opt_state, PARAMS)
    if name == "scale_state":
        with pytest.raises(ScaleStateError, match=message):
            get_scale_state(opt_state)


def test_an_error_of_the_wrapped_optimizer_is_its_own():
    """If its state is as its `init` made it."""

    def update(grads, state, params=None):
        raise AttributeError("the schedule is missing")

    optimizer = loss_scaled(optax.GradientTransformation(optax.adam(0.1).init, update), POLICY)
    with pytest.raises(AttributeError, match="the schedule is missing"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def test_a_wrapped_optimizer_may_keep_a_list():
    """Then a list is what its `init` made."""
    inner = optax.GradientTransformation(lambda params: [jnp.int32(0)], lambda grads, state, _=None: (grads, state))
    optimizer = loss_scaled(inner, POLICY)
    assert optimizer.apply_gradients(PARAMS, optimizer.init(PARAMS), PARAMS)[1].inner_state == [0]


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
    TypeError: [
        (lambda: scale(1.0, OPTIMIZER.init(PARAMS)), r"is not a state.*with its scale_state"),
        (lambda: value_and_grad(sum)(PARAMS, STATE), r"is not a state.*call value_and_grad\(fun\)\(state"),
        (lambda: loss_scaled("dynamic", optax.sgd(0.1)), "inner='dynamic' .*and the policy after it"),
        (lambda: scale("1.0", STATE), r"'1\.0' is not a loss; call scale\(loss, state\)"),
        (lambda: value_and_grad(STATE), r"fun=.* must be a function that returns a loss; call value_and_grad\(fun\)"),
        (lambda: all_finite({"a": "w"}), "'w' is not an array; pass a pytree of arrays, such as jax.grad returns"),
    ],
    ScaleStateError: [
        (
            lambda: get_scale_state(PARAMS),
            r"state \(dict\) holds no scale state; wrap the optimizer .*, or merge",
        ),
        (lambda: get_scale_state(SEVERAL.init(PARAMS)), r"2 scale states, at .*\['a'\].*\['b'\].*; pass the part that"),
        (lambda: OPTIMIZER.update(OPTIMIZER.init(PARAMS), PARAMS), "dict .*after the gradients"),
        (
            lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS),
            r"ScaleState is not a state of loss_scaled; pass .* optimizer\.init\(params\)\._replace\(inner_state=",
        ),
    ],
    PolicyError: [
        (_step_of("window", "plain"), f"accumulation_steps=2 and guard=None do not .* {WITHOUT}; make"),
        (_step_of("guard", "plain"), f"do not fit a state {WITHOUT}; make .* take what is missing from a"),
        (_step_of("plain", "window"), "made with accumulation and without a guard"),
        (_step_of("plain", "guard"), "guard=None do not fit .* with a guard"),
        (lambda: TWICE.init(PARAMS), "inner is loss-scaled already; wrap the optimizer once"),
        # settings that make no sense
        (_wrapped(max_norm=float("nan")), "max_norm=nan must be a number from 0"),
        (
            _wrapped(max_norm=1.0, axis_name="data"),
            "take reduced gradients, and axis_name others; reduce the",
        ),
        (_wrapped(accumulation_steps=2, axis_name="data"), "reduce the gradients over the axis first and leave axis_n"),
        (_wrapped(accumulation_steps=0), "=0 must be a whole number from 1 to .*; pass 1, or leave it out"),
        (_wrapped(keep_dtypes="float16"), "keep_dtypes=.float16. must be True or False"),
        (_wrapped(skip=True), "skip=True must be 'cond' or 'select'"),
        (_wrapped(drop="batch"), "drop='batch' must be 'window' or 'micro_batch'; leave it out for the default"),
        (_wrapped(guard=8.0), r"guard=8\.0 must be a SpikeGuard"),
    ],
}
ROWS = [(error, *row) for error, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(("error", "call", "message"), ROWS)
def test_a_mistake_is_told_what_is_right(error, call, message):
    """One sentence says what was given, and how the call goes, or which name or value is right."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_its_packages_the_import_says_what_to_install(missing):
    """In place of the name of a module alone, which is still there."""
    code = f"import sys; sys.modules['{missing}'] = None; import lossscale_jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = f'needs jax and optax, and {missing} is not installed; run: pip install "lossscale[jax]"'
    assert f"lossscale_jax {said}" in result.stderr
    assert f"import of {missing} halted" in result.stderr
    assert "direct cause" in result.stderr


@pytest.mark.parametrize("settings", [{}, {"keep_dtypes": True}, {"accumulation_steps": 2}, {"max_norm": 1.0}])
@pytest.mark.parametrize("method", ["update", "apply_gradients"])
def test_eager_steps_on_numpy_float64(method, settings):
    """Without x64 JAX computes in float32 with such parameters; the step is applied, and skipped."""
    params, optimizer = {"weight": np.ones(2)}, loss_scaled(optax.adam(0.1), POLICY, **settings)
    opt_state = optimizer.init(params)
    for size in (1.0, 1.0, np.inf, np.inf):
        grads = {"weight": np.full(2, size)}
        result, opt_state = getattr(optimizer, method)(grads, opt_state, params)
        assert result["weight"].dtype == jnp.float32
    assert int(get_scale_state(opt_state).skipped_steps) == 2 // settings.get("accumulation_steps", 1)

"""What every public function says of a policy, an optimizer's state, a dict and None in each place."""

import re
import warnings

import jax.numpy as jnp
import keras
import optax
import pytest
import tensorflow as tf
import torch

import lossscale_core as core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch
from lossscale_torch import GradScaler

POLICY = core.DynamicScaling()
HOST, MODEL, LOSS, KERAS_SGD = core.init_state(POLICY), torch.nn.Linear(2, 1), jnp.float32(1.0), keras.optimizers.SGD()
LOSSES = {
    core: 1.0,
    lossscale_torch: torch.ones(()),
    lossscale_jax: LOSS,
    lossscale_keras: tf.ones(()),
    lossscale_tf: tf.ones(()),
}
OPTAX = lossscale_jax.loss_scaled(optax.adam(0.1), POLICY)
WRONG = {
    "a policy": POLICY,
    "torch's optimizer": torch.optim.AdamW(MODEL.parameters()).state_dict(),
    "optax' state": OPTAX.init({"w": jnp.ones(2)}),
    "a dict": {"a": 1.0},
    "None": None,
}


def _scaler():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


CALLS = {
    "as_policy": (core.as_policy, POLICY),
    "policy_to_dict": (core.policy_to_dict, POLICY),
    "policy_from_dict": (core.policy_from_dict, core.policy_to_dict(POLICY)),
    "load_policy": (core.load_policy, "policy.toml"),
    "dump_policy": (core.dump_policy, POLICY, "policy.toml"),
    "state_to_dict": (core.state_to_dict, HOST, POLICY),
    "state_from_dict": (core.state_from_dict, core.state_to_dict(HOST), POLICY),
    "step_info": (core.step_info, HOST, HOST),
    "metrics": (core.metrics, HOST),
    "diagnose": (core.diagnose, POLICY, HOST),
    "gradient_range": (core.gradient_range, lambda scale: {}),
    "range_report": (lossscale_torch.range_report, MODEL, lambda: MODEL(torch.ones(1, 2)).sum()),
    "float32_plan": (lossscale_torch.float32_plan, MODEL, [lambda: MODEL(torch.ones(1, 2)).sum()]),
    "keep_in_float32": (lossscale_torch.keep_in_float32, MODEL, ()),
    "guarded": (lambda optimizer: lossscale_torch.guarded(optimizer), None),
    "unscale_": (lambda optimizer: _scaler().unscale_(optimizer), None),
    "unscale_and_clip_": (lambda optimizer: _scaler().unscale_and_clip_(optimizer, 1.0), None),
    "step": (lambda optimizer: _scaler().step(optimizer), None),
    "skip": (lambda optimizer: _scaler().skip(optimizer), None),
    "value_and_grad": (
        lambda fun, state: lossscale_jax.value_and_grad(fun)(state, LOSS),
        lambda x: x * 1.0,
        lossscale_jax.init_state(POLICY),
    ),
    "loss_scaled": (lossscale_jax.loss_scaled, optax.sgd(0.1), POLICY),
    "get_scale_state": (lossscale_jax.get_scale_state, WRONG["optax' state"]),
    "load_scale_state": (lossscale_jax.load_scale_state, WRONG["optax' state"], core.state_to_dict(HOST), POLICY),
    "keras.LossScaleOptimizer": (lossscale_keras.LossScaleOptimizer, KERAS_SGD, POLICY),
    "tf.LossScaleOptimizer": (lossscale_tf.LossScaleOptimizer, KERAS_SGD),
}
for package, loss in LOSSES.items():
    state, start = package.init_state(POLICY), f"{package.__name__.removeprefix('lossscale_')}."
    verbs = {"init_state": [POLICY], "scale": [loss, state], "unscale": [[loss], state], "all_finite": [[]]}
    others = {"select": [True, loss, loss]} | ({} if package is core else {"overflow_report": [[]]})
    CALLS |= {start + verb: (getattr(package, verb), *given) for verb, given in (verbs | others).items()}
CASES = [(name, place) for name, (_, *arguments) in CALLS.items() for place in range(len(arguments))]
REMEDY = re.compile(
    r"\b(pass|call|write|add|wrap|derive|make|merge|leave|restore)\b|known: |it takes |^pytree structure error"
    r"|^Attempt to convert a value|^The two structures don't have the same nested structure"  # TensorFlow's
)
PYTHONS = re.compile(r"object (is not|has no)|unsupported operand|expected str|got an unexpected|argument must be")


def _sentence(call, arguments, place, value):
    """Return what a call says of a value in one place; None if it works."""
    arguments = [*arguments[:place], value, *arguments[place + 1 :]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(*arguments)
        except Exception as error:
            return str(error)
    return None


@pytest.mark.parametrize(("name", "place"), CASES, ids=[f"{name}-{place}" for name, place in CASES])
def test_a_wrong_argument_is_named_with_what_is_right(name, place, tmp_path, monkeypatch):
    """The call works, or its error says what was given and what to do, in words of the library and not of Python."""
    monkeypatch.chdir(tmp_path)
    call, *arguments = CALLS[name]
    said = {what: _sentence(call, arguments, place, value) for what, value in WRONG.items()}
    for what, sentence in said.items():
        assert sentence is None or (REMEDY.search(sentence) and not PYTHONS.search(sentence)), (what, sentence)

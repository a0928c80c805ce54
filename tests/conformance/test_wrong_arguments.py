"""Each public function explains a policy, an optimizer's state, a dict and None in the place of each argument."""

import inspect
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

POLICY, MODEL = core.DynamicScaling(), torch.nn.Linear(2, 1)
STATE, KERAS_SGD = core.init_state(POLICY), keras.optimizers.SGD()
LOSSES = {
    core: 1.0,
    lossscale_torch: torch.ones(()),
    lossscale_jax: jnp.float32(1.0),
    lossscale_keras: tf.ones(()),
    lossscale_tf: tf.ones(()),
}
WRONG = {
    "a policy": POLICY,
    "torch's optimizer": torch.optim.AdamW(MODEL.parameters()).state_dict(),
    "optax' state": lossscale_jax.loss_scaled(optax.adam(0.1), POLICY).init({"w": jnp.ones(2)}),
    "a dict": {"a": 1.0},
    "None": None,
}
ARGUMENTS = {
    **dict.fromkeys(("policy", "source"), POLICY),
    **dict.fromkeys(("before", "after"), STATE),
    **{name: [] for name in ("grads", "grads_and_vars", "named_parameters", "names")},
    **{"saved": core.state_to_dict(STATE), "config": core.policy_to_dict(POLICY), "path": "policy.toml"},
    **{"grads_at": lambda scale: {}, "grads_finite": True, "optimizer": None},
    **{"model": MODEL, "loss_fn": lambda: MODEL(torch.ones(1, 2)).sum(), "fun": lambda x: x * 1.0},
    **{"inner": optax.sgd(0.1), "opt_state": WRONG["optax' state"]},
}
"""A right argument for each name of a parameter; those of a loss and of a state depend on the package."""


CALLS = {
    "torch.unscale_": (lossscale_torch.GradScaler("cpu").unscale_, {"optimizer": None}),
    "torch.step": (lossscale_torch.GradScaler("cpu").step, {"optimizer": None}),
    "keras.LossScaleOptimizer": (lossscale_keras.LossScaleOptimizer, {"inner_optimizer": KERAS_SGD, "policy": POLICY}),
    "tf.LossScaleOptimizer": (lossscale_tf.LossScaleOptimizer, {"inner_optimizer": KERAS_SGD}),
    "value_and_grad of a state": (
        lambda state: lossscale_jax.value_and_grad(ARGUMENTS["fun"])(state, LOSSES[lossscale_jax]),
        {"state": lossscale_jax.init_state(POLICY)},
    ),
}
for package, loss in LOSSES.items():
    right = {**ARGUMENTS, **dict.fromkeys(("loss", "new", "old"), loss), "state": package.init_state(POLICY)}
    for name in {*package.__all__} - {"saturating_increment", "clip_and_check_"}:  # of parameters, as torch's functions
        if inspect.isfunction(function := getattr(package, name)):
            names = [parameter for parameter in inspect.signature(function).parameters if parameter in right]
            CALLS[f"{package.__name__}.{name}"] = function, {parameter: right[parameter] for parameter in names}
CASES = sorted((name, parameter) for name, (_, arguments) in CALLS.items() for parameter in arguments)
REMEDY = re.compile(
    r"\b(pass|call|write|add|wrap|derive|make|merge|leave|restore)\b|known: |it takes |^pytree structure error"
    r"|^Attempt to convert a value|^The two structures don't have the same nested structure"  # TensorFlow's
)
PYTHONS = re.compile(r"object (is not|has no)|unsupported operand|expected str|got an unexpected|argument must be")


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=[f"{name}-{parameter}" for name, parameter in CASES])
def test_a_wrong_argument_is_explained(name, parameter, tmp_path, monkeypatch):
    """The call works, or its error says what was given and what to do, in words of the library and not of Python."""
    monkeypatch.chdir(tmp_path)
    function, right = CALLS[name]
    for kind, value in WRONG.items():
        sentence = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                function(**{**right, parameter: value})
            except Exception as error:
                sentence = str(error)
        assert sentence is None or (REMEDY.search(sentence) and not PYTHONS.search(sentence)), (kind, sentence)

"""Likely mistakes with the core: the error of each says what was given, the rule and what to do in one sentence."""

import math
import re
import types

import numpy as np
import pytest

from lossscale import state_from_tool
from lossscale_core import (
    DynamicScaling,
    NoScaling,
    ScaleWatch,
    SpikeGuard,
    as_policy,
    diagnose,
    gradient_range,
    load_policy,
    metrics,
    state_from_dict,
    state_to_dict,
    step_info,
)
from lossscale_core.adapters import check_guard, check_setting, guard_state_from_dict, warn_caller
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError
from lossscale_core.testing import simulate, simulate_gradients

POLICY = DynamicScaling()
STATE = POLICY.init_state()
GRADS = {"w": np.ones(3, np.float32)}
CHECKPOINT = {"model": {}, "scaler": state_to_dict(STATE)}
COUNT = "must be a whole number from 1 to 2**31 - 1; pass 1, or leave it out"
NOT_A_POLICY = "is not a loss-scaling policy; pass a policy such as DynamicScaling(), 'dynamic', 'none', a num"
CALL_UPDATE = "call update(state, grads_finite)"
_log, _update, _set = ScaleWatch().log, POLICY.update, check_setting
GUARD, RUN = SpikeGuard(), {"policy": "dynamic", "grads_finite": [True, True]}
MISTAKES = {
    TypeError: [
        *((value, (8.0,), "takes 1 positional argument but 2 were given") for value in (DynamicScaling, SpikeGuard)),
        # arguments in another order
        (_update, (True, STATE), f"state=True is not a state, since it has no loss_scale; {CALL_UPDATE}"),
        (NoScaling().update, (True, STATE), CALL_UPDATE),
        (_update, (STATE, GRADS), f"must be a bool of shape (); {CALL_UPDATE}, with what all_finite returned"),
        (_update, (STATE, np.float32("nan")), "grads_finite=np.float32(nan) must be a bool of shape ()"),
        (_update, (STATE, np.array([True])), "must be a bool of shape ()"),
        (diagnose, (POLICY, None), "state=None is not a state, since it has no loss_scale"),
        (_log, (POLICY, POLICY), "call log(policy, state), with a state that init_state"),
        (state_to_dict, (POLICY, STATE), "call state_to_dict(state, policy)"),
        (metrics, (POLICY,), "call metrics(state), with a state that init_state or update returned"),
        (simulate, ([True, False], POLICY), "call simulate(policy, grads_finite)"),
        (simulate, (POLICY, 5), "grads_finite=5 must be a sequence of bools"),
        (gradient_range, (3,), "grads_at=3 must be a function of a loss scale that returns gradients by name"),
        (SpikeGuard().check, (1.0, STATE), "state=1.0 is not a state of a guard; call check(state, norm)"),
    ],
    ValueError: [
        (step_info, (_update(STATE, True), STATE), "0 steps after 1; call step_info(before, after)"),
        # norms without a guard, a guard without norms, and another number of them than of steps
        *((simulate, {**RUN, **arguments}, "norms") for arguments in ({"norms": [1.0]}, {"guard": GUARD})),
        (simulate, {**RUN, "norms": [1.0], "guard": GUARD}, "norms"),
        (simulate_gradients, ([1.0], POLICY), "call simulate_gradients(policy, gradient_max)"),
    ],
    CheckpointError: [(state_from_dict, (CHECKPOINT,), "has no version, but model, scaler; pass its part 'scaler'")],
    PolicyError: [
        (as_policy, ("dynamik",), "'dynamik' is not a loss-scaling policy; did you mean 'dynamic'? pass a policy"),
        *((as_policy, (value,), f"{value!r} {NOT_A_POLICY}") for value in ("1024", "cuda", NoScaling, None, True, [])),
        (as_policy, (STATE,), "is a state and not a policy; pass its policy in this place"),
        (as_policy, (0,), "init_scale=0 must be a number from"),
        (load_policy, (3,), "3 is not the path of a .toml or .json file; call load_policy('policy.toml')"),
        (check_guard, (POLICY,), "must be a SpikeGuard; pass SpikeGuard(), or leave it out"),
        *(
            (SpikeGuard, {name: value}, f"{name}={value} must be {rule}")
            for name, value, rule in (
                *(("threshold", 0.5, "a number from 1"), ("memory", 0, "a whole number from 1")),
                *(("warmup", 1.5, "a whole number from 1"), ("max_streak", 0, "None or a whole number")),
            )
        ),
        # Adapters check the numbers that they take in addition to a policy as settings are checked.
        (_set, ("max_norm", math.nan), "max_norm=nan must be a number from 0; pass math.inf not to clip"),
        (_set, ("max_norm", [["1" * 150] * 6] * 6), "11111... must be a number from 0"),
        (SpikeGuard, {"warmup": 0}, "warmup=0 must be a whole number from 1 to 2**24; pass 16"),
        (_set, ("max_norm", "1.0"), "max_norm='1.0' must be a number from 0; pass math.inf not to clip"),
        (_set, ("global_clipnorm", 0), "global_clipnorm=0 must be a positive number; pass math.inf not to clip"),
        (_set, ("accumulation_steps", True), f"accumulation_steps=True {COUNT}"),
        (_set, ("accumulation_steps", 1.5), f"accumulation_steps=1.5 {COUNT}"),
    ],
}
ROWS = [(error, *row) for error, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(("error", "call", "arguments", "sentence"), ROWS)
def test_a_mistake_is_told_what_is_right(error, call, arguments, sentence):
    """The message names what was given and the right argument or call; it stays the error that Python raises there."""
    arguments, settings = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with pytest.raises(error, match=re.escape(sentence)):
        call(*arguments, **settings)


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (metrics, "metrics(state)"),
        (state_to_dict, "state_to_dict(state, policy)"),
        (lambda state: diagnose(POLICY, state), "diagnose(policy, state)"),
        (lambda state: ScaleWatch().log(POLICY, state), "log(policy, state)"),
        (lambda state: step_info(state, state), "step_info(before, after)"),
    ],
)
def test_the_state_of_an_optimizer_and_of_an_ensemble(call, right):
    """The error says which part of it to pass."""
    sentence = f"is not a state of a policy, but holds one; call {right}, with its scale_state"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        call(types.SimpleNamespace(scale_state=STATE))
    if "step_info" not in right:
        member = re.escape("such as state._make(field[0] for field in state)")
        with pytest.raises(TypeError, match=f"leading axis of 3, .* {member}"):
            call(STATE._make(np.stack([field] * 3) for field in STATE))


TORCHS = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


@pytest.mark.parametrize("restore", [state_from_dict, guard_state_from_dict])
def test_the_dict_of_another_tool_is_sent_to_state_from_tool(restore):
    """The message has the call that reads it, and that call does."""
    with pytest.raises(CheckpointError) as caught:
        restore(TORCHS)
    message = str(caught.value)
    assert message.startswith("the saved state has no version, but scale, growth_factor, backoff_factor, ")
    assert "if another tool such as torch saved it, lossscale.state_from_tool('torch', saved)" in message
    assert state_from_tool("torch", TORCHS).growth_tracker == 7


PASSED = ["lossscale", "lossscale_core", "lossscale_jax", "lossscale_keras", "lossscale_tf", "lossscale_torch"]


@pytest.mark.parametrize("package", [*PASSED, "jax", "keras", "tensorflow", "tf_keras", "torch"])
def test_a_warning_points_at_the_line_of_the_program(package):
    """Functions of libraries between the program and an adapter that warns are looked past."""
    adapter = {"__name__": "an_adapter.loops", "warn_caller": warn_caller, "Told": CheckpointWarning}
    exec("def load(): warn_caller('The scale starts over', Told, packages=['an_adapter'])", adapter)
    library = {"__name__": f"{package}.framework.ops", "load": adapter["load"]}
    exec("def restore(): load()", library)
    with pytest.warns(CheckpointWarning, match="^The scale starts over$") as caught:
        library["restore"]()
    assert caught[0].filename == __file__

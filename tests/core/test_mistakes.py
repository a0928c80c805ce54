"""Likely mistakes with the core: the error of each says what was given, the rule and what to do in one sentence."""

import math
import re
import types

import numpy as np
import pytest

import lossscale_core as core
from lossscale_core import DynamicScaling, SpikeGuard, as_policy, state_from_dict
from lossscale_core.adapters import check_guard, check_setting, guard_state_from_dict, warn_caller
from lossscale_core.errors import CheckpointError, CheckpointWarning, LossScaleError, PolicyError
from lossscale_core.testing import simulate, simulate_gradients

POLICY = DynamicScaling()
STATE = POLICY.init_state()
SAVED = core.state_to_dict(STATE)
GUARD = SpikeGuard()
SAVED_GUARD = core.state_to_dict(STATE, guard=GUARD.init_state())
GRADS = {"w": np.ones(3, np.float32)}
READ = guard_state_from_dict
RUN = {"policy": "dynamic", "grads_finite": [True, True]}
RECORDS = np.rec.array([(1.0, 2)], dtype=[("a", "f4"), ("n", "i4")])
TORCHS = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
FOREIGN = types.SimpleNamespace(dtype="float32")  # without a namespace
OPTIMIZER_STATE = types.SimpleNamespace(scale_state=STATE)
ENSEMBLE = STATE._make(np.stack([field] * 3) for field in STATE)

SCALE = "2**-126 to 2**126"
NOT_A_POLICY = "is not a loss-scaling policy; pass a policy such as DynamicScaling(), 'dynamic', 'none', a num"
CALL_UPDATE = "call update(state, grads_finite)"
CALL_SIMULATE = "call simulate(policy, grads_finite)"
FROM_TOOL = "for the config of another tool run: lossscale policy convert FILE, or call lossscale.from_tool"
READS_TORCH = "if another tool such as torch saved it, lossscale.state_from_tool('torch', saved)"
STATE_CALLS = {
    "metrics(state)": (core.metrics,),
    "state_to_dict(state, policy)": (core.state_to_dict,),
    "diagnose(policy, state)": (core.diagnose, POLICY),
    "log(policy, state)": (core.ScaleWatch().log, POLICY),
}
SETTINGS = {
    "init_scale": [(value, SCALE) for value in (math.nan, 10**400, True)],
    "growth_factor": [(1.0 + 2.0**-30, "above 1")],
    "backoff_factor": [(value, "between 0 and 1") for value in (0.0, 1.0 - 2.0**-25)],
    "growth_interval": [(value, "a whole number from 1 to 2**31 - 1") for value in (0, "500", 2**31, 2000.5)],
    "cooldown": [(-1, "a whole number from 0")],
    "refill_on_finite": [(1, "True or False")],
    "min_scale": [(2.0**-127, f"{SCALE}, where")],
    "max_scale": [(2.0**127, SCALE)],
    "max_overflow_streak": [(0, "None or a whole number")],
}
ENTRIES = {
    "version": [(value, "1; pass a dict that state_to_dict") for value in (True, 2)],
    "loss_scale": [(value, "a positive finite number") for value in (0.0, math.inf, True)],
    "steps": [(value, "a whole number from 0 that fits int32") for value in (1.5, 2**31, -5)],
    "growth_tracker": [(-(2**31) - 1, "a whole number from -2147483648 that")],
}
CONFIGS = [
    ({"kind": "dynamic", "growth_intervall": 3}, "growth_intervall' … did you mean 'growth_interval' … known:"),
    ({"kind": ["dynamic"]}, "kind= … known:"),
    ({"kind": "fixed"}, "a 'fixed' policy needs init_scale; add it, as in init_scale = 1024.0"),
    ([1], "table … kind = 'dynamic'"),
    ({"growth_interval": 3}, "no 'kind', but growth_interval; add kind = 'dynamic' (known: none, fixed, dynamic"),
    ({"train_batch_size": 8, "fp16": {"enabled": True}}, f"no 'kind' … {FROM_TOOL}"),
    ({}, "no 'kind', but nothing; add kind = 'dynamic'"),
]
MISTAKES = {
    TypeError: [
        *((value, (8.0,), "takes 1 positional argument but 2 were given") for value in (DynamicScaling, SpikeGuard)),
        # arguments in another order
        (POLICY.update, (True, STATE), f"state=True is not a state, since it has no loss_scale; {CALL_UPDATE}"),
        (POLICY.update, (STATE, GRADS), f"must be a bool of shape (); {CALL_UPDATE}, with what all_finite returned"),
        (POLICY.update, (STATE, np.array([True])), "grads_finite=array([ True]) must be a bool of shape ()"),
        (simulate, ([True, False], POLICY), f"must be a sequence of bools; {CALL_SIMULATE}"),
        *((simulate, (POLICY, wrong), CALL_SIMULATE) for wrong in ("0010", [True, 0.5])),
        (SpikeGuard().check, (1.0, STATE), "state=1.0 is not a state of a guard; call check(state, norm)"),
        # gradients
        (core.gradient_range, (3,), "grads_at=3 must be a function of a loss scale that returns gradients by name"),
        (core.gradient_range, (lambda scale: [np.ones(2)],), "returns gradients by name, but returned"),
        (core.gradient_range, (lambda scale: {},), "returns gradients by name, but returned {}"),
        (core.all_finite, ([FOREIGN],), "xp="),
        (core.all_finite, (np.zeros(0, object),), "a leaf of dtype object is not a gradient; pass float arrays"),
        (core.all_finite, (np.zeros(2, "V4"),), "a leaf of dtype |V4 is not a gradient; pass float arrays"),
        (core.unscale, (RECORDS, STATE), "a leaf of dtype … is not a gradient; pass each field of it"),
        # the state of an optimizer, and of an ensemble
        *(
            (call, (*first, OPTIMIZER_STATE), f"is not a state of a policy, but holds one; call {right}, with its sc")
            for right, (call, *first) in STATE_CALLS.items()
        ),
        (core.step_info, (OPTIMIZER_STATE, OPTIMIZER_STATE), "call step_info(before, after), with its scale_state"),
        *(
            (call, (*first, ENSEMBLE), "leading axis of 3, … such as state._make(field[0] for field in state)")
            for call, *first in STATE_CALLS.values()
        ),
    ],
    ValueError: [
        (core.step_info, (POLICY.update(STATE, True), STATE), "0 steps after 1; call step_info(before, after)"),
        # norms without a guard, a guard without norms, and another number of them than of steps
        *((simulate, {**RUN, **arguments}, "norms") for arguments in ({"norms": [1.0]}, {"guard": GUARD})),
        (simulate, {**RUN, "norms": [1.0], "guard": GUARD}, "norms"),
        (simulate_gradients, (POLICY, [0.0, -3.0]), "must hold a number from 0 … call simulate_grad"),
        *((simulate_gradients, (POLICY, wrong), "must hold a number from 0") for wrong in ([[1.0]], POLICY)),
        (simulate_gradients, (POLICY, [1.0], "float8"), "float16, bfloat16"),
        (core.select, (True, {"w": [1, 2]}, {"w": [1]}), "structures differ … ['w']:"),
        (core.select, (True, {"w": [1, 2]}, {"w": (1, 2)}), "structures differ … ['w']:"),
        (core.select, (True, {"w": [1, 2]}, {"w": [1, None]}), "structures differ … ['w'][1]:"),
        (core.select, (True, {"w": 1}, {"w": 1, "x": 0}), "structures differ … the top"),
    ],
    FileNotFoundError: [(as_policy, ("missing.toml",), "No such file or directory: 'missing.toml'")],
    CheckpointError: [
        (state_from_dict, ({"model": {}, "scaler": SAVED},), "has no version, but model, scaler; pass its part 'sc"),
        (state_from_dict, ([],), "is not a saved state"),
        (state_from_dict, ({"version": 1, "steps": 0},), "has no loss_scale, growth"),
        *(
            (state_from_dict, ({**SAVED, name: value},), f"{name}={repr(value)[:9]} … must be {rule}")
            for name, rows in ENTRIES.items()
            for value, rule in rows
        ),
        *((restore, (TORCHS,), f"has no version, but scale, … {READS_TORCH}") for restore in (state_from_dict, READ)),
        *(
            (READ, ({**SAVED_GUARD, "guard": {**SAVED_GUARD["guard"], name: value}},), f"{name}={value} … must be a")
            for name, value in (("mean", math.nan), ("deviation", -1.0))
        ),
        (READ, ({**SAVED_GUARD, "guard": {"deviation": 1.0, "norms": 1, "streak": 0}},), "has no mean, spikes"),
    ],
    PolicyError: [
        (as_policy, ("dynamik",), "'dynamik' is not a loss-scaling policy; did you mean 'dynamic'? pass a policy"),
        *((as_policy, (value,), f"{value!r} {NOT_A_POLICY}") for value in ("1024", DynamicScaling, True)),
        (as_policy, (STATE,), "is a state and not a policy; pass its policy in this place"),
        *((core.policy_from_dict, (config,), words) for config, words in CONFIGS),
        (core.load_policy, (3,), "3 is not the path of a .toml or .json file; call load_policy('policy.toml')"),
        (core.dump_policy, (POLICY, "policy.ini"), ".toml or .json"),
        (type, ("Mine", (core.BaseScaling,), {"kind": "dynamic"}), "kind='dynamic' is taken by DynamicScaling"),
        # settings
        *(
            (DynamicScaling, {name: value}, f"{name}={value!r} must be … {rule} … ; pass ")
            for name, rows in SETTINGS.items()
            for value, rule in rows
        ),
        (DynamicScaling, {"init_scale": 0.5}, "min_scale=1.0 must not exceed init_scale=0.5; lower … or raise"),
        (DynamicScaling, {"init_scale": 2.0**40}, "init_scale=1099511627776.0 must not exceed max_scale=4294967296.0"),
        (DynamicScaling, {"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8.0 must not exceed max_scale=4.0; lower"),
        (check_guard, (POLICY,), "must be a SpikeGuard; pass SpikeGuard(), or leave it out"),
        (SpikeGuard, {"threshold": 0.5}, "threshold=0.5 must be a number from 1"),
        (SpikeGuard, {"warmup": 2**24 + 1}, "warmup=16777217 must be a whole number from 1 to 2**24"),
        (SpikeGuard, {"max_streak": 0}, "max_streak=0 must be None or a whole number"),
        # Adapters check the numbers that they take in addition to a policy as settings are checked.
        (check_setting, ("max_norm", math.nan), "max_norm=nan must be a number from 0; pass math.inf for no clip"),
        (check_setting, ("max_norm", [["1" * 150] * 6] * 6), "11111... must be a number from 0"),
        (check_setting, ("max_norm", [[[1.0]]]), "max_norm=[[[1.0]]] must be a number from 0"),
        (check_setting, ("global_clipnorm", 0), "global_clipnorm=0 must be a positive number; pass math.inf"),
    ],
}
"""The errors, each with calls, arguments and words of the message, in which … stands for other words."""
ROWS = [(error, *row) for error, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(("error", "call", "arguments", "words"), ROWS)
def test_a_mistake_is_explained(error, call, arguments, words, tmp_path, monkeypatch):
    """A wrong argument raises Python's usual error, which names the argument, its rule and the right call."""
    monkeypatch.chdir(tmp_path)
    arguments, settings = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with pytest.raises(error, match=" ?.* ?".join(map(re.escape, words.split(" … ")))) as caught:
        call(*arguments, **settings)
    assert error is not PolicyError or (
        isinstance(caught.value, ValueError) and isinstance(caught.value, LossScaleError)
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("package", ["lossscale_core", "lossscale_torch", "jax", "keras", "torch"])
def test_a_warning_points_at_the_program(package):
    """`warn_caller` names the line of the program, not a line of a library between the program and the adapter."""
    adapter = {"__name__": "an_adapter.loops", "warn_caller": warn_caller, "Told": CheckpointWarning}
    exec("def load(): warn_caller('The scale starts over', Told, packages=['an_adapter'])", adapter)
    library = {"__name__": f"{package}.framework.ops", "load": adapter["load"]}
    exec("def restore(): load()", library)
    with pytest.warns(CheckpointWarning, match="^The scale starts over$") as caught:
        library["restore"]()
    assert caught[0].filename == __file__

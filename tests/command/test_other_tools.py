"""Other tools' configs and checkpoints: the policy and the state do what the tool does, step for step."""

import copy
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from lossscale import from_tool, state_from_tool
from lossscale.other_tools import tools_of_checkpoint
from lossscale_core import DynamicScaling, FixedScaling, state_from_dict, state_to_dict
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import CheckpointError, PolicyError
from tests.core.own_policies import AdditiveScaling
from tests.other_tools import check_scaler

RUNS = json.loads(Path(__file__).with_name("tool_runs.json").read_text())
"""Runs of each tool, recorded (with a version) or worked out from its source; Chainer and MXNet have other rules."""


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_policy_has_the_tools_scales(run):
    """The policy of a tool's config has the tool's scales, also in a run that continues the tool's saved run."""
    scales, grads_finite = map(np.float32, run["scale_after"]), [flag == "0" for flag in run["overflow"]]
    stop, saved = run.get("saved_after"), lambda: [run["saved"]]
    check_scaler(run["tool"], run["config"], lambda finite: next(scales), saved, [], grads_finite, stop)


def _named(value):
    return value if type(value) is str else ""


_megatrons = functools.partial(DynamicScaling, growth_interval=1000, hysteresis=2, refill_on_finite=False)
_wide = functools.partial(DynamicScaling, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
DEFAULTS = {
    "torch": _wide(),
    "apex": _wide(max_scale=2.0**24),
    "deepspeed": _megatrons(cooldown=1, max_scale=LARGEST_SCALE),
    "megatron": _megatrons(init_scale=2.0**32, max_scale=LARGEST_SCALE),
    "keras": DynamicScaling(init_scale=2.0**15, max_scale=LARGEST_SCALE),
    "flax": _wide(growth_interval=2001),
    "paddle": _wide(refill_on_backoff=True),
}
"""A key that is left out takes the tool's default; a bound that the tool lacks is the outermost possible one."""


def _default(name, **changes):
    return dataclasses.replace(DEFAULTS[name], **changes)


TORCHS = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}
KERAS_3_11 = {  # as Keras 3.0 to 3.11 write it
    "name": "loss_scale_optimizer",
    **dict.fromkeys(("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "ema_overwrite_frequency"), None),
    **{"use_ema": False, "ema_momentum": 0.99, "loss_scale_factor": None, "gradient_accumulation_steps": None},
    **{"inner_optimizer": {}, "initial_scale": 32768.0, "dynamic_growth_steps": 2000},
}
CONFIGS = [
    *((name, {}, policy) for name, policy in DEFAULTS.items()),
    ("deepspeed", {"fp16": {"hysteresis": 3}, "bf16": {}}, _default("deepspeed", hysteresis=1)),
    # as its loss scaler has it, without the ZeRO block
    (
        "deepspeed",
        {"init_scale": 65536.0, "min_scale": 0, "delayed_shift": 2},
        _default("deepspeed", min_scale=2.0**-126),
    ),
    ("megatron", {"--loss-scale-window": "1000", "initial-loss-scale": "4294967296"}, _default("megatron")),
    ("megatron", {"loss_scale_window": 1000.5}, _default("megatron", growth_interval=2**31 - 1)),
    (
        "apex",
        {"init_scale": 2.0**20, "min_loss_scale": 4.0, "max_loss_scale": 64.0},
        _default("apex", init_scale=64.0, min_scale=4.0, max_scale=64.0),
    ),
    ("apex", {"opt_level": "O3"}, FixedScaling(1.0)),
    ("torch", TORCHS, _wide(init_scale=8.0)),
    ("torch", {"device": "cuda", "init_scale": np.float32(65536), "enabled": True}, _default("torch")),
    ("jmp", {"loss_scale": 8.0, "counter": 3}, DynamicScaling(init_scale=8.0, max_scale=LARGEST_SCALE)),
    ("keras", {"inner_optimizer": {}, "dynamic": True, "initial_scale": None}, _default("keras")),
    ("keras", {"multiplier": 4}, _default("keras", growth_factor=4.0, backoff_factor=0.25)),
    ("keras", {"dynamic": False, "initial_scale": 8.0}, FixedScaling(8.0)),
    ("keras3", {"dynamic": True, "name": None}, _default("keras", min_scale=SMALLEST_SCALE)),
    ("keras", {"dynamic_growth_steps": 0}, _default("keras", growth_interval=1)),
    ("keras3", KERAS_3_11, _default("keras", min_scale=SMALLEST_SCALE)),
    ("paddle", {"use_dynamic_loss_scaling": False, "init_loss_scaling": 64.0}, FixedScaling(64.0)),
]


@pytest.mark.parametrize(("name", "config", "policy"), CONFIGS, ids=_named)
def test_a_config_has_one_policy(name, config, policy):
    """`from_tool` reads each form of a tool's settings, and does not change the config."""
    before = copy.deepcopy(config)
    assert from_tool(name, config) == policy
    assert config == before


PLACED = [
    ("torch", {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 7}),
    ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}),
    ("apex", {"dynamic": True, "_loss_scale": 8.0, "_unskipped": 7, "_min_loss_scale": None}),
    ("deepspeed", {"loss_scaler": {"cur_scale": 8, "cur_iter": 1020, "last_overflow_iter": 11, "scale_window": 1000}}),
    ("deepspeed", {"cur_scale": 8.0, "cur_iter": 20, "last_overflow_iter": 11, "scale_window": 9, "dtype": "half"}),
    ("megatron", {"grad_scaler": {"scale": [8.0], "growth_tracker": 7, "hysteresis_tracker": -3}}),
    ("megatron", {"_scale": np.array([8.0]), "_growth_tracker": 7, "_hysteresis_tracker": 1, "min_scale": 1.0}),
    ("keras", {"opt/loss_scale/current_loss_scale/.ATTRIBUTES/VARIABLE_VALUE": 8.0, "opt/loss_scale/good_steps:0": 7}),
    ("keras", {"loss_scale": np.float32(8.0), "dynamic_counter": np.int64(7)}),
    ("keras3", {"dynamic_scale": np.float32(8.0), "step_counter": 7}),
    ("jmp", {"loss_scale": np.float32(8.0), "counter": np.int32(7), "period": 2000}),
    ("flax", {"fin_steps": np.int32(7), "scale": np.float32(8.0)}),
    ("paddle", {"scale": np.array([8.0]), "incr_count": 7, "decr_count": 0, "decr_every_n_nan_or_inf": 1}),
    ("paddle", {"_scale": np.array([8.0]), "_incr_count": 7, "_decr_count": 0, "_decr_every_n_nan_or_inf": 1}),
]
"""Tools by name, and what they save if the scale is 8 after seven finite steps."""


@pytest.mark.parametrize(("name", "entries"), PLACED, ids=_named)
def test_a_checkpoint_is_recognised(name, entries):
    """Each layout of a tool gives the name of the tool, the scale, and seven finite steps toward growth."""
    assert tools_of_checkpoint(entries) == [name]
    state = state_from_tool(name, entries)
    assert (state.loss_scale, state.growth_tracker) == (8.0, 7)
    assert state_from_dict(json.loads(json.dumps(state_to_dict(state)))) == state


def test_no_tool_is_recognised():
    """What is no dict, and a dict of too many entries, have the names of no tool."""
    for other in ([8.0, 7], {"step": 1}, {**PLACED[0][1], **dict.fromkeys(range(1000))}):
        assert tools_of_checkpoint(other) == []


def test_another_policy_continues_the_run():
    """A counter that the checkpoint lacks starts over; a policy without counters ignores those of the checkpoint."""
    entries = {"scale": 8.0, "_growth_tracker": 7}
    assert state_from_tool("torch", entries, 8.0) == FixedScaling(8.0).init_state()
    own = state_from_tool("torch", entries, AdditiveScaling(growth_interval=9))
    assert (own.loss_scale, own.growth_tracker, own.additions) == (8.0, 7, 0.0)
    # More overflows than the tolerance, as after its setting was lowered, leave nothing of it.
    entries = {"scale": 8.0, "incr_count": 1, "decr_count": 5}
    assert state_from_tool("paddle", entries, DynamicScaling(hysteresis=2)).hysteresis_tracker == 0
    # Apex saves no overflows that are left: its own resumed run has all of them.
    state = state_from_tool("apex", {"loss_scale": 8.0, "unskipped": 3}, DynamicScaling(hysteresis=3))
    assert (state.growth_tracker, state.hysteresis_tracker, state.steps) == (3, 3, 0)


ITERATIONS = {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": -1}
REFUSED = {
    from_tool: [
        ("torch", [], "must be a dict"),
        ("torch", {"growth_intervall": 3}, "'growth_intervall' is not a key of torch; did you mean 'growth_interval'"),
        ("torch", {"init_scale": 4.0, "scale": 8.0}, "scale and init_scale are names of one setting"),
        ("deepspeed", {"initial_scale_power": -2}, "min_scale=1.0 must not exceed init_scale=0.25"),
        ("deepspeed", {"raise_error_at_min_scale": False, "hysteresis": 2}, "pass keys of one list"),
        ("deepspeed", {"enabled": "maybe"}, "enabled='maybe' .* it must be true or false"),
        ("jmp", {}, "no default for loss_scale"),
        ("paddle", {"decr_ratio": 2.0}, "decr_ratio=2.0 .*: backoff_factor=2.0 must be between 0 and 1"),
    ],
    state_from_tool: [
        ("torch", {}, "has no scale, growth_tracker, and is empty"),
        ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {}}, "holds 2 scalers"),
        ("torch", {"scale": 8.0, "_growth_tracker": -5}, "growth_tracker=-5 .* must be a whole number from 0"),
        ("deepspeed", {**ITERATIONS, "last_overflow_iter": 3, "scale_window": 4}, "cur_iter=3 must be after last_"),
        ("deepspeed", ITERATIONS, r"depends on growth_interval, .* pass policy=from_tool\('deepspeed'"),
    ],
}


@pytest.mark.parametrize(
    ("read", "name", "entries", "words"), [(read, *row) for read, rows in REFUSED.items() for row in rows], ids=_named
)
def test_a_wrong_entry_is_named(read, name, entries, words):
    """A config without a policy and a checkpoint without a state are refused with the tool's own key and the value."""
    with pytest.raises(PolicyError if read is from_tool else CheckpointError, match=words):
        read(name, entries)


def test_auto_is_the_tools_default():
    """A value of "auto" means the tool's default, with a warning, because a trainer may use another value."""
    config = {"fp16": {"enabled": True, "initial_scale_power": "auto", "loss_scale_window": 500}}
    with pytest.warns(UserWarning, match=r'deepspeed: initial_scale_power of "auto" is taken .* write the number'):
        policy = from_tool("deepspeed", config)
    assert (policy.init_scale, policy.growth_interval) == (2.0**16, 500)

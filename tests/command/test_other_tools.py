"""Other tools' configs and checkpoints: the policy and the state do what the tool does, step for step."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale import from_tool, state_from_tool, tools
from lossscale.other_tools import tools_of_checkpoint, tools_of_config
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, state_from_dict, state_to_dict
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import CheckpointError, CheckpointWarning, PolicyError
from lossscale_core.testing import overflow_traces, simulate
from tests.command.tool_models import DRAWN, GUESSED, PLACED
from tests.core.own_policies import AdditiveScaling
from tests.core.test_tool_runs import POLICIES, RUNS

TOOL_OF_RUN = {run: record["tool"] for run, record in RUNS.items() if "tool" in record}


def _named(value):
    return value if type(value) is str else ""


def _run_model(model, config, grads_finite):
    """Return the model's scale after each step, up to where it leaves the range in which both have a scale."""
    tool, scales = model(**config), []
    for finite in grads_finite:
        tool.step(not finite)
        if not SMALLEST_SCALE < tool.scale < LARGEST_SCALE:
            break
        scales.append(tool.scale)
    return scales


def test_every_tool_has_a_model():
    """No row of the table is untested, and no model stands for a tool that is not there."""
    assert DRAWN.keys() == tools().keys()
    assert all("(" in about for about in tools().values())


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_the_policy_does_what_the_tool_does(name, data):
    """Scales are equal after every step: exactly where factors are powers of two, else to 1e-6 a step."""
    model, configs = DRAWN[name]
    config, grads_finite = data.draw(configs), data.draw(overflow_traces(max_steps=120))
    before = copy.deepcopy(config)
    expected = _run_model(model, config, grads_finite)
    trace = simulate(from_tool(name, config), grads_finite[: len(expected)])
    assert config == before
    factors = [config.get(key, 2.0) for key in config if "factor" in key or "ratio" in key or key == "multiplier"]
    if all(np.frexp(factor)[0] == 0.5 for factor in factors):
        assert trace.loss_scale_after.tolist() == np.float32(expected).tolist()
    else:
        off = np.abs(trace.loss_scale_after / np.array(expected) - 1.0)
        assert np.all(off <= 1e-6 * np.arange(1, len(expected) + 1))
    assert trace.skipped.tolist() == [not finite for finite in grads_finite[: len(expected)]]


@pytest.mark.parametrize("run", TOOL_OF_RUN)
def test_recorded_runs(run):
    """The keys of a recorded run are read too, and left alone; the run is the original's, to the last bit."""
    config = copy.deepcopy(RUNS[run]["config"])
    policy = from_tool(TOOL_OF_RUN[run], config)
    assert config == RUNS[run]["config"]
    grads_finite = [flag == "0" for flag in RUNS[run]["overflow"]]
    expected = np.array(RUNS[run]["scale_after"], dtype=np.float32)
    np.testing.assert_array_equal(simulate(policy, grads_finite).loss_scale_after, expected)
    assert type(policy) is type(POLICIES[run])


DEFAULTS = {
    "torch": DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    "apex": DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=2.0**24),
    "deepspeed": DynamicScaling(
        growth_interval=1000, hysteresis=2, refill_on_finite=False, cooldown=1, max_scale=LARGEST_SCALE
    ),
    "megatron": DynamicScaling(
        init_scale=2.0**32, growth_interval=1000, hysteresis=2, refill_on_finite=False, max_scale=LARGEST_SCALE
    ),
    "keras": DynamicScaling(init_scale=2.0**15, max_scale=LARGEST_SCALE),
    "flax": DynamicScaling(growth_interval=2001, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    "paddle": DynamicScaling(refill_on_backoff=True, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_empty_config_is_the_tools_defaults(name):
    """A key that is left out takes the tool's default; a bound that the tool lacks is the outermost possible one."""
    assert from_tool(name, {}) == DEFAULTS[name]


SAYINGS = [
    ("deepspeed", {"enabled": True, "loss_scale": 0}, DEFAULTS["deepspeed"]),
    ("deepspeed", {"loss_scale": "0", "hysteresis": 2.0, "loss_scale_window": "1000"}, DEFAULTS["deepspeed"]),
    ("deepspeed", {"loss_scale": 0, "initial_scale_power": "auto", "auto_cast": False}, DEFAULTS["deepspeed"]),
    ("deepspeed", {"enabled": True, "loss_scale": 128}, FixedScaling(128.0)),
    (
        "deepspeed",
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "hysteresis": 2}},
        DEFAULTS["deepspeed"],
    ),
    ("megatron", {"fp16": True, "loss_scale": 0.0, "loss_scale_window": 1000.0}, DEFAULTS["megatron"]),
    ("megatron", {"loss_scale": 4096.0}, FixedScaling(4096.0)),
    ("apex", {"opt_level": "O1", "loss_scale": None, "max_loss_scale": 2.0**24}, DEFAULTS["apex"]),
    ("apex", {"max_loss_scale": 1024.0}, DynamicScaling(init_scale=1024.0, min_scale=SMALLEST_SCALE, max_scale=1024.0)),
    (
        "torch",
        {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3},
        DynamicScaling(init_scale=8.0, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    ),
    ("torch", {"device": "cuda", "init_scale": np.float32(65536), "enabled": True}, DEFAULTS["torch"]),
    ("deepspeed", {"fp16": {"hysteresis": 3}, "bf16": {}}, dataclasses.replace(DEFAULTS["deepspeed"], hysteresis=1)),
    ("deepspeed", {"fp16": {}, "zero_optimization": True}, DEFAULTS["deepspeed"]),
    ("deepspeed", {"enabled": "false"}, NoScaling()),
    ("megatron", {"--loss-scale-window": "1000", "initial-loss-scale": "4294967296"}, DEFAULTS["megatron"]),
    ("megatron", {"loss_scale_window": 1000.5}, dataclasses.replace(DEFAULTS["megatron"], growth_interval=2**31 - 1)),
    ("apex", {"max_loss_scale": None}, dataclasses.replace(DEFAULTS["apex"], max_scale=LARGEST_SCALE)),
    ("apex", {"opt_level": "O3"}, FixedScaling(1.0)),
    ("torch", {"enabled": False}, NoScaling()),
    ("jmp", {"loss_scale": 8.0, "counter": 3}, DynamicScaling(init_scale=8.0, max_scale=LARGEST_SCALE)),
    ("keras", {"dynamic": False, "initial_scale": 8.0}, FixedScaling(8.0)),
    ("keras", {"dynamic_growth_steps": -3}, dataclasses.replace(DEFAULTS["keras"], growth_interval=1)),
    ("keras3", {"dynamic": True, "name": None}, dataclasses.replace(DEFAULTS["keras"], min_scale=SMALLEST_SCALE)),
    (
        "keras3",  # as Keras 3.0 to 3.11 write it
        {
            "name": "loss_scale_optimizer",
            **dict.fromkeys(("weight_decay", "clipnorm", "global_clipnorm", "clipvalue"), None),
            **{"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None},
            **{"loss_scale_factor": None, "gradient_accumulation_steps": None},
            **{"inner_optimizer": {}, "initial_scale": 32768.0, "dynamic_growth_steps": 2000},
        },
        dataclasses.replace(DEFAULTS["keras"], min_scale=SMALLEST_SCALE),
    ),
    ("keras", {"inner_optimizer": {}, "dynamic": True, "initial_scale": None}, DEFAULTS["keras"]),
    ("paddle", {"use_dynamic_loss_scaling": False, "init_loss_scaling": 64.0}, FixedScaling(64.0)),
]


@pytest.mark.parametrize(("name", "config", "policy"), SAYINGS, ids=_named)
def test_what_a_config_means(name, config, policy):
    """Each tool's own ways of saying a thing; the config is left alone."""
    before = copy.deepcopy(config)
    assert from_tool(name, config) == policy
    assert config == before


NO_FLOORS = [
    ("deepspeed", {"init_scale": 8, "min_scale": 0, "scale_window": 5}),
    ("megatron", {"initial_scale": 8, "min_scale": 1e-40}),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": 0}),
]


@pytest.mark.parametrize(("name", "config"), NO_FLOORS, ids=_named)
def test_a_floor_beyond_ours_is_ours(name, config):
    """A floor below 2**-126, or none at all, is 2**-126."""
    assert from_tool(name, config).min_scale == SMALLEST_SCALE


REFUSED = [
    ("torhc", {}, "did you mean 'torch'"),
    ("torch", [], "must be a dict"),
    ("torch", {"growth_intervall": 3}, "'growth_intervall' is not a key of torch; did you mean 'growth_interval'"),
    ("torch", {"growth_factor": 1.0}, "growth_factor=1.0"),
    ("torch", {"backoff_factor": -0.5}, "backoff_factor=-0.5"),
    ("torch", {"init_scale": 1e38}, "init_scale=1e[+]38"),
    ("torch", {"init_scale": 0.0}, "init_scale=0.0"),
    ("torch", {"init_scale": 4.0, "scale": 8.0}, "scale and init_scale are names of one setting"),
    ("torch", {"growth_interval": "many"}, "growth_interval='many'"),
    ("torch", {"enabled": "perhaps"}, "enabled='perhaps'"),
    ("torch", {"enabled": np.array([1, 2])}, "torch: enabled=ndarray of shape"),
    ("torch", {"init_scale": [1.0, 2.0]}, r"init_scale=\[1.0, 2.0\] must be one number"),
    ("torch", {"growth_interval": 10**400}, "growth_interval=1000.* must be a number"),
    ("torch", {"growth_interval": float("nan")}, "growth_interval=nan .* must be a number"),
    ("keras", {"dynamic_growth_steps": float("nan")}, "dynamic_growth_steps=nan"),
    ("deepspeed", {"loss_scale": np.zeros(2)}, "loss_scale=ndarray of shape"),
    ("deepspeed", {"loss_scale": float("nan")}, "loss_scale=nan"),
    ("apex", {"min_loss_scale": float("nan")}, "min_loss_scale=nan"),
    ("apex", {"scale_window": 0}, "scale_window=0"),
    ("apex", {"min_loss_scale": 2.0**20}, "min_scale=1048576.0 must not exceed init_scale"),
    ("deepspeed", {"loss_scale_window": 2.7}, "loss_scale_window=2.7"),
    ("deepspeed", {"min_loss_scale": 0.5}, "min_loss_scale=0.5"),
    ("deepspeed", {"min_loss_scale": 0}, "min_loss_scale=0"),
    ("deepspeed", {"loss_scale": True}, "loss_scale=True"),
    ("deepspeed", {"loss_scale": -1}, "loss_scale=-1"),
    ("deepspeed", {"initial_scale_power": 5000}, "initial_scale_power=5000"),
    ("deepspeed", {"initial_scale_power": -2}, "min_scale=1.0 must not exceed init_scale=0.25"),
    ("deepspeed", {"raise_error_at_min_scale": False, "hysteresis": 2}, "pass one form"),
    ("deepspeed", {"train_batch_size": 8, "bf16": {"enabled": True}}, "no fp16 block"),
    ("deepspeed", {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}, "no fp16 block"),
    ("megatron", {"hysteresis": 0}, "hysteresis=0"),
    ("megatron", {"min_scale": 0.0}, "min_loss_scale=0.0"),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": None}, "min_loss_scale=None"),
    ("keras3", {"dynamic": False}, "dynamic=False"),
    ("megatron", {"initial_loss_scale": 0.5}, "min_scale=1.0 must not exceed init_scale=0.5"),
    ("paddle", {"use_dynamic_loss_scaling": False, "init_loss_scaling": -1.0}, "init_loss_scaling=-1.0"),
    ("keras", {"multiplier": 4.0}, "multiplier=4.0"),
    ("keras", {"dynamic": False}, "initial_scale"),
    ("keras", {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, "dynamic_growth_steps"),
    ("deepspeed", {"fp16": None}, "fp16=None must be a block of keys"),
    ("keras", {"dynamic": "perhaps"}, "dynamic='perhaps'"),
    ("jmp", {}, "no default for loss_scale"),
    ("flax", {"minimum_scale": 2.0**20}, "min_scale=1048576.0"),
    ("paddle", {"decr_ratio": 2.0}, "decr_ratio=2.0"),
]


@pytest.mark.parametrize(("name", "config", "words"), REFUSED, ids=_named)
def test_what_cannot_be_expressed_names_the_field(name, config, words):
    """The error names the key of theirs and its value."""
    with pytest.raises(PolicyError, match=words):
        from_tool(name, config)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"fp16": {"loss_scale_window": 500}, "train_batch_size": 8}, ["deepspeed"]),
        ({"init_scale": 8.0, "growth_interval": 3}, ["torch"]),
        ({"--initial-loss-scale": 8.0}, ["megatron"]),
        ({"period": 3}, ["jmp"]),
        ({"growth_interval": 3}, ["torch", "megatron", "flax"]),
        ({"learning_rate": 1.0}, []),
    ],
    ids=str,
)
def test_a_config_is_recognised_by_its_keys(config, names):
    """A tool is found if it knows all of them."""
    assert tools_of_config(config) == names


def _go_on(policy, state, tool, grads_finite):
    """Return pairs of our scale and the tool's after each further step, while the tool's stays in range."""
    pairs = []
    for finite in grads_finite:
        tool.step(not finite)
        state = policy.update(state, finite)
        if not SMALLEST_SCALE < tool.scale < LARGEST_SCALE:
            break
        pairs.append((float(state.loss_scale), float(np.float32(tool.scale))))
    return np.array(pairs).reshape(-1, 2)


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_a_run_continues(name, data):
    """Stopped anywhere, saved as the tool saves, also through JSON, and gone on with under the policy."""
    model, configs = DRAWN[name]
    config, tool = data.draw(configs), None
    tool = model(**config)
    for finite in data.draw(overflow_traces(max_steps=60)):
        tool.step(not finite)
        if not 2.0**-60 < tool.scale < 2.0**60:
            return
    policy = from_tool(name, config)
    saved = json.loads(json.dumps(tool.saved()))
    state = state_from_tool(name, saved, policy)
    pairs = _go_on(policy, state, tool, data.draw(overflow_traces(max_steps=60)))
    np.testing.assert_allclose(pairs[:, 0], pairs[:, 1], rtol=1e-6 * (len(pairs) + 1))


def test_without_a_policy_where_the_checkpoint_places_every_counter():
    """The same state as with the policy; where a counter hangs on a setting, the error asks for the policy."""
    for name, (model, _) in DRAWN.items():
        config = {"loss_scale": 64.0} if name == "jmp" else {}
        tool = model(**config)
        for overflow in (False, True, False, False):
            tool.step(overflow)
        policy = from_tool(name, config)
        saved = tool.saved()
        assert state_from_tool(name, saved) == state_from_tool(name, saved, policy), name
    saved = {key: value for key, value in DRAWN["deepspeed"][0]().saved().items() if key != "scale_window"}
    with pytest.raises(CheckpointError, match=r"depends on growth_interval, .* pass policy=from_tool\('deepspeed'"):
        state_from_tool("deepspeed", saved)


@pytest.mark.parametrize(("name", "saved"), PLACED, ids=_named)
def test_counters_are_placed(name, saved):
    """Each layout that a tool saves: this scale, and seven finite steps toward growth."""
    state = state_from_tool(name, saved)
    assert (state.loss_scale, state.growth_tracker) == (8.0, 7)
    assert state_from_dict(json.loads(json.dumps(state_to_dict(state)))) == state


def test_iterations_since_a_change():
    """DeepSpeed counts one step fewer: before the first growth, and after."""
    policy = from_tool("deepspeed", {"loss_scale_window": 4})
    trackers = [
        state_from_tool(
            "deepspeed", {"cur_scale": 8.0, "cur_iter": now, "last_overflow_iter": 9}, policy
        ).growth_tracker
        for now in range(10, 20)
    ]
    assert trackers == [-1, 0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_what_a_checkpoint_lacks_starts_fresh():
    """Apex saves no overflows that are left: its own resumed run has all of them."""
    state = state_from_tool("apex", {"loss_scale": 8.0, "unskipped": 3}, DynamicScaling(hysteresis=3))
    assert (state.growth_tracker, state.hysteresis_tracker, state.steps) == (3, 3, 0)


def test_another_kind_of_policy_continues_with_the_scale():
    """Counters are placed under a policy that has them, and left alone under one that has none."""
    saved = {"scale": 8.0, "_growth_tracker": 7}
    assert state_from_tool("torch", saved, 8.0) == FixedScaling(8.0).init_state()
    own = state_from_tool("torch", saved, AdditiveScaling(growth_interval=9))
    assert (own.loss_scale, own.growth_tracker, own.additions) == (8.0, 7, 0.0)


def test_a_scale_outside_the_policys_bounds_is_brought_within():
    """As in every restored state, with a warning."""
    policy = DynamicScaling(init_scale=2.0, max_scale=4.0)
    with pytest.warns(CheckpointWarning, match="loss_scale was 8 and becomes 4"):
        assert state_from_tool("torch", {"scale": 8.0, "_growth_tracker": 0}, policy).loss_scale == 4.0


NO_CHECKPOINTS = [
    ("torch", {}, "has no scale, growth_tracker, and is empty"),
    ("torch", {"scale": 8.0}, "has no growth_tracker"),
    ("torch", [8.0], "must be a dict, not list"),
    ("torch", {"scale": 0.0, "_growth_tracker": 1}, "loss_scale=0.0"),
    ("torch", {"scale": float("inf"), "_growth_tracker": 1}, "loss_scale=inf"),
    ("torch", {"scale": "8", "_growth_tracker": 1}, "scale='8'"),
    ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {}}, "holds 2 scalers"),
    ("megatron", {"grad_scaler": {}}, "has no scale"),
    ("torhc", {"scale": 8.0}, "did you mean 'torch'"),
    ("torch", {"scale": 8.0, "_growth_tracker": float("inf")}, "growth_tracker=inf .* must be a whole number"),
    ("torch", {"scale": 8.0, "_growth_tracker": float("nan")}, "growth_tracker=nan .* must be a whole number"),
    ("torch", {"scale": 8.0, "_growth_tracker": 7.9}, "growth_tracker=7.9 .* must be a whole number"),
    ("torch", {"scale": 8.0, "_growth_tracker": -5}, "growth_tracker=-5 .* must be a whole number from 0"),
    ("paddle", {"scale": 8.0, "incr_count": 1, "decr_count": -1}, "decr_count=-1 .* from 0"),
    (
        "deepspeed",
        {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": 30, "scale_window": 4},
        "cur_iter=3 must be after last_overflow_iter=30",
    ),
]


@pytest.mark.parametrize(("name", "saved", "words"), NO_CHECKPOINTS, ids=_named)
def test_what_no_state_can_hold_is_refused(name, saved, words):
    """The error names the key, the value and what to do."""
    with pytest.raises(CheckpointError, match=words):
        state_from_tool(name, saved)


@pytest.mark.parametrize("name", GUESSED)
def test_a_saved_scaler_is_recognised(name):
    """By the names that it saves; one name, or one that many dicts have, is too few."""
    assert tools_of_checkpoint(GUESSED[name]) == [name]
    for saved in ({}, {"scale": 8.0}, {"epoch": 3}, [1]):
        assert tools_of_checkpoint(saved) == []


def test_every_tools_first_state_is_ours():
    """Each row of the table reads what its model saves."""
    for name, (model, _) in DRAWN.items():
        required = {"loss_scale": 64.0} if name == "jmp" else {}
        policy = from_tool(name, required)
        assert state_from_tool(name, model(**required).saved(), policy) == policy.init_state()

"""Other tools' configs: the policy does what the tool does, step for step, and says what it cannot or will not do."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale.dialects import from_tool
from lossscale.dialects._tools import TOOLS
from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import DialectWarning, PolicyError
from lossscale_core.testing import overflow_traces, simulate
from tests.core.dialect_models import DRAWN
from tests.core.test_tool_runs import POLICIES, RUNS

PEER_RUNS = {run: record["tool"] for run, record in RUNS.items() if "tool" in record}


def _quietly(function, *arguments):
    """Call with every `DialectWarning` left unsaid; tests of their own listen for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DialectWarning)
        return function(*arguments)


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
    """No record is untested, and no model stands for a tool that is not there."""
    assert DRAWN.keys() == TOOLS.keys()


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_the_policy_does_what_the_tool_does(name, data):
    """Scales are equal after every step: exactly where factors are powers of two, else to 1e-6 a step."""
    model, configs = DRAWN[name]
    config, grads_finite = data.draw(configs), data.draw(overflow_traces(max_steps=120))
    before = copy.deepcopy(config)
    expected = _run_model(model, config, grads_finite)
    trace = simulate(_quietly(from_tool, name, config), grads_finite[: len(expected)])
    assert config == before
    factors = [config.get(key, 2.0) for key in config if "factor" in key or "ratio" in key or key == "multiplier"]
    if all(np.frexp(factor)[0] == 0.5 for factor in factors):
        assert trace.loss_scale_after.tolist() == np.float32(expected).tolist()
    else:
        off = np.abs(trace.loss_scale_after / np.array(expected) - 1.0)
        assert np.all(off <= 1e-6 * np.arange(1, len(expected) + 1))
    assert trace.skipped.tolist() == [not finite for finite in grads_finite[: len(expected)]]


@pytest.mark.parametrize("run", PEER_RUNS)
def test_recorded_runs(run):
    """The keys of a recorded run are read too, and left alone; the run is the original's, to the last bit."""
    config = copy.deepcopy(RUNS[run]["config"])
    policy = from_tool(PEER_RUNS[run], config)
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
        {"loss_scale": 128, "loss_scale_window": 0, "hysteresis": 0},
        FixedScaling(128.0),
    ),  # unused there too
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
    (
        "deepspeed",
        {
            "dynamic_loss_scale": True,
            "dynamic_loss_args": {"init_scale": 64, "scale_window": 2, "min_scale": 1, "delayed_shift": 1},
        },
        DynamicScaling(
            init_scale=64.0, growth_interval=2, cooldown=1, refill_on_backoff=False, max_scale=LARGEST_SCALE
        ),
    ),
    ("deepspeed", {"scale": 128}, FixedScaling(128.0)),
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


@pytest.mark.parametrize(("name", "config", "policy"), SAYINGS, ids=lambda value: value if type(value) is str else "")
def test_what_a_config_says(name, config, policy):
    """Each tool's own ways of saying a thing; the config is left alone."""
    before = copy.deepcopy(config)
    read = from_tool(name, config)
    assert config == before
    trace = [True] * 3 + [False] * 4 + [True] * 2
    assert type(read) is type(policy)
    np.testing.assert_array_equal(simulate(read, trace).loss_scale_after, simulate(policy, trace).loss_scale_after)


NO_FLOORS = [
    ("deepspeed", {"init_scale": 8, "min_scale": 0}),
    ("megatron", {"initial_scale": 8, "min_scale": 1e-40}),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": 0}),
]


@pytest.mark.parametrize(("name", "config"), NO_FLOORS, ids=lambda value: value if type(value) is str else "")
def test_a_floor_beyond_ours_is_ours(name, config):
    """A floor below 2**-126, or none at all, is 2**-126."""
    assert from_tool(name, config).min_scale == SMALLEST_SCALE


BUGS = [
    ("torch", {"growth_interval": 0}, "growth_interval=0 never grows"),
    ("apex", {"scale_window": float("inf")}, "scale_window=inf never grows"),
    ("torch", {"enabled": False}, "turned off it applies infinite gradients"),
    ("apex", {"scale_factor": 4.0}, "scale_factor=4.0 is ignored"),
    ("apex", {"loss_scale": "128.0"}, "applies infinite gradients under a fixed scale"),
    ("apex", {"opt_level": "O3"}, "applies infinite gradients under a fixed scale"),
    ("deepspeed", {"hysteresis": 0}, "hysteresis=0 never lowers the scale"),
    ("deepspeed", {"fp16": {"hysteresis": 2}}, "ignored by DeepSpeed without ZeRO"),
    ("deepspeed", {"enabled": False}, "turned off"),
    (
        "deepspeed",
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"delayed_shift": 3}},
        "delayed_shift=3 is ignored",
    ),
    ("megatron", {"loss_scale_window": 1000.5}, "megatron: loss_scale_window=1000.5 never grows"),
    ("keras", {"dynamic": False, "initial_scale": 8.0}, "applies infinite gradients under a fixed scale"),
    ("keras3", {"dynamic_growth_steps": 0}, "dynamic_growth_steps=0 never grows"),
    ("jmp", {"loss_scale": 64.0, "min_loss_scale": 4.0, "jit": True}, "min_loss_scale is lost under jit"),
    ("jmp", {"loss_scale": 64.0, "counter": 3}, "pass it to state_from_tool"),
    ("paddle", {"decr_every_n_nan_or_inf": 0}, "decr_every_n_nan_or_inf=0 never lowers"),
]


@pytest.mark.parametrize(("name", "config", "words"), BUGS, ids=lambda value: value if type(value) is str else "")
def test_a_config_that_triggers_a_bug_gets_a_warning(name, config, words):
    """A warning, not silence; and a policy."""
    with pytest.warns(DialectWarning, match=words):
        policy = from_tool(name, config)
    assert isinstance(policy, DynamicScaling | FixedScaling | NoScaling)


REFUSED = [
    ("torhc", {}, "did you mean 'torch'"),
    ("torch", [], "must be a dict"),
    ("torch", {"growth_intervall": 3}, "'growth_intervall' is not a key of torch; did you mean 'growth_interval'"),
    ("torch", {"growth_factor": 1.0}, "growth_factor=1.0"),
    ("torch", {"backoff_factor": -0.5}, "backoff_factor=-0.5"),
    ("torch", {"init_scale": 1e38}, "init_scale=1e[+]38"),
    ("torch", {"init_scale": 0.0}, "init_scale=0.0"),
    ("torch", {"init_scale": 4.0, "scale": 8.0}, "init_scale and scale are names of one setting"),
    ("torch", {"growth_interval": "many"}, "growth_interval='many'"),
    ("torch", {"enabled": "perhaps"}, "enabled='perhaps'"),
    ("torch", {"enabled": np.array([1, 2])}, "torch: enabled=ndarray of shape"),
    ("torch", {"init_scale": [1.0, 2.0]}, r"init_scale=\[1.0, 2.0\] must be one number"),
    ("torch", {"growth_interval": 10**400}, "growth_interval=1000.* larger than every float"),
    ("torch", {"growth_interval": float("nan")}, "growth_interval=nan .* must be a number"),
    ("keras", {"dynamic_growth_steps": float("nan")}, "dynamic_growth_steps=nan"),
    ("deepspeed", {"loss_scale": np.zeros(2)}, "loss_scale=ndarray of shape"),
    ("deepspeed", {"loss_scale": float("nan")}, "loss_scale=nan"),
    ("apex", {"min_loss_scale": float("nan")}, "min_loss_scale=nan"),
    ("apex", {"scale_window": 0}, "scale_window=0"),
    ("apex", {"min_loss_scale": 2.0**20}, r"min_loss_scale=1048576.0 is above init_scale=65536.0"),
    ("deepspeed", {"loss_scale_window": 2.7}, "loss_scale_window=2.7"),
    ("deepspeed", {"min_loss_scale": 0.5}, "min_loss_scale=0.5"),
    ("deepspeed", {"min_loss_scale": 0}, "min_loss_scale=0"),
    ("deepspeed", {"loss_scale": True}, "loss_scale=True"),
    ("deepspeed", {"loss_scale": -1}, "loss_scale=-1"),
    ("deepspeed", {"initial_scale_power": 5000}, "initial_scale_power=5000"),
    ("deepspeed", {"initial_scale_power": -2}, "min_loss_scale=1 is above initial_scale_power=-2"),
    ("deepspeed", {"raise_error_at_min_scale": False, "hysteresis": 2}, "not a key of deepspeed"),
    ("deepspeed", {"train_batch_size": 8, "bf16": {"enabled": True}}, "no fp16 block"),
    ("deepspeed", {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}, "no fp16 block"),
    ("megatron", {"hysteresis": 0}, "hysteresis=0"),
    ("megatron", {"min_scale": 0.0}, "min_scale=0.0"),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": None}, "min_loss_scale=None"),
    ("keras3", {"dynamic": False}, "dynamic=False"),
    ("megatron", {"initial_loss_scale": 0.5}, "min_scale=1.0 is above initial_loss_scale=0.5"),
    ("paddle", {"use_dynamic_loss_scaling": False, "init_loss_scaling": -1.0}, "init_loss_scaling=-1.0"),
    ("keras", {"multiplier": 4.0}, "multiplier=4.0"),
    ("keras", {"dynamic": False}, "initial_scale"),
    ("keras", {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, "dynamic_growth_steps"),
    ("keras", {"dynamic": 1}, "dynamic=1"),
    ("jmp", {}, "no default for loss_scale"),
    ("flax", {"minimum_scale": 2.0**20}, "minimum_scale=1048576.0"),
    ("paddle", {"decr_ratio": 2.0}, "decr_ratio=2.0"),
]


@pytest.mark.parametrize(("name", "config", "words"), REFUSED, ids=lambda value: value if type(value) is str else "")
def test_what_cannot_be_expressed_names_the_field(name, config, words):
    """The error names the key of theirs and its value."""
    with pytest.raises(PolicyError, match=words):
        from_tool(name, config)


def test_an_interval_without_end_is_read():
    """TensorFlow compares with `>=`; ours is the longest possible."""
    assert from_tool("keras", {"dynamic_growth_steps": float("inf")}).growth_interval == 2**31 - 1
    assert from_tool("keras", {"dynamic_growth_steps": float("-inf")}).growth_interval == 1


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("deepspeed", {"fp16": None}, "fp16=None must be a block of keys"),
        ("deepspeed", {"fp16": True}, "fp16=True must be a block of keys"),
    ],
)
def test_a_config_with_mixed_up_keys_is_refused(name, config, words):
    """By the key that is wrong, of whichever form it is."""
    with pytest.raises(PolicyError, match=words):
        from_tool(name, config)

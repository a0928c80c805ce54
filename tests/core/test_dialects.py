"""Other tools' configs: the policy does what the tool does, step for step, and says what it cannot or will not do."""

import copy
import dataclasses
import json
import time
import warnings

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lossscale.dialects import from_tool, to_tool, tools
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, TolerantScaling
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import DialectWarning, PolicyError
from lossscale_core.testing import overflow_traces, policies, simulate
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
    assert DRAWN.keys() == {tool.name for tool in tools()}


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
    if all(np.frexp(factor)[0] == 0.5 for factor in factors) and name != "tf-contrib":
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


@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
def test_there_and_back(name, data):
    """What `to_tool` writes reads as a policy that does the same, and writes the same again."""
    policy = _quietly(from_tool, name, data.draw(DRAWN[name][1]))
    config = to_tool(name, policy)
    again = from_tool(name, json.loads(json.dumps(config)))
    assert to_tool(name, again) == config
    grads_finite = data.draw(overflow_traces(max_steps=60))
    np.testing.assert_array_equal(
        simulate(policy, grads_finite).loss_scale_after, simulate(again, grads_finite).loss_scale_after
    )


@pytest.mark.parametrize("name", DRAWN)
@given(policy=policies(), grads_finite=overflow_traces(max_steps=60))
def test_what_is_written_is_exact(name, policy, grads_finite):
    """Any policy of ours is written so that it reads as one that does the same, or a field is named."""
    try:
        config = to_tool(name, policy)
    except PolicyError as error:
        assert any(word in str(error) for word in (*DynamicScaling.__slots__, "tolerance", "kind"))  # noqa: PT017
        return
    there, here = simulate(from_tool(name, config), grads_finite), simulate(policy, grads_finite)
    np.testing.assert_array_equal(there.loss_scale_after, here.loss_scale_after)


DEFAULTS = {
    "torch": DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    "apex": DynamicScaling(min_scale=SMALLEST_SCALE, max_scale=2.0**24),
    "deepspeed": DynamicScaling(
        growth_interval=1000, hysteresis=2, refill_on_finite=False, cooldown=1, max_scale=LARGEST_SCALE
    ),
    "megatron": DynamicScaling(
        init_scale=2.0**32, growth_interval=1000, hysteresis=2, refill_on_finite=False, max_scale=LARGEST_SCALE
    ),
    "fairseq": TolerantScaling(tolerance=0.0, init_scale=2.0**15, min_scale=2.0**-13, max_scale=LARGEST_SCALE),
    "keras": DynamicScaling(init_scale=2.0**15, max_scale=LARGEST_SCALE),
    "flax": DynamicScaling(growth_interval=2001, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    "paddle": DynamicScaling(refill_on_backoff=True, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE),
    "mindspore": DynamicScaling(init_scale=2.0**24, max_scale=LARGEST_SCALE, max_overflow_streak=1001),
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
        "fairseq",
        {"fp16_init_scale": 4, "update_freq": [4], "distributed_world_size": 8},
        TolerantScaling(
            tolerance=0.0, init_scale=4.0, growth_interval=512, min_scale=2.0**-13, max_scale=LARGEST_SCALE
        ),
    ),
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
    ("tf-contrib", {"loss_scale": 5000}, FixedScaling(5000.0)),
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
    ("tf-v1", {"opt": None, "loss_scale": "dynamic"}, DEFAULTS["keras"]),
    (
        "keras-experimental",
        {"optimizer": {}, "loss_scale": {"class_name": "DynamicLossScale", "config": {"increment_period": 2000}}},
        DEFAULTS["keras"],
    ),
    ("keras", {"inner_optimizer": {}, "dynamic": True, "initial_scale": None}, DEFAULTS["keras"]),
    ("mindspore", {"loss_scale": 1024.0, "drop_overflow_update": True}, FixedScaling(1024.0)),
    (
        "mindspore",
        {"loss_scale_value": 2**24, "scale_factor": 2, "scale_window": 2000, "note": "the cell"},
        DynamicScaling(init_scale=2.0**24, max_scale=LARGEST_SCALE),
    ),
    (
        "paddle-static",
        {"use_pure_fp16": True},
        DynamicScaling(
            init_scale=2.0**15,
            growth_interval=1000,
            backoff_factor=0.8,
            hysteresis=2,
            refill_on_backoff=True,
            max_scale=LARGEST_SCALE,
        ),
    ),
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
    assert to_tool(name, read) == to_tool(name, policy)
    np.testing.assert_array_equal(simulate(read, trace).loss_scale_after, simulate(policy, trace).loss_scale_after)


NO_FLOORS = [
    ("deepspeed", {"init_scale": 8, "min_scale": 0}),
    ("megatron-v1", {"init_scale": 8, "min_scale": -1}),
    ("megatron", {"initial_scale": 8, "min_scale": 1e-40}),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": 0}),
    ("colossalai", {"min_scale": 1e-40}),
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
    ("apex-fp16-utils", {"scale": 128}, "applies infinite gradients under a fixed scale"),
    ("megatron-v1", {"scale": 128}, "applies infinite gradients under a fixed scale"),
    ("megatron", {"loss_scale_window": 1000.5}, "megatron: loss_scale_window=1000.5 never grows"),
    ("keras", {"dynamic": False, "initial_scale": 8.0}, "applies infinite gradients under a fixed scale"),
    ("tf-v1", {"loss_scale_value": 8.0}, "applies infinite gradients under a fixed scale"),
    ("keras-experimental", {"loss_scale": 8}, "applies infinite gradients under a fixed scale"),
    ("keras3", {"dynamic_growth_steps": 0}, "dynamic_growth_steps=0 never grows"),
    ("jmp", {"loss_scale": 64.0, "min_loss_scale": 4.0, "jit": True}, "min_loss_scale is lost under jit"),
    ("jmp", {"loss_scale": 64.0, "counter": 3}, "pass it to state_from_tool"),
    ("paddle", {"decr_every_n_nan_or_inf": 0}, "decr_every_n_nan_or_inf=0 never lowers"),
    ("mindspore", {"loss_scale": 8.0, "drop_overflow_update": False}, "drop_overflow_update=False"),
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
    ("mindspore", {"scale_window": float("inf")}, "scale_window=inf"),
    ("deepspeed", {"loss_scale": np.zeros(2)}, "loss_scale=ndarray of shape"),
    ("deepspeed", {"loss_scale": float("nan")}, "loss_scale=nan"),
    ("apex", {"min_loss_scale": float("nan")}, "min_loss_scale=nan"),
    ("fairseq", {"fp16_scale_window": None, "update_freq": 32768}, "update_freq=32768 leaves no window"),
    ("fairseq", {"fp16_scale_window": None, "update_freq": [2, 4]}, r"update_freq=\[2, 4\]"),
    ("fairseq", {"fp16_scale_window": None, "update_freq": 0}, "update_freq=0"),
    ("fairseq", {"fp16_init_scale": 4, "distributed_world_size": 0}, "distributed_world_size=0"),
    ("fairseq", {"tolerance": float("nan")}, "tolerance=nan"),
    ("apex", {"scale_window": 0}, "scale_window=0"),
    ("apex", {"min_loss_scale": 2.0**20}, r"min_loss_scale=1048576.0 is above init_scale=65536.0"),
    ("apex-fp16-utils", {"scale_window": 0}, "scale_window=0"),
    ("apex-fp16-utils", {"init_scale": 0.25}, "init_scale=0.25"),
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
    ("fairseq", {"tolerance": 1.5}, "tolerance=1.5"),
    ("fairseq", {"tolerance": 1.0}, "tolerance=1.0"),
    ("fairseq", {"threshold": 2.0**20}, "threshold=1048576.0"),
    ("fairseq", {"init_scale": 1e-5}, "min_loss_scale"),
    ("fairseq", {"scale_factor": 1.0}, "scale_factor=1.0"),
    ("colossalai", {"min_scale": 2.0**20}, "min_scale=1048576.0"),
    ("keras", {"multiplier": 4.0}, "multiplier=4.0"),
    ("keras", {"dynamic": False}, "initial_scale"),
    ("keras", {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, "dynamic_growth_steps"),
    ("keras", {"dynamic": 1}, "dynamic=1"),
    ("tf-v1", {"multiplier": 0.5}, "multiplier=0.5"),
    ("tf-v1", {"multiplier": 0}, "multiplier=0"),
    ("tf-v1", {"initial_loss_scale": 0.25}, "initial_loss_scale=0.25"),
    ("tf-contrib", {"init_loss_scale": 8.0}, "no default for incr_every_n_steps"),
    ("jmp", {}, "no default for loss_scale"),
    ("flax", {"minimum_scale": 2.0**20}, "minimum_scale=1048576.0"),
    ("paddle", {"decr_ratio": 2.0}, "decr_ratio=2.0"),
    ("mindspore", {"scale_factor": 0}, "scale_factor=0"),
]


@pytest.mark.parametrize(("name", "config", "words"), REFUSED, ids=lambda value: value if type(value) is str else "")
def test_what_cannot_be_expressed_names_the_field(name, config, words):
    """The error names the key of theirs and its value."""
    with pytest.raises(PolicyError, match=words):
        from_tool(name, config)


UNSAYABLE = [
    ("torch", DynamicScaling(), "min_scale"),
    ("torch", FixedScaling(8.0), "kind"),
    ("torch", NoScaling(), "kind"),
    ("torch", TolerantScaling(), "kind"),
    ("torch", DynamicScaling(hysteresis=2, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE), "hysteresis"),
    ("apex", FixedScaling(8.0), "kind"),
    ("apex", DynamicScaling(growth_factor=4.0, min_scale=SMALLEST_SCALE, max_scale=2.0**24), "growth_factor"),
    ("deepspeed", DynamicScaling(max_scale=LARGEST_SCALE), "cooldown"),
    ("deepspeed", DynamicScaling(init_scale=3.0, cooldown=1, max_scale=LARGEST_SCALE), "init_scale=3.0"),
    ("megatron", DynamicScaling(hysteresis=2, max_scale=LARGEST_SCALE), "refill_on_finite"),
    ("jmp", DynamicScaling(growth_factor=4.0, max_scale=LARGEST_SCALE), "backoff_factor"),
    ("keras", DynamicScaling(max_scale=1024.0, init_scale=8.0), "max_scale"),
    ("paddle", DynamicScaling(max_overflow_streak=3, min_scale=SMALLEST_SCALE), "max_"),
]


@pytest.mark.parametrize(("name", "policy", "field"), UNSAYABLE, ids=lambda value: value if type(value) is str else "")
def test_what_the_tool_cannot_say_names_the_field(name, policy, field):
    """A config that would do something else is never written."""
    with pytest.raises(PolicyError, match=field):
        to_tool(name, policy)


WRITTEN = [
    ("flax", {"minimum_scale": SMALLEST_SCALE}),
    ("jmp", {"loss_scale": 8.0, "min_loss_scale": SMALLEST_SCALE}),
    ("colossalai", {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}),
    ("fairseq", {"threshold": SMALLEST_SCALE, "min_loss_scale": 0.0}),
]


@pytest.mark.parametrize(("name", "config"), WRITTEN, ids=lambda value: value if type(value) is str else "")
def test_the_outermost_bounds_are_written_as_numbers(name, config):
    """A tool that takes a bound is given ours, so that its scale stays where ours does."""
    written = to_tool(name, from_tool(name, config))
    assert config.items() <= written.items()


def test_megatron_is_written_in_one_vocabulary():
    """Either what its class takes, or what `OptimizerConfig` takes."""
    dynamic = {"initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"}
    assert to_tool("megatron", from_tool("megatron", {})).keys() == dynamic
    assert to_tool("megatron", 8.0) == {"initial_loss_scale": 8.0, "loss_scale": 8.0}


def test_policies_are_given_as_anywhere():
    """`to_tool` takes what `as_policy` takes."""
    assert to_tool("deepspeed", 128) == {"loss_scale": 128.0, "enabled": True}
    assert to_tool("colossalai", {"kind": "dynamic"})["growth_interval"] == 2000
    with pytest.raises(PolicyError, match="did you mean 'jmp'"):
        to_tool("jmpp", "dynamic")


@given(st.floats(0.01, 1000.0), st.sampled_from([2.0, 3.0, 4.0]), overflow_traces(max_steps=80))
def test_fairseq_stops_above_min_loss_scale(init_scale, factor, grads_finite):
    """Where fairseq would end the run the scale stays at the last value above its limit, never at it."""
    limit = 1e-3
    assume(init_scale > limit)
    policy = from_tool("fairseq", {"init_scale": init_scale, "scale_factor": factor, "min_loss_scale": limit})
    assert np.all(simulate(policy, grads_finite).loss_scale_after > np.float32(limit))


THRESHOLDS = [
    ({"init_scale": 128.0, "threshold": 1.5, "min_loss_scale": 1.0}, 1.5),
    ({"scale_factor": 8.0, "threshold": 2e-4}, 2e-4),
    ({"init_scale": 8.0, "threshold": 1.0, "min_loss_scale": 1.0}, 2.0),
    ({"init_scale": 8.0, "threshold": 0.5, "min_loss_scale": 0.0}, 0.5),
    ({"fp16_init_scale": 8, "threshold_loss_scale": 0.3}, 0.3),
    ({"min_loss_scale": 0.0}, SMALLEST_SCALE),
]


@pytest.mark.parametrize(("config", "floor"), THRESHOLDS, ids=str)
def test_fairseq_falls_to_its_threshold(config, floor):
    """A `threshold` above `min_loss_scale` is the floor; otherwise it never acts."""
    policy = from_tool("fairseq", config)
    assert policy.min_scale == floor
    assert simulate(policy, [False] * 200).loss_scale_after[-1] == np.float32(floor)


def test_an_interval_without_end_is_read():
    """TensorFlow compares with `>=`; ours is the longest possible."""
    assert from_tool("tf-v1", {"increment_period": float("inf")}).growth_interval == 2**31 - 1
    assert from_tool("keras", {"dynamic_growth_steps": float("-inf")}).growth_interval == 1


TOLERANCES = st.sampled_from([0.33333334, 0.6666667, 0.66666669, 0.33333331, 0.142857145, 0.9999999]) | st.builds(
    lambda share, off: min(share * (1 + off), 1.0 - 2.0**-24),
    st.sampled_from([1 / 3, 2 / 3, 1 / 7, 3 / 7, 0.1, 15 / 16]),
    st.floats(-1e-7, 1e-7),
)


@given(TOLERANCES, overflow_traces(max_steps=80))
def test_fairseqs_tolerance_beside_a_share(tolerance, grads_finite):
    """A tolerance just above a share of overflows tolerates it in float32 too, and one just below does not."""
    config = {"tolerance": tolerance, "scale_window": 5, "min_loss_scale": 0.0}
    expected = _run_model(DRAWN["fairseq"][0], config, grads_finite)
    trace = simulate(from_tool("fairseq", config), grads_finite[: len(expected)])
    assert trace.loss_scale_after.tolist() == expected


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("deepspeed", {"fp16": None}, "fp16=None must be a block of keys"),
        ("deepspeed", {"fp16": True}, "fp16=True must be a block of keys"),
        ("fairseq", {"fp16-init-scale": 4}, "did you mean 'fp16_init_scale'"),
        ("fairseq", {"init_scale": 4, "fp16_scale_window": 3}, "fp16_scale_window belongs to another form"),
        ("fairseq", {"fp16_init_scale": 4, "update_freq": "[1]"}, r"update_freq='\[1\]' does not say the window"),
    ],
)
def test_a_config_with_mixed_up_keys_is_refused(name, config, words):
    """By the key that is wrong, of whichever form it is."""
    with pytest.raises(PolicyError, match=words):
        from_tool(name, config)


@pytest.mark.parametrize("factor", [1.0000002, 1.00001, 1.001, 1.5, 2.0])
def test_a_factor_next_to_one_is_read_at_once(factor):
    """fairseq's floor lies one fall above the scale at which its run would end, however many falls lead there."""
    start = time.perf_counter()
    policy = from_tool("fairseq", {"scale_factor": factor, "min_loss_scale": 0.3})
    assert time.perf_counter() - start < 2.0
    assert 0.3 < policy.min_scale <= 0.3 * factor * (1 + 1e-12)

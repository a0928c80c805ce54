"""Other tools' checkpoints: the restored state continues exactly where the tool's own run would have."""

import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale.dialects import from_tool, guess_tool, possible_tools, state_from_tool
from lossscale.dialects._tools import TOOLS
from lossscale_core import DynamicScaling, FixedScaling, state_from_dict, state_to_dict
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.errors import CheckpointError, CheckpointWarning, DialectWarning
from lossscale_core.testing import overflow_traces
from tests.core.dialect_models import DRAWN, GUESSED, PLACED
from tests.core.own_policies import AdditiveScaling


def _quietly(function, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DialectWarning)
        return function(*arguments)


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
    policy = _quietly(from_tool, name, config)
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
    with pytest.raises(CheckpointError, match=r"depends on growth_interval; pass policy=from_tool\('deepspeed'"):
        state_from_tool("deepspeed", saved)


@pytest.mark.parametrize(("name", "saved"), PLACED, ids=lambda value: value if type(value) is str else "")
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


def test_a_fixed_scale():
    """A static scaler has a scale and nothing to place."""
    state = state_from_tool("deepspeed", {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 5}, 128)
    assert state == FixedScaling(128.0).init_state()


def test_another_kind_of_policy_continues_with_the_scale():
    """Counters are placed under a policy that has them, and left alone under one that has none."""
    saved = {"scale": 8.0, "_growth_tracker": 7}
    assert state_from_tool("torch", saved, 8.0) == FixedScaling(8.0).init_state()
    own = state_from_tool("torch", saved, AdditiveScaling(growth_interval=9))
    assert (own.loss_scale, own.growth_tracker, own.additions) == (8.0, 7, 0.0)
    with pytest.raises(CheckpointError, match=r"AdditiveScaling.* has no hysteresis, which places decr_count"):
        state_from_tool("paddle", {"scale": [8.0], "incr_count": 7, "decr_count": 0}, AdditiveScaling())


def test_settings_of_the_checkpoint_that_differ_are_named():
    """The tool would continue with those it saved."""
    saved = {"scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 3}
    with pytest.warns(CheckpointWarning, match=r"growth_factor was 4.0 .* is 2.0 .*; growth_interval was 10"):
        state = state_from_tool("torch", saved, from_tool("torch", {}))
    assert state.growth_tracker == 3


def test_a_count_past_the_interval_gets_a_warning():
    """torch would wait for the next overflow; here the scale grows on the next finite step."""
    policy = from_tool("torch", {"growth_interval": 5})
    with pytest.warns(CheckpointWarning, match="count 9 is past growth_interval=5"):
        state = state_from_tool("torch", {"scale": 8.0, "_growth_tracker": 9}, policy)
    assert policy.update(state, True).loss_scale == 16.0


def test_a_scale_outside_the_policys_bounds_is_brought_within():
    """As in every restored state, with a warning."""
    policy = DynamicScaling(init_scale=2.0, max_scale=4.0)
    with pytest.warns(CheckpointWarning, match="loss_scale was 8 and becomes 4"):
        assert state_from_tool("torch", {"scale": 8.0, "_growth_tracker": 0}, policy).loss_scale == 4.0


REFUSED = [
    ("torch", {}, "has no scale, _growth_tracker, and is empty"),
    ("torch", {"scale": 8.0}, "has no _growth_tracker"),
    ("torch", [8.0], "must be a dict, not list"),
    ("torch", {"scale": 0.0, "_growth_tracker": 1}, "loss_scale=0.0"),
    ("torch", {"scale": float("inf"), "_growth_tracker": 1}, "loss_scale=inf"),
    ("torch", {"scale": "8", "_growth_tracker": 1}, "scale='8'"),
    ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {}}, "holds 2 scalers"),
    ("megatron", {"grad_scaler": {}}, "has no scale"),
    ("torhc", {"scale": 8.0}, "did you mean 'torch'"),
]


IMPLAUSIBLE = [
    ("torch", {"_growth_tracker": float("inf")}, "_growth_tracker=inf .* must be a whole number"),
    ("torch", {"_growth_tracker": float("nan")}, "_growth_tracker=nan .* must be a whole number"),
    ("torch", {"_growth_tracker": 7.9}, "_growth_tracker=7.9 .* must be a whole number"),
    ("torch", {"_growth_tracker": -5}, "_growth_tracker=-5 .* cannot be below 0"),
    ("paddle", {"incr_count": 1, "decr_count": -1, "decr_every_n_nan_or_inf": 2}, "decr_count=-1 .* below 0"),
    (
        "deepspeed",
        {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": 30, "scale_window": 4},
        "cur_iter=3, last_overflow_iter=30 .* before the present",
    ),
]


@pytest.mark.parametrize(("name", "saved", "words"), IMPLAUSIBLE, ids=lambda value: value if type(value) is str else "")
def test_an_implausible_count_is_refused(name, saved, words):
    """No tool counts like that; the error names the key and its value."""
    with pytest.raises(CheckpointError, match=words):
        state_from_tool(name, {"scale": 8.0, **saved})


def test_more_overflows_left_than_the_policy_tolerates():
    """The count is lowered to the policy's, with a warning."""
    saved = {"scale": 8.0, "growth_tracker": 1, "hysteresis_tracker": 50}
    with pytest.warns(CheckpointWarning, match="50 overflows were left in the checkpoint, and hysteresis=2 leaves 2"):
        assert state_from_tool("megatron", saved, from_tool("megatron", {})).hysteresis_tracker == 2


@pytest.mark.parametrize(("name", "saved", "words"), REFUSED, ids=lambda value: value if type(value) is str else "")
def test_what_no_state_can_hold_is_refused(name, saved, words):
    """The error names the key, the value and what to do."""
    with pytest.raises(CheckpointError, match=words):
        state_from_tool(name, saved)


@pytest.mark.parametrize("name", GUESSED)
def test_a_saved_scaler_is_recognised(name):
    """By the names it saves; of tools that save the same and mean the same, the first."""
    assert guess_tool(GUESSED[name]) == name


def test_what_is_not_unmistakable_is_not_guessed():
    """One name is too few."""
    for saved in ({}, {"scale": 8.0}, {"epoch": 3}, [1]):
        with pytest.raises(CheckpointError, match="no known tool"):
            guess_tool(saved)
    assert possible_tools({"epoch": 3}) == ()


def test_every_tool_has_a_layout_that_is_recognised():
    """Each record reads what its model saves."""
    for name in TOOLS:
        model = DRAWN[name][0]
        required = {"loss_scale": 64.0} if name == "jmp" else {}
        original, policy = model(**required), from_tool(name, required)
        state = state_from_tool(name, original.saved(), policy)
        assert state == policy.init_state()

"""Likely mistakes with the core: the error of each says what was given, the rule and what to do in one sentence."""

import dataclasses
import errno
import inspect
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest

from lossscale import state_from_tool
from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    ScaleWatch,
    SpikeGuard,
    as_policy,
    diagnose,
    load_policy,
    metrics,
    policy_from_dict,
    state_from_dict,
    state_to_dict,
    step_info,
)
from lossscale_core.adapters import check_setting, guard_state_from_dict
from lossscale_core.errors import CheckpointError, PolicyError
from lossscale_core.testing import simulate, simulate_gradients

POLICY = DynamicScaling()
STATE = POLICY.init_state()
GRADS = {"w": np.ones(3, np.float32)}
SETTINGS = "known: init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, refill_on_finite"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: DynamicScaling(grow_interval=3),
            f"'grow_interval' is not an argument of DynamicScaling; did you mean 'growth_interval'? {SETTINGS}",
        ),
        (
            lambda: dataclasses.replace(DynamicScaling(), hysteresys=2),
            f"'hysteresys' is not an argument of DynamicScaling; did you mean 'hysteresis'? {SETTINGS}",
        ),
        (lambda: NoScaling(init_scale=4.0), "'init_scale' is not an argument of NoScaling; known: none"),
        (
            lambda: DynamicScaling(scale_window=100),
            "'scale_window' is called growth_interval in DynamicScaling; write growth_interval=100",
        ),
        (lambda: SpikeGuard(treshold=8.0), "'treshold' is not an argument of SpikeGuard; did you mean 'threshold'?"),
    ],
)
def test_a_misspelt_setting_names_the_nearest(make, sentence):
    """A constructor, `replace` and a guard say so as a file does, and it stays the TypeError of any Python function."""
    with pytest.raises(TypeError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (metrics, "call metrics(state), with its scale_state"),
        (state_to_dict, "call state_to_dict(state, policy), with its scale_state"),
        (lambda state: diagnose(POLICY, state), "call diagnose(policy, state), with its scale_state"),
        (lambda state: ScaleWatch().log(POLICY, state), "call log(policy, state), with its scale_state"),
        (lambda state: step_info(state, state), "call step_info(before, after), with its scale_state"),
    ],
)
def test_the_state_of_an_optimizer_and_of_an_ensemble(call, sentence):
    """The error says which part of it to pass."""
    with pytest.raises(TypeError, match=re.escape(f"is not a state of a policy, but holds one; {sentence}")):
        call(types.SimpleNamespace(scale_state=STATE))
    if "step_info" not in sentence:
        member = re.escape("such as state._make(field[0] for field in state)")
        with pytest.raises(TypeError, match=f"leading axis of 3, .* {member}"):
            call(STATE._make(np.stack([field] * 3) for field in STATE))


def test_swapped_states_and_a_whole_checkpoint():
    """The order of the arguments, and the part of the dict, are said."""
    with pytest.raises(ValueError, match="0 steps after 1; call step_info"):
        step_info(POLICY.update(STATE, True), STATE)
    with pytest.raises(CheckpointError, match="has no version, but model, scaler; pass its part 'scaler'"):
        state_from_dict({"model": {}, "scaler": state_to_dict(STATE)})


@pytest.mark.parametrize("policy", [NoScaling(), FixedScaling(4.0), DynamicScaling(hysteresis=2), SpikeGuard()])
def test_the_sentence_costs_no_signature(policy):
    """Editors and `inspect` still see the settings with their defaults."""
    parameters = inspect.signature(type(policy)).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(policy)]
    for field in dataclasses.fields(policy):
        assert parameters[field.name].default in (field.default, inspect.Parameter.empty)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: POLICY.update(True, STATE), "state=True is not a state, since it has no loss_scale; call update("),
        (lambda: NoScaling().update(True, STATE), "call update(state, grads_finite)"),
        (
            lambda: POLICY.update(STATE, GRADS),
            "must be a bool of shape (); call update(state, grads_finite), with what all_finite",
        ),
        (lambda: diagnose(POLICY, None), "state=None is not a state, since it has no loss_scale"),
        (lambda: ScaleWatch().log(POLICY, POLICY), "call log(policy, state), with a state that init_state"),
        (lambda: state_to_dict(POLICY, STATE), "call state_to_dict(state, policy)"),
        (lambda: metrics(POLICY), "call metrics(state), with a state that init_state or update returned"),
        (lambda: simulate([True, False], POLICY), "call simulate(policy, grads_finite)"),
        (lambda: POLICY.update(STATE, np.float32("nan")), "grads_finite=np.float32(nan) must be a bool of shape ()"),
        (lambda: POLICY.update(STATE, None), "grads_finite=None must be a bool of shape ()"),
        (lambda: POLICY.update(STATE, np.array([True])), "must be a bool of shape ()"),
        (lambda: simulate(POLICY, 5), "grads_finite=5 must be a sequence of bools"),
        (lambda: simulate_gradients([1.0], POLICY), "call simulate_gradients(policy, gradient_max)"),
    ],
)
def test_swapped_arguments_are_shown_in_their_order(call, sentence):
    """The message names the argument that is in the wrong place, and the order of the call."""
    with pytest.raises(TypeError, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("dynamik", "'dynamik' is not a loss-scaling policy; did you mean 'dynamic'? pass a policy such as"),
        (
            "1024",
            "'1024' is not a loss-scaling policy; pass a policy such as DynamicScaling(), 'dynamic', 'none', a num",
        ),
        (DynamicScaling, "is not a loss-scaling policy; pass a policy such as DynamicScaling()"),
        ("cuda", "'cuda' is not a loss-scaling policy; pass a policy such as"),
        (STATE, "is a state and not a policy; pass its policy in this place"),
        (None, "None is not a loss-scaling policy; pass a policy such as"),
        (True, "True is not a loss-scaling policy; pass a policy such as"),
        ([], "[] is not a loss-scaling policy; pass a policy such as"),
        (0, "0 is not a loss-scaling policy: as a fixed scale, init_scale=0 must be a number from 2**-126 to 2**126"),
    ],
)
def test_what_is_not_a_policy_names_what_was_meant(source, sentence):
    """The nearest word; a state."""
    with pytest.raises(PolicyError, match=re.escape(sentence)):
        as_policy(source)


@pytest.mark.parametrize("read", [as_policy, load_policy])
@pytest.mark.parametrize("make_path", [str, Path])
def test_a_file_that_is_not_a_policy_is_named_with_what_to_do(tmp_path, read, make_path):
    """A folder, a missing file, a binary one and one of another suffix: never the name of a codec or a number alone."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.toml").mkdir()
    for name in ("binary.toml", "model.pt"):
        (tmp_path / name).write_bytes(bytes(range(256)))
    for name, error, sentence in (
        ("folder", PolicyError, "folder' is a folder; pass a .toml or .json file in it"),
        ("folder.toml", PolicyError, "folder.toml is a folder; pass a file in it"),
        ("missing.toml", FileNotFoundError, "No such file or directory; pass the path of a policy file, such as dump_"),
        ("binary.toml", PolicyError, "binary.toml is not valid TOML: 'utf-8' codec can't decode byte 0x80 in position"),
        ("model.pt", PolicyError, "model.pt' must end in .toml or .json; "),
    ):
        path = make_path(tmp_path / name)
        with pytest.raises(error, match=re.escape(sentence)) as caught:
            read(path)
        assert name in str(caught.value)
        if error is FileNotFoundError:  # programs read its number and its name
            assert (caught.value.errno, Path(caught.value.filename)) == (errno.ENOENT, Path(path))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("max_norm", float("nan"), "max_norm=nan must be a number from 0; pass math.inf not to clip"),
        ("max_norm", "1.0", "max_norm='1.0' must be a number from 0; pass math.inf not to clip"),
        ("global_clipnorm", 0, "global_clipnorm=0 must be a positive number; pass math.inf not to clip"),
        ("updates_per_step", True, "updates_per_step=True must be a whole number from 1 to 2**31 - 1; pass 1 for one"),
        ("updates_per_step", 1.5, "updates_per_step=1.5 must be a whole number from 1 to 2**31 - 1; pass 1 for one"),
    ],
)
def test_arguments_of_adapters_have_one_rule(name, value, sentence):
    """Adapters check the numbers that they take in addition to a policy by `check_setting`, as settings are."""
    with pytest.raises(PolicyError, match=re.escape(sentence)):
        check_setting(name, value)
    assert check_setting("max_norm", float("inf")) == float("inf")
    assert check_setting("max_norm", 0) == 0.0
    assert check_setting("updates_per_step", np.int64(3)) == 3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"train_batch_size": 8, "fp16": {"enabled": True}},
            "lossscale.from_tool reads the config of another tool, as in from_tool('deepspeed', config)",
        ),
        (
            {"loss_scale": 0, "initial_scale_power": 16},
            "no 'kind', but loss_scale, initial_scale_power; add kind = 'dynamic' (known: none, fixed, dynamic",
        ),
        ({"kind": "dynamic", "loss_scale_window": 1000}, "lossscale.from_tool"),
        ({"policy": {"kind": "dynamic"}}, "the keys are in the table 'policy'; write them without a table"),
        ({}, "no 'kind', but nothing; add kind = 'dynamic'"),
    ],
)
def test_the_config_of_another_tool_is_sent_to_from_tool(tmp_path, config, sentence):
    """A dict and a file get the same sentence; the file's begins with its path."""
    with pytest.raises(PolicyError, match=re.escape(sentence)):
        policy_from_dict(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=f"^{re.escape(str(path))}: .*{re.escape(sentence)}"):
        load_policy(path)


TORCHS = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


@pytest.mark.parametrize(
    "restore", [state_from_dict, lambda saved: state_from_dict(saved, POLICY), guard_state_from_dict]
)
def test_the_dict_of_another_tool_is_sent_to_state_from_tool(restore):
    """The message has the call that reads it, and that call does."""
    with pytest.raises(CheckpointError) as caught:
        restore(TORCHS)
    message = str(caught.value)
    assert message.startswith("the saved state has no version, but scale, growth_factor, backoff_factor, ")
    assert "if another tool such as torch saved it, lossscale.state_from_tool('torch', saved)" in message
    assert state_from_tool("torch", TORCHS).growth_tracker == 7


def test_a_guard_with_swapped_arguments():
    """The message shows the right call."""
    guard = SpikeGuard()
    with pytest.raises(TypeError, match=r"state=1\.0 is not a state of a guard; call check\(state, norm\)"):
        guard.check(1.0, guard.init_state())

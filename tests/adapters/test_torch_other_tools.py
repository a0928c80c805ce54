"""torch's scaler beside policies of this library, and the files that `torch.save` writes against the command."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lossscale_torch
from lossscale import from_tool
from tests.adapters.torch_steps import INF, one, take_step
from tests.command.commanding import succeed
from tests.core.own_policies import AdditiveScaling
from tests.other_tools import check_scaler
from tests.strategies import overflow_traces

CONFIGS = st.fixed_dictionaries(
    {"growth_interval": st.integers(-1, 6) | st.sampled_from([2000, 2**31 - 1, 10**10])},
    optional={
        "init_scale": st.integers(-20, 40).map(lambda power: 2.0**power),
        "growth_factor": st.sampled_from([2.0, 4.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.8]),
    },
)


@given(config=CONFIGS, grads_finite=overflow_traces(max_steps=60), stop=st.integers(0, 30))
def test_a_policy_has_torchs_scales(config, grads_finite, stop):
    """The policy of a config, the drop-in's too, has the scales of torch's scalers, also in a run that is resumed."""
    scaler = torch.amp.GradScaler("cpu", **config)
    scaler.scale(torch.zeros(()))  # what makes its state live

    def step(finite):
        take_step(scaler, one(lr=0.1)[1], 1.0 if finite else INF)
        return scaler.get_scale()

    def saved():
        entries = scaler.state_dict()
        return [entries, vars(scaler), {key: torch.tensor([value]) for key, value in entries.items()}]

    policies = [from_tool("torch", scaler.state_dict())]
    if config["growth_interval"] >= 0:
        policies.append(lossscale_torch.GradScaler("cpu", **config).policy)
    check_scaler("torch", config, step, saved, policies, grads_finite, stop)


def test_own_policies_have_no_keys_of_torch():
    """A scaler of torch has no such rule, and refuses the state dict."""
    saved = lossscale_torch.GradScaler("cpu", policy=AdditiveScaling()).state_dict()
    with pytest.raises(KeyError, match="scale"):
        torch.amp.GradScaler("cpu").load_state_dict(saved)


def test_the_command_reads_what_torch_saves(tmp_path):
    """The command reads a scaler of torch in a checkpoint, and parts of tensors."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    for grad in (1.0, INF, 1.0, 1.0):
        take_step(scaler, one(lr=0.1)[1], grad)
    torch.save({"model": {"weight": torch.ones(3)}, "scaler": scaler.state_dict()}, tmp_path / "checkpoint.pt")
    parts = {"scale": torch.tensor([3.0, 32768.0], dtype=torch.bfloat16)[1:], "growth_tracker": torch.tensor(2)}
    others = {"weight": torch.nn.Parameter(torch.ones(2).half())}
    torch.save({**others, "optimizer": {"grad_scaler": {**parts, "hysteresis_tracker": 1}}}, tmp_path / "parts.pt")
    for name, *options in (["checkpoint.pt"], ["parts.pt", "--from", "megatron"]):
        state = json.loads(succeed("checkpoint", name, *options, cwd=tmp_path)[0])
        assert (state["loss_scale"], state["growth_tracker"]) == (32768.0, 2)

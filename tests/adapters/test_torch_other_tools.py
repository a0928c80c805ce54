"""torch's scalers against their translations, and the files that `torch.save` writes against the command."""

import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import lossscale_torch
from lossscale import from_tool, state_from_tool
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from tests.adapters.torch_steps import INF, one, take_step
from tests.command.commanding import succeed
from tests.strategies import overflow_traces

CONFIGS = st.fixed_dictionaries(
    {"growth_interval": st.integers(-1, 6)},
    optional={
        "init_scale": st.integers(-20, 40).map(lambda power: 2.0**power),
        "growth_factor": st.sampled_from([2.0, 4.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.8]),
    },
)


GIVEN = [
    {},
    *({"growth_interval": interval} for interval in (0, 1, 7.0, 2000, 2**31 - 1, 10**10)),
    {"init_scale": 3.0, "growth_factor": 1.5, "backoff_factor": 0.8},
]


@pytest.mark.parametrize("arguments", GIVEN, ids=str)
def test_the_drop_in_and_from_tool_read_torchs_arguments_alike(arguments):
    """Both have one policy, also after a checkpoint."""
    policy = from_tool("torch", arguments)
    scaler = lossscale_torch.GradScaler("cpu", **arguments)
    again = lossscale_torch.GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    setting = lossscale_torch.GradScaler("cpu", **{**arguments, "growth_interval": 3})
    setting.set_growth_interval(arguments.get("growth_interval", 2000))
    assert scaler.policy == setting.policy == policy
    assert again.policy.growth_interval == policy.growth_interval


def _step(scaler, finite):
    """Take one step of torch's own scaler, with a gradient that is finite or not; return the scale after it."""
    take_step(scaler, one(lr=0.1)[1], 1.0 if finite else INF)
    return scaler.get_scale()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@given(config=CONFIGS, grads_finite=overflow_traces(max_steps=60), stop=st.integers(0, 30))
def test_grad_scaler(kind, config, grads_finite, stop):
    """The whole run of torch's own scalers, and one resumed from the state dict after `stop` steps."""
    group = {"process_group": dist.group.WORLD} if kind is ShardedGradScaler else {}
    scaler, policy = kind("cpu", **config, **group), from_tool("torch", config)
    scaler.scale(torch.zeros(()))  # what makes its state live
    is_exact = config.get("growth_factor") != 1.5 and config.get("backoff_factor") != 0.8
    states = [policy.init_state()]
    for step, finite in enumerate(grads_finite):
        if step == stop:
            states.append(state_from_tool("torch", scaler.state_dict(), policy))
        scale = _step(scaler, finite)
        if not SMALLEST_SCALE < scale < LARGEST_SCALE:
            return
        states = [policy.update(state, finite) for state in states]
        for state in states:
            assert float(state.loss_scale) == pytest.approx(scale, rel=0.0 if is_exact else 1e-6 * (step + 1))


def _stepped():
    """Return torch's own scaler after an overflow and two finite steps."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    for finite in (True, False, True, True):
        _step(scaler, finite)
    return scaler


def test_the_attributes_of_a_scaler():
    """`vars` of torch's own is read like its state dict, tensors and all; so are tensors of one element."""
    scaler = _stepped()
    saved = state_from_tool("torch", scaler.state_dict())
    assert saved.growth_tracker == 2
    assert state_from_tool("torch", vars(scaler)) == saved
    assert state_from_tool("torch", {key: torch.tensor([each]) for key, each in scaler.state_dict().items()}) == saved


def test_the_command_reads_what_torch_saves(tmp_path):
    """A scaler alone or within a checkpoint, torch's own or ours; a part of a tensor is a number."""
    scaler = _stepped()
    torch.save({"model": {"weight": torch.ones(3)}, "scaler": scaler.state_dict()}, tmp_path / "checkpoint.pt")
    ours = lossscale_torch.GradScaler("cpu", growth_interval=7)
    ours.load_state_dict(scaler.state_dict())
    torch.save(ours.state_dict(), tmp_path / "ours.pt")
    parts = {"scale": torch.tensor([3.0, 32768.0], dtype=torch.bfloat16)[1:], "growth_tracker": torch.tensor(2)}
    others = {"weight": torch.nn.Parameter(torch.ones(2).half())}
    torch.save({**others, "optimizer": {"grad_scaler": {**parts, "hysteresis_tracker": 1}}}, tmp_path / "parts.pt")
    for name, *options in (["checkpoint.pt"], ["ours.pt"], ["parts.pt", "--from", "megatron"]):
        state = json.loads(succeed("checkpoint", name, *options, cwd=tmp_path)[0])
        assert (state["loss_scale"], state["growth_tracker"]) == (32768.0, 2)

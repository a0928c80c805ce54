"""A guarded run continues from a checkpoint to the bit, whichever tool of torch has saved the optimizer."""

import copy
import math
import pickle
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lossscale_core import SpikeGuard
from lossscale_core.errors import OverflowStreakError
from lossscale_torch import StepInfo, guarded
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.adapters.torch_steps import guarded_steps, one, same
from tests.torch_versions import FSDP2

BAD = {2: math.nan, 6: math.inf, 7: math.nan, 8: math.nan, 10: 1e4, 12: math.nan}
"""The gradients that are bad, by step: the run is saved before step 8, and its third bad step in a row raises."""
SAVED_AT, LAST = 8, 14
STREAK = (
    "3 steps in a row had gradients that are NaN or infinite, which reaches max_streak=3; look at the loss, the "
    "learning rate and the data"
)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _groups(params):
    """Return an optimizer with three parameter groups, one of them added later."""
    first, second, *rest = params
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.02}], lr=0.01)
    optimizer.add_param_group({"params": rest, "weight_decay": 0.1})
    return optimizer


MAKES = {
    "SGD without state": _sgd,
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "several groups": _groups,
}


def _guard(optimizer):
    norm_group = dist.group.WORLD if dist.is_initialized() else None  # FSDP1 has no mesh
    return guarded(optimizer, max_norm=1.0, guard=SpikeGuard(warmup=3), max_streak=3, norm_group=norm_group)


def _parts(make, wrap=lambda model: model):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    return model, make([*model.parameters()])


def _train(model, optimizer, first, last):
    """Take steps, with their gradients cleared after each; return their outcomes, and what the error says."""
    outcomes = []
    for number in range(first, last):
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        if number in BAD:
            next(grad for grad in _grads(model) if grad.numel()).view(-1)[0] = BAD[number]
        try:
            optimizer.step()
        except OverflowStreakError as error:
            outcomes.append(str(error))
        optimizer.zero_grad()
        info = optimizer.last_step
        outcomes.append([bool(info), bool(info.spiked), int(info.overflow_streak), repr(info.norm)])
    return outcomes


def _grads(model):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]


def _by_file(folder, model, optimizer, *, saves):
    if saves:
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/all.pt")
        return
    weights, state = torch.load(f"{folder}/all.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def _by_dcp(folder, model, optimizer, *, saves, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    if saves:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        return
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


TOOLS = {"torch.save": _by_file, "dcp": _by_dcp, "flat dcp": partial(_by_dcp, flat=True)}


def _through_file(tool, folder, model, optimizer, make, wrap=lambda model: model, is_guarded_last=False):
    tool(folder, model, optimizer, saves=True)
    resumed = _parts(make, wrap)
    if not is_guarded_last:
        _guard(resumed[1])
    tool(folder, *resumed, saves=False)
    if is_guarded_last:  # as where a trainer loads before its callbacks run
        _guard(resumed[1])
    return resumed


def _through_copy(duplicate, _, model, optimizer, make):
    resumed = duplicate((model, optimizer))
    assert resumed[1].last_step == StepInfo(False, 1.0, 1.0, 0)  # it has taken none
    assert type(resumed[1]) is type(optimizer)
    return resumed


WAYS = {
    **{name: partial(_through_file, tool) for name, tool in TOOLS.items()},
    "guarded after loading": partial(_through_file, _by_file, is_guarded_last=True),
    "copy": partial(_through_copy, copy.deepcopy),
    "pickle": partial(_through_copy, lambda parts: pickle.loads(pickle.dumps(parts))),
}


def _require_exact(make, resume, folder, wrap=lambda model: model):
    """Require that a run that was saved and resumed ends as a run without a break, and that both save the same."""
    (model, optimizer), saved = (_parts(make, wrap) for _ in range(2))
    _guard(optimizer)
    outcomes = _train(model, optimizer, 0, LAST)
    assert [text for text in outcomes if isinstance(text, str)] == [STREAK]
    _guard(saved[1])
    before = _train(*saved, 0, SAVED_AT)
    resumed = resume(folder, *saved, make)
    assert resumed[1].metrics() == saved[1].metrics()
    calls = []
    resumed[1].register_step_post_hook(lambda *_: calls.append(bool(resumed[1].last_step)))
    assert [*before, *_train(*resumed, SAVED_AT, LAST)] == outcomes
    is_fused = resumed[1].param_groups[0].get("fused")  # its kernel skips
    assert calls == [False] * (LAST - SAVED_AT if is_fused else 3)  # the outcome is not known yet
    assert same(local_parameters(model), local_parameters(resumed[0]))
    assert optimizer.state_dict()["param_groups"] == resumed[1].state_dict()["param_groups"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("resume", WAYS.values(), ids=WAYS)
def test_a_resumed_run_equals_a_run_without_a_break(resume, make, tmp_path):
    """Norms, spikes, counts, streaks and parameters are the same, to the bit."""
    _require_exact(make, resume, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_plain_optimizer_loads_the_checkpoint(tool, tmp_path):
    """It continues with the parameters and the moments; the numbers of the guard do not disturb it."""
    saved, plain = _parts(MAKES["AdamW"]), _parts(MAKES["AdamW"])
    _guard(saved[1])
    _train(*saved, 0, 5)
    tool(tmp_path, *saved, saves=True)
    tool(tmp_path, *plain, saves=False)
    for model, optimizer in (saved, plain):
        model(torch.ones(4, 4)).square().mean().mul(0.1).backward()
        optimizer.step()
    assert same(saved[0].parameters(), plain[0].parameters())


def _on_rank(rank, world_size, kind, flat):
    wraps = {
        "fsdp1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
        "fsdp2": lambda model: fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,))),
    }
    folder = [TemporaryDirectory().name if rank == 0 else None]
    dist.broadcast_object_list(folder)
    resume = partial(_through_file, partial(_by_dcp, flat=flat), wrap=wraps[kind])
    _require_exact(MAKES["AdamW"], resume, folder[0], wraps[kind])


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("kind", ["fsdp1", FSDP2])
def test_a_sharded_run_resumes_exactly(kind, flat):
    """Each rank continues with the memory of all."""
    on_ranks(2, partial(_on_rank, kind=kind, flat=flat))


def test_a_fused_run_on_a_device_resumes_at_every_step():
    """The host reads the streak at the same steps as without a break, so that the error comes at the same step."""
    sizes = [1.0, 1.1, 0.9, math.nan, 1e4, 1.0, *[math.nan] * 3, 1.0, math.nan, 1e4]
    with Emulated("mps"):
        whole = _guard(one(fused=True, device="mps", lr=1e-3)[1])
        letters, rows = guarded_steps(whole, sizes)
        for place in range(1, len(sizes)):
            (param, saved), (other, resumed) = (one(fused=True, device="mps", lr=1e-3) for _ in range(2))
            before = guarded_steps(_guard(saved), sizes[:place])
            _guard(resumed).load_state_dict(saved.state_dict())
            other.data.copy_(param.data)
            assert guarded_steps(resumed, sizes[place:]) == (letters[place:], rows[place:])
            assert before == (letters[:place], rows[:place])
            assert resumed.state_dict() == whole.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_checkpoint_of_a_plain_optimizer_starts_the_guard_over(tool, tmp_path):
    """No number of the run before remains; `load_state_dict` warns, and other tools load before `guarded`."""
    plain, (model, optimizer) = _parts(MAKES["AdamW"]), _parts(MAKES["AdamW"])
    plain[0](torch.ones(4, 4)).sum().backward()
    plain[1].step()
    plain[1].zero_grad()
    tool(tmp_path, *plain, saves=True)
    if tool is _by_file:
        _guard(optimizer)
        _train(model, optimizer, 0, 5)
        assert optimizer.metrics()["skipped_steps"] == 1
        with pytest.warns(match="the guard starts over"):
            tool(tmp_path, model, optimizer, saves=False)
    else:
        tool(tmp_path, model, optimizer, saves=False)
        _guard(optimizer)
    assert [n for name, n in optimizer.param_groups[0].items() if name.startswith("guarded_")] == [0] * 9
    assert optimizer.state_dict()["state"][0]["step"] == 1

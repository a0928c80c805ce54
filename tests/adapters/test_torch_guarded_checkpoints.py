"""A guarded run continues from a checkpoint to the bit, whichever tool of torch has saved the optimizer."""

import copy
import math
import pickle
from contextlib import nullcontext
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
from tests.adapters.torch_ranks import local, local_parameters, on_ranks
from tests.adapters.torch_steps import same
from tests.torch_versions import FSDP2

BAD = {2: math.nan, 6: math.inf, 7: math.nan, 8: math.nan, 10: 1e4, 12: math.nan}
"""The gradients that are bad, by step: the run is saved before step 8, and its third bad step in a row raises."""
SAVED_AT, LAST = 8, 14
STREAK = (
    "3 steps in a row had gradients that are NaN or infinite, which reaches max_streak=3; look at the loss, the "
    "learning rate and the data"
)


def _groups(params):
    """Return an optimizer with two parameter groups, one of them added later."""
    optimizer = torch.optim.AdamW(params[:1], lr=0.01)
    optimizer.add_param_group({"params": params[1:], "weight_decay": 0.1})
    return optimizer


MAKES = {
    "SGD without state": partial(torch.optim.SGD, lr=0.1),
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
            grads = [local(param.grad) for param in model.parameters() if param.grad is not None]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = BAD[number]
        try:
            optimizer.step()
        except OverflowStreakError as error:
            outcomes.append(str(error))
        optimizer.zero_grad()
        info = optimizer.last_step
        outcomes.append([bool(info), bool(info.spiked), int(info.overflow_streak), repr(info.norm)])
    return outcomes


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


def _through_file(tool, folder, model, optimizer, make, wrap=lambda model: model):
    tool(folder, model, optimizer, saves=True)
    resumed = _parts(make, wrap)
    _guard(resumed[1])
    tool(folder, *resumed, saves=False)
    return resumed


def _guarded_last(folder, model, optimizer, make):
    """Load before the optimizer is guarded, as where a trainer loads before its callbacks run."""
    _by_file(folder, model, optimizer, saves=True)
    resumed = _parts(make)
    _by_file(folder, *resumed, saves=False)
    _guard(resumed[1])
    return resumed


def _through_copy(duplicate, _, model, optimizer, make):
    resumed = duplicate((model, optimizer))
    assert resumed[1].last_step == StepInfo(False, 1.0, 1.0, 0)  # it has taken none
    assert type(resumed[1]) is type(optimizer)
    return resumed


WAYS = {
    **{name: partial(_through_file, tool) for name, tool in TOOLS.items()},
    "guarded after loading": _guarded_last,
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
    assert [*before, *_train(*resumed, SAVED_AT, LAST)] == outcomes
    assert same(local_parameters(model), local_parameters(resumed[0]))
    assert optimizer.state_dict()["param_groups"] == resumed[1].state_dict()["param_groups"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("resume", WAYS.values(), ids=WAYS)
def test_a_resumed_run_is_exact(resume, make, tmp_path):
    """Norms, spikes, counts, streaks and parameters are the same, to the bit."""
    _require_exact(make, resume, tmp_path)


def _resume_on_rank(rank, world_size, kind):
    wraps = {
        "fsdp1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
        "fsdp2": lambda model: fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,))),
    }
    for flat in (False, True):
        folder = [TemporaryDirectory().name if rank == 0 else None]
        dist.broadcast_object_list(folder)
        resume = partial(_through_file, partial(_by_dcp, flat=flat), wrap=wraps[kind])
        _require_exact(MAKES["AdamW"], resume, folder[0], wraps[kind])


@pytest.mark.parametrize("kind", ["fsdp1", FSDP2])
def test_a_sharded_run_resumes_exactly(kind):
    """Each rank continues with the memory of all."""
    on_ranks(2, partial(_resume_on_rank, kind=kind))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_plain_checkpoint_starts_over(tool, tmp_path):
    """No number of the run before remains; `load_state_dict` warns, and other tools load before `guarded`."""
    plain, (model, optimizer) = _parts(MAKES["AdamW"]), _parts(MAKES["AdamW"])
    plain[0](torch.ones(4, 4)).sum().backward()
    plain[1].step()
    plain[1].zero_grad()
    tool(tmp_path, *plain, saves=True)
    if tool is _by_file:
        _train(model, _guard(optimizer), 0, 5)
    with pytest.warns(match="the guard starts over") if tool is _by_file else nullcontext():
        tool(tmp_path, model, optimizer, saves=False)
    if tool is not _by_file:
        _guard(optimizer)
    assert [n for name, n in optimizer.param_groups[0].items() if "guarded_" in name] == [0] * 9
    assert optimizer.state_dict()["state"][0]["step"] == 1

"""The guard proposes at a step, and remembers at the end of it what was decided."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale_core import SpikeGuard
from lossscale_core.errors import CheckpointError, SyncError
from lossscale_torch import GradScaler, guarded
from lossscale_torch.hooks import Guard, Hook
from tests.adapters.emulated_device import Emulated
from tests.adapters.test_torch_distributed import _on_ranks

INF = float("inf")
RULE = SpikeGuard(warmup=2)
KINDS = pytest.mark.parametrize("kind", ["ordinary", "fused", "fused on a device"])


class _Flag(Hook):
    """Sets a flag, which a test changes."""

    value: object = 0.0

    def before_step(self, scaler, optimizer, record):
        """Set it."""
        record["found_inf_per_device"]["mine"] = self.value


class _Count(Hook):
    """Counts steps."""

    count = 0

    def after_update(self, scaler, info):
        """Count one."""
        self.count += 1

    def state_dict(self):
        """Save the count."""
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        """Restore it."""
        self.count = state_dict["count"]


def _two(kind, **settings):
    device = "mps" if "device" in kind else "cpu"
    params = [torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1e-3, fused=kind != "ordinary") for param in params]
    scaler = GradScaler(device, policy=8.0, guard=RULE, **settings)
    return params, optimizers, scaler


def _take(params, optimizers, scaler, *sizes):
    for param, size in zip(params, sizes, strict=True):
        param.grad = torch.full_like(param, size * 8.0)
    scaler.scale(torch.ones((), device=params[0].device))
    for optimizer in optimizers:
        scaler.step(optimizer)
    return scaler.update()


def _remembered(scaler):
    return [(int(each["norms"]), int(each["spikes"])) for each in scaler.state_dict()["guard"]]


@KINDS
def test_each_optimizer_is_remembered_by_itself(kind):
    """Another one's overflow does not matter; its own is not remembered, nor a norm that a veto has refused."""
    with Emulated("mps"):
        veto = _Flag()
        params, optimizers, scaler = _two(kind, hooks=[veto])
        for sizes in [(1.0, 1.0), (1.0, INF), (1.0, 1.0)]:
            _take(params, optimizers, scaler, *sizes)
        assert _remembered(scaler) == [(3, 0), (2, 0)]
        veto.value = 1.0
        _take(params, optimizers, scaler, 1.0, 1e4)
        assert _remembered(scaler) == [(3, 0), (2, 0)]
        veto.value = 0.0
        _take(params, optimizers, scaler, 1.0, 1e4)
        assert _remembered(scaler) == [(4, 0), (3, 1)]


@KINDS
def test_two_guards_have_a_veto_each(kind):
    """The second does not lift the veto of the first; the one that accepts a refused step does not remember it."""
    with Emulated("mps"):
        strict, lax = Guard(RULE), Guard(SpikeGuard(warmup=9))
        device = "mps" if "device" in kind else "cpu"
        param = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([param], lr=1e-3, fused=kind != "ordinary")
        scaler = GradScaler(device, init_scale=8.0, hooks=[strict, lax])
        infos = [_take([param], [optimizer], scaler, size) for size in (1.0, 1.0, 1e4)]
        assert [(bool(each.applied), bool(each.spiked)) for each in infos] == [(True, False)] * 2 + [(False, True)]
        assert [int(guard.states()[0].norms) for guard in (strict, lax)] == [3, 2]


@pytest.mark.parametrize("value", [1.0, True, 1, torch.tensor([1.0])])
def test_a_veto_may_be_a_number(value):
    """As the flags of torch it is true if it is not zero."""
    veto = _Flag()
    params, optimizers, scaler = _two("ordinary", hooks=[veto])
    veto.value = value
    assert not _take(params, optimizers, scaler, 1.0, 1.0).applied
    veto.value = type(value)(False) if not isinstance(value, torch.Tensor) else torch.zeros(1)
    assert _take(params, optimizers, scaler, 1.0, 1.0).applied


def test_a_veto_that_is_no_number_is_told():
    """The error names the hook, its flag, and what a veto is."""
    veto = _Flag()
    params, optimizers, scaler = _two("ordinary", hooks=[veto])
    veto.value = "yes"
    with pytest.raises(TypeError, match=r"_Flag.before_step set the flag 'mine' to 'yes'; a veto is 1.0"):
        _take(params, optimizers, scaler, 1.0, 1.0)


def test_a_checkpoint_is_loaded_as_a_whole():
    """An entry that the guard refuses leaves policy, scale, counters and other hooks as they were."""
    params, optimizers, _ = _two("ordinary")
    scaler = GradScaler("cpu", init_scale=8.0, guard=RULE, hooks=[_Count()])
    _take(params, optimizers, scaler, 1.0, 1.0)
    before, policy = scaler.state_dict(), scaler.policy
    other = {**GradScaler("cpu", init_scale=2.0, growth_interval=7).state_dict(), "count": 5}
    with pytest.raises(CheckpointError):
        scaler.load_state_dict({**other, "guard": {"mean": "large"}})
    assert (scaler.state_dict(), scaler.policy) == (before, policy)


def test_two_guards_are_saved_by_themselves():
    """Each continues with its own norms, also in a copy and a pickle."""
    strict, lax = Guard(RULE), Guard(SpikeGuard(warmup=9))
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1e-3)
    scaler = GradScaler("cpu", init_scale=8.0, hooks=[strict, lax])
    for size in (1.0, 1.0, 1e4):
        _take([param], [optimizer], scaler, size)
    fresh = GradScaler("cpu", init_scale=8.0, hooks=[Guard(RULE), Guard(SpikeGuard(warmup=9))])
    fresh.load_state_dict(scaler.state_dict())
    for other in (fresh, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == scaler.state_dict()
    assert [scaler.state_dict()[name]["norms"] for name in ("guard", "guard_2")] == [3, 2]


def test_a_new_optimizer_has_no_norms_of_a_dead_one():
    """Although it may get its id."""
    param = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", policy=8.0, guard=RULE)
    for size in (1.0, 1e4, 1e8):
        optimizer = torch.optim.SGD([param], lr=1e-3)
        for _ in range(4):
            assert _take([param], [optimizer], scaler, size).applied
        del optimizer
    saved = {**scaler.state_dict(), "guard": {**scaler.state_dict()["guard"], "mean": 1.5, "norms": 7.0}}
    scaler.load_state_dict(saved)  # into the next optimizer, and not into a dead one
    optimizer = torch.optim.SGD([param], lr=1e-3)
    assert _take([param], [optimizer], scaler, 1.0)
    assert scaler.state_dict()["guard"]["norms"] == 8


def test_a_record_that_is_replaced_after_a_step():
    """By torch's factory, as other packages do: the step is then not remembered."""
    params, optimizers, scaler = _two("ordinary")
    for param in params:
        param.grad = torch.full_like(param, 8.0)
    scaler.scale(torch.ones(()))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizers[0])] = _refresh_per_optimizer_state()
    assert scaler.update().applied
    assert _remembered(scaler) == [(0, 0), (1, 0)]


def test_a_guarded_optimizer_loads_as_a_whole():
    """A refused entry, of the guard or of the optimizer, leaves settings and state as they were."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = guarded(torch.optim.SGD([param], lr=1e-3, momentum=0.9), guard=RULE)
    param.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = guarded(torch.optim.SGD([param], lr=0.5), guard=RULE).state_dict()
    for wrong, error in (({"guard": {"mean": 1.0}}, CheckpointError), ({"param_groups": []}, ValueError)):
        with pytest.raises(error):
            optimizer.load_state_dict({**other, **wrong})
        assert str(optimizer.state_dict()) == str(before)


def _missing_on_rank_1(rank, world_size):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", policy=8.0, process_group=dist.group.WORLD, norm_group=dist.group.WORLD)
    for call in ("unscale_", "clip"):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((2,), 8.0) if rank == 0 else None
        scaler.unscale_(optimizer) if call == "unscale_" else scaler.unscale_and_clip_(optimizer, 1e3)
        scaler.scale(torch.ones(()))  # of another optimizer
        scaler.step(optimizer)
        assert scaler.update().applied


def test_a_rank_without_gradients_has_given_none_up():
    """A second scaled loss in the same step is then no error on one rank alone."""
    _on_ranks(2, _missing_on_rank_1)


def _overflow_on_rank_1(rank, world_size, how):
    param = torch.nn.Parameter(torch.ones(2))
    group = dist.group.WORLD
    if how == "guarded":
        optimizer = guarded(torch.optim.SGD([param], lr=1e-3), guard=RULE, process_group=group)
    else:
        optimizer = torch.optim.SGD([param], lr=1e-3, fused=how == "fused")
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group, guard=RULE)
    # The ranks have different norms, as where an optimizer reduces the gradients itself.
    for size in (1.0, 1.0, 3.0, 1e4, 1.0):
        param.grad = torch.full((2,), size * (rank + 1) if size != 3.0 or rank == 0 else INF)
        if how == "guarded":
            optimizer.step()
            continue
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    state = optimizer.state_dict()["guard"] if how == "guarded" else scaler.state_dict()["guard"]
    theirs = [None] * world_size
    dist.all_gather_object(theirs, state)
    assert theirs[0] == theirs[1]
    assert (state["norms"], state["spikes"]) == (4, 1)
    if how != "guarded":
        scaler.check_sync()
        if rank == 1:
            scaler.load_state_dict({**scaler.state_dict(), "guard": {**state, "spikes": 0}})
        with pytest.raises(SyncError, match=r"ranks \[1\] differ from rank 0's in guard \("):
            scaler.check_sync()


@pytest.mark.parametrize("how", ["ordinary", "fused", "guarded"])
def test_the_guards_of_ranks_stay_the_same(how):
    """Each sees the largest norm, and none remembers a step that another's overflow has refused."""
    _on_ranks(2, partial(_overflow_on_rank_1, how=how))

"""The guard proposes at a step, and remembers at the end of it what was decided."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale_core import GuardState, SpikeGuard
from lossscale_core.errors import CheckpointError, SyncError
from lossscale_torch import GradScaler, guarded
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Veto, one, take_steps, two
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY

RULE = SpikeGuard(warmup=2)
KINDS = pytest.mark.parametrize("kind", ["ordinary", "fused", "fused on a device"])


def _made(kind, **settings):
    """Return two parameters, their optimizers, and a scaler."""
    device = "mps" if "device" in kind else "cpu"
    params, optimizers = two(kind != "ordinary", device=device, lr=1e-3)
    settings = {"guard": RULE, **settings} if "hooks" not in settings else settings
    return params, optimizers, GradScaler(device, init_scale=8.0, **settings)


def _remembered(scaler):
    return [(int(each["norms"]), int(each["spikes"])) for each in scaler.state_dict()["guard"]]


@KINDS
def test_each_optimizer_is_remembered_by_itself(kind):
    """Another one's overflow or spike does not matter; its own is not remembered, nor a norm that a veto has refused.

    A saved state continues in the same scaler and in a new one, by the order of the optimizers.
    """
    with Emulated("mps"):
        veto = Veto()
        params, optimizers, scaler = _made(kind, hooks=[veto], guard=RULE)
        for sizes in [(1.0, 100.0), (1.0, INF), (1.0, 100.0)]:
            take_steps(params, optimizers, scaler, *sizes)
        assert _remembered(scaler) == [(3, 0), (2, 0)]
        saved = scaler.state_dict()
        for loaded in (scaler, scaler, _made(kind, hooks=[veto], guard=RULE)[2]):
            loaded.load_state_dict(saved)
            for veto.value, norms in ((1.0, [(3, 0), (2, 0)]), (0.0, [(4, 0), (3, 1)])):
                info = take_steps(params, optimizers, loaded, 1.0, 1e6)
                assert [bool(info.applied_of(each)) for each in optimizers] == [not veto.value, False]
                assert _remembered(loaded) == norms


@pytest.mark.parametrize("value", [1.0, True, 1, torch.tensor([1.0]), torch.tensor(True), torch.tensor(math.nan)])
def test_a_veto_may_be_a_number(value):
    """A veto refuses the step if it is not zero; a value that is not a number is an error that names the hook."""
    veto = Veto(value=value)
    params, optimizers, scaler = _made("ordinary", hooks=[veto])
    assert not take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    for veto.value in (None, False, torch.zeros_like(torch.as_tensor(value))):
        assert take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    for veto.value in ("yes", torch.ones(2)):
        with pytest.raises(TypeError, match=r"Veto.before_step returned .*; return True, or a tensor of one element"):
            take_steps(params, optimizers, scaler, 1.0, 1.0)


class _Reimplemented(GradScaler):
    """A subclass with torch's own lines in the place of ours."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


@EITHER_KIND
def test_a_subclass_that_steps_by_itself_is_guarded_too(fused):
    """A spike is a flag among the others; the norms that are checked, each once, are those before torch's clip."""
    param, optimizer = one(fused)
    scaler = _Reimplemented("cpu", policy=POLICY, guard=GUARD)
    prepare = [(scaler.unscale_, optimizer), (torch.nn.utils.clip_grad_norm_, [param], 0.1)]
    for step, norm in enumerate(NORMS):
        before = param.item()
        info = take_steps([param], [optimizer], scaler, float(norm), prepare=prepare)
        assert (bool(info.spiked), bool(info.overflowed)) == (EXPECTED.spiked[step], EXPECTED.skipped[step])
        assert bool(info.applied) == (param.item() != before) == (not (info.spiked or info.overflowed))
        assert scaler.get_scale() == EXPECTED.loss_scale_after[step]
    assert scaler.state_dict()["guard"]["norms"] == len(EXPECTED.skipped) - EXPECTED.skipped.sum()
    assert scaler.metrics()["spikes"] == EXPECTED.spiked.sum()
    assert f"refused {EXPECTED.spiked.sum()} spikes" in scaler.diagnose()


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_several_optimizers_clipped_together_have_one_norm(order):
    """Then a spike skips all of them, and is no overflow, also after two passes."""
    params, optimizers, scaler = _made("ordinary")
    prepare = [(scaler.unscale_and_clip_, optimizers, 1.0, order)]
    for size in [1.0] * 8 + [100.0]:
        info = take_steps(params, optimizers, scaler, size, 1.0, prepare=prepare)
    assert (info.spiked, info.overflowed, scaler.get_scale()) == (True, False, 8.0)
    assert [info.applied_of(optimizer) for optimizer in optimizers] == [False, False]


def test_a_replayed_graph_still_checks():
    """The state is written in place, so that each replay compares with the norms of those before."""
    param, optimizer = one(fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    scaler.place_on("cpu")
    param.grad = torch.ones(1)

    def step():
        scaler.unscale_and_clip_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()

    step()  # the guard's state is then on the host
    with RecordedGraph() as graph:
        step()
    scaler.load_state_dict(GradScaler("cpu", init_scale=2.0**10, guard=GUARD).state_dict())
    applied = []
    for size in [1.0] * 8 + [50.0, INF, 1.0]:
        param.grad.fill_(size * scaler.get_scale())
        before = param.item()
        graph.replay()
        applied.append(param.item() != before)
    assert applied == [True] * 8 + [False, False, True]
    assert (scaler.state_dict()["guard"]["spikes"], scaler.get_scale()) == (1, 2.0**9)


def test_a_checkpoint_is_loaded_as_a_whole():
    """An entry that the guard refuses leaves policy, scale, counters and other hooks as they were."""
    params, optimizers, scaler = _made("ordinary", hooks=[Veto()], guard=RULE)
    take_steps(params, optimizers, scaler, 1.0, 1.0)
    before, policy = scaler.state_dict(), scaler.policy
    other = {**GradScaler("cpu", init_scale=2.0, growth_interval=7).state_dict(), "veto": 5}
    with pytest.raises(CheckpointError):
        scaler.load_state_dict({**other, "guard": {"mean": "large"}})
    assert (scaler.state_dict(), scaler.policy) == (before, policy)


def test_a_guarded_optimizer_loads_as_a_whole():
    """A refused entry, of the guard or of the optimizer, leaves settings and state as they were."""
    param, optimizer = one(momentum=0.9)
    guarded(optimizer, guard=RULE)
    param.grad = torch.ones(1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = guarded(torch.optim.SGD([param], lr=0.5), guard=RULE).state_dict()
    (group,) = other["param_groups"]
    for groups, error in (([{**group, "guarded_mean": "large"}], CheckpointError), ([group] * 2, ValueError)):
        with pytest.raises(error):
            optimizer.load_state_dict({**other, "param_groups": groups})
        assert str(optimizer.state_dict()) == str(before)


def test_a_new_optimizer_has_no_norms_of_a_dead_one():
    """Although it may get its id."""
    param = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", policy=8.0, guard=RULE)
    for size in (1.0, 1e4, 1e8):
        optimizer = torch.optim.SGD([param], lr=1e-3)
        for _ in range(4):
            assert take_steps([param], [optimizer], scaler, size).applied
        del optimizer
    saved = {**scaler.state_dict(), "guard": {**scaler.state_dict()["guard"], "mean": 1.5, "norms": 7.0}}
    scaler.load_state_dict(saved)  # into the next optimizer, and not into a dead one
    optimizer = torch.optim.SGD([param], lr=1e-3)
    assert take_steps([param], [optimizer], scaler, 1.0)
    assert scaler.state_dict()["guard"]["norms"] == 8


def test_a_record_that_is_replaced_after_a_step():
    """By torch's factory, as other packages do: the step is then not remembered."""
    params, optimizers, scaler = _made("ordinary")
    scaler.scale(torch.ones(()))
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.full_like(param, 8.0)
        scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizers[0])] = _refresh_per_optimizer_state()
    assert scaler.update().applied
    assert _remembered(scaler) == [(0, 0), (1, 0)]


def _refused_by_one_rank(rank, world_size, how):
    veto, group, (param, optimizer) = Veto(), dist.group.WORLD, one(how == "fused", lr=1e-3)
    if how == "guarded":
        guarded(optimizer, guard=RULE, process_group=group)
    else:
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group, hooks=[veto], guard=RULE)
    for bad in (None, None, "overflow", "spike", "veto", None):
        # The ranks have different norms, as where an optimizer reduces the gradients itself.
        size, before = {"spike": 1e4, "overflow": (1.0, INF)[rank]}.get(bad, 1.0), param.item()
        veto.value = float(bad == "veto" and rank == 1)
        if how == "guarded":
            param.grad = torch.full((1,), size * (rank + 1))
            optimizer.step()
            info, refuses = optimizer.last_step, bad in ("overflow", "spike")
        else:
            info, refuses = take_steps([param], [optimizer], scaler, size * (rank + 1)), bad is not None
        assert (bool(info.applied), param.item() == before) == (not refuses, refuses)
        assert (bool(info.spiked), bool(info.overflowed)) == (bad == "spike", bad == "overflow")
    if how == "guarded":
        group = optimizer.state_dict()["param_groups"][0]
        state = {name: group[f"guarded_{name}"] for name in GuardState._fields}
    else:
        state = scaler.state_dict()["guard"]
    theirs = [None] * world_size
    dist.all_gather_object(theirs, state)
    assert theirs[0] == theirs[1]
    assert (state["norms"], state["spikes"]) == (5 if how == "guarded" else 4, 1)
    if how != "guarded":
        assert scaler.get_scale() == 4.0
        scaler.check_sync()
        if rank == 1:
            scaler.load_state_dict({**scaler.state_dict(), "guard": {**state, "spikes": 0}})
        with pytest.raises(SyncError, match=r"ranks \[1\] differ from rank 0's in guard \("):
            scaler.check_sync()
        veto.value, scaler = float(rank == 1), GradScaler("cpu", norm_group=group, hooks=[veto])
        clip = scaler.unscale_and_clip_, optimizer, INF  # it combines what is known of the step; the veto comes later
        assert not take_steps([param], [optimizer], scaler, 1.0, prepare=[clip]).applied


@pytest.mark.parametrize("how", ["ordinary", "fused", "guarded"])
def test_ranks_refuse_and_remember_together(how):
    """A veto, a spike or an overflow of one rank skips on all, each as what it is: a veto leaves the loss scale.

    Each guard sees the largest norm, and none remembers a step that another's overflow or veto has refused.
    """
    _on_ranks(2, partial(_refused_by_one_rank, how=how))

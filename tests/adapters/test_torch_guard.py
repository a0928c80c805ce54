"""`GradScaler(guard=...)` and `guarded(guard=...)`: spikes, vetoes, checkpoints, CUDA graphs and several ranks."""

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
from tests.adapters.torch_ranks import on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Veto, one, take_steps, two
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY

EARLY_GUARD = SpikeGuard(warmup=2)
KINDS = pytest.mark.parametrize("kind", ["ordinary", "fused", "fused on a device"])


def _setup(kind, **settings):
    """Return two parameters, their optimizers and a scaler, which has a guard unless `settings` have hooks."""
    device = "mps" if "device" in kind else "cpu"
    params, optimizers = two(kind != "ordinary", device=device, lr=1e-3)
    settings = {"guard": EARLY_GUARD, **settings} if "hooks" not in settings else settings
    return params, optimizers, GradScaler(device, init_scale=8.0, **settings)


def _counts(scaler):
    """Return the number of norms and of spikes in the guard's state, for each optimizer."""
    return [(int(state["norms"]), int(state["spikes"])) for state in scaler.state_dict()["guard"]]


@KINDS
def test_each_optimizer_has_its_own_norms(kind):
    """An optimizer's norms do not depend on another optimizer's overflows and spikes, and survive a restart.

    The guard does not learn the norm of an overflow or of a vetoed step. Loaded states go to the optimizers in the
    order of their first steps, in the same scaler and in a new one.
    """
    with Emulated("mps"):
        veto = Veto()
        params, optimizers, scaler = _setup(kind, hooks=[veto], guard=EARLY_GUARD)
        for sizes in [(1.0, 100.0), (1.0, INF), (1.0, 100.0)]:
            take_steps(params, optimizers, scaler, *sizes)
        assert _counts(scaler) == [(3, 0), (2, 0)]
        state = scaler.state_dict()
        for loaded in (scaler, scaler, _setup(kind, hooks=[veto], guard=EARLY_GUARD)[2]):
            loaded.load_state_dict(state)
            for veto.value, counts in ((1.0, [(3, 0), (2, 0)]), (0.0, [(4, 0), (3, 1)])):
                info = take_steps(params, optimizers, loaded, 1.0, 1e6)
                assert [bool(info.applied_of(optimizer)) for optimizer in optimizers] == [not veto.value, False]
                assert _counts(loaded) == counts


@pytest.mark.parametrize("value", [1.0, True, 1, torch.tensor([1.0]), torch.tensor(True), torch.tensor(math.nan)])
def test_a_veto_is_any_nonzero_number(value):
    """A hook vetoes a step by a number other than zero, and a hook of the same name does not take the veto back.

    Another type is an error that names the hook.
    """
    veto = Veto(value=value)
    params, optimizers, scaler = _setup("ordinary", hooks=[veto, Veto(value=torch.zeros(()))])
    assert not take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    for veto.value in (None, False, torch.zeros_like(torch.as_tensor(value))):
        assert take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    for veto.value in ("yes", torch.ones(2)):
        with pytest.raises(TypeError, match=r"Veto.before_step returned .*; return True, or a tensor of one element"):
            take_steps(params, optimizers, scaler, 1.0, 1.0)


class _OwnStepScaler(GradScaler):
    """A subclass that overrides `_maybe_opt_step` by the lines of torch's scaler."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


@EITHER_KIND
def test_a_subclass_with_its_own_step_is_guarded(fused):
    """The guard flags spikes for the subclass, and checks each norm once, before `clip_grad_norm_` changes it."""
    param, optimizer = one(fused)
    scaler = _OwnStepScaler("cpu", policy=POLICY, guard=GUARD)
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
def test_a_spike_skips_all_optimizers_that_are_clipped_together(order):
    """A spike of the common norm skips every optimizer and keeps the loss scale, for norms of order 2 and 3."""
    params, optimizers, scaler = _setup("ordinary")
    prepare = [(scaler.unscale_and_clip_, optimizers, 1.0, order)]
    for size in [1.0] * 8 + [100.0]:
        info = take_steps(params, optimizers, scaler, size, 1.0, prepare=prepare)
    assert (info.spiked, info.overflowed, scaler.get_scale()) == (True, False, 8.0)
    assert [info.applied_of(optimizer) for optimizer in optimizers] == [False, False]


def test_a_replayed_graph_checks_the_norms():
    """Each replay of a captured step compares its norm with the norms of earlier replays."""
    param, optimizer = one(fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    scaler.place_on("cpu")
    param.grad = torch.ones(1)

    def step():
        scaler.unscale_and_clip_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()

    step()  # creates the guard's state, on the host
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


def test_a_checkpoint_with_a_bad_guard_state_changes_nothing():
    """If the guard rejects its entry, the policy, the scale, the counters and the other hooks stay unchanged."""
    params, optimizers, scaler = _setup("ordinary", hooks=[Veto()], guard=EARLY_GUARD)
    take_steps(params, optimizers, scaler, 1.0, 1.0)
    before, policy = scaler.state_dict(), scaler.policy
    other = {**GradScaler("cpu", init_scale=2.0, growth_interval=7).state_dict(), "veto": 5}
    with pytest.raises(CheckpointError):
        scaler.load_state_dict({**other, "guard": {"mean": "large"}})
    assert (scaler.state_dict(), scaler.policy) == (before, policy)


def test_a_bad_state_of_a_guarded_optimizer_changes_nothing():
    """If the guard or the optimizer rejects its entry, the settings and the state of both stay unchanged."""
    param, optimizer = one(momentum=0.9)
    guarded(optimizer, guard=EARLY_GUARD)
    param.grad = torch.ones(1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = guarded(torch.optim.SGD([param], lr=0.5), guard=EARLY_GUARD).state_dict()
    (group,) = other["param_groups"]
    for groups, error in (([{**group, "guarded_mean": "large"}], CheckpointError), ([group] * 2, ValueError)):
        with pytest.raises(error):
            optimizer.load_state_dict({**other, "param_groups": groups})
        assert str(optimizer.state_dict()) == str(before)


def test_a_new_optimizer_starts_without_norms():
    """An optimizer does not inherit the norms of a deleted optimizer, even if Python reuses its `id`."""
    param = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", policy=8.0, guard=EARLY_GUARD)
    for size in (1.0, 1e4, 1e8):
        optimizer = torch.optim.SGD([param], lr=1e-3)
        for _ in range(4):
            assert take_steps([param], [optimizer], scaler, size).applied
        del optimizer
    state = {**scaler.state_dict(), "guard": {**scaler.state_dict()["guard"], "mean": 1.5, "norms": 7.0}}
    scaler.load_state_dict(state)  # the next optimizer gets this state, not the deleted one
    optimizer = torch.optim.SGD([param], lr=1e-3)
    assert take_steps([param], [optimizer], scaler, 1.0)
    assert scaler.state_dict()["guard"]["norms"] == 8


def test_a_step_with_a_replaced_record_is_not_learnt():
    """If a package replaces a record by `_refresh_per_optimizer_state()`, the guard does not learn that step's norm."""
    params, optimizers, scaler = _setup("ordinary")
    scaler.scale(torch.ones(()))
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.full_like(param, 8.0)
        scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizers[0])] = _refresh_per_optimizer_state()
    assert scaler.update().applied
    assert _counts(scaler) == [(0, 0), (1, 0)]


def _check_one_bad_rank(rank, world_size, kind):
    veto, group, (param, optimizer) = Veto(), dist.group.WORLD, one(kind == "fused", lr=1e-3)
    if kind == "guarded":
        guarded(optimizer, guard=EARLY_GUARD, process_group=group)
    else:
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group, hooks=[veto], guard=EARLY_GUARD)
    for bad in (None, None, "overflow", "spike", "veto", None):
        # The norms differ between the ranks, as they do if the optimizer reduces the gradients.
        size, before = {"spike": 1e4, "overflow": (1.0, INF)[rank]}.get(bad, 1.0), param.item()
        veto.value = float(bad == "veto" and rank == 1)
        if kind == "guarded":
            param.grad = torch.full((1,), size * (rank + 1))
            optimizer.step()
            info, is_skipped = optimizer.last_step, bad in ("overflow", "spike")
        else:
            info, is_skipped = take_steps([param], [optimizer], scaler, size * (rank + 1)), bad is not None
        assert (bool(info.applied), param.item() == before) == (not is_skipped, is_skipped)
        assert (bool(info.spiked), bool(info.overflowed)) == (bad == "spike", bad == "overflow")
    if kind == "guarded":
        group = optimizer.state_dict()["param_groups"][0]
        state = {name: group[f"guarded_{name}"] for name in GuardState._fields}
    else:
        state = scaler.state_dict()["guard"]
    states = [None] * world_size
    dist.all_gather_object(states, state)
    assert states[0] == states[1]
    assert (state["norms"], state["spikes"]) == (5 if kind == "guarded" else 4, 1)
    if kind != "guarded":
        assert scaler.get_scale() == 4.0
        scaler.check_sync()
        if rank == 1:
            scaler.load_state_dict({**scaler.state_dict(), "guard": {**state, "spikes": 0}})
        with pytest.raises(SyncError, match=r"ranks \[1\] differ from rank 0's in guard \("):
            scaler.check_sync()
        veto.value, scaler = float(rank == 1), GradScaler("cpu", norm_group=group, hooks=[veto])
        clip = scaler.unscale_and_clip_, optimizer, INF  # combines the flags of the ranks before the hook sets its veto
        assert not take_steps([param], [optimizer], scaler, 1.0, prepare=[clip]).applied


@pytest.mark.parametrize("kind", ["ordinary", "fused", "guarded"])
def test_one_bad_rank_skips_the_step_on_all_ranks(kind):
    """A veto, a spike or an overflow on one rank skips the step on all ranks; only an overflow lowers the loss scale.

    The guards of all ranks learn the largest norm. They do not learn a step that overflowed or was vetoed on any rank.
    """
    on_ranks(2, partial(_check_one_bad_rank, kind=kind))

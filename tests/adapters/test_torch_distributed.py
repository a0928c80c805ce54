"""An overflow on one rank skips on every rank, in real gloo processes on loopback: random runs, sums, hooks of DDP."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import SpikeGuard
from lossscale_core.errors import SyncError
from lossscale_torch import GradScaler
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.adapters.torch_steps import CALLS, Legacy, Veto, one, same
from tests.torch_versions import FSDP2

STEPS = 200


def _applied(module, optimizer, scaler):
    """Step and update; return whether the step was applied, having checked that the parameters agree with it."""
    before = [param.detach().clone() for param in local_parameters(module)]
    scaler.step(optimizer)
    applied = bool(scaler.update().applied)
    assert same(before, local_parameters(module)) != applied
    optimizer.zero_grad()
    return applied


def _train(rank, world_size, kind, fused, call):
    """Train with overflows on random single ranks, and check at each step what every rank did."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    group = dist.group.WORLD if kind == "group" else None
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3, process_group=group)
    if kind == "ddp":
        module = DistributedDataParallel(module)
    elif kind == "fsdp2":
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    chance = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        victim = int(torch.randint(0, 3 * world_size, (), generator=chance))
        images = torch.ones(2, 4) if kind == "group" else torch.full((2, 4), 1.0 + rank)
        if kind != "group" and victim == rank:
            images[0, 0] = float("inf")
        scaler.scale(module(images).square().mean()).backward()
        if kind == "group" and victim == rank:
            next(module.parameters()).grad[0, 0] = float("nan")
        if call:
            getattr(scaler, call)(optimizer, *([1.0] if "clip" in call else []))
        assert _applied(module, optimizer, scaler) == (victim >= world_size)
    scaler.check_sync()
    assert int(scaler.metrics()["skipped_steps"]) > 20
    if kind != "fsdp2":
        for param in module.parameters():
            everyone = [torch.empty_like(param) for _ in range(world_size)]
            dist.all_gather(everyone, param.detach())
            assert all(torch.equal(param, other) for other in everyone)
    assert all(torch.isfinite(param).all() for param in local_parameters(module))


@pytest.mark.parametrize("kind", ["ddp", FSDP2, "group"])
@pytest.mark.parametrize(
    ("world_size", "fused", "call"),
    [(2, False, None), (2, False, "unscale_"), (4, True, None), (2, True, "unscale_"), (2, False, "unscale_and_clip_")],
)
def test_ranks_decide_alike(kind, world_size, fused, call):
    """Scales, trackers and parameters stay bit-identical, and a skipped step changes nothing on any rank."""
    on_ranks(world_size, partial(_train, kind=kind, fused=fused, call=call))


def _train_with_a_rank_without_gradients(rank, world_size):
    for fused, call in product((False, True), ("step", "unscale_", "unscale_and_clip_")):
        param = torch.nn.Parameter(torch.ones(3))
        group = dist.group.WORLD
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group, norm_group=group if "clip" in call else None)
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        for bad in (False, True):
            scaler.scale(torch.ones(()))
            param.grad = None if rank == 1 else torch.full((3,), float("inf") if bad else 8.0)
            if call != "step":
                getattr(scaler, call)(optimizer, *([1e3] if "clip" in call else []))
            scaler.scale(torch.ones(()))  # of another optimizer: no rank takes its own gradients for given up
            scaler.step(optimizer)
            assert bool(scaler.update().applied) != bad
        scaler.check_sync()
        assert param.tolist() == ([1.0] * 3 if rank == 1 else [0.0] * 3)


def test_a_rank_without_gradients_takes_part():
    """It neither hangs the others nor falls behind them."""
    on_ranks(2, _train_with_a_rank_without_gradients)


# --- a step that one rank leaves out


def _gather(value, world_size):
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def _leave_out(rank, world_size):
    """Skip steps on one rank, on the other and on both, after each call; the ranks stay alike."""
    world, mesh = dist.group.WORLD, init_device_mesh("cpu", (world_size,))
    kinds = {
        "group": {"process_group": world}, "norm": {"norm_group": world}, "mesh": {},
        "guard": {"process_group": world, "guard": SpikeGuard()},
        "norm, guard": {"norm_group": world, "guard": SpikeGuard()},
        "hook of rank 0": {"process_group": world, "hooks": [Veto(value=torch.zeros(()))] if rank == 0 else []},
    }  # fmt: skip
    for (kind, settings), make, call in product(
        kinds.items(), (torch.optim.SGD, partial(torch.optim.AdamW, fused=True), Legacy), CALLS
    ):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        if kind == "mesh":
            params = [torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])) for param in params]
        optimizers, outcomes = [make([param], lr=0.125) for param in params], []
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, **settings)
        if kind in ("norm", "norm, guard", "mesh") and "clip" in call:
            continue
        for step in range(7):
            for param in params:
                param.grad = torch.full_like(param, scaler.get_scale())
            if step or rank == 0:  # rank 1 leaves the first step out before it scales a loss
                scaler.scale(torch.ones(()))
            if step in (3, 5) and rank == 0:
                (params[0].grad.to_local() if kind == "mesh" else params[0].grad)[0] = float("inf")
            for number, optimizer in enumerate(optimizers):
                if step or call == "step":
                    CALLS[call](scaler, optimizer)
                skips = (step, rank) in ((0, 1), (2, 0), (4, 0), (4, 1), (5, 1)) and (number == 0 or step < 3)
                (scaler.skip if skips else scaler.step)(optimizer)
            info = scaler.update()
            outcomes.append(([bool(info.applied_of(each)) for each in optimizers], float(info.loss_scale_after)))
        values = [local_parameters(torch.nn.ParameterList(params)), outcomes, scaler.metrics()]
        first, second = _gather([[each.tolist() for each in values[0]], *values[1:]], world_size)
        assert first == second, (kind, make, call, first, second)
        both, none, one_of_two = [True, True], [False, False], [False, True]
        assert [outcome for outcome, _ in outcomes] == [none, both, none, one_of_two, one_of_two, one_of_two, both]
        assert int(scaler.metrics()["skipped_steps"]) == 2


def test_a_step_that_one_rank_leaves_out():
    """All ranks skip it, whatever was called before, and later steps are those of all."""
    on_ranks(2, _leave_out)


def _leave_out_after_a_clip(rank, world_size):
    """Skip a step on all ranks, then on one, after a clip by the norm of all; then clip again, or not."""
    for fused, order, clips in product((False, True), (2.0, float("inf")), (False, True)):
        param, optimizer = one(fused)
        scaler = GradScaler("cpu", norm_group=dist.group.WORLD)
        for step in range(4):
            scaler.scale(torch.ones(()))
            param.grad = torch.full_like(param, scaler.get_scale())
            if step < 3 or clips:
                scaler.unscale_and_clip_(optimizer, 1.0, order)
            before = param.item()
            (scaler.skip if step == 0 or (step, rank) == (2, 1) else scaler.step)(optimizer)
            with pytest.raises(SyncError, match=r"has called skip\(\) after a clip") if step == 3 else nullcontext():
                scaler.update()
        assert param.item() == before  # the last step was not taken


def test_a_step_that_one_rank_leaves_out_after_a_clip():
    """The clip has decided for all, so that the next update is an error on all ranks."""
    on_ranks(2, _leave_out_after_a_clip)


def _miscount(rank, world_size):
    """Forget the second optimizer on one rank; be disabled on one rank."""
    (first, second), scaler = (one()[1] for _ in range(2)), GradScaler("cpu", process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    scaler.step(first)
    if rank == 0:
        scaler.step(second)
    else:
        scaler.update()
        scaler.scale(torch.ones(()))
        scaler.step(first)
    with pytest.raises(SyncError, match=r"step\(\) or skip\(\) at different updates"):
        scaler.update()
    with pytest.raises(SyncError, match=r"ranks \[1\] differ from rank 0's in .*rank 0: 2\*\*16, rank 1: disabled"):
        GradScaler("cpu", enabled=rank == 0).check_sync()


def test_ranks_that_have_lost_step():
    """The next update says that other steps were combined."""
    on_ranks(2, _miscount)


# --- communication hooks of DistributedDataParallel


def _applied_steps(rank, hook, state, process_group=None, steps=6):
    """Train with an overflow in step 3 on rank 1, and return which steps were applied."""
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(32, 32, bias=False))
    module.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8, process_group=process_group)
    applied = []
    for step in range(steps):
        images = torch.full((2, 32), 1.0 + rank)
        if step == 3 and rank == 1:
            images[0, 0] = float("inf")
        scaler.scale(module(images).square().mean()).backward()
        applied.append(_applied(module, optimizer, scaler))
    return applied


def _train_with_hooks(rank, world_size):
    once = [True, True, True, False, True, True]
    assert _applied_steps(rank, fp16_compress_hook, None) == once
    compress = partial(PowerSGDState, None, start_powerSGD_iter=2, min_compression_rate=0.5)
    forgetful = compress(use_error_feedback=False, warm_start=False)
    assert _applied_steps(rank, powerSGD_hook, forgetful) == once
    assert _applied_steps(rank, powerSGD_hook, compress()) == [True, True, True, False, False, False]
    each_alone, _ = dist.new_subgroups(group_size=1)
    local = partial(PostLocalSGDState, None, each_alone, start_localSGD_iter=1)
    assert _applied_steps(rank, post_localSGD_hook, local()) == (once if rank == 1 else [True] * 6)
    assert _applied_steps(rank, post_localSGD_hook, local(), process_group=dist.group.WORLD) == once


def test_which_communication_hooks_need_a_group():
    """Compressed gradients are alike on all ranks; post-local SGD's are not, and PowerSGD remembers an overflow."""
    on_ranks(2, _train_with_hooks)


# --- a rank outside of the group


def _protect_on_a_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for fused in (False, True):
        model = distribute_module(torch.nn.BatchNorm1d(4, affine=False), mesh)
        model.register_buffer("plain", torch.zeros(1))
        param = torch.nn.Parameter(torch.ones(8, 4))
        optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
        scaler = GradScaler("cpu", protect=model, process_group=dist.group.WORLD)
        for value, count in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
            out = model(distribute_tensor(param.detach().clone(), mesh, [Replicate()]))
            param.grad = torch.full_like(param, value if rank else 1.0)
            scaler.scale(out.to_local().sum())
            scaler.step(optimizer)
            assert bool(scaler.update().applied) == (value == 1.0)
            assert model.num_batches_tracked.full_tensor().item() == count


def test_buffers_on_a_mesh_are_protected():
    """`distribute_module` puts the statistics of a module on its mesh."""
    on_ranks(2, _protect_on_a_mesh)


def _stand_outside(rank, world_size):
    param, optimizer = one()
    scaler = GradScaler("cpu", process_group=dist.new_group([0]))
    scaler.scale(param.sum()).backward()
    for call in (partial(scaler.step, optimizer), scaler.check_sync):
        if rank == 0:
            call()
        else:
            with pytest.raises(SyncError, match=rf"rank {rank} is not in the process_group of its scaler"):
                call()
    for guarded in ({0, 1}, {1, 2}):
        with pytest.raises(SyncError, match=r"ranks \[1, 2\] differ from rank 0's in .*guard \(.*rank 2: 4"):
            GradScaler("cpu", init_scale=2.0**rank, guard=SpikeGuard() if rank in guarded else None).check_sync()


def test_check_sync_names_the_ranks_that_differ():
    """Every rank raises, and says which ones; one outside of the group would step alone, and compare nothing."""
    on_ranks(3, _stand_outside)

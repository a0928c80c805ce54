"""Ranks that lack gradients, leave a step out, differ, or reduce by a hook of DDP, in real gloo processes."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import SpikeGuard
from lossscale_core.errors import SyncError
from lossscale_torch import GradScaler
from tests.adapters.torch_ranks import local, local_parameters, on_ranks
from tests.adapters.torch_steps import CALLS, INF, Veto, one, same

CASES = [*product((False, True), CALLS)]
"""Whether the optimizer is fused, and what the loop calls before `step`."""


def _gather(value, world_size):
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def _train_with_a_rank_without_gradients(rank, world_size):
    for fused, call in CASES:
        param, group = torch.nn.Parameter(torch.ones(3)), dist.group.WORLD
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group, norm_group=group if "clip" in call else None)
        optimizer = torch.optim.SGD([param], lr=0.125, fused=fused)
        for bad in (False, True):
            scaler.scale(torch.ones(()))
            param.grad = None if rank == 1 else torch.full((3,), INF if bad else 2.0)
            CALLS[call](scaler, optimizer)
            scaler.scale(torch.ones(()))  # of another optimizer: no rank takes its own gradients for given up
            scaler.step(optimizer)
            assert bool(scaler.update().applied) != bad
        scaler.check_sync()
        assert param.tolist() == [1.0 if rank == 1 else 1.0 - 0.25 / 8.0] * 3


def test_a_rank_without_gradients_takes_part():
    """It neither hangs the others nor falls behind them."""
    on_ranks(2, _train_with_a_rank_without_gradients)


# --- a step that one rank leaves out


def _leave_out(rank, world_size):
    """Skip steps on one rank, on the other and on both, after each call; the ranks stay alike."""
    world, mesh = dist.group.WORLD, init_device_mesh("cpu", (world_size,))
    kinds = {
        "group": {"process_group": world},
        "norm, guard": {"norm_group": world, "guard": SpikeGuard()},
        "mesh": {},
        "hook of rank 0": {"process_group": world, "hooks": [Veto(value=torch.zeros(()))] if rank == 0 else []},
    }
    for (kind, settings), (fused, call) in product(kinds.items(), CASES):
        if kind in ("norm, guard", "mesh") and "clip" in call:  # see the next test
            continue
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        if kind == "mesh":
            params = [torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])) for param in params]
        optimizers, outcomes = [torch.optim.AdamW([param], fused=fused) for param in params], []
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, **settings)
        for step in range(7):
            for param in params:
                param.grad = torch.full_like(param, scaler.get_scale())
            if step or rank == 0:  # rank 1 leaves the first step out before it scales a loss
                scaler.scale(torch.ones(()))
            if step in (3, 5) and rank == 0:
                local(params[0].grad)[0] = INF
            for number, optimizer in enumerate(optimizers):
                if step or call == "step":
                    CALLS[call](scaler, optimizer)
                skips = (step, rank) in ((0, 1), (2, 0), (4, 0), (4, 1), (5, 1)) and (number == 0 or step < 3)
                (scaler.skip if skips else scaler.step)(optimizer)
            info = scaler.update()
            outcomes.append([bool(info.applied_of(each)) for each in optimizers])
        values = [[local(param).tolist() for param in params], scaler.metrics()]
        first, second = _gather(values, world_size)
        assert first == second, (kind, fused, call)
        both, none, one_of_two = [True, True], [False, False], [False, True]
        assert outcomes == [none, both, none, one_of_two, one_of_two, one_of_two, both]
        assert int(scaler.metrics()["skipped_steps"]) == 2


def test_one_rank_leaves_a_step_out():
    """All ranks skip it, whatever was called before, and later steps are those of all."""
    on_ranks(2, _leave_out)


def _leave_out_after_a_clip(rank, world_size):
    """Skip a step on all ranks, then on one, after a clip by the norm of all; then clip again, or not."""
    for fused, order, clips in product((False, True), (2.0, INF), (False, True)):
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


def test_one_rank_skips_after_a_clip():
    """The clip has decided for all, so that the next update is an error on all ranks."""
    on_ranks(2, _leave_out_after_a_clip)


# --- communication hooks of DistributedDataParallel


def _applied_steps(rank, hook, state, process_group=None):
    """Train with an overflow in step 3 on rank 1, and return which of six steps were applied."""
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(32, 32, bias=False))
    module.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8, process_group=process_group)
    applied = []
    for step in range(6):
        images = torch.full((2, 32), INF if (step, rank) == (3, 1) else 1.0 + rank)
        scaler.scale(module(images).square().mean()).backward()
        before = [param.clone() for param in local_parameters(module)]
        scaler.step(optimizer)
        applied.append(bool(scaler.update().applied))
        assert same(before, local_parameters(module)) != applied[-1]
        optimizer.zero_grad()
    return applied


def _train_with_hooks(rank, world_size):
    once = [True, True, True, False, True, True]
    compress = partial(PowerSGDState, None, start_powerSGD_iter=2, min_compression_rate=0.5)
    forgetful = compress(use_error_feedback=False, warm_start=False)
    assert _applied_steps(rank, powerSGD_hook, forgetful) == once
    assert _applied_steps(rank, powerSGD_hook, compress()) == [True, True, True, False, False, False]
    each_alone, _ = dist.new_subgroups(group_size=1)
    local_sgd = partial(PostLocalSGDState, None, each_alone, start_localSGD_iter=1)
    assert _applied_steps(rank, post_localSGD_hook, local_sgd()) == (once if rank == 1 else [True] * 6)
    assert _applied_steps(rank, post_localSGD_hook, local_sgd(), process_group=dist.group.WORLD) == once


def test_which_communication_hooks_need_a_group():
    """Compressed gradients are alike on all ranks; post-local SGD's are not, and PowerSGD remembers an overflow."""
    on_ranks(2, _train_with_hooks)


# --- ranks that differ


def _differ(rank, world_size):
    """Forget the second optimizer on one rank, stand outside of the group, and start with other scalers."""
    (first, second), scaler = (one()[1] for _ in range(2)), GradScaler("cpu", process_group=dist.group.WORLD)
    for optimizer in (first, second) if rank == 0 else (first, None, first):
        if optimizer is None:
            scaler.update()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
    with pytest.raises(SyncError, match=r"step\(\) or skip\(\) at different updates"):
        scaler.update()
    scaler = GradScaler("cpu", process_group=dist.new_group([0]))
    scaler.scale(torch.ones(()))
    outside = pytest.raises(SyncError, match=rf"rank {rank} is not in the process_group of its scaler")
    for call in (partial(scaler.step, first), scaler.check_sync):
        with outside if rank else nullcontext():
            call()
    for guarded in ({0, 1}, {1, 2}):
        with pytest.raises(SyncError, match=r"ranks \[1, 2\] differ from rank 0's in .*guard \(.*rank 2: 4"):
            GradScaler("cpu", init_scale=2.0**rank, guard=SpikeGuard() if rank in guarded else None).check_sync()
    with pytest.raises(SyncError, match=r"ranks \[2\] differ from rank 0's in .*rank 0: 2\*\*16, rank 2: disabled"):
        GradScaler("cpu", enabled=rank < 2).check_sync()


def test_ranks_that_differ_are_named():
    """Every rank raises, and says which ones; one outside of the group would step alone, and compare nothing."""
    on_ranks(3, _differ)

"""Partial sums, communication hooks, a rank outside of the group: on gloo ranks."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from lossscale_core.errors import SyncError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks

INF = float("inf")


def _step(module, optimizer, scaler):
    """Step and update; return whether the step was applied, having checked that the parameters agree with it."""
    before = [param.detach().clone() for param in _local(module)]
    scaler.step(optimizer)
    applied = bool(scaler.update().applied)
    is_same = all(torch.equal(a, b) for a, b in zip(before, _local(module), strict=True))
    assert is_same != applied
    optimizer.zero_grad()
    return applied


# --- gradients that are summed


def _sum_partial(rank, world_size):
    """Give a replicated parameter gradients that are summands over the ranks, each finite by itself."""
    mesh = init_device_mesh("cpu", (world_size,))
    calls = ("", "unscale_", "unscale_and_clip_")
    for fused, call, (summand, is_finite) in product((False, True), calls, ((8.0 * (1 + rank), True), (3e38, False))):
        param = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        optimizer = torch.optim.AdamW([param], betas=(0.0, 0.0), fused=fused)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        param.grad = DTensor.from_local(torch.full((4,), summand), mesh, [Partial()])
        if call:
            norm = getattr(scaler, call)(optimizer, *([100.0] if "clip" in call else []))
            assert norm is None or not norm.isfinite() or norm.item() == pytest.approx(6.0)
        scaler.step(optimizer)
        assert bool(scaler.update().applied) == is_finite
        assert torch.equal(param.to_local(), torch.ones(4)) != is_finite
        if is_finite:
            assert optimizer.state[param]["exp_avg"].to_local().tolist() == [3.0] * 4
        scaler.check_sync()


def test_a_sum_over_ranks_that_overflows_skips_everywhere():
    """Partial gradients are summed before they are checked; a finite sum is applied as it is."""
    _on_ranks(2, _sum_partial)


# --- communication hooks of DistributedDataParallel


def _applied(rank, hook, state, process_group=None, steps=6):
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
            images[0, 0] = INF
        scaler.scale(module(images).square().mean()).backward()
        applied.append(_step(module, optimizer, scaler))
    return applied


def _train_with_hooks(rank, world_size):
    once = [True, True, True, False, True, True]
    assert _applied(rank, fp16_compress_hook, None) == once
    compress = partial(PowerSGDState, None, start_powerSGD_iter=2, min_compression_rate=0.5)
    forgetful = compress(use_error_feedback=False, warm_start=False)
    assert _applied(rank, powerSGD_hook, forgetful) == once
    assert _applied(rank, powerSGD_hook, compress()) == [True, True, True, False, False, False]
    each_alone, _ = dist.new_subgroups(group_size=1)
    local = partial(PostLocalSGDState, None, each_alone, start_localSGD_iter=1)
    assert _applied(rank, post_localSGD_hook, local()) == (once if rank == 1 else [True] * 6)
    assert _applied(rank, post_localSGD_hook, local(), process_group=dist.group.WORLD) == once


def test_which_communication_hooks_need_a_group():
    """Compressed gradients are alike on all ranks; post-local SGD's are not, and PowerSGD remembers an overflow."""
    _on_ranks(2, _train_with_hooks)


# --- a rank outside of the group


def _stand_outside(rank, world_size):
    scaler = GradScaler("cpu", process_group=dist.new_group([0]))
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    for call in (partial(scaler.step, optimizer), scaler.check_sync):
        if rank == 0:
            call()
        else:
            with pytest.raises(SyncError, match="rank 1 is not in the process_group of its scaler"):
                call()


def test_a_rank_outside_of_the_group():
    """It would step alone, and a comparison would compare nothing."""
    _on_ranks(2, _stand_outside)

"""Sharding that changes, partial sums, uneven inputs, communication hooks, distributed checkpoints: on gloo ranks."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from lossscale_core.errors import SyncError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import needs_fsdp2_on_cpu

INF = float("inf")
_alone = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def _layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))


def _backward(module, scaler):
    scaler.scale(module(torch.ones(2, 4)).square().mean()).backward()


def _spoil_here(module):
    """Write an infinity to a gradient that this rank holds; the other ranks do not see it."""
    _local_grad(module)[0, 0] = INF


def _local_grad(module):
    grad = next(module.parameters()).grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _step(module, optimizer, scaler):
    """Step and update; return whether the step was applied, having checked that the parameters agree with it."""
    before = [param.detach().clone() for param in _local(module)]
    scaler.step(optimizer)
    applied = bool(scaler.update().applied)
    is_same = all(torch.equal(a, b) for a, b in zip(before, _local(module), strict=True))
    assert is_same != applied
    optimizer.zero_grad()
    return applied


# --- checkpoints of torch.distributed.checkpoint


def _advanced(steps=7):
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(steps):
        scaler.scale(param.sum()).backward()
        if step == 4:
            param.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


@_alone
def test_a_distributed_checkpoint_restores_every_field(tmp_path):
    """Saved by this scaler, it loads into this scaler bit for bit, and into torch's own."""
    saved = _advanced()
    dcp.save({"scaler": saved}, checkpoint_id=tmp_path)
    restored, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    dcp.load({"scaler": restored}, checkpoint_id=tmp_path)
    dcp.load({"scaler": torchs}, checkpoint_id=tmp_path)
    assert restored.state_dict() == saved.state_dict()
    assert torchs.state_dict() == {name: saved.state_dict()[name] for name in torchs.state_dict()}
    assert saved.state_dict()["skipped_steps"] == 1


# --- parameters that are sharded, and gradients that are summed, after the optimizer was made


def _shard_later(rank, world_size):
    """Shard a module after its optimizer has stepped, and give the optimizer's groups the new parameters."""
    mesh = init_device_mesh("cpu", (world_size,))
    for fused in (False, True):
        module = _layers()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        plain = list(module.parameters())
        _backward(module, scaler)
        assert _step(module, optimizer, scaler)
        fully_shard(module, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(module.parameters())
        for bad in (False, True, False):
            _backward(module, scaler)
            if bad and rank == 1:
                _spoil_here(module)
            assert _step(module, optimizer, scaler) != bad
        scaler.check_sync()
        optimizer.param_groups[0]["params"] = plain
        scaler.scale(torch.ones(()))
        for param in plain:
            param.grad = torch.full_like(param, INF if rank == 1 else 1.0)
        scaler.step(optimizer)
        assert bool(scaler.update().applied) == (rank == 0)  # no rank communicates any more


@needs_fsdp2_on_cpu
def test_ranks_decide_together_from_the_step_on_in_which_parameters_are_sharded():
    """`fully_shard` after the optimizer was made, and groups that get other parameters, are followed at once."""
    _on_ranks(2, _shard_later)


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


# -- the flags of several ranks ----------------------------------------------------------------------------------------


def _two_optimizers(fused=False):
    params = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)]
    return params, [torch.optim.SGD([param], lr=1.0, fused=fused) for param in params]


def _step_in_order(scaler, params, optimizers, order):
    for param in params:
        param.grad = None
    scaler.scale(sum(param.sum() for param in params)).backward()
    for i in order:
        scaler.step(optimizers[i])
    scaler.update()


def _step_stages(rank, world_size):
    params = [torch.nn.Parameter(torch.ones(size + rank)) for size in (2, 3)]
    optimizers = [torch.optim.SGD([params[0]], lr=1.0), torch.optim.AdamW([params[1]], lr=1.0)]
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    for _ in range(3):
        _step_in_order(scaler, params, optimizers, (0, 1))
    assert scaler.metrics()["steps"] == 3


def test_ranks_may_hold_other_parameters():
    """As stages of a pipeline do, which decide together on optimizers of different shapes."""
    _on_ranks(2, _step_stages)


def _stand_outside(rank, world_size):
    group = dist.new_group([0])
    scaler = GradScaler("cpu", init_scale=2.0 ** (3 + rank), process_group=group)
    params, optimizers = _two_optimizers()
    if rank == 0:
        _step_in_order(scaler, params, optimizers, (0, 1))
        scaler.check_sync()
        return
    with pytest.raises(SyncError, match="rank 1 is not in the process_group of its scaler"):
        _step_in_order(scaler, params, optimizers, (0, 1))
    with pytest.raises(SyncError, match="rank 1 is not in the process_group of its scaler"):
        scaler.check_sync()


def test_a_rank_outside_of_the_group():
    """It would step alone, and a comparison would compare nothing."""
    _on_ranks(2, _stand_outside)

"""`minimize` and `protect=` on two gloo ranks: an overflow on one rank is retried, and put back, on both."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_core.errors import CallOrderError, SyncError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import HAS_FSDP2_ON_CPU


def _model(world_size, kind):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8) if kind == "ddp" else torch.nn.LayerNorm(8)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), norm, torch.nn.Linear(8, 4))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    return model


def _inputs(rank, step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _retry_together(rank, world_size, kind, fused):
    """Train with losses that overflow on one rank above a scale; compare with a run that begins at that scale."""
    ours, plain = _model(world_size, kind), _model(world_size, kind)
    first, second = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=fused) for each in (ours, plain))
    group = dist.group.WORLD if kind == "group" else None
    scaler = GradScaler("cpu", init_scale=2.0**10, process_group=group)
    for step in range(8):
        victim, calls = step % 3, []

        def loss(model=ours, step=step, calls=calls, victim=victim):
            calls.append(scaler.get_scale())
            spoils = rank == victim and len(calls) < 3
            return model(_inputs(rank, step)).square().mean() * (math.inf if spoils else 1.0)

        info = scaler.minimize(first, loss, retries=1 if step == 3 else 4, max_norm=1.0)
        assert bool(info.applied) == (step != 3)
        assert len(calls) == (1 if victim == 2 else 2 if step == 3 else 3)
        if info.applied:
            at_once = GradScaler("cpu", init_scale=float(info.loss_scale_used), process_group=group)
            at_once.load_state_dict(at_once.state_dict())
            second.zero_grad()
            at_once.scale(plain(_inputs(rank, step)).square().mean()).backward()
            at_once.unscale_and_clip_(second, 1.0)
            at_once.step(second)
            assert at_once.update().applied
        for a, b in zip((*_local(ours), *ours.buffers()), (*_local(plain), *plain.buffers()), strict=True):
            assert torch.equal(a, b), step
    scaler.check_sync()
    assert scaler.get_scale() == 2.0**-2


def _retry_with_every_kind(rank, world_size):
    kinds = ("ddp", "fsdp2", "group") if HAS_FSDP2_ON_CPU else ("ddp", "group")
    for kind, fused in itertools.product(kinds, (False, True)):
        _retry_together(rank, world_size, kind, fused)


def test_every_rank_retries_together():
    """Weights and buffers equal those of a run at the scale that fitted, on both ranks, bit for bit."""
    _on_ranks(2, _retry_with_every_kind)


def _micro_batches(rank, world_size):
    """Accumulate under `no_sync`, where a micro-batch overflows on rank 1 alone."""
    weights = []
    for is_view in (False, True):
        module = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        model = DistributedDataParallel(module, gradient_as_bucket_view=is_view)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        calls = []

        def loss(number, model=model, calls=calls):
            calls.append(number)
            spoils = rank == 1 and number == 1 and calls.count(1) < 3
            return model(torch.full((1, 3), 1.0 + rank)).sum() * (math.inf if spoils else 1.0)

        def without_sync(number, model=model, loss=loss):
            with model.no_sync():
                result = loss(number)
                model.require_forward_param_sync = True
            return result

        loss_fns = [partial(without_sync, 0), partial(without_sync, 1), partial(loss, 2)]
        lonely = GradScaler("cpu", init_scale=8.0)
        with pytest.raises(SyncError, match=r"under no_sync\(\) each rank makes gradients of its own"):
            lonely.minimize(optimizer, loss_fns, retries=3)
        calls.clear()
        scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        assert scaler.minimize(optimizer, loss_fns, retries=3).applied
        assert calls == [0, 1, 1, 1, 2]
        weights.append(module.weight.detach().clone())
        scaler.check_sync()
    assert [each.tolist() for each in weights] == [[[-4.5] * 3]] * 2


def _unsynchronised_shards(rank, world_size):
    """Their gradients are where no other code can restore them."""
    model = _model(world_size, "fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)

    def loss(synchronises):
        model.set_requires_gradient_sync(synchronises)
        return model(_inputs(rank, 0)).square().mean()

    with pytest.raises(CallOrderError, match=r"loss_fn\[0\] left no gradients"):
        scaler.minimize(optimizer, [lambda: loss(False), lambda: loss(True)], retries=2)


def _synchronised_shards(rank, world_size):
    """Each micro-batch reduces its gradients, and the second overflows on rank 1 above a scale."""
    ours, plain = _model(world_size, "fsdp2"), _model(world_size, "fsdp2")
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, plain))
    scaler, calls = GradScaler("cpu", init_scale=8.0), []

    def loss(number):
        calls.append(number)
        spoils = rank == 1 and calls.count(1) in {1, 2} and number == 1
        return ours(_inputs(rank, number)).square().mean() * (math.inf if spoils else 1.0)

    assert scaler.minimize(first, [partial(loss, 0), partial(loss, 1), partial(loss, 2)], retries=3).applied
    assert calls == [0, 1, 1, 1, 2]
    for number in range(3):
        plain(_inputs(rank, number)).square().mean().backward()
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(_local(ours), _local(plain), strict=True))
    scaler.check_sync()


def _accumulate(rank, world_size):
    _micro_batches(rank, world_size)
    if HAS_FSDP2_ON_CPU:
        _synchronised_shards(rank, world_size)
        _unsynchronised_shards(rank, world_size)


def test_micro_batches_on_ranks():
    """Both ranks retry the one that overflowed; without synchronisation only with `process_group`, and never shards."""
    _on_ranks(2, _accumulate)


def _protect(rank, world_size):
    for protects_whole in (True, False):
        model = _model(world_size, "ddp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0, protect=[model if protects_whole else model.module])
        for step, victim in enumerate((None, 1, 0, None)):
            before = copy.deepcopy(dict(model.named_buffers()))
            optimizer.zero_grad()
            images = _inputs(rank, step) * (math.inf if rank == victim else 1.0)
            scaler.scale(model(images).square().mean()).backward()
            scaler.step(optimizer)
            assert scaler.update().applied == (victim is None)
            now = dict(model.named_buffers())
            if victim is not None and (protects_whole or rank == 0):
                assert all(torch.equal(before[name], now[name]) for name in now)
            elif victim is not None:  # the module inside sees rank 0's, which were broadcast before its forward
                mean = before["module.1.running_mean"].clone()
                dist.broadcast(mean, 0)
                assert torch.equal(now["module.1.running_mean"], mean)
            if victim is not None and not protects_whole and rank == 0:
                dist.broadcast(before["module.1.running_mean"], 0)
        assert model.module[1].num_batches_tracked.item() == 2
        assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_buffers_that_are_broadcast_are_protected():
    """The DDP module itself: as before on every rank; the module inside: as rank 0's were."""
    _on_ranks(2, _protect)

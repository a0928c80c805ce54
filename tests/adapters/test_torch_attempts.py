"""`GradScaler.attempts` repeats a step at the lower scale, as if the run had begun there.

`test_torch_transactions.py` tests the ways out of a loop.
"""

import contextlib
import logging
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Loop, copies, one, same, take_step, two
from tests.torch_versions import FSDP2


class _Observer(nn.Module):
    """The largest values of each channel, in a buffer that is resized in place, as those of `torch.ao` are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x):
        if not len(self.largest):
            self.largest.resize_(x.shape[1]).zero_()
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return x


def _run(init_scale, retries=30, fused=False, kind=None, rank=0, world_size=1):
    """Train in float16 with micro-batches and draws of all generators; return the scaler, and what it has trained."""
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    odd = [] if kind else [_Observer(), torch.jit.script(nn.BatchNorm1d(16))]  # its buffers are in no dict
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), *odd, nn.Dropout(0.3), nn.Linear(16, 1))
    if kind == "fsdp2":
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    model = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    group = dist.group.WORLD if kind == "group" else None
    scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=10**6, process_group=group)
    for step in range(3 if kind else 30):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(world_size * step + rank))
        if kind and rank == step % world_size:
            batch *= 101.0  # one rank overflows at lower scales than the other
        # Each try begins with the same buffers and the same random states.
        for attempt in scaler.attempts(model, retries=retries):  # noqa: B007  # used after the loop
            optimizer.zero_grad()
            for part, is_last in zip(batch.chunk(2), (False, True), strict=True):
                noise = torch.tensor(np.random.rand(), dtype=torch.float32) + random.random()
                with model.no_sync() if kind == "ddp" and not is_last else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.float16):
                        loss = model(part * noise).float().square().mean() * 40
                    scaler.scale(loss).backward()
            scaler.unscale_and_clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert attempt.info
    return scaler, copies([*local_parameters(model), *model.buffers()])


def _require_same_bits(**how):
    scaler, found = _run(2.0**30, **how)
    assert scaler.metrics()["skipped_steps"] > 5
    _, began = _run(scaler.get_scale(), retries=0, **how)
    assert same(found, began)
    return scaler


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@EITHER_KIND
def test_bits_of_runs_that_begin_lower(fused):
    """A run that repeats steps from a scale of 2**30 down has the bits of a run that begins at the last scale."""
    _require_same_bits(fused=fused)


@EITHER_KIND
def test_each_optimizer_steps_once(fused):
    """A later try does not step an optimizer that an earlier try has stepped, and begins without gradients."""
    params, optimizers = two(fused, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    for attempt in scaler.attempts(retries=60):  # noqa: B007  # used after the loop
        scaler.scale(params[0].sum() * 0.25 + params[1].sum() * 2.0**100).backward()
        results = [scaler.step(each) for each in optimizers]
        assert scaler.update().applied_of(optimizers[0])
    assert attempt.number == 13
    assert results[0] is None
    buffers = [optimizer.state[param]["momentum_buffer"] for param, optimizer in zip(params, optimizers, strict=True)]
    assert [buffer.item() for buffer in buffers] == [0.25, 2.0**100]
    assert params[0].item() == 0.75


@EITHER_KIND
def test_retries_on_a_device(fused):
    """The next try has the lower scale, if the host or only the device knows the outcome of the last try."""
    with Emulated("mps"):
        (param, optimizer), scaler = one(fused, "mps"), GradScaler("mps", init_scale=16.0)
        for attempt in scaler.attempts(retries=3):
            take_step(scaler, optimizer, INF if attempt.number < 2 else 4.0)
        assert (attempt.scales, bool(attempt.info), param.item()) == ([16.0, 8.0, 4.0], True, 0.0)


def test_loops_count_as_one_step(caplog):
    """Retries are not skipped steps: the log, the diagnosis and `max_overflow_streak` do not count them."""
    caplog.set_level(logging.WARNING, "lossscale")
    policy = DynamicScaling(init_scale=2.0**28, growth_interval=10**6, max_overflow_streak=3)
    (param, optimizer), scaler = one(lr=0.0), GradScaler("cpu", policy=policy)
    for _ in range(40):
        for attempt in scaler.attempts(retries=30):  # noqa: B007  # used after the loop
            optimizer.zero_grad()
            scaler.scale(param.sum() * 2.0**118).backward()
            scaler.step(optimizer)
            scaler.update()
        assert attempt.info
    assert scaler.state_dict()["retries"] == scaler.metrics()["skipped_steps"] > 10
    assert not caplog.records
    assert "too often" not in scaler.diagnose()
    resumed = GradScaler("cpu")
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.diagnose() == scaler.diagnose()
    resumed.load_state_dict({**GradScaler("cpu").state_dict(), "retries": 9})  # more than its steps
    assert resumed.diagnose().startswith("not started")


NOT_ONE_STEP = [
    (0, 1, r"called update\(\) 0 times and must call it once; .*with Accelerate, all bodies of accumulate"),
    (2, 1, r"called update\(\) 2 times"),
    (1, 2, "inside another loop over attempts"),
]


@pytest.mark.parametrize(("updates", "depth", "sentence"), NOT_ONE_STEP)
def test_bodies_without_one_update(updates, depth, sentence):
    """A body without an update, with two updates, or with another loop raises `CallOrderError`."""
    loop = Loop()

    def retry(depth):
        for _ in loop.scaler.attempts(loop.model):
            if depth > 1:
                retry(depth - 1)
            for _ in range(updates):
                loop.step()

    with pytest.raises(CallOrderError, match=sentence):
        retry(depth)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _on_a_rank(rank, world_size, kind, fused):
    """Train as one of the ranks."""
    of_rank = {"kind": kind, "rank": rank, "world_size": world_size}
    _require_same_bits(fused=fused, **of_rank).check_sync()
    if kind == "group":
        # A loss that is not finite on one rank of a group ends the tries of all ranks.
        loop = Loop(process_group=dist.group.WORLD)
        for attempt in loop.scaler.attempts(loop.model):  # noqa: B007  # used after the loop
            loop.step(factor=math.nan if rank else 1.0)
        assert (attempt.number, bool(attempt.info)) == (0, False)


@pytest.mark.parametrize("kind", ["ddp", "group", FSDP2])
@EITHER_KIND
def test_ranks_take_the_same_tries(kind, fused):
    """All ranks repeat a step that overflows on one rank, and get the bits of a run that begins lower."""
    on_ranks(2, partial(_on_a_rank, kind=kind, fused=fused))

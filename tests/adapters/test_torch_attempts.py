"""`GradScaler.attempts` repeats a step at the lower scale, as if the run had begun there.

`test_torch_transactions.py` tests the ways out of a loop.
"""

import contextlib
import json
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
from lossscale_core.errors import CallOrderError, OverflowStreakError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Loop, copies, one, same, take_step, two
from tests.torch_versions import FSDP2


class Noting(nn.Module):
    """A layer that puts a longer buffer in the place of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().sum()[None]])
        return x


class Observer(nn.Module):
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
    odd = [] if kind else [Noting(), Observer(), torch.jit.script(nn.BatchNorm1d(16))]  # whose buffers are in no dict
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
    """A run that repeats its steps down from 2**30 has the bits of a run that begins at its last loss scale.

    Each try begins with the same buffers and the same random states.
    """
    _require_same_bits(fused=fused)


@EITHER_KIND
@pytest.mark.parametrize("how", ["alone", "joint"])
def test_each_optimizer_steps_once(how, fused):
    """A later try does not step an optimizer that an earlier try has stepped.

    Optimizers that decide together step together. Each try begins without gradients, also of a skipped optimizer.
    """
    runs = []
    for init_scale in (2.0**40, 2.0**20):
        params, optimizers = map(list, two(fused, lr=0.1, momentum=0.9))
        skipped, left_out = one(fused)
        policy = DynamicScaling(init_scale=init_scale, max_scale=2.0**60)
        scaler = GradScaler("cpu", policy=policy)
        for attempt in scaler.attempts(retries=60):  # noqa: B007  # used after the loop
            scaler.scale(params[0].square().sum() * 1e-3 + params[1].sum() * 2.0**100 + skipped.sum()).backward()
            scaler.skip(left_out)
            if how == "joint":
                scaler.unscale_and_clip_(optimizers, INF)
            results = [scaler.step(each) for each in optimizers]
            info = scaler.update()
            assert how == "joint" or info.applied_of(optimizers[0])
        assert results[0] is None
        assert attempt.info is scaler.last_step
        assert all(map(attempt.info.applied_of, optimizers))
        assert skipped.grad.item() == attempt.scales[-1]
        assert attempt.scales == [init_scale * 0.5**n for n in range(attempt.number + 1)]
        assert (attempt.number > 5) is (init_scale > 2.0**30)
        runs.append([*params, *(state["momentum_buffer"] for each in optimizers for state in each.state.values())])
        assert params[0].item() == pytest.approx(1.0 - 0.1 * 2e-3)  # one step
    assert same(*runs)


@EITHER_KIND
def test_retries_on_a_device(fused):
    """The next try has the lower scale, if the host or only the device knows the outcome of the last try."""
    with Emulated("mps"):
        (param, optimizer), scaler = one(fused, "mps"), GradScaler("mps", init_scale=16.0)
        for attempt in scaler.attempts(retries=3):
            take_step(scaler, optimizer, INF if attempt.number < 2 else 4.0)
        assert (attempt.scales, bool(attempt.info), param.item()) == ([16.0, 8.0, 4.0], True, 0.0)


def test_a_skip_before_the_first_loss():
    """A body may skip the first step of a scaler before the scaler has scaled a loss."""
    (_, optimizer), scaler = one(), GradScaler("cpu")
    for attempt in scaler.attempts():  # noqa: B007  # used after the loop
        scaler.skip(optimizer)
        scaler.update()
    assert (attempt.number, bool(attempt.info)) == (0, False)


def test_a_loop_counts_as_one_step(caplog):
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
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert resumed.diagnose() == scaler.diagnose()


def test_loops_that_fail_for_one_optimizer():
    """A loop in which one of two optimizers overflows at each scale counts as one overflow."""
    params, optimizers = two()
    scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=512.0, max_overflow_streak=4))
    words = "in 3 tries, at the loss scales {}, {}, {};"
    for loop in range(4):
        message = words.format(*(512 >> (loop + number) for number in range(3)))
        with pytest.raises(OverflowStreakError) if loop == 3 else pytest.warns(UserWarning, match=message):
            for attempt in scaler.attempts(retries=2):  # noqa: B007  # used after the loop
                scaler.scale(sum(params).sum()).backward()
                params[1].grad.fill_(INF)
                for each in optimizers:
                    scaler.step(each)
                scaler.update()
        assert attempt.number == 2
        assert loop != 2 or "3 of 3 steps skipped" in scaler.diagnose()


@pytest.mark.parametrize(("mode", "length"), [(contextlib.nullcontext, 0), (RecordedGraph, 4)], ids=["host", "device"])
def test_buffers_that_a_forward_pass_resizes(mode, length):
    """A skipped step makes the buffer empty again, if the host knows that the step was skipped."""
    loop = Loop(fused=True, protects=True, model=nn.Sequential(nn.Linear(4, 4), Observer()))
    with mode():
        loop.step(is_bad=True)
    assert len(loop.model[1].largest) == length
    loop.step()
    assert len(loop.model[1].largest) == 4


NOT_ONE_STEP = [
    (0, 1, r"called update\(\) 0 times and must call it once; .*with Accelerate, all bodies of accumulate"),
    (2, 1, r"called update\(\) 2 times"),
    (1, 2, "inside another loop over attempts"),
]


@pytest.mark.parametrize(("updates", "depth", "sentence"), NOT_ONE_STEP)
def test_bodies_that_are_not_one_step(updates, depth, sentence):
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
        loop = Loop(process_group=dist.group.WORLD)
        for attempt in loop.scaler.attempts(loop.model):  # noqa: B007  # used after the loop
            loop.step(factor=math.nan if rank else 1.0)
        assert (attempt.number, bool(attempt.info)) == (0, False)


@pytest.mark.parametrize("kind", ["ddp", "group", FSDP2])
@EITHER_KIND
def test_ranks_take_the_same_tries(kind, fused):
    """All ranks repeat a step that overflows on one rank, and get the bits of a run that begins lower.

    A loss that is not finite on one rank of a group ends the tries of all ranks.
    """
    on_ranks(2, partial(_on_a_rank, kind=kind, fused=fused))

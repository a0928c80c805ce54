"""`GradScaler.attempts`: a step is taken again at the lower scale, as if the run had begun there."""

import contextlib
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

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard
from lossscale_core.errors import CallOrderError, PolicyError, RetriesExhaustedError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import FSDP2

FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


class Noting(nn.Module):
    """A layer that puts a longer buffer in the place of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().sum()[None]])
        return x


class Run:
    """A model with BatchNorm and Dropout in float16, whose step draws from all generators."""

    def __init__(self, fused=False, init_scale=2.0**16, **settings):
        torch.manual_seed(0)
        random.seed(1)
        np.random.seed(1)
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), Noting(), nn.Dropout(0.3), nn.Linear(16, 1)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=10**6, **settings)
        self.applied = 0

    def body(self, batch):
        self.optimizer.zero_grad()
        for part in batch.chunk(2):
            noise = torch.tensor(np.random.rand(), dtype=torch.float32) + random.random()
            with torch.autocast("cpu", torch.float16):
                loss = self.model(part * noise).float().square().mean() * 40
            self.scaler.scale(loss).backward()
        self.scaler.unscale_and_clip_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        return self.scaler.update()

    def run(self, steps, **settings):
        for step in range(steps):
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            for attempt in self.scaler.attempts(self.model, **settings):  # noqa: B007  # used after the loop
                self.body(batch)
            self.applied += bool(attempt.info)
        return self

    def tensors(self):
        return [*self.model.parameters(), *self.model.buffers()]


@FUSED
def test_the_bits_are_those_of_a_run_that_began_at_the_scale_that_was_found(fused):
    """From 2**30 with 30 retries no batch is lost; buffers and random states are put back before each try."""
    found = Run(fused, init_scale=2.0**30).run(40, retries=30)
    began = Run(fused, init_scale=found.scaler.get_scale()).run(40, retries=0)
    assert (found.applied, began.applied) == (40, 40)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors(), began.tensors(), strict=True))
    assert found.scaler.metrics()["skipped_steps"] > 5


def _step(run, is_bad):
    run.optimizer.zero_grad()
    run.scaler.scale(run.model(torch.ones(16, 8)).square().mean()).backward()
    if is_bad:
        run.model[0].weight.grad[0, 0] = float("nan")
    run.scaler.step(run.optimizer)
    run.scaler.update()


def _steps(run, bad, **settings):
    for is_bad in bad:
        for _ in run.scaler.attempts(run.model, **settings):
            _step(run, is_bad)


@FUSED
def test_a_gradient_that_overflows_at_every_scale_costs_one_backoff(fused):
    """The scale after used-up retries is that of the run without them; a warning names the scales, at the loop."""
    run, plain = Run(fused, init_scale=512.0), Run(fused, init_scale=512.0)
    with pytest.warns(UserWarning, match="overflowed in 4 tries, at the loss scales 512, 256, 128, 64;") as caught:
        _steps(run, [False, True, False], retries=3)
    assert [each.filename for each in caught] == [__file__]
    for is_bad in (False, True, False):
        _step(plain, is_bad)
    assert run.scaler.state_dict() == plain.scaler.state_dict()
    with pytest.raises(RetriesExhaustedError, match="at the loss scales 256, 128;"):
        _steps(run, [True], retries=1, raise_at_end=True)


@FUSED
@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_is_left_after_several_tries_costs_one_backoff(fused, how):
    """As one that used up its retries."""
    run, plain = Run(fused, init_scale=512.0), Run(fused, init_scale=512.0)
    for bad in (False, True, False):
        _step(plain, bad)
    _steps(run, [False])
    with pytest.raises(KeyError) if how == "error" else contextlib.nullcontext():
        for attempt in run.scaler.attempts(run.model):
            _step(run, True)
            if attempt.number == 2 and how == "error":
                raise KeyError
            if attempt.number == 2:
                break
    _steps(run, [False])
    assert run.scaler.state_dict() == plain.scaler.state_dict()


@FUSED
def test_no_try_is_taken_again_at_the_smallest_scale(fused):
    """It would overflow as before; the loop ends as with used-up retries."""
    run = Run(fused)
    run.scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=4.0, min_scale=1.0))
    with pytest.raises(RetriesExhaustedError, match="overflowed in 3 tries, at the loss scales 4, 2, 1;"):
        _steps(run, [True], retries=20, raise_at_end=True)
    assert run.scaler.get_scale() == 2.0


def _take(scaler, model, optimizer, factor=1.0):
    """Take a step with a loss that is multiplied by a factor."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


ENDS = {
    "spike": ({"guard": SpikeGuard(threshold=2.0, warmup=1)}, 1e3),
    "fixed": ({"policy": FixedScaling(4.0)}, 1e38),
    "NaN": ({}, math.nan),
    "infinity": ({}, math.inf),
    "disabled": ({"enabled": False}, 1.0),
}


@pytest.mark.parametrize(("settings", "factor"), ENDS.values(), ids=ENDS)
def test_a_step_that_no_lower_scale_saves_is_not_taken_again(settings, factor):
    """A spike, an overflow under a policy that does not adapt, a loss that is not finite, a scaler that is disabled."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", **settings)
    tries = 0
    for each in (1.0, 1.0, factor):
        for attempt in scaler.attempts(model):
            tries += 1
            assert attempt.info is None
            _take(scaler, model, optimizer, each)
    assert tries == 3
    assert bool(attempt.info) is (not scaler.is_enabled())


def test_a_step_that_the_body_skips_is_not_taken_again():
    """The user has decided."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for attempt in scaler.attempts(model):  # noqa: B007  # used after the loop
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.skip(optimizer)
        scaler.update(scaler.get_scale())
    assert (attempt.number, bool(attempt.info)) == (0, False)


def test_a_lazy_module():
    """Its buffers are made by the first try, and put back from the next step on."""
    model = nn.Sequential(nn.Linear(2, 4), nn.LazyBatchNorm1d())
    scaler = GradScaler("cpu")
    for tries in (1, 3):
        for attempt in scaler.attempts(model):
            scaler.scale(model(torch.randn(4, 2)).sum()).backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if attempt.number < tries - 1:
                model[0].weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
    assert model[1].num_batches_tracked.item() == 2


@pytest.mark.parametrize("how", ["break", "raise", "no update"])
def test_a_body_that_is_left_before_update_leaves_no_record(how):
    """The next step begins anew."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with contextlib.suppress(KeyError, CallOrderError):
        for _ in scaler.attempts(model):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            if how == "break":
                break
            if how == "raise":
                raise KeyError
    for attempt in scaler.attempts(model):  # noqa: B007  # used after the loop
        _take(scaler, model, optimizer)
    assert attempt.info


@pytest.mark.parametrize(
    ("updates", "depth", "sentence"),
    [
        (0, 1, r"ended 0 steps by update\(\) and must end one; .*with Accelerate, all bodies of accumulate"),
        (2, 1, "ended 2 steps"),
        (1, 2, "inside a loop over attempts"),
    ],
)
def test_a_body_that_is_not_one_step(updates, depth, sentence):
    """No update, two, and a loop within a loop."""
    run = Run()

    def loop(depth):
        for _ in run.scaler.attempts(run.model):
            if depth > 1:
                loop(depth - 1)
            for _ in range(updates):
                _step(run, is_bad=False)

    with pytest.raises(CallOrderError, match=sentence):
        loop(depth)


def test_wrong_arguments():
    """They are refused when the loop is made."""
    scaler = GradScaler("cpu")
    with pytest.raises(PolicyError, match="retries=-1"):
        scaler.attempts(retries=-1)
    with pytest.raises(TypeError, match=r"given str; it takes modules: scaler.attempts\(model\)"):
        scaler.attempts("model")


@FUSED
def test_updates_per_step(fused):
    """A try ends at the last update of a step, and an overflow of the first optimizer is tried again with all."""
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=fused) for each in models]
    scaler = GradScaler("cpu", init_scale=1024.0, updates_per_step=2)
    for attempt in scaler.attempts(*models):
        for each in optimizers:
            each.zero_grad()
        scaler.scale(sum(model(torch.ones(1, 2)).sum() for model in models)).backward()
        if attempt.number < 2:
            models[0].weight.grad.fill_(float("inf"))
        for each in optimizers:
            scaler.step(each)
            scaler.update()
    assert attempt.info is scaler.last_step
    assert attempt.info
    assert (attempt.number, attempt.scales) == (2, [1024.0, 512.0, 256.0])


def _on_a_rank(rank, world_size, kind, fused):
    """From 2**30 each rank takes the tries of the others, and its bits are those of a run that began lower."""

    def run(init_scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        if kind == "fsdp2":
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
        model = DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        group = dist.group.WORLD if kind == "group" else None
        scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=10**6, process_group=group)
        for step in range(3):
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(world_size * step + rank))
            batch *= 1.0 + 100.0 * (rank == step % world_size)  # one rank overflows at lower scales than the other
            for attempt in scaler.attempts(model, retries=30):  # noqa: B007  # used after the loop
                optimizer.zero_grad()
                for part, is_last in zip(batch.chunk(2), (False, True), strict=True):
                    with model.no_sync() if kind == "ddp" and not is_last else contextlib.nullcontext():
                        with torch.autocast("cpu", torch.float16):
                            loss = model(part).float().square().mean()
                        scaler.scale(loss).backward()
                scaler.unscale_and_clip_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
            assert attempt.info
        scaler.check_sync()
        return scaler, [*_local(model), *model.buffers()]

    scaler, found = run(2.0**30)
    assert scaler.metrics()["skipped_steps"] > 5
    _, began = run(scaler.get_scale())
    assert all(torch.equal(a, b) for a, b in zip(found, began, strict=True))


@pytest.mark.parametrize("kind", ["ddp", "group", FSDP2])
@FUSED
def test_ranks_take_the_same_tries(kind, fused):
    """With micro-batches under `no_sync`, different parameters on each rank, and sharded ones."""
    _on_ranks(2, partial(_on_a_rank, kind=kind, fused=fused))


def _bad_loss_on_one_rank(rank, world_size):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    for attempt in scaler.attempts(model):  # noqa: B007  # used after the loop
        scaler.scale(model(torch.full((1, 8), math.nan if rank else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (attempt.number, bool(attempt.info)) == (0, False)


def test_a_bad_loss_on_one_rank_ends_the_tries_of_all():
    """The ranks of a group agree that no scale helps."""
    _on_ranks(2, _bad_loss_on_one_rank)

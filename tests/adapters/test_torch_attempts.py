"""`GradScaler.attempts`: a step is taken again at the lower scale, as if the run had begun there."""

import contextlib
import gc
import json
import logging
import math
import random
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard
from lossscale_core.errors import CallOrderError, OverflowStreakError, RetriesExhaustedError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Loop, Veto, copies, one, same, take_step, two
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
    return scaler, copies([*_local(model), *model.buffers()])


def _require_the_bits_of_a_run_that_began_lower(**how):
    scaler, found = _run(2.0**30, **how)
    assert scaler.metrics()["skipped_steps"] > 5
    _, began = _run(scaler.get_scale(), retries=0, **how)
    assert same(found, began)
    return scaler


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@EITHER_KIND
def test_the_bits_are_those_of_a_run_that_began_at_the_scale_that_was_found(fused):
    """From 2**30 with 30 retries no batch is lost; buffers and random states are put back before each try."""
    _require_the_bits_of_a_run_that_began_lower(fused=fused)


# -- ways out of a loop ------------------------------------------------------------------------------------------------


ENDS = {
    "used up": (3, pytest.warns(UserWarning, match="in 4 tries, at the loss scales 512, 256, 128, 64;")),
    "at the smallest scale": (20, pytest.raises(RetriesExhaustedError, match=r"in 5 tries, at the loss scales .* 32;")),
    "break": (3, contextlib.nullcontext()),
    "error": (3, pytest.raises(KeyError)),
}


@EITHER_KIND
@pytest.mark.parametrize("how", ENDS)
def test_a_gradient_that_overflows_at_every_scale_costs_one_backoff(how, fused):
    """State and buffers are then those after one skipped step; a warning at the loop, or an error, names the scales.

    No try is taken again at the smallest scale, where it would overflow as before.
    """
    loop, plain = (Loop(fused, policy=DynamicScaling(init_scale=512.0, min_scale=32.0)) for _ in range(2))
    for is_bad in (False, True, False):
        plain.step(is_bad)
    loop.retry()
    before, (retries, expected) = loop.buffers(), ENDS[how]
    with expected as caught:
        for attempt in loop.scaler.attempts(loop.model, retries=retries, raise_at_end=retries == 20):
            loop.step(is_bad=True)
            if attempt.number == 2 and how == "error":
                raise KeyError
            if attempt.number == 2 and how == "break":
                break
    assert how != "used up" or [each.filename for each in caught] == [__file__]
    assert same(before, loop.buffers())
    loop.retry()
    assert loop.scaler.state_dict() == plain.scaler.state_dict()


WITHOUT_A_STEP = ["break", "error", "no update", "skip", "skip before a loss"]


@EITHER_KIND
@pytest.mark.parametrize("how", [*WITHOUT_A_STEP, "break after the step", "error after the step"])
def test_a_body_that_ends_early(how, fused):
    """It runs once. Without a step buffers come back, no record is left, and random states stay: new numbers follow.

    After a step the parameters have moved, and the statistics belong to them.
    """
    loop, steps = Loop(fused), how not in WITHOUT_A_STEP
    if how == "error after the step":
        loop.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    before, weight, state = loop.buffers(), loop.model[0].weight.detach().clone(), torch.get_rng_state()
    with contextlib.suppress(KeyError, CallOrderError, ZeroDivisionError):
        for attempt in loop.scaler.attempts(loop.model):  # noqa: B007  # used after the loop
            if how == "skip before a loss":
                loop.model(torch.full((8, 4), math.nan))
            else:
                loop.backward(torch.eye(8, 4) if steps else torch.full((8, 4), math.nan))
                loop.scaler.unscale_(loop.optimizer)
            if steps:
                loop.scaler.step(loop.optimizer)
            if how.startswith("break"):
                break
            if how == "error":
                raise KeyError
            if how != "no update":
                loop.scaler.skip(loop.optimizer)
                loop.scaler.update()
    assert same(before, loop.buffers()) == torch.equal(weight, loop.model[0].weight) == (not steps)
    assert torch.equal(state, torch.get_rng_state())
    assert (attempt.number, bool(attempt.info)) == (0, False)
    assert steps or loop.retry().info


@EITHER_KIND
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_loop_that_is_held_and_left_undoes_nothing_later(is_bad, fused):
    """Its iterator ends while another step is unscaled; that one is not unscaled again, and keeps its statistics.

    A streak of overflows in steps since is an error.
    """
    moved = []
    for is_held in (False, True):
        loop = Loop(fused, policy=DynamicScaling(init_scale=2.0**10, max_overflow_streak=3))
        tries = loop.scaler.attempts(loop.model) if is_held else [None]
        for _ in tries:
            loop.step(is_bad)
            break
        loop.model.load_state_dict(Loop().model.state_dict())
        loop.backward(torch.ones(8, 4))
        loop.scaler.unscale_(loop.optimizer)
        del tries
        loop.scaler.step(loop.optimizer)
        assert loop.scaler.update().applied
        moved.append([*loop.model.parameters(), *loop.model.buffers()])
        held = loop.scaler.attempts(loop.model)
        next(held)
        loop.step()
        with pytest.raises(OverflowStreakError):
            any(loop.step(is_bad=True).applied for _ in range(4))
    assert same(*moved)


@pytest.mark.filterwarnings("ignore:the gradients of a step overflowed in 2 tries:UserWarning")
@pytest.mark.parametrize("protects", [False, True])
@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("has_hook", [False, True])
@EITHER_KIND
def test_an_optimizer_without_gradients_has_not_moved(fused, has_hook, is_left, protects):
    """Its step keeps no statistics of a loop that gives up, or that is left before the other optimizer steps."""
    loop = Loop(fused, protects=protects, hooks=[Veto(value=torch.zeros(()))] if has_hook else [])
    (_, idle), before = one(fused), loop.buffers()
    for _ in loop.scaler.attempts(loop.model, retries=1):
        loop.backward()
        loop.model[0].weight.grad.fill_(INF)
        loop.scaler.step(idle)
        if is_left:
            break
        loop.scaler.step(loop.optimizer)
        assert not loop.scaler.update().applied
    assert same(before, loop.buffers())


NOT_TAKEN_AGAIN = {
    "spike": ({"guard": SpikeGuard(threshold=2.0, warmup=1)}, 1e3),
    "fixed": ({"policy": FixedScaling(4.0)}, 1e38),
    "NaN": ({}, math.nan),
    "infinity": ({}, math.inf),
    "disabled": ({"enabled": False}, 1.0),
}


@pytest.mark.parametrize(("settings", "factor"), NOT_TAKEN_AGAIN.values(), ids=NOT_TAKEN_AGAIN)
def test_a_step_that_no_lower_scale_saves_is_not_taken_again(settings, factor):
    """A spike, an overflow under a policy that does not adapt, a loss that is not finite, a scaler that is disabled."""
    loop = Loop(**settings)
    tries, batch = 0, torch.randn(8, 4)
    for each in (1.0, 1.0, factor):
        before = loop.buffers()
        for attempt in loop.scaler.attempts(loop.model):
            tries += 1
            assert (attempt.number, attempt.info) == (0, None)
            loop.step(batch=batch, factor=each)
    assert tries == 3
    assert bool(attempt.info) is not loop.scaler.is_enabled()
    assert same(before, loop.buffers()) is loop.scaler.is_enabled()


# -- what a body is ----------------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("how", ["alone", "joint"])
def test_an_optimizer_that_was_applied_is_left_alone_in_later_tries(how, fused):
    """Each steps once for a batch; decided together, both move with the bits of the scale that fits.

    Each try begins without the gradients of those before, also for an optimizer that is skipped.
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
    """The next try has the lower scale, whoever knows the outcome of the last one."""
    with Emulated("mps"):
        (param, optimizer), scaler = one(fused, "mps"), GradScaler("mps", init_scale=16.0)
        for attempt in scaler.attempts(retries=3):
            take_step(scaler, optimizer, INF if attempt.number < 2 else 4.0)
        assert (attempt.scales, bool(attempt.info), param.item()) == ([16.0, 8.0, 4.0], True, 0.0)


def test_the_log_and_the_streak_count_a_loop_once(caplog):
    """A scale that begins too high skips no batch: nothing is logged, and `max_overflow_streak` is not reached."""
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


@pytest.mark.filterwarnings("ignore:the gradients of a step overflowed in 6 tries:UserWarning")
def test_loops_that_give_up_one_of_two_optimizers():
    """The state is that after the first try, from which no tries are left out; so many loops in a row are an error."""
    params, optimizers = two()
    scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=2.0**30, max_overflow_streak=4))
    for loop in range(4):
        with pytest.raises(OverflowStreakError) if loop == 3 else contextlib.nullcontext():
            for attempt in scaler.attempts(retries=5):  # noqa: B007  # used after the loop
                scaler.scale(sum(params).sum()).backward()
                params[1].grad.fill_(INF)
                for each in optimizers:
                    scaler.step(each)
                scaler.update()
        assert attempt.number == 5
        assert loop != 2 or "3 of 3 steps skipped" in scaler.diagnose()


@pytest.mark.parametrize(("mode", "length"), [(contextlib.nullcontext, 0), (RecordedGraph, 4)], ids=["host", "device"])
def test_a_buffer_that_the_first_forward_pass_resizes_in_place(mode, length):
    """A skipped step makes the buffer empty again, unless the host does not know that the step was skipped."""
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
def test_a_body_that_is_not_one_step(updates, depth, sentence):
    """No update, two, and a loop within a loop."""
    loop = Loop()

    def retry(depth):
        for _ in loop.scaler.attempts(loop.model):
            if depth > 1:
                retry(depth - 1)
            for _ in range(updates):
                loop.step()

    with pytest.raises(CallOrderError, match=sentence):
        retry(depth)


def test_retries_keep_no_model_alive():
    """Nor the scaler, also where the model holds it."""
    loop = Loop()
    loop.model.attach = loop.scaler.attach
    loop.retry()
    refs = [weakref.ref(each) for each in (loop.scaler, loop.model)]
    del loop
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# -- ranks -------------------------------------------------------------------------------------------------------------


def _on_a_rank(rank, world_size, kind, fused):
    """Each rank takes the tries of the others, and its bits are those of a run that began lower."""
    of_rank = {"kind": kind, "rank": rank, "world_size": world_size}
    _require_the_bits_of_a_run_that_began_lower(fused=fused, **of_rank).check_sync()
    if kind == "group":
        loop = Loop(process_group=dist.group.WORLD)
        for attempt in loop.scaler.attempts(loop.model):  # noqa: B007  # used after the loop
            loop.step(factor=math.nan if rank else 1.0)
        assert (attempt.number, bool(attempt.info)) == (0, False)


@pytest.mark.parametrize("kind", ["ddp", "group", FSDP2])
@EITHER_KIND
def test_ranks_take_the_same_tries(kind, fused):
    """With micro-batches under `no_sync`, different parameters on each rank, and sharded ones.

    A loss that is bad on one rank of a group ends the tries of all.
    """
    _on_ranks(2, partial(_on_a_rank, kind=kind, fused=fused))

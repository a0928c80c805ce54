"""The loops of docs/trainers.md for several ranks, on gloo; those of trainers beside loops with torch's scaler."""

import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.pages import code_of
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.adapters.test_torch_odd_optimizers import _Container
from tests.torch_versions import needs_fsdp2_on_cpu

PAGE = "docs/trainers.md"
STEPS = 8
CULPRITS = {2: 1, 5: 0}
"""The rank on which gradients overflow, by step."""
SETTINGS = {"device": "cpu", "init_scale": 2.0**10, "growth_interval": 2}


def _run(source, **names):
    """Run a recipe on a CPU, with a scale that grows soon; return all names."""
    source = source.replace('"cuda"', "").replace("GradScaler(", "GradScaler(**SETTINGS, ").replace(", )", ")")
    names["SETTINGS"] = SETTINGS
    exec(compile(source, PAGE, "exec"), names)
    return names


def _data(rank):
    """Return two micro-batches for each step, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    data = [[torch.randn(4, 8, generator=generator) for _ in range(2)] for _ in range(STEPS)]
    for step, culprit in CULPRITS.items():
        data[step][-1] *= float("inf") if culprit == rank else 1.0
    return data


def _loss_fn(outputs, targets):
    return (outputs.float() - targets).square().mean()


# --- nanochat


class _ReducesInside(torch.optim.SGD):
    """Averages the gradients of all ranks in its step."""

    def step(self):
        """Average, then step."""
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad.div_(dist.get_world_size()))
        super().step()


class _ModelWithLoss(torch.nn.Linear):
    def forward(self, x, y):
        return _loss_fn(super().forward(x), y)


def _nanochat(rank, world_size):
    def run(source, kind=_ReducesInside):
        torch.manual_seed(0)
        model = _ModelWithLoss(8, 1)
        names = {"model": model, "optimizer": kind(model.parameters(), lr=0.1), "x": None, "y": torch.ones(4, 1)}
        names["x"], *others = itertools.chain(*_data(rank), [None])
        names["train_loader"] = ((x, names["y"], {}) for x in others)
        scaler = _run(source, torch=torch, dist=dist, num_iterations=STEPS, grad_accum_steps=2, **names)["scaler"]
        return scaler, [scaler.get_scale(), model.weight.tolist(), model.bias.tolist()]

    scaler, ours = run(code_of(PAGE, "nanochat"))
    assert ours == run(code_of(PAGE, "nanochat", before=True))[1]
    assert scaler.metrics()["skipped_steps"] == len(CULPRITS)
    alone, _ = run(code_of(PAGE, "nanochat").replace("process_group=dist.group.WORLD", ""), torch.optim.SGD)
    assert alone.metrics()["skipped_steps"] == 1  # by another step on each rank, so they part, or wait for each other


def test_nanochat():
    """Ranks whose optimizer reduces inside its step skip together, with the bits of the page's loop before."""
    _on_ranks(2, _nanochat)


# --- torchtitan and verl


class _Experts(torch.nn.Module):
    """Experts on a mesh dimension, which see the tokens of their own rank; on one rank, gradients overflow once."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 8, 8), mesh, [Shard(0)]))
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        weight = self.weight.to_local() * 1.0
        if (self.calls, dist.get_rank()) == (7, 3):
            weight.register_hook(lambda grad: grad * float("inf"))
        return (tokens @ weight).sum(0)


def _parts_of(layout):
    """Return a model in this layout, sharded ones in float16, and its optimizers in torchtitan's container."""
    torch.manual_seed(0)
    model, dtypes = torch.nn.Sequential(torch.nn.Linear(8, 8)), MixedPrecisionPolicy(torch.float16, torch.float32)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        if layout == "experts":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
            experts, mesh, place = _Experts(mesh["ep"]), mesh["efsdp"], lambda param: Shard(1)
            model.append(fully_shard(experts, mesh=mesh, mp_policy=dtypes, shard_placement_fn=place))
        fully_shard(model, mp_policy=dtypes)
    parts = model if layout == "experts" else [model]
    return model, _Container([torch.optim.AdamW(part.parameters(), lr=0.01, fused=True) for part in parts])


def _as_torch(model, optimizer, schedule, max_norm, data):
    """Train by torch's scaler and functions; by the norm of all gradients, all ranks and optimizers step or none."""
    scaler, params = torch.amp.GradScaler(**SETTINGS), [*model.parameters()]
    for micro_batches in data:
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            scaler.scale(_loss_fn(model(micro_batch), 1.0) / 2).backward()
        for each in optimizer.optimizers:
            scaler.unscale_(each)
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(max_norm)
        else:
            norm = torch.nn.utils.get_total_norm([getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in params])
            for param in params:
                torch.nn.utils.clip_grads_with_norm_([param], max_norm, norm)
        for each in optimizer.optimizers:
            for flag in scaler._found_inf_per_device(each).values():
                flag.copy_(~norm.isfinite())
            scaler.step(each)
        scaler.update()
        if norm.isfinite():
            schedule.step()
    return scaler


def _torchtitan(model, optimizer, schedule, max_norm, data):
    source = code_of(PAGE, "torchtitan, FSDP2").replace("max_norm=1.0", f"max_norm={max_norm}")
    data = [[(micro_batch, 1.0) for micro_batch in micro_batches] for micro_batches in data]
    names = {"model": model, "optimizers": optimizer, "lr_schedulers": schedule, "data": data}
    return _run(source, loss_fn=_loss_fn, **names)["scaler"]


class _FSDPEngine(SimpleNamespace):
    def _build_fsdp_module(self, module):
        return module


def _verl(model, optimizer, schedule, max_norm, data):
    registry = SimpleNamespace(register=lambda model_type, backends, vendor: lambda engine: engine)
    sys.modules["verl.workers.engine"] = SimpleNamespace(EngineRegistry=registry, FSDPEngineWithLMHead=_FSDPEngine)
    config, state = SimpleNamespace(clip_grad=max_norm), None
    engine = _run(code_of(PAGE, "verl").replace("growth_interval=400, ", ""))["Float16Engine"](optimizer_config=config)
    engine.optimizer = optimizer
    for micro_batches in data:
        engine._build_fsdp_module(model)
        if state is not None:  # each step continues from a checkpoint
            engine.scaler.load_state_dict(state)
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            engine.scaler.scale(_loss_fn(model(micro_batch), 1.0) / 2).backward()
        engine.optimizer_step()
        if engine.scaler.last_step.applied:
            schedule.step()
        state = engine.scaler.state_dict()
    return engine.scaler


def _compare(rank, world_size, recipe, layout):
    for max_norm, tolerance in ((1e6, 0.0), (0.1, 1e-5)):
        found = []
        for train in (recipe, _as_torch):
            model, optimizer = _parts_of(layout)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizers[0], 1, 0.9)
            scaler = train(model, optimizer, schedule, max_norm, _data(rank))
            found.append([*_local(model), torch.tensor([scaler.get_scale(), schedule.last_epoch])])
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
        assert schedule.last_epoch == STEPS - len(CULPRITS) - (layout == "experts")


LOOPS = [(_torchtitan, "fsdp2"), (_torchtitan, "experts"), (_torchtitan, "ddp"), (_verl, "fsdp2"), (_verl, "fsdp1")]


@needs_fsdp2_on_cpu
@pytest.mark.parametrize(("recipe", "layout"), LOOPS)
def test_torchtitan_and_verl(recipe, layout):
    """One call clips by the norm of each layout, and skips on all ranks, with the bits of torch's scaler."""
    _on_ranks(4 if layout == "experts" else 2, partial(_compare, recipe=recipe, layout=layout))


# --- pipelines


def _pipeline(rank, world_size):
    """Train two stages from a scale that is far too large: both skip the same steps, and the loss falls."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.nn.Linear(8, 1)]
    inputs = torch.randn(8, 4)
    targets, losses = inputs.sum(1, keepdim=True), []

    def loss_fn(outputs, targets):
        losses.append(torch.nn.functional.mse_loss(outputs.float(), targets))
        return losses[-1]

    names = {
        **{"device": torch.device("cpu"), "rank": rank, "world_size": world_size, "part_of_model": parts[rank]},
        **{"optimizer": torch.optim.SGD(parts[rank].parameters(), lr=0.05), "data": [(inputs, targets)] * 100},
        "loss_fn": loss_fn,
    }
    before = [each.detach().clone() for each in parts[rank].parameters()]
    source = code_of(PAGE, "Pipeline parallelism").replace("WORLD)", "WORLD, init_scale=2.0**30)")
    exec(compile(source, PAGE, "exec"), names)
    scaler = names["scaler"]
    scaler.check_sync()
    assert 5 < scaler.metrics()["skipped_steps"] < 40
    assert not any(torch.equal(a, b) for a, b in zip(before, parts[rank].parameters(), strict=True))
    if rank == 1:
        # Two micro-batches each; before them, the schedule has called it once on memory that holds anything.
        assert sum(losses[-2:]) < 0.5 * sum(losses[1:3])


def _averages(rank, world_size):
    """Average gradients that are finite everywhere; the sum of their undivided values is not."""
    names = {}
    exec(compile(code_of(PAGE, "Finite here, infinite in the sum"), PAGE, "exec"), names)
    average = names["average"]
    large, small = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2))
    large.grad, small.grad = torch.full_like(large, 6e4), torch.full_like(small, 1.0 + rank)
    undivided = large.grad.clone()
    dist.all_reduce(undivided)
    assert undivided.isinf().all()
    assert [bool(each) for each in average([large, small])] == [True, True]
    assert large.grad.tolist() == [torch.tensor(6e4).half().item()] * 3
    assert small.grad.tolist() == [1.5] * 3
    if rank == 0:
        large.grad[0] = torch.inf
    assert [bool(each) for each in average([large])] == [False, False]


def test_a_pipeline_skips_on_all_stages():
    """A stage that never scales a loss follows the last one."""
    _on_ranks(2, _pipeline)


def test_an_average_in_float16_does_not_overflow_in_the_sum():
    """And the two flags say where an overflow came from."""
    _on_ranks(2, _averages)

"""The recipes of docs/trainers.md for several ranks, on gloo, beside loops with torch's scaler."""

import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from tests.adapters.odd_optimizers import Container
from tests.adapters.torch_programs import bits, loss_fn, run_recipe
from tests.adapters.torch_ranks import local_parameters, on_ranks
from tests.torch_versions import needs_fsdp2_on_cpu

STEPS = 8
CULPRITS = {2: 1, 5: 0}
"""The rank on which gradients overflow, by step."""
SETTINGS = {"device": "cpu", "init_scale": 2.0**10, "growth_interval": 2}


def _run(heading, replaced, before=False, **names):
    """Run a recipe with the settings of this file; return all names."""
    return run_recipe(heading, {"SETTINGS": SETTINGS, "loss_fn": loss_fn, **names}, replaced, before=before)


def _data(rank):
    """Return two micro-batches for each step, which differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    data = [[torch.randn(4, 8, generator=generator) for _ in range(2)] for _ in range(STEPS)]
    for step, culprit in CULPRITS.items():
        data[step][-1] *= float("inf") if culprit == rank else 1.0
    return data


# --- nanochat


class _ReducesInside(torch.optim.SGD):
    """An optimizer that averages the gradients of all ranks in its step."""

    def step(self):
        """Average, then step."""
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad.div_(dist.get_world_size()))
        super().step()


class _ModelWithLoss(torch.nn.Linear):
    def forward(self, x, y):
        return loss_fn(super().forward(x), y)


def _nanochat(rank, world_size):
    def run(scaler, settings, before=False):
        torch.manual_seed(0)
        model = _ModelWithLoss(8, 1)
        names = {"model": model, "optimizer": _ReducesInside(model.parameters(), lr=0.1), "y": torch.ones(4, 1)}
        names["x"], *others = itertools.chain(*_data(rank), [None])
        names |= {"train_loader": ((x, names["y"], {}) for x in others), "num_iterations": STEPS, "grad_accum_steps": 2}
        scaler = _run("nanochat", {scaler: f"GradScaler(**SETTINGS{settings})"}, before, **names)["scaler"]
        return bits(scaler.get_scale(), model.state_dict())

    group = "process_group=dist.group.WORLD"
    assert run(f"GradScaler({group})", f", {group}") == run("GradScaler()", "", before=True)


def test_nanochat():
    """If an optimizer reduces in its step, all ranks skip together, with the bits of the loop before the change."""
    on_ranks(2, _nanochat)


# --- torchtitan and verl


def _parts_of(layout):
    """Return a model in this layout, and its optimizers in torchtitan's container."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    parts = [model] if layout == "fsdp1" else model
    return model, Container([torch.optim.AdamW(part.parameters(), lr=0.01, fused=True) for part in parts])


def _backward(scaler, model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        scaler.scale(loss_fn(model(micro_batch)) / 2).backward()


def _as_torch(model, optimizer, schedule, max_norm, data):
    """Train by torch's scaler and functions; by the norm of all gradients, all ranks and optimizers step or none."""
    scaler, params = torch.amp.GradScaler(**SETTINGS), [*model.parameters()]
    for micro_batches in data:
        _backward(scaler, model, optimizer, micro_batches)
        for inner in optimizer.optimizers:
            scaler.unscale_(inner)
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(max_norm)
        else:
            norm = torch.nn.utils.get_total_norm([param.grad.full_tensor() for param in params])
            for param in params:
                torch.nn.utils.clip_grads_with_norm_([param], max_norm, norm)
        for inner in optimizer.optimizers:
            for flag in scaler._found_inf_per_device(inner).values():
                flag.copy_(~norm.isfinite())
            scaler.step(inner)
        scaler.update()
        if norm.isfinite():
            schedule.step()
    return scaler


def _torchtitan(model, optimizer, schedule, max_norm, data):
    replaced = {"max_norm=1.0": f"max_norm={max_norm}", 'GradScaler("cuda")': "GradScaler(**SETTINGS)"}
    data = [[(micro_batch, 1.0) for micro_batch in micro_batches] for micro_batches in data]
    names = {"model": model, "optimizers": optimizer, "lr_schedulers": schedule, "data": data}
    return _run("torchtitan, FSDP2", replaced, **names)["scaler"]


class _FSDPEngine(SimpleNamespace):
    def _build_fsdp_module(self, module):
        return module


def _verl(model, optimizer, schedule, max_norm, data):
    registry = SimpleNamespace(register=lambda model_type, backends, vendor: lambda engine: engine)
    sys.modules["verl.workers.engine"] = SimpleNamespace(EngineRegistry=registry, FSDPEngineWithLMHead=_FSDPEngine)
    kind = _run("verl", {"GradScaler(growth_interval=400": "GradScaler(**SETTINGS"})["Float16Engine"]
    engine, state = kind(optimizer_config=SimpleNamespace(clip_grad=max_norm), optimizer=optimizer), None
    for micro_batches in data:
        engine._build_fsdp_module(model)
        if state is not None:  # each step continues from a checkpoint
            engine.scaler.load_state_dict(state)
        _backward(engine.scaler, model, optimizer, micro_batches)
        engine.optimizer_step()
        if engine.scaler.last_step.applied:
            schedule.step()
        state = engine.scaler.state_dict()
    return engine.scaler


def _compare(rank, world_size, recipe, layout):
    for max_norm, tolerance in ((1e6, 0.0), (0.1, 1e-5)):
        outcomes = []
        for train in (recipe, _as_torch):
            model, optimizer = _parts_of(layout)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizers[0], 1, 0.9)
            scaler = train(model, optimizer, schedule, max_norm, _data(rank))
            outcomes.append([*local_parameters(model), torch.tensor([scaler.get_scale(), schedule.last_epoch])])
        torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)
        assert schedule.last_epoch == STEPS - len(CULPRITS)


LOOPS = [(_torchtitan, "fsdp2"), (_verl, "fsdp2"), (_verl, "fsdp1")]


@needs_fsdp2_on_cpu
@pytest.mark.parametrize(("recipe", "layout"), LOOPS)
def test_torchtitan_and_verl(recipe, layout):
    """One call clips by the norm of each layout, and skips on all ranks, with the bits of torch's scaler."""
    on_ranks(2, partial(_compare, recipe=recipe, layout=layout))


# --- pipelines


def _pipeline(rank, world_size):
    """Train two stages from a scale that is far too large: both skip the same steps, and the loss falls."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.nn.Linear(8, 1)]
    part, inputs, losses = parts[rank], torch.randn(8, 4), []
    names = {"device": torch.device("cpu"), "rank": rank, "world_size": world_size, "part_of_model": part}
    names |= {"optimizer": torch.optim.SGD(part.parameters(), lr=0.05), "data": [(inputs, inputs.sum(1, True))] * 100}
    names["loss_fn"] = lambda outputs, targets: losses.append(loss_fn(outputs, targets)) or losses[-1]
    scaler = run_recipe("Pipeline parallelism", names, {"WORLD)": "WORLD, init_scale=2.0**30)"})["scaler"]
    scaler.check_sync()
    assert 5 < scaler.metrics()["skipped_steps"] < 40
    if rank == 1:
        # Two micro-batches each; before them, the schedule has called it once on memory that holds anything.
        assert sum(losses[-2:]) < 0.5 * sum(losses[1:3])


def _averages(rank, world_size):
    """Average gradients that are finite everywhere; the sum of their undivided values would be infinite."""
    average = run_recipe("Finite here, infinite in the sum", {})["average"]
    large, small = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2))
    large.grad, small.grad = torch.full_like(large, 6e4), torch.full_like(small, 1.0 + rank)
    assert [bool(flag) for flag in average([large, small])] == [True, True]
    assert large.grad.tolist() == [torch.tensor(6e4).half().item()] * 3
    assert small.grad.tolist() == [1.5] * 3
    if rank == 0:
        large.grad[0] = torch.inf
    assert [bool(flag) for flag in average([large])] == [False, False]


def test_a_pipeline_skips_on_all_stages():
    """A stage that never scales a loss skips the steps of the last stage."""
    on_ranks(2, _pipeline)


def test_an_average_in_float16_stays_finite():
    """The sum of float16 gradients over the ranks does not overflow; two flags say where an overflow came from."""
    on_ranks(2, _averages)

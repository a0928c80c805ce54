"""The loops of nanochat, torchtitan and verl on docs/trainers.md, on gloo ranks, beside loops with torch's scaler."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_torch import GradScaler
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
    source = source.replace('"cuda"', "").replace("GradScaler(", "GradScaler(**SETTINGS, ")
    names["SETTINGS"] = SETTINGS
    exec(compile(source.replace(", )", ")"), PAGE, "exec"), names)
    return names


def _data(rank, micro_batches=2):
    """Return the micro-batches of each step, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    data = [[torch.randn(4, 8, generator=generator) for _ in range(micro_batches)] for _ in range(STEPS)]
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


def _nanochat(rank, world_size):
    def run(source, kind=_ReducesInside):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 1)

        def model(x, y):
            with torch.autocast("cpu", torch.float16):
                return _loss_fn(layer(x), y)

        model.zero_grad = layer.zero_grad
        loader = ((x, torch.ones(4, 1), {}) for x in [*itertools.chain(*_data(rank)), torch.ones(4, 8)])
        x, y, _ = next(loader)
        names = {"model": model, "optimizer": kind(layer.parameters(), lr=0.1), "x": x, "y": y, "train_loader": loader}
        names = _run(source, torch=torch, dist=dist, num_iterations=STEPS, grad_accum_steps=2, **names)
        return names["scaler"], [names["scaler"].get_scale(), *(param.tolist() for param in layer.parameters())]

    scaler, ours = run(code_of(PAGE, "nanochat"))
    assert ours == run(code_of(PAGE, "nanochat", before=True))[1]
    assert scaler.metrics()["skipped_steps"] == len(CULPRITS)
    alone, _ = run(code_of(PAGE, "nanochat").replace("process_group=dist.group.WORLD", ""), torch.optim.SGD)
    assert alone.metrics()["skipped_steps"] == 1  # by another step on each rank, so they part, or wait for each other


def test_nanochat():
    """Ranks whose optimizer reduces inside its step skip together, with the bits of the page's loop before."""
    _on_ranks(2, _nanochat)


# --- torchtitan and verl


def _parts_of(layout):
    """Return a model in this layout, sharded ones in float16, and its optimizers in torchtitan's container."""
    torch.manual_seed(0)
    model, dtypes = torch.nn.Sequential(torch.nn.Linear(8, 8)), MixedPrecisionPolicy(torch.float16, torch.float32)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mp_policy=dtypes)
    return model, _Container([torch.optim.AdamW([param], lr=0.01, fused=True) for param in model.parameters()])


class FSDPEngine:
    """What the recipe replaces in verl's engine, for torch's scaler, with a norm by kind of wrapper."""

    def __init__(self, layout, max_norm, scaler=None):
        self.module, self.optimizer = _parts_of(layout)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer.optimizers[0], 1, 0.9)
        self.optimizer_config, self.scaler, self.norms = SimpleNamespace(clip_grad=max_norm), scaler, []

    def optimizer_step(self):
        """Clip by the norm of all gradients, and let all ranks and optimizers step or none."""
        max_norm, params = self.optimizer_config.clip_grad, [*self.module.parameters()]
        for each in self.optimizer.optimizers:
            self.scaler.unscale_(each)
        norm = torch.nn.utils.get_total_norm([getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in params])
        for param in params:
            torch.nn.utils.clip_grads_with_norm_([param], max_norm, norm)
        for each in self.optimizer.optimizers:
            for flag in self.scaler._found_inf_per_device(each).values():
                flag.copy_(~norm.isfinite())
            self.scaler.step(each)
        self.scaler.update()
        self.was_applied = norm.isfinite()
        return norm.item()

    def lr_scheduler_step(self):
        """Follow applied steps."""
        if self.was_applied:
            self.lr_scheduler.step()

    def train(self, data, loaded=None):
        """Train on micro-batches, and go on with another scaler from the state of this one half way."""
        for step, micro_batches in enumerate(data):
            if loaded is not None and step == STEPS // 2:
                loaded.load_state_dict(self.scaler.state_dict())
                self.scaler = loaded
            self.optimizer.zero_grad()
            for micro_batch in micro_batches:
                self.scaler.scale(_loss_fn(self.module(micro_batch), 1.0) / 2).backward()
            self.norms.append(self.optimizer_step())
            self.lr_scheduler_step()
        return self

    def outcome(self):
        """Return weights, scale and schedule."""
        return [*_local(self.module), torch.tensor([self.scaler.get_scale(), self.lr_scheduler.last_epoch])]


def _torchtitan(layout, max_norm, data):
    engine = FSDPEngine(layout, max_norm)
    names = {"model": engine.module, "optimizers": engine.optimizer, "lr_schedulers": engine.lr_scheduler}
    source = code_of(PAGE, "torchtitan, FSDP2").replace("max_norm=1.0", f"max_norm={max_norm}")
    data = [[(micro_batch, 1.0) for micro_batch in micro_batches] for micro_batches in data]
    engine.scaler = _run(source, loss_fn=_loss_fn, data=data, **names)["scaler"]
    assert engine.optimizer.steps == STEPS  # its own step is called, with its hooks; fused optimizers skip themselves
    return engine


def _verl(layout, max_norm, data):
    engine = _run(code_of(PAGE, "verl"), FSDPEngine=FSDPEngine)["Float16Engine"](layout, max_norm)
    engine.scaler, loaded = (GradScaler(**SETTINGS) for _ in range(2))
    return engine.train(data, loaded)


def _compare(rank, world_size, recipe, layout):
    for max_norm, tolerance in ((1e6, 0.0), (0.1, 1e-5)):
        ours = recipe(layout, max_norm, _data(rank))
        torchs = FSDPEngine(layout, max_norm, torch.amp.GradScaler(**SETTINGS)).train(_data(rank))
        torch.testing.assert_close(ours.outcome(), torchs.outcome(), rtol=tolerance, atol=tolerance)
        assert ours.lr_scheduler.last_epoch == STEPS - len(CULPRITS)
        if ours.norms:
            torch.testing.assert_close(ours.norms, torchs.norms, rtol=1e-5, atol=0.0, equal_nan=True)


LOOPS = [(_torchtitan, "fsdp2"), (_verl, "fsdp2"), (_verl, "ddp")]


@needs_fsdp2_on_cpu
@pytest.mark.parametrize(("recipe", "layout"), LOOPS)
def test_torchtitan_and_verl(recipe, layout):
    """One call clips by the norm of each layout, and skips on all ranks, with the bits of torch's scaler."""
    _on_ranks(2, partial(_compare, recipe=recipe, layout=layout))

"""Training loops with a scaler of torch; the argument of the script is the code that calls them."""

import copy
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}
scaler = GradScaler("cpu", **SETTINGS)
fork = multiprocessing.get_context("fork")


def spoil(param, step):
    if step in (2, 5):
        param.grad.view(-1)[0] = float("inf")


def train(scaler, steps=range(8), clip=None, **options):
    """Train with overflows in two steps, and print the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
        spoil(model.weight, step)
        if clip:
            clip(scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()
    print(model.weight.tolist(), model.bias.tolist(), flush=True)


def unscale_and_clip(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


class Mine(GradScaler):
    """A subclass."""


def names():
    import lossscale_torch

    for old in (torch.cpu.amp.GradScaler(64.0, 3.0), ShardedGradScaler("cpu", 64.0, 0.25, enabled=False)):
        assert isinstance(old, GradScaler)
    assert isinstance(old, ShardedGradScaler)
    assert torch.GradScaler is GradScaler is torch.amp.grad_scaler.GradScaler
    assert issubclass(torch.cuda.amp.GradScaler, GradScaler)
    assert issubclass(lossscale_torch.GradScaler, GradScaler)
    mine = pickle.loads(pickle.dumps(Mine("cpu", 8.0)))
    assert (type(mine), mine.get_scale()) == (Mine, 1024.0)
    scaler = copy.copy(GradScaler("cpu", 4.0))
    train(scaler, clip=unscale_and_clip)
    train(pickle.loads(pickle.dumps(scaler)), range(1))


def own(init_scale):
    from lossscale_core import DynamicScaling, SpikeGuard
    from lossscale_torch import GradScaler

    scaler = GradScaler("cpu", policy=DynamicScaling(**SETTINGS), guard=SpikeGuard(), protect=[])
    train(scaler, clip=lambda scaler, optimizer, model: scaler.unscale_and_clip_(optimizer, 1e-3))
    assert scaler.policy.init_scale == init_scale, scaler.policy
    pickle.loads(pickle.dumps(scaler))


def device():  # its objects die before the exit
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.adapters.emulated_device import Emulated

    with Emulated("mps"):
        param = torch.nn.Parameter(torch.ones(3, device="mps"))
        optimizer, scaler = torch.optim.SGD([param], lr=0.5, fused=True), GradScaler("mps", **SETTINGS)
        for step in range(104):
            scaler.scale(torch.ones((), device="mps"))
            param.grad = torch.full((3,), 4096.0, device="mps")
            spoil(param, step)
            scaler.step(optimizer)
            scaler.update()
    print(Path("scale.csv").read_text().count("\n"))


def half():
    import lossscale_torch

    param = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = lossscale_torch.GradScaler("cpu", init_scale=1.0, half_gradients=True)
    scaler.scale(param.sum() * 60000.0).backward()
    scaler.step(torch.optim.SGD([param], lr=0.0))
    scaler.update()


def resumes():
    """Train for four steps from the saved scaler, if there is a saved scaler, and save it."""
    steps = range(4)
    if os.path.exists("scaler.pt"):
        scaler.load_state_dict(torch.load("scaler.pt"))
        steps = range(4, 8)
    train(scaler, steps)
    torch.save(scaler.state_dict(), "scaler.pt")


def rank():
    torch.distributed.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    train(scaler)


if __name__ == "__main__":
    exec(sys.argv[1])

"""What `lossscale_torch.GradScaler` costs against torch's own: ratios of interleaved medians in one run.

    python benchmarks/bench_torch.py                                      measure and print
    python benchmarks/bench_torch.py --quick                              a smoke test, in seconds
    python benchmarks/bench_torch.py --output-folder docs/benchmarks  keep the table

Runs on the CPU, and on a CUDA device too where there is one. Exits with status 1 where a bar is missed on the CPU by
more than the noise allowed.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from measuring import Row, interleaved, resnet50_shapes, run

from lossscale_torch import GradScaler

Step = Callable[[], object]


class NoOp(torch.optim.Optimizer):
    """An optimizer that leaves everything alone, so that the scaler's own cost remains.

    Its `step` is the instance's: torch wraps that of every optimizer *class* in a profiler hook, which costs more than
    the scaler does.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.step = lambda: None


def parameters(shapes: list[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    """Return parameters of these shapes with finite gradients."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def synchronize(device: str) -> None:
    """Wait for the device, so that a time covers the work it started."""
    if device == "cuda":
        torch.cuda.synchronize()


def step_with(scaler: Any, optimizer: Any, device: str) -> None:
    """Take one step as every training loop does."""
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer)
    scaler.update()
    synchronize(device)


def clip_with_torch(scaler: Any, optimizer: Any, params: list[Any], device: str) -> None:
    """Unscale, clip, step, update: torch's recipe."""
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    synchronize(device)


def clip_with_ours(scaler: Any, optimizer: Any, device: str) -> None:
    """Do the same with one read and one multiply."""
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    synchronize(device)


def clip_without_scaler(optimizer: Any, params: list[Any], device: str) -> None:
    """Clip and step without any scaling."""
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    synchronize(device)


def own_cost_rows(quick: bool, device: str) -> list[Row]:
    """Time the scalers with an optimizer that does nothing."""
    rows = []
    for count in (4, 40, 400):
        optimizer = NoOp(parameters([(64,)] * count, device))
        steps = [
            functools.partial(step_with, scaler(device, init_scale=1.0, growth_interval=2**30), optimizer, device)
            for scaler in (torch.amp.GradScaler, GradScaler)
        ]
        theirs, ours = interleaved(steps, 5 if quick else 51, 4000 // count)
        rows.append(Row(f"own cost, {count} tensors of 64 ({device})", "× torch's GradScaler", ours / theirs, 0.6))
    return rows


def training_rows(quick: bool, device: str) -> list[Row]:
    """Time the stage after backward on ResNet-50's 161 parameters, with and without clipping."""
    rows = []
    optimizers = {
        "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-6, foreach=True),
        "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-6, fused=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
    }
    for name, make in optimizers.items():
        params = parameters(resnet50_shapes(), device)
        optimizer = make(params)
        peer, ours = (
            scaler(device, init_scale=2.0, growth_interval=2**30) for scaler in (torch.amp.GradScaler, GradScaler)
        )
        steps: list[Step] = [
            functools.partial(step_with, peer, optimizer, device),
            functools.partial(step_with, ours, optimizer, device),
            functools.partial(clip_with_torch, peer, optimizer, params, device),
            functools.partial(clip_with_ours, ours, optimizer, device),
            functools.partial(clip_without_scaler, optimizer, params, device),
        ]
        times = interleaved(steps, 3 if quick else 41, before=functools.partial(restore, params))
        bar = 0.65 if "fused" in name else 0.78
        where = f"{name}, 161 tensors ({device})"
        rows += [
            Row(f"step, {where}", "× torch's GradScaler", times[1] / times[0], 1.0),
            Row(f"clip + step, {where}", "× unscale_ + clip_grad_norm_ + step + update", times[3] / times[2], bar),
            Row(f"clip + step, {where}", "× clip_grad_norm_ + step, no scaler", times[3] / times[4], 1.0),
        ]
    return rows


def restore(params: list[Any]) -> None:
    """Make gradients what they were: each step unscales them, and clipping shrinks them."""
    for param in params:
        param.grad.fill_(1e-3)


def measure(quick: bool) -> list[Row]:
    """Measure on the CPU, and on CUDA where there is a device."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [row for device in devices for row in own_cost_rows(quick, device) + training_rows(quick, device)]


if __name__ == "__main__":
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "not measured on a GPU"
    sys.exit(run("torch", "What the PyTorch scaler costs", measure, f"torch {torch.__version__}, {gpu}", __doc__))

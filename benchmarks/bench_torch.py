"""Cost of `lossscale_torch.GradScaler`, compared with torch's scaler: ratios of interleaved medians in one run.

    python benchmarks/bench_torch.py                                      measure and print
    python benchmarks/bench_torch.py --quick                              a smoke test, in seconds
    python benchmarks/bench_torch.py --output-folder benchmarks  write the table

Runs on a CUDA device if available, otherwise on the CPU. On the CPU it exits with status 1 if a bar is missed by more
than the allowed noise.
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import Row, interleaved, resnet50_shapes, run
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler, guarded

Step = Callable[[], object]
ON = "cuda" if torch.cuda.is_available() else "cpu"


class NoOp(torch.optim.Optimizer):
    """An optimizer that changes nothing, so that a step costs the time of the scaler.

    Its `step` is an attribute of the instance, because torch wraps the `step` of every optimizer class in a profiler
    hook, which costs more than the scaler.
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
    """Wait for the device, so that a time includes the work on it."""
    if device == "cuda":
        torch.cuda.synchronize()


def step_with(scaler: Any, optimizer: Any, device: str) -> None:
    """Take one step like a plain training loop."""
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer)
    scaler.update()
    synchronize(device)


def clip_with_torch(scaler: Any, optimizer: Any, params: list[Any], device: str) -> None:
    """Take one step with clipping by torch's recipe."""
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    synchronize(device)


def clip_with_ours(scaler: Any, optimizer: Any, device: str) -> None:
    """Take one step with clipping by `unscale_and_clip_`, which reads once and multiplies once."""
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


def step_alone(optimizer: Any, device: str) -> None:
    """Step a `guarded` optimizer, which checks and clips."""
    optimizer.step()
    synchronize(device)


class FusedNoOp(NoOp):
    """An optimizer that changes nothing, and accepts the factor and the flag of a fused optimizer."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        """Do nothing; the attribute of the instance replaces this method."""


OWN_COST_BARS = {
    "plain": {4: 1.05, 40: 0.95, 400: 0.85},
    "with clipping": {4: 0.95, 40: 0.85, 400: 0.6},
    "fused": {4: 1.0, 40: 0.95, 400: 0.85},
}


def own_cost_rows(quick: bool, device: str) -> list[Row]:
    """Time the calls of a scaler alone, after a real backward pass and without an update, on one thread."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for kind, bars in OWN_COST_BARS.items():
        for count, bar in bars.items():
            loops = [OwnCost(make, kind, count, device) for make in (torch.amp.GradScaler, GradScaler)]
            torch_time, our_time = interleaved_seconds(loops, 3 if quick else 21, max(2000 // count, 5))
            work = f"own cost, {kind}, {count} tensors of 64 ({device})"
            rows.append(Row(work, "× torch's GradScaler", our_time / torch_time, bar))
    torch.set_num_threads(threads)
    return rows


class OwnCost:
    """A training loop in which only the calls of the scaler are timed."""

    def __init__(self, make_scaler: Any, kind: str, count: int, device: str) -> None:
        self.params = [torch.nn.Parameter(torch.randn(64, device=device)) for _ in range(count)]
        self.optimizer = (FusedNoOp if kind == "fused" else NoOp)(self.params)
        self.scaler: Any = make_scaler(device, init_scale=1.0, growth_interval=2**30)
        self.device = device
        self.clip: Callable[[], object] = {
            "with clipping": self._clip_with_ours if isinstance(self.scaler, GradScaler) else self._clip_with_torch
        }.get(kind, lambda: None)

    def __call__(self) -> float:
        """Take a step; return the seconds of the scaler's calls."""
        loss = torch.cat(self.params).sum()
        synchronize(self.device)
        start = time.perf_counter()
        scaled = self.scaler.scale(loss)
        seconds = time.perf_counter() - start
        scaled.backward()
        synchronize(self.device)
        start = time.perf_counter()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        synchronize(self.device)
        seconds += time.perf_counter() - start
        for param in self.params:
            param.grad = None
        return seconds

    def _clip_with_ours(self) -> None:
        self.scaler.unscale_and_clip_(self.optimizer, 1.0)

    def _clip_with_torch(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)


def interleaved_seconds(steps: list[OwnCost], repetitions: int, calls: int) -> list[float]:
    """Return the median over repetitions of the mean seconds of a step; the loops take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for first in range(repetitions):
        for turn in range(len(steps)):
            number = (first + turn) % len(steps)
            times[number].append(statistics.mean(steps[number]() for _ in range(calls)))
    return [statistics.median(seconds) for seconds in times]


def launch_rows() -> list[Row]:
    """Count the calls of torch in an `update` after a fused optimizer, which a graph would record."""
    counts = []
    for make in (torch.amp.GradScaler, GradScaler):
        param = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([param], lr=1e-6, fused=True)
        scaler: Any = make("cpu")
        for _ in range(2):  # the first update puts the state on the device
            scaler.scale(param.sum()).backward()
            with CallCounter():
                scaler.step(optimizer)
            with CallCounter() as calls:
                scaler.update()
        counts.append(calls.count)
    return [Row("calls of torch in a recorded update after a fused optimizer", f"(torch: {counts[0]})", counts[1], 10)]


def attempts_rows(quick: bool, device: str) -> list[Row]:
    """Time a finite step of about a millisecond within `attempts`, which copies buffers and random states."""
    layers = [layer for _ in range(10) for layer in (torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = GradScaler(device, init_scale=2.0, growth_interval=2**30)
    batch = torch.randn(64, 64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        synchronize(device)

    def step_in_attempts() -> None:
        for _ in scaler.attempts(model):
            step()

    alone, tried = interleaved([step, step_in_attempts], 3 if quick else 201)
    return [
        Row(f"a finite step of {alone * 1e3:.1f} ms in attempts ({device})", "× the step alone", tried / alone, 1.15)
    ]


class CallCounter(TorchDispatchMode):
    """A counter of the calls that reach torch's kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def training_rows(quick: bool, device: str) -> list[Row]:
    """Time the stage after backward on ResNet-50's 161 parameters, with and without clipping.

    A row with clipping also names its bound: the number of arrays of all elements that each recipe must move through
    memory. For AdamW, torch reads and writes the gradients to unscale, reads them for the norm, reads and writes them
    to clip (5), and its kernel reads four arrays and writes three (7). `unscale_and_clip_` reads the gradients for the
    norm, and then reads and writes them once (3).
    """
    rows = []
    optimizers = {
        "SGD foreach": (lambda p: torch.optim.SGD(p, lr=1e-6, foreach=True), (6, 8)),
        "SGD fused": (lambda p: torch.optim.SGD(p, lr=1e-6, fused=True), (5, 8)),
        "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True), (10, 12)),
    }
    for name, (make, (our_streams, torch_streams)) in optimizers.items():
        params = parameters(resnet50_shapes(), device)
        optimizer = make(params)
        peer, ours = (
            scaler(device, init_scale=2.0, growth_interval=2**30) for scaler in (torch.amp.GradScaler, GradScaler)
        )
        watching = GradScaler(device, init_scale=2.0, growth_interval=2**30, guard=SpikeGuard())
        alone = guarded(make(params), max_norm=1.0)
        steps: list[Step] = [
            functools.partial(step_with, peer, optimizer, device),
            functools.partial(step_with, ours, optimizer, device),
            functools.partial(clip_with_torch, peer, optimizer, params, device),
            functools.partial(clip_with_ours, ours, optimizer, device),
            functools.partial(clip_without_scaler, optimizer, params, device),
            functools.partial(clip_with_ours, watching, optimizer, device),
            functools.partial(step_alone, alone, device),
        ]
        times = interleaved(steps, 3 if quick else 41, before=functools.partial(restore, params))
        bound = our_streams / torch_streams
        bar = round(bound + 0.03, 2)
        where = f"{name}, 161 tensors ({device})"
        bounded = f"{where}; {our_streams}/{torch_streams} = {bound:.2f} by memory streams"
        rows += [
            Row(f"step, {where}", "× torch's GradScaler", times[1] / times[0], 1.0),
            Row(f"clip + step, {bounded}", "× unscale_ + clip_grad_norm_ + step + update", times[3] / times[2], bar),
            Row(f"clip + step, {where}", "× clip_grad_norm_ + step, no scaler", times[3] / times[4], 1.0),
            Row(f"clip + step with a spike guard, {where}", "× the same without a guard", times[5] / times[3], 1.03),
            Row(
                f"guarded step, {where}",
                "× clip_grad_norm_ + step",
                times[6] / times[4],
                1.0 if our_streams == 6 else 1.05,
            ),
        ]
    return rows


def device_rows(quick: bool) -> list[Row]:
    """Return the time by CUDA events, the number of kernels, and the ratio to the bandwidth limit."""
    params = parameters(resnet50_shapes(), "cuda")
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    peer, ours = (
        scaler("cuda", init_scale=2.0, growth_interval=2**30) for scaler in (torch.amp.GradScaler, GradScaler)
    )
    recipes = {
        "unscale_ + clip_grad_norm_ + step + update": functools.partial(
            clip_with_torch, peer, optimizer, params, "cuda"
        ),
        "unscale_and_clip_ + step + update": functools.partial(clip_with_ours, ours, optimizer, "cuda"),
    }
    elements = sum(param.numel() for param in params)
    least = 4 * elements * (1 + 7)  # gradients read once for the norm; then AdamW reads four arrays and writes three
    limit = least / _bandwidth()
    rows = []
    for name, step in recipes.items():
        seconds, launches = _event_seconds(step, 5 if quick else 41, params), _launches(step, params)
        rows += [
            Row(f"{name}, AdamW fused, 161 tensors, by events (cuda)", "ms", seconds * 1e3, math.inf),
            Row(f"{name}, kernels launched (cuda)", "a step", launches, math.inf),
            Row(f"{name}, {least / 1e6:.0f} MB at least (cuda)", "× the bandwidth limit", seconds / limit, math.inf),
        ]
    return rows


def _bandwidth() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / _event_seconds(lambda: target.copy_(source), 11, [])


def _event_seconds(step: Step, repetitions: int, params: list[Any]) -> float:
    times = []
    for _ in range(repetitions):
        restore(params)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _launches(step: Step, params: list[Any]) -> float:
    restore(params)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    return float(sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key))


def restore(params: list[Any]) -> None:
    """Reset the gradients, because each step unscales them and clipping shrinks them."""
    for param in params:
        param.grad.fill_(1e-3)


def measure(quick: bool) -> list[Row]:
    """Measure on a CUDA device if available, otherwise on the CPU."""
    kinds = (own_cost_rows, training_rows, attempts_rows)
    rows = [row for measure_rows in kinds for row in measure_rows(quick, ON)]
    return rows + (device_rows(quick) if ON == "cuda" else launch_rows())


if __name__ == "__main__":
    device = torch.cuda.get_device_name() if ON == "cuda" else "not measured on a GPU"
    name, title = ("torch-cuda", " on a GPU") if ON == "cuda" else ("torch", "")
    versions = f"torch {torch.__version__}, {device}"
    sys.exit(run(name, f"What the PyTorch scaler costs{title}", measure, versions, __doc__))

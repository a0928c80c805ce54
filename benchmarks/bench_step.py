"""Time that a scaler adds to a whole training step of PyTorch, in milliseconds and as a share of the step.

    python benchmarks/bench_step.py                                   measure and print
    python benchmarks/bench_step.py --output-folder benchmarks   write the table

Forward, backward and the optimizer run in float32: on a CPU float16 is slower, and a scaler's share would look smaller.
The step runs in one thread, and only its processor time counts, so that other work on the machine has no effect.
"""

import argparse
import copy
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lossscale_torch import GradScaler

ROUNDS = 101

Step = Callable[[], tuple[float, float]]


class Model(NamedTuple):
    """A model, the shape of its batch, and its name in the table."""

    name: str
    module: torch.nn.Module
    batch: tuple[int, ...]


def models() -> list[Model]:
    """Return a small and a medium model."""
    perceptron = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    transformer = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return [
        Model("perceptron 64-128-10, batch of 64", perceptron, (64, 64)),
        Model("transformer, 2 layers of width 256, batch of 8 × 32", transformer, (8, 32, 256)),
    ]


def train(module: torch.nn.Module, optimizer: Any, scaler: Any, batch: torch.Tensor) -> tuple[float, float]:
    """Take one step; return the milliseconds of the step, and of its calls of scaler and optimizer alone."""
    start = time.process_time()
    optimizer.zero_grad()
    loss = module(batch).square().mean()
    before_scale = time.process_time()
    if scaler is not None:
        loss = scaler.scale(loss)
    after_scale = time.process_time()
    loss.backward()
    before_step = time.process_time()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    end = time.process_time()
    return 1e3 * (end - start), 1e3 * (end - before_step + after_scale - before_scale)


def measure(model: Model, rounds: int) -> list[float]:
    """Return the milliseconds of a step without a scaler, and the time that torch's scaler and this one add to it.

    The time that a scaler adds is the difference of its calls alone: forward and backward vary more than this.
    """
    batch = torch.randn(model.batch)
    steps = []
    for make in (None, torch.amp.GradScaler, GradScaler):
        module = copy.deepcopy(model.module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
        scaler = make("cpu", init_scale=1024.0) if make else None
        steps.append(functools.partial(train, module, optimizer, scaler, batch))
    for step in 3 * steps:
        step()
    turns = [_turn(steps, first) for first in range(rounds)]
    added = (statistics.median(turn[which][1] - turn[0][1] for turn in turns) for which in (1, 2))
    return [statistics.median(turn[0][0] for turn in turns), *added]


def _turn(steps: list[Step], first: int) -> list[tuple[float, float]]:
    """Run each step once, beginning with another step in each round."""
    times = {}
    for number in range(len(steps)):
        which = (first + number) % len(steps)
        times[which] = steps[which]()
    return [times[which] for which in range(len(steps))]


def table(rounds: int) -> str:
    """Return the measurements as a table in Markdown."""
    lines = ["| model | parameters | a step without a scaler | torch's `GradScaler` adds | this one adds |"]
    lines.append("|---|---|---|---|---|")
    for model in models():
        plain, *added = measure(model, rounds)
        count = sum(parameter.numel() for parameter in model.module.parameters())
        cells = [f"{more:.2f} ms ({more / plain:.1%})" for more in added]
        lines.append(f"| {model.name} | {count / 1e6:.2g} M | {plain:.2f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the table if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that everything runs")
    parser.add_argument("--output-folder", type=Path, help="a folder to write the table to, as Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"a CPU with {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    rounds = 9 if options.quick else ROUNDS
    text = (
        f"{table(rounds)}\n\nA step is forward, backward and AdamW, in float32. Medians over "
        f"{rounds} rounds of one thread's processor time; in a round each step runs once. A scaler adds the time of "
        f"`scale`, `step` and `update`, less the time of `optimizer.step()` alone. Measured on {machine}; "
        "not measured on a GPU."
    )
    print(text)
    if options.output_folder:
        made = f"Made by `python benchmarks/bench_step.py --output-folder {options.output_folder}`."
        page = f"# Time that a scaler adds to a training step in PyTorch\n\n{text}\n\n{made}\n"
        (options.output_folder / "step.md").write_text(page)


if __name__ == "__main__":
    main()

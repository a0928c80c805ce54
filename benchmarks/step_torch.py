"""What a scaler adds to a whole training step of PyTorch, in milliseconds and as a share of the step.

    python benchmarks/step_torch.py                                    measure and print
    python benchmarks/step_torch.py --output docs/benchmarks/step.md   keep the table

Forward, backward and the optimizer run in float32. On a CPU float16 is slower, so that a scaler's share would look smaller.
One thread works, and the time that it had the processor counts, so that other work on the machine does not.
"""

import argparse
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


class Model(NamedTuple):
    """A model, the shape of its batch, and its name in the table."""

    name: str
    module: torch.nn.Module
    batch: tuple[int, ...]


def models() -> list[Model]:
    """Return a small and a middle model."""
    perceptron = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    transformer = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return [
        Model("perceptron 64-128-10, batch of 64", perceptron, (64, 64)),
        Model("transformer, 2 layers of width 256, batch of 8 × 32", transformer, (8, 32, 256)),
    ]


def train(module: torch.nn.Module, optimizer: Any, scaler: Any, batch: torch.Tensor) -> None:
    """Take one step, with or without a scaler."""
    optimizer.zero_grad()
    loss = module(batch).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def measured(model: Model, rounds: int) -> list[float]:
    """Return the milliseconds of a step without a scaler, and what torch's scaler and this library's add to it."""
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-6)
    batch = torch.randn(model.batch)
    scalers = [None, *(scaler("cpu", init_scale=1024.0) for scaler in (torch.amp.GradScaler, GradScaler))]
    steps = [functools.partial(train, model.module, optimizer, scaler, batch) for scaler in scalers]
    for step in steps:
        step()
    turns = [_times(steps, first) for first in range(rounds)]
    plain = statistics.median(turn[0] for turn in turns)
    return [plain, *(statistics.median(turn[which] - turn[0] for turn in turns) for which in (1, 2))]


def _times(steps: list[Callable[[], None]], first: int) -> list[float]:
    """Return the milliseconds of each step of one round; another step begins each round."""
    times = [0.0] * len(steps)
    for number in range(len(steps)):
        which = (first + number) % len(steps)
        start = time.process_time()
        steps[which]()
        times[which] = 1e3 * (time.process_time() - start)
    return times


def table(rounds: int) -> str:
    """Return the measurements as a table in Markdown."""
    lines = ["| model | parameters | a step without a scaler | torch's `GradScaler` adds | this one adds |"]
    lines.append("|---|---|---|---|---|")
    for model in models():
        plain, *added = measured(model, rounds)
        count = sum(parameter.numel() for parameter in model.module.parameters())
        cells = [f"{more:.2f} ms ({more / plain:.1%})" for more in added]
        lines.append(f"| {model.name} | {count / 1e6:.2g} M | {plain:.2f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and keep the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that everything runs")
    parser.add_argument("--output", type=Path, help="a file to keep the table in, as Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"a CPU with {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    text = (
        f"{table(9 if options.quick else ROUNDS)}\n\nA step is forward, backward and AdamW, in float32. Medians over "
        f"{ROUNDS} rounds of one thread's processor time; in a round each step runs once. Measured on {machine}; "
        "not measured on a GPU."
    )
    print(text)
    if options.output:
        title = "What a scaler adds to a training step"
        options.output.write_text(f"# {title}\n\n{text}\n\nMade by `python benchmarks/step_torch.py --output {options.output}`.\n")


if __name__ == "__main__":
    main()

"""Train with overflows, spikes and killed processes, and compare bit for bit with a run without kills.

    python benchmarks/soak_torch.py                  2 and 4 processes, some minutes
    python benchmarks/soak_torch.py --quick          2 processes, a minute

Processes train together (DistributedDataParallel over gloo) with BatchNorm, a schedule, clipping, a spike guard and
retries. At random steps the gradients of one rank overflow, a batch has a norm that is far too large, or a process is
killed with SIGKILL: between two steps, between backward and step, or while it saves.
The run then continues from its last checkpoint. In the end weights, buffers, optimizer, schedule, loss scale and guard
must be equal to the same run without kills.
"""

import argparse
import io
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_torch import GradScaler, StepInfo

RETRIES = 2
SAVE_EVERY = 5
PHASES = ("before", "backward", "saving")
FINISHED, KILLED = "finished.pt", -signal.SIGKILL


class Figures(NamedTuple):
    """The counts of a soak, and the differences at its end."""

    processes: int
    steps: int
    overflows: int
    spikes: int
    skipped: int
    kills: int
    differences: int


class Fault(NamedTuple):
    """The planned fault of a step, and the rank that it affects."""

    overflows_above: float
    """The loss scale above which the gradients of the rank overflow."""
    weight: float
    """The factor of the loss of the rank: large for a spike."""
    rank: int


def faults(seed: int, steps: int, processes: int) -> list[Fault]:
    """Return the fault of each step; most of them have no effect."""
    chance = random.Random(seed)
    planned = []
    for _ in range(steps):
        overflows_above, weight = float("inf"), 1.0
        if chance.random() < 0.15:
            overflows_above = 2.0 ** chance.randint(0, 12)
        elif chance.random() < 0.05:
            weight = 1e3
        planned.append(Fault(overflows_above, weight, chance.randrange(processes)))
    return planned


class Run:
    """The part of a run in one process."""

    def __init__(self, folder: Path, rank: int, processes: int, seed: int, steps: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._folder, self._rank, self._seed, self._steps = folder, rank, seed, steps
        self._faults = faults(seed, steps, processes)
        layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        # Without this argument, DDP changes its buckets after the first step of a process. The ring over four ranks
        # then adds the same numbers in another order, and a restarted run would differ by roundings.
        self._model = DistributedDataParallel(layers, find_unused_parameters=True)
        self._optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2, fused=bool(seed % 2))
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, 0.99)
        policy = DynamicScaling(init_scale=2.0**12, growth_interval=4, min_scale=2.0**-10)
        self._scaler = GradScaler("cpu", policy=policy, guard=SpikeGuard(warmup=8), protect=[layers])
        self._number = 0
        self._die_in = ""
        self.overflows = self.spikes = self.skipped = 0

    def parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint by name."""
        return {"model": self._model, "optimizer": self._optimizer, "schedule": self._schedule, "scaler": self._scaler}

    def resume(self) -> None:
        """Continue from the last checkpoint, if one exists."""
        file = self._folder / "checkpoint.pt"
        if file.exists():
            checkpoint = torch.load(file, weights_only=False)
            for name, part in self.parts().items():
                part.load_state_dict(checkpoint[name])
            self._number = checkpoint["step"]

    def save(self, name: str) -> None:
        """Save on rank 0; a reader sees the old file or the new file, never a part of it."""
        if self._rank == 0:
            buffer = io.BytesIO()
            states = {name: part.state_dict() for name, part in self.parts().items()}
            counts = {"overflows": self.overflows, "spikes": self.spikes, "skipped": self.skipped}
            torch.save({**states, **counts, "step": self._number}, buffer)
            half = len(buffer.getvalue()) // 2
            with open(self._folder / "partial", "wb") as file:
                file.write(buffer.getvalue()[:half])
                self._die_here("saving")
                file.write(buffer.getvalue()[half:])
            os.replace(self._folder / "partial", self._folder / name)

    def train(self, die_at: int, die_in: str) -> None:
        """Train to the end, or to the step at which this process kills itself."""
        while self._number < self._steps:
            self._die_in = die_in if self._number >= die_at else ""
            self._die_here("before")
            info = self._take_step()
            self.skipped += not info.applied
            self.spikes += bool(info.spiked)
            if info.applied:
                self._schedule.step()
            self._number += 1
            if self._number % SAVE_EVERY == 0:
                self.save("checkpoint.pt")
        self.save(FINISHED)

    def _take_step(self) -> StepInfo:
        """Take a step; after an overflow, repeat it at the lower scale."""
        for _ in range(RETRIES + 1):
            self._optimizer.zero_grad()
            self._scaler.scale(self._loss()).backward()
            self._scaler.unscale_and_clip_(self._optimizer, 1.0)
            self._scaler.step(self._optimizer)
            info = self._scaler.update()
            if not info.overflowed:
                break
        return info

    def _loss(self) -> torch.Tensor:
        fault = self._faults[self._number]
        batch = torch.Generator().manual_seed(self._seed * 10_000 + self._number * 10 + self._rank)
        torch.manual_seed(self._seed * 10_000 + self._number)
        images = torch.randn(16, 8, generator=batch)
        loss = (self._model(images) - images.sum(1, keepdim=True)).square().mean()
        self._die_here("backward")
        if fault.rank == self._rank:
            loss = loss * fault.weight
        if self._scaler.get_scale() > fault.overflows_above:
            self.overflows += 1
            return loss * (float("inf") if fault.rank == self._rank else 1.0)
        return loss

    def _die_here(self, phase: str) -> None:
        if self._die_in == phase:
            os.kill(os.getpid(), signal.SIGKILL)


def work(
    rank: int, processes: int, meeting: Path, folder: Path, seed: int, steps: int, die_at: int, die_in: str
) -> None:
    """Run one process of the run; its warnings and its error go to a file."""
    os.dup2(os.open(folder / f"errors{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    run = Run(folder, rank, processes, seed, steps)
    run.resume()
    run.train(die_at, die_in)
    dist.barrier()
    os._exit(0)  # without the orderly end of the interpreter, which torch's threads abort now and then


def train(folder: Path, processes: int, seed: int, steps: int, victims: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Train in processes; restart after each victim (rank, step, phase) is killed, and return the last checkpoint."""
    for attempt, (victim, *death) in enumerate([*victims, (-1, steps, "")]):
        running = []
        for rank in range(processes):
            arguments = (rank, processes, folder / f"meeting{attempt}", folder, seed, steps)
            end = death if rank == victim else (steps, "")
            running.append(multiprocessing.get_context("forkserver").Process(target=work, args=(*arguments, *end)))
            running[-1].start()
        _wait(running, victim, folder)
    return dict(torch.load(folder / FINISHED, weights_only=False))


def _wait(running: list[Any], victim: int, folder: Path) -> None:
    """Wait for the victim, or for all processes if there is none; then kill those that still run."""
    expected = dict.fromkeys(range(len(running)), 0) if victim < 0 else {victim: KILLED}
    try:
        for rank, status in expected.items():
            running[rank].join(timeout=300)
            if running[rank].exitcode != status:
                file = folder / f"errors{rank}.txt"
                errors = file.read_text()[-2000:] if file.exists() else ""
                raise RuntimeError(f"rank {rank} ended with {running[rank].exitcode}, not with {status}: {errors}")
    finally:
        for process in running:
            process.kill()
            process.join()


def differences(a: Any, b: Any) -> int:
    """Return the number of numbers and tensors in which two checkpoints differ, bit for bit."""
    if isinstance(a, dict):
        return sum(differences(a[key], b[key]) if key in b else 1 for key in a) + len(b.keys() - a.keys())
    if isinstance(a, list | tuple):
        return abs(len(a) - len(b)) + sum(map(differences, a, b))
    if isinstance(a, torch.Tensor):
        return int(not torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b))
    return int(a != b)


def soak(processes: int, steps: int, kills: int, seed: int) -> Figures:
    """Run once with kills and once without, and compare."""
    chance = random.Random(seed)
    at = sorted(chance.sample(range(SAVE_EVERY, steps - 1), kills))
    victims = []
    for step in at:
        phase = chance.choice(PHASES)
        victims.append((0 if phase == "saving" else chance.randrange(processes), step, phase))
    with tempfile.TemporaryDirectory() as disturbed, tempfile.TemporaryDirectory() as calm:
        actual = train(Path(disturbed), processes, seed, steps, victims)
        expected = train(Path(calm), processes, seed, steps, [])
    counts = {name: expected.pop(name) for name in ("overflows", "spikes", "skipped")}
    actual = {name: actual[name] for name in expected}  # without the counts, which a restarted run began at zero
    return Figures(processes, steps, **counts, kills=kills, differences=differences(actual, expected))


def main() -> int:
    """Run all soaks, and print a line for each soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run")
    arguments = parser.parse_args()
    runs = [(2, 60, 2, 0)] if arguments.quick else [(2, 400, 8, 0), (2, 400, 8, 1), (4, 200, 4, 2), (4, 200, 4, 3)]
    print("| processes | steps | overflows | spikes | skipped | kills | differences |\n|---|---|---|---|---|---|---|")
    worst = 0
    for run in runs:
        figures = soak(*run)
        print("| " + " | ".join(map(str, figures)) + " |", flush=True)
        worst = max(worst, figures.differences)
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())

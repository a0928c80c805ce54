"""What a default `SpikeGuard` refuses in real runs: healthy ones, changes of level for good, and planted spikes.

    python benchmarks/spike_guard_runs.py            measure and print, some minutes
    python benchmarks/spike_guard_runs.py --quick    a smoke test, in seconds

Small networks train in float32 on one thread of a CPU, on scikit-learn's bundled data and on random sequences. Each
norm is that of the gradients before they are clipped to 1. The guard works in training, so that a refused step is
skipped. With the same torch on the same machine each call finds the same numbers.
"""

import argparse
import itertools
import platform
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler

BATCH, WIDTH, SYMBOLS = 64, 64, 8
STEPS = 400
FACTORS = (10.0, 100.0)
GUARDS = {
    "SpikeGuard()": SpikeGuard(),
    "SpikeGuard(threshold=16)": SpikeGuard(threshold=16),
    "SpikeGuard(memory=32)": SpikeGuard(memory=32),
}
FAMILIES = ("MLP", "CNN", "transformer", "LSTM", "GRU")

Data = tuple[torch.Tensor, torch.Tensor]


class Setting(NamedTuple):
    """The network, the data and the optimizer of a run."""

    family: str
    task: str
    optimizer: str
    lr: float
    batch_norm: bool = False


class Step(NamedTuple):
    """The disturbance of a step: factors of the loss, of the inputs, of the targets, and of a sequence's length."""

    loss: float = 1.0
    inputs: float = 1.0
    targets: float = 1.0
    length: int = 1


Change = tuple[str, Setting, Step]


class Trained(NamedTuple):
    """A finished run: the norm before clipping, the loss and whether the guard refused it, step by step."""

    setting: Setting
    norms: np.ndarray
    losses: np.ndarray
    refused: np.ndarray

    @property
    def final_loss(self) -> float:
        """The mean of the last losses."""
        return float(self.losses[-50:].mean())


SETTINGS = [
    Setting("MLP", "digits", "SGD", 0.1),
    Setting("MLP", "digits", "AdamW", 1e-3),
    Setting("MLP", "diabetes", "SGD", 0.01),
    Setting("MLP", "diabetes", "AdamW", 3e-3),
    Setting("CNN", "digits", "SGD", 0.05),
    Setting("CNN", "digits", "AdamW", 3e-3),
    Setting("CNN", "digits", "SGD", 0.1, batch_norm=True),
    Setting("CNN", "digits", "AdamW", 1e-3, batch_norm=True),
    Setting("transformer", "digits", "SGD", 0.05),
    Setting("transformer", "digits", "AdamW", 1e-3),
    Setting("transformer", "copying", "AdamW", 1e-3),
    Setting("transformer", "copying", "AdamW", 3e-3),
    *(
        Setting(family, *rest)
        for family in ("LSTM", "GRU")
        for rest in (
            ("digits", "SGD", 0.3),
            ("digits", "AdamW", 3e-3),
            ("copying", "AdamW", 1e-2),
            ("adding", "AdamW", 1e-2),
        )
    ),
]
CHANGES: list[Change] = [
    ("loss summed over the batch of 64, not averaged", Setting("MLP", "digits", "AdamW", 1e-3), Step(loss=64.0)),
    ("loss summed over the batch of 64, not averaged", Setting("LSTM", "digits", "SGD", 0.3), Step(loss=64.0)),
    ("targets 10 times as large", Setting("MLP", "diabetes", "AdamW", 3e-3), Step(targets=10.0)),
    ("inputs 10 times as large", Setting("CNN", "digits", "AdamW", 3e-3), Step(inputs=10.0)),
    ("sequences 4 times as long", Setting("transformer", "copying", "AdamW", 1e-3), Step(length=4)),
    ("sequences 4 times as long", Setting("GRU", "copying", "AdamW", 1e-2), Step(length=4)),
    ("sequences 4 times as long", Setting("LSTM", "adding", "AdamW", 1e-2), Step(length=4)),
]


class Recurrent(torch.nn.Module):
    """An LSTM or a GRU, and a linear layer at each place of the sequence."""

    def __init__(self, family: str, features: int, outputs: int) -> None:
        super().__init__()
        self.layers = getattr(torch.nn, family)(features, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each place."""
        return self.head(self.layers(inputs)[0])


class Transformer(torch.nn.Module):
    """Two encoder layers over learnt positions, and a linear layer at each place of the sequence."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(features, WIDTH)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(64, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each place."""
        return self.head(self.layers(self.embedding(inputs) + self.positions[: inputs.shape[1]]))


def model_for(setting: Setting, inputs: torch.Tensor, outputs: int) -> torch.nn.Module:
    """Return a fresh model from inputs of shape (batch, places, features) to outputs of (batch, places, outputs)."""
    nn = torch.nn
    if setting.family == "MLP":
        hidden = [nn.Linear(inputs[0].numel(), 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, outputs), nn.Unflatten(1, (1, outputs)))
    if setting.family == "CNN":
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8))]
        for channels_in, channels in ((1, 16), (16, 32)):
            layers.append(nn.Conv2d(channels_in, channels, 3, padding=1))
            layers += [nn.BatchNorm2d(channels)] if setting.batch_norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, outputs), nn.Unflatten(1, (1, outputs)))
    if setting.family == "transformer":
        return Transformer(inputs.shape[2], outputs)
    return Recurrent(setting.family, inputs.shape[2], outputs)


def batches(task: str, seed: int) -> tuple[Callable[[int], Data], int]:
    """Return the function that draws a batch with sequences this many times as long, and the number of outputs.

    Targets have a value for each of the last places: classes, or numbers to be met.
    """
    chance = torch.Generator().manual_seed(seed)
    if task == "copying":  # read symbols, then write them in the same order
        return lambda length: _copying(5 * length, chance), SYMBOLS
    if task == "adding":  # the sum of the two numbers that are marked
        return lambda length: _adding(10 * length, chance), 1
    bunch = load_digits() if task == "digits" else load_diabetes()
    if task == "digits":  # a sequence of rows
        data = torch.tensor(bunch.images / 16, dtype=torch.float32)
        targets = torch.tensor(bunch.target)[:, None]
    else:
        data = torch.tensor(bunch.data / bunch.data.std(0), dtype=torch.float32)[:, None]
        targets = torch.tensor((bunch.target - bunch.target.mean()) / bunch.target.std(), dtype=torch.float32)[:, None]

    def draw(_: int) -> Data:
        chosen = torch.randint(len(data), (BATCH,), generator=chance)
        return data[chosen], targets[chosen]

    return draw, 10 if task == "digits" else 1


def _copying(length: int, chance: torch.Generator) -> Data:
    symbols = torch.randint(SYMBOLS, (BATCH, length), generator=chance)
    blanks = torch.full_like(symbols, SYMBOLS)
    return one_hot(torch.cat([symbols, blanks], 1), SYMBOLS + 1).float(), symbols


def _adding(length: int, chance: torch.Generator) -> Data:
    numbers = torch.rand(BATCH, length, generator=chance)
    places = torch.rand(BATCH, length, generator=chance).topk(2).indices
    marks = torch.zeros(BATCH, length).scatter(1, places, 1.0)
    return torch.stack([numbers, marks], 2), (numbers * marks).sum(1, keepdim=True)


def train(
    setting: Setting,
    seed: int,
    steps: int,
    guard: SpikeGuard | None,
    unusual: Callable[[int], Step] = lambda _: Step(),
) -> Trained:
    """Train a fresh model, with a guard or without."""
    draw, outputs = batches(setting.task, seed)
    torch.manual_seed(seed)
    model = model_for(setting, draw(1)[0], outputs)
    momentum = {"momentum": 0.9} if setting.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=setting.lr, **momentum)
    scaler = GradScaler("cpu", policy="none", guard=guard)
    rows = []
    for number in range(steps):
        step = unusual(number)
        inputs, targets = draw(step.length)
        written = model(inputs * step.inputs)[:, -targets.shape[1] :]
        if targets.is_floating_point():
            loss = mse_loss(written[..., 0], targets * step.targets)
        else:
            loss = cross_entropy(written.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        scaler.scale(loss * step.loss).backward()
        norm = scaler.unscale_and_clip_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        rows.append((norm.item(), loss.item(), bool(scaler.update().spiked)))
    norms, losses, refused = map(np.asarray, zip(*rows, strict=True))
    return Trained(setting, norms, losses, refused)


def lasting(after: Step, since: int) -> Callable[[int], Step]:
    """Return what changes for good at a step."""
    return lambda number: after if number >= since else Step()


def single(factors: dict[int, float]) -> Callable[[int], Step]:
    """Return what multiplies the loss of single steps."""
    return lambda number: Step(loss=factors.get(number, 1.0))


def percent(share: float) -> str:
    """Return a share as the page writes it."""
    return f"{100 * share:.2f} %"


def healthy_rows(runs: list[Trained]) -> list[str]:
    """Return what the guard refused in healthy runs, by family."""
    rows = ["| healthy runs | runs | steps | refused | in the first 100 steps | worst run |", "|---" * 6 + "|"]
    for family in (*FAMILIES, "all"):
        ours = [run for run in runs if family in (run.setting.family, "all")]
        steps, refused = sum(len(run.refused) for run in ours), sum(run.refused.sum() for run in ours)
        worst = max(ours, key=lambda run: run.refused.sum())
        rows.append(
            f"| {family} | {len(ours)} | {steps:,} | {refused} ({percent(refused / steps)}) "
            f"| {sum(run.refused[:100].sum() for run in ours)} | {worst.refused.sum()} of {len(worst.refused)} |"
        )
    return rows


def loss_line(guarded: list[Trained], free: list[Trained]) -> str:
    """Return how the guard moved the final losses of the runs in which it refused a step."""
    pairs = [(a, b) for a, b in zip(guarded, free, strict=True) if a.refused.any()]
    ratios = [a.final_loss / b.final_loss for a, b in pairs] or [1.0]
    learnt = max(run.final_loss / run.losses[:5].mean() for run in guarded)
    return (
        f"Steps were refused in {len(pairs)} of {len(guarded)} runs. Their final loss with the guard over that without "
        f"it: median {np.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}, lower in "
        f"{sum(ratio < 1 for ratio in ratios)}. No run ends with more than {percent(learnt)} of its first loss."
    )


def planted(runs: list[tuple[int, Setting]], steps: int, guard: SpikeGuard) -> list[str]:
    """Return how many planted spikes the guard found, for each factor.

    Each run has a spike of each factor, at steps after the warm-up that chance decides. A spike that the guard missed
    is hidden if its norm is no larger than the largest before it.
    """
    found: dict[float, list[bool]] = {factor: [] for factor in FACTORS}
    hidden = dict.fromkeys(FACTORS, 0)
    for number, (seed, setting) in enumerate(runs):
        at = random.Random(number).sample(range(guard.warmup, steps), len(FACTORS))
        run = train(setting, seed, steps, guard, single(dict(zip(at, FACTORS, strict=True))))
        for step, factor in zip(at, FACTORS, strict=True):
            found[factor].append(bool(run.refused[step]))
            usual = np.delete(run.norms[:step], [other for other in at if other < step])
            hidden[factor] += not run.refused[step] and run.norms[step] <= usual.max()
    return [f"{sum(found[factor])} of {len(runs)} (hidden: {hidden[factor]})" for factor in FACTORS]


def guard_rows(runs: list[tuple[int, Setting]], steps: int, healthy: list[Trained]) -> list[str]:
    """Return what each guard refuses of healthy steps, and what it finds of planted spikes."""
    spikes = " | ".join(f"spikes of {factor:g} times the loss found" for factor in FACTORS)
    rows = [f"| guard | healthy steps refused | {spikes} |", "|---" * 4 + "|"]
    for name, guard in GUARDS.items():
        ours = [train(setting, seed, steps, guard) for seed, setting in runs] if guard != SpikeGuard() else healthy
        refused = np.concatenate([run.refused for run in ours]).mean()
        rows.append(f"| `{name}` | {percent(refused)} | {' | '.join(planted(runs, steps, guard))} |")
    return rows


def change_rows(changes: list[Change], seeds: int, steps: int) -> list[str]:
    """Return how far the norms jump by a change for good, and how many steps the guard refuses after it.

    The change comes in the middle, and a quarter of the steps is watched after it.
    """
    rows = ["| change for good | network, task | the norms jump | refused | the last of them |", "|---" * 5 + "|"]
    at, end = steps // 2, steps // 2 + steps // 4
    for name, setting, after in changes:
        jumps, refused, last = [], [], []
        for seed in range(seeds):
            run = train(setting, seed, end, SpikeGuard(), lasting(after, at))
            jumps.append(np.median(run.norms[at : at + 10]) / np.median(run.norms[at - 20 : at]))
            refused.append(run.refused[at:].sum())
            last.append(max(np.flatnonzero(run.refused[at:]) + 1, default=0))
        spans = [f"{min(values):.0f} to {max(values):.0f}" for values in (jumps, refused, last)]
        rows.append(f"| {name} | {setting.family}, {setting.task} | × {' | '.join(spans)} |")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short runs: shows that everything runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    steps = 80 if quick else STEPS
    settings, seeds, changes = (SETTINGS[::4], 1, CHANGES[:1]) if quick else (SETTINGS, 2, CHANGES)
    runs = list(itertools.product(range(seeds), settings))
    guarded = [train(setting, seed, steps, SpikeGuard()) for seed, setting in runs]
    free = [train(setting, seed, steps, None) for seed, setting in runs]
    print(*healthy_rows(guarded), "", loss_line(guarded, free), "", sep="\n", flush=True)
    print(*guard_rows(runs, steps, guarded), "", sep="\n", flush=True)
    print(*change_rows(changes, 2 * seeds, steps), "", f"torch {torch.__version__}, {platform.machine()}.", sep="\n")


if __name__ == "__main__":
    main()

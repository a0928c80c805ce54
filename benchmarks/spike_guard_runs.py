"""Compare `SpikeGuard` with the rules of other tools, on the gradient norms of real runs with planted spikes.

    python benchmarks/spike_guard_runs.py            measure and print the table of spike_guard.md, half a minute
    python benchmarks/spike_guard_runs.py --quick    a smoke test with two runs

Eighteen small networks train in float32 on one thread of a CPU, 400 steps each, clipped to a norm of 1. The norm before
clipping and the loss of each step are recorded once. Every rule then reads the same records, in which some norms are
multiplied or replaced. With the same torch on the same machine each call finds the same numbers.
"""

import argparse
import math
import platform
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lossscale_core import SpikeGuard

STEPS, SEEDS = 400, 3
FACTORS = (4, 10, 50)
SPIKES_PER_RUN = 10
Record = np.ndarray
"""The norm and the loss of each step: float64, shape (steps, 2)."""
Rule = Callable[[float, float], bool]
"""A function of the norm and the loss of a step; it remembers them, and returns whether the step is skipped."""


# The runs.


class Task(NamedTuple):
    """A network, the loss of its next batch, and its optimizer."""

    net: nn.Module
    loss_of_batch: Callable[[], Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, float] = {"lr": 3e-3}  # noqa: RUF012


def language_model(chance: torch.Generator) -> Task:
    """Predict the symbols of a Markov chain by a transformer of one layer."""
    successors = torch.randint(0, 24, (24, 24), generator=chance)
    embedding = nn.Embedding(24, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    head, mask = nn.Linear(32, 24), nn.Transformer.generate_square_subsequent_mask(16)

    def loss_of_batch() -> Tensor:
        text = torch.randint(0, 24, (16, 17), generator=chance)
        for place in range(1, 17):
            text[:, place] = successors[text[:, place - 1], torch.randint(0, 3, (16,), generator=chance)]
        return functional.cross_entropy(head(layer(embedding(text[:, :-1]), mask)).flatten(0, 1), text[:, 1:].flatten())

    return Task(nn.ModuleList([embedding, layer, head]), loss_of_batch)


def diffusion(chance: torch.Generator) -> Task:
    """Predict the noise in points of a circle; little noise has a large weight."""
    net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def loss_of_batch() -> Tensor:
        time = torch.rand(64, 1, generator=chance)
        points = functional.normalize(torch.randn(64, 2, generator=chance))
        noise = torch.randn(64, 2, generator=chance)
        noisy = torch.cat([points * (1 - time) + noise * time, time], 1)
        return ((net(noisy) - noise) ** 2 / (time + 0.05)).mean()

    return Task(net, loss_of_batch)


def policy_gradient(chance: torch.Generator) -> Task:
    """Choose the best of six actions by REINFORCE."""
    net, rewards = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 6)), torch.randn(8, 6, generator=chance)

    def loss_of_batch() -> Tensor:
        states = torch.randn(32, 8, generator=chance)
        log_probs = net(states).log_softmax(-1)
        actions = torch.multinomial(log_probs.exp().detach(), 1, generator=chance)
        reward = (states @ rewards).gather(1, actions)
        return -((reward - reward.mean()) * log_probs.gather(1, actions)).mean()

    return Task(net, loss_of_batch)


def critic(chance: torch.Generator) -> Task:
    """Tell points of a circle from those of a generator, which trains as well."""
    net = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)

    def loss_of_batch() -> Tensor:
        of_generator.zero_grad()
        (-net(generator(torch.randn(64, 4, generator=chance))).mean()).backward()
        of_generator.step()
        net.zero_grad()
        points = functional.normalize(torch.randn(64, 2, generator=chance))
        fakes = generator(torch.randn(64, 4, generator=chance)).detach()
        return functional.softplus(net(fakes)).mean() + functional.softplus(-net(points)).mean()

    return Task(net, loss_of_batch)


def experts(chance: torch.Generator) -> Task:
    """Fit a function by four experts, of which a router chooses one for each input."""
    router, target = nn.Linear(16, 4), torch.randn(16, 16, generator=chance)
    parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def loss_of_batch() -> Tensor:
        inputs = torch.randn(64, 16, generator=chance)
        weight, choice = router(inputs).softmax(-1).max(-1)
        outputs = sum((choice == number)[:, None] * part(inputs) for number, part in enumerate(parts))
        return ((outputs * weight[:, None] - torch.sin(inputs @ target)) ** 2).mean()

    return Task(nn.ModuleList([router, parts]), loss_of_batch)


def small_batches(chance: torch.Generator) -> Task:
    """Classify batches of eight by a network with batch norm, at a large rate."""
    net = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    target = torch.randn(10, 3, generator=chance)

    def loss_of_batch() -> Tensor:
        inputs = torch.randn(8, 10, generator=chance)
        return functional.cross_entropy(net(inputs), (inputs @ target).argmax(-1))

    return Task(net, loss_of_batch, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


TASKS = (language_model, diffusion, policy_gradient, critic, experts, small_batches)


def record(make: Callable[[torch.Generator], Task], seed: int) -> Record:
    """Train a task, and return the norm before clipping and the loss of each step."""
    torch.manual_seed(seed)
    task = make(torch.Generator().manual_seed(seed))
    optimizer, rows = task.optimizer(task.net.parameters(), **task.settings), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss_of_batch()
        loss.backward()
        rows.append((nn.utils.clip_grad_norm_(task.net.parameters(), 1.0).item(), loss.item()))
        optimizer.step()
    return np.array(rows)


# The rules. Those of other tools are written here from their public code, without their optimizers.


def spike_guard(**settings: float) -> Rule:
    """Return the rule of a `SpikeGuard`."""
    guard = SpikeGuard(**settings)  # type: ignore[arg-type]
    state = guard.init_state()

    def skips(norm: float, _: float) -> bool:
        nonlocal state
        accepted, state = guard.check(state, norm)
        return not accepted

    return skips


def rolling(leaves_out_bad: bool) -> Rule:
    """Skip a step if loss or norm is more than 6 deviations above the mean of the last 128, skipped steps included.

    https://github.com/allenai/OLMo-core, `SkipStepOptimizer`; an edition of 2026 leaves out what is not finite.
    https://github.com/AI-Hypercomputer/maxtext, `skip_step_on_spikes`: as the older edition.
    """
    history: list[tuple[float, float]] = []

    def skips(norm: float, loss: float) -> bool:
        before = np.array(history[-128:])
        history.append((norm, loss))
        if len(history) < 64:
            return False
        for values, value in zip(before.T, (norm, loss), strict=True):
            known = values[np.isfinite(values)] if leaves_out_bad else values
            # A comparison with NaN is False.
            if not value - known.mean() <= 6.0 * known.std(ddof=1) or (leaves_out_bad and not math.isfinite(value)):
                return True
        return False

    return skips


def z_score(threshold: float) -> Rule:
    """Skip a step if the norm is more than `threshold` deviations above a running mean.

    https://github.com/bluorion-com/ZClip, with `skip_update_on_spike`: alpha 0.97, and 25 steps of warm-up. A spike is
    remembered as the norm to which it would be clipped.
    """
    first: list[float] = []
    mean = variance = 0.0

    def skips(norm: float, _: float) -> bool:
        nonlocal mean, variance
        if len(first) < 25:
            first.append(norm)
            mean, variance = float(np.mean(first)), float(np.var(first))
            return False
        deviation = math.sqrt(variance)
        z = (norm - mean) / (deviation + 1e-6)
        is_spike = z > threshold
        known = mean + threshold * deviation / (z / threshold) if is_spike else norm
        mean = 0.97 * mean + 0.03 * known
        variance = 0.97 * variance + 0.03 * (known - mean) ** 2
        return is_spike

    return skips


RULES: dict[str, Callable[[], Rule]] = {
    "`SpikeGuard()`": spike_guard,
    "`SpikeGuard(threshold=16)`": lambda: spike_guard(threshold=16.0),
    "`SpikeGuard(memory=32)`": lambda: spike_guard(memory=32),
    "OLMo-core, older edition; MaxText": lambda: rolling(leaves_out_bad=False),
    "OLMo-core, edition of 2026": lambda: rolling(leaves_out_bad=True),
    "ZClip, z = 2.5 (its default)": lambda: z_score(2.5),
    "ZClip, z = 8": lambda: z_score(8.0),
}


# The comparison.


def apply(make: Callable[[], Rule], records: Record) -> np.ndarray:
    """Return which steps a new rule skips."""
    rule = make()
    with np.errstate(invalid="ignore"):
        return np.array([rule(float(norm), float(loss)) for norm, loss in records])


def with_norms(records: Record, at: np.ndarray, factor: float) -> Record:
    """Return records in which some norms are multiplied, as by one bad sample behind a loss that is clipped."""
    after = records.copy()
    after[at, 0] *= factor
    return after


def row(make: Callable[[], Rule], runs: list[Record]) -> list[str]:
    """Return what a rule does to healthy runs, to planted spikes, to a lasting change and after a NaN."""
    healthy = [apply(make, run) for run in runs]
    cells = [f"{100 * np.mean(healthy):.2f} %"]
    for factor in FACTORS:
        hits = 0
        for number, run in enumerate(runs):
            at = np.random.default_rng(number).choice(np.arange(100, 390), SPIKES_PER_RUN, replace=False)
            hits += apply(make, with_norms(run, at, factor))[at].sum()
        cells.append(str(hits))
    late = np.arange(200, STEPS)
    lasting = [
        apply(make, with_norms(run, late, 10.0)).sum() - skipped.sum()
        for run, skipped in zip(runs, healthy, strict=True)
    ]
    cells.append(f"{np.median(lasting):.0f}, at most {max(lasting)}")
    spikes, lost, hits = np.arange(260, STEPS, 28), [], 0
    for run in runs:
        after = with_norms(run, spikes, 50.0)
        after[200] = math.nan
        skipped = apply(make, after)
        hits += skipped[spikes].sum()
        skipped[spikes] = False
        lost.append(skipped[201:].sum())
    span = f"{min(lost)} to {max(lost)}" if min(lost) < max(lost) else f"{max(lost)}"
    return [*cells, span, f"{hits} of {len(runs) * len(spikes)}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs: shows that everything runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    runs = [record(task, seed) for task in TASKS[: 2 if quick else None] for seed in range(1 if quick else SEEDS)]
    planted = ", ".join(f"× {factor}" for factor in FACTORS)
    print(f"{len(runs)} runs, {len(runs) * SPIKES_PER_RUN} spikes of each size ({planted})\n")
    header = [
        "rule",
        "healthy steps skipped",
        *(f"found × {factor}" for factor in FACTORS),
        "skipped after × 10 for good",
    ]
    header += ["healthy steps skipped after one NaN", "spikes found after it"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name, make in RULES.items():
        print(f"| {name} | {' | '.join(row(make, runs))} |", flush=True)
    print(f"\ntorch {torch.__version__}, NumPy {np.__version__}, {platform.machine()}.")


if __name__ == "__main__":
    main()

"""The subcommand `lossscale demo`: train a small network in real float16, with and without loss scaling."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lossscale.cli._shared import FILE, OVERWRITE, console, example, require_new
from lossscale_core import dump_policy, load_policy
from lossscale_core.adapters import shown_number, write_whole

_COLUMNS = ("accuracy", "flushed", "skipped", "final scale")
_TABLE_WIDTH = 72
_RESULTS = ("demo.png", "trace.json", "policy.toml")


@click.command(
    "demo",
    short_help="Train in float16, with and without loss scaling.",
    epilog=example("lossscale demo --steps 300 --out lossscale-demo"),
)
@click.option("--policy", "policy_file", type=FILE, help="A policy file (.toml or .json) for the dynamic regime.")
@click.option(
    "--weight", type=click.FloatRange(1e-9, 1.0), default=1e-5, show_default=True, help="The weight of the loss."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The seed of weights and batches.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Training steps of each run.")
@click.option("--out", type=FILE, default="lossscale-demo", show_default=True, help="The folder of the results.")
@OVERWRITE
def command(policy_file: Path | None, weight: float, seed: int, steps: int, out: Path, overwrite: bool) -> None:
    """Train a small network in real float16, with and without loss scaling.

    The demo compares four runs, and repeats them with other weights of the loss. It prints a table and writes
    demo.png, trace.json and policy.toml to the --out folder. Existing files are replaced only with --overwrite; a
    --policy that is itself the folder's policy.toml is never replaced.
    """
    if math.isnan(weight):
        raise click.UsageError("--weight nan must be a number from 1e-9 to 1; pass 1e-5 or leave it out")
    from lossscale import demo  # imported late, since scikit-learn and matplotlib take seconds
    from lossscale.cli._pictures import experiment_as_png

    results = [out / name for name in _RESULTS if not _is_same_file(policy_file, out / name)]
    if not overwrite:
        require_new(*results, hint="name another folder, or pass --overwrite")
    policy = demo.DEFAULT_POLICY if policy_file is None else load_policy(policy_file)
    settings = demo.Settings(policy, weight, seed, steps)
    out.mkdir(parents=True, exist_ok=True)
    terminal = console()
    with _progress(terminal) as progress:
        experiment = demo.run_experiment(settings, lambda name, total: _advancing(progress, name, total))
    terminal.print(_results_table(experiment, is_narrow=terminal.width < _TABLE_WIDTH))
    contents: dict[str, str | bytes] = {
        "demo.png": experiment_as_png(experiment),
        "trace.json": json.dumps(experiment.as_json(), indent=1) + "\n",
    }
    for path in results:
        if path.name in contents:
            write_whole(path, contents[path.name], overwrite=overwrite)
        else:
            dump_policy(policy, path, overwrite=overwrite)
    terminal.print(f"wrote demo.png, trace.json and policy.toml to {out}", soft_wrap=True)
    # Change the policy, and try it on the same gradients without training again.
    again = f"lossscale simulate {out / 'policy.toml'} --gradient-max {out / 'trace.json'}"
    terminal.print(f"next: {again}", soft_wrap=True)


def _is_same_file(path: Path | None, other: Path) -> bool:
    return path is not None and path.exists() and other.exists() and path.samefile(other)


def _progress(terminal: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=terminal,
    )


def _advancing(progress: Progress, name: str, total: int) -> Callable[[], Any]:
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)


def _results_table(experiment: Any, is_narrow: bool) -> Table:
    """Return the table of the results; a narrow one has the results of a regime below each other."""
    settings = experiment.settings
    table = Table(title=f"Digits in float16: loss × {settings.weight:g}, {settings.steps} steps, seed {settings.seed}")
    table.add_column("regime", no_wrap=not is_narrow)
    for column in ("result",) if is_narrow else _COLUMNS:
        table.add_column(column, justify="left" if is_narrow else "right", no_wrap=True)
    for name, run in experiment.runs.items():
        flushed, skipped = f"{run.flushed:.1%}", str(run.skipped_steps)
        results = (f"{run.accuracy:.1%}", flushed, skipped, shown_number(run.final_scale))
        if is_narrow:
            table.add_row(name, "\n".join(map(" ".join, zip(_COLUMNS, results, strict=True))), end_section=True)
        else:
            table.add_row(name, *results)
    table.caption = "accuracy on test images; flushed: gradient elements lost to zero; skipped: steps that overflowed"
    return table

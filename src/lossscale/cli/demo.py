"""The subcommand `lossscale demo`: train a small network in real float16, with and without loss scaling."""

from pathlib import Path

import click

from lossscale.cli._shared import FILE, OVERWRITE, example, print_table, require_new, say
from lossscale_core import load_policy
from lossscale_core.adapters import format_number, policy_text
from lossscale_core.files import csv_lines, write_whole
from lossscale_core.testing import TITLES


@click.command("demo", epilog=example("lossscale demo --steps 300 --out lossscale-demo"))
@click.option("--policy", "policy_file", type=FILE, help="A policy file (.toml or .json) for the dynamic regime.")
@click.option("--weight", type=click.FloatRange(1e-9, 1.0), default=1e-5, help="The weight of the loss.")
@click.option("--seed", type=click.IntRange(0), default=0, help="The seed of weights and batches.")
@click.option("--steps", type=click.IntRange(1), default=300, help="Training steps of each run.")
@click.option("--out", type=FILE, default="lossscale-demo", help="The folder of the results.")
@OVERWRITE
def command(policy_file: Path | None, weight: float, seed: int, steps: int, out: Path, overwrite: bool) -> None:
    """Train a network in float16, with and without loss scaling.

    The demo compares four runs. It prints a table, and writes demo.png, trace.csv and, without --policy, policy.toml to
    the --out folder.
    """
    # Imported late, since matplotlib takes seconds.
    from lossscale.cli._pictures import draw_demo
    from lossscale.demo import DEFAULT_POLICY, regimes, train

    policy = DEFAULT_POLICY if policy_file is None else load_policy(policy_file)
    results = [out / name for name in ("demo.png", "trace.csv", *(["policy.toml"] if policy_file is None else []))]
    require_new(*results, overwrite=overwrite)
    out.mkdir(parents=True, exist_ok=True)
    runs = {name: train(scaling, dtype, weight, seed, steps) for name, (dtype, scaling) in regimes(policy).items()}
    rows = [("regime", "accuracy", "zero", "skipped", "scale")]
    for name, run in runs.items():
        skipped, scale = str(int(run.steps[2].sum())), format_number(run.final_scale)
        rows.append((name, f"{run.accuracy:.1%}", f"{run.zero:.1%}", skipped, scale))
    title = f"Digits in float16: loss × {weight:g}, {steps} steps, seed {seed}"
    say(title)
    print_table(rows)
    say("accuracy on test images; zero: gradient elements that are zero; skipped: steps that overflowed")
    trace = [
        (step, scale, skipped == 0.0, skipped == 1.0, False, None, largest, 0)
        for step, (_, scale, skipped, largest) in enumerate(run.steps.T.tolist())
    ]
    contents: dict[str, str | bytes] = {
        "demo.png": draw_demo(runs, title),
        "trace.csv": "".join(csv_lines(trace, TITLES)),
        "policy.toml": policy_text(policy, ".toml"),
    }
    for path in results:
        write_whole(path, contents[path.name], overwrite=overwrite)
    say(f"wrote {', '.join(path.name for path in results)} to {out}")
    say(f"next: change the policy, and run: lossscale simulate {policy_file or results[2]} {results[1]}")

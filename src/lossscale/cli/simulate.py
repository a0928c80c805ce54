"""The subcommand `lossscale simulate`: try a policy on a recorded run, without training."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.table import Table

from lossscale.cli._shared import FILE, OVERWRITE, console, example, number_or_text, require_picture, scale_text
from lossscale.cli._trace_file import read_gradient_max, read_overflow
from lossscale_core import ScalingPolicy, as_policy, diagnose, testing
from lossscale_core._files import write_whole

_MOST_ROWS = 40


@click.command(
    "simulate", epilog=example("lossscale simulate lossscale-demo/policy.toml --gradient-max lossscale-demo/trace.json")
)
@click.argument("policy")
@click.option("--overflow", type=FILE, help="A file with 0 or 1 for each step: whether it overflowed.")
@click.option("--gradient-max", type=FILE, help="A file with each step's largest gradient magnitude, unscaled.")
@click.option("--dtype", type=click.Choice(tuple(testing.LARGEST_NUMBER)), default="float16", show_default=True)
@click.option("--plot", type=FILE, default="simulation.png", show_default=True, help="The file of the picture.")
@OVERWRITE
def command(
    policy: str, overflow: Path | None, gradient_max: Path | None, dtype: str, plot: Path, overwrite: bool
) -> None:
    """Try POLICY on a recorded run, without training.

    POLICY is a .toml or .json file, "dynamic", "none" or a number (a fixed scale). The run comes from --overflow or
    --gradient-max; the demo's trace.json serves for both.
    """
    if (overflow is None) == (gradient_max is None):
        raise click.UsageError("pass one of --overflow FILE and --gradient-max FILE")
    require_picture(plot, "--plot", overwrite)
    scaling = as_policy(number_or_text(policy))
    if overflow is not None:
        trace = testing.simulate(scaling, [not flag for flag in read_overflow(overflow)])
    else:
        trace = testing.simulate_gradients(scaling, read_gradient_max(gradient_max or Path()), dtype)
    terminal = console()
    terminal.print(_stretches_table(trace))
    for line in _summary(scaling, trace):
        terminal.print(line, soft_wrap=True, highlight=False)
    write_whole(plot, _picture(trace, plot.suffix[1:]), overwrite=overwrite)
    terminal.print(f"wrote {plot}", soft_wrap=True)


def _stretches_table(trace: testing.Trace) -> Table:
    """Return a table with a row for each stretch of steps under one loss scale."""
    table = Table("steps", "loss scale", "applied", "skipped", "then")
    used = trace.loss_scale_used
    starts = [0, *(np.flatnonzero(np.diff(used)) + 1).tolist()]
    stretches = list(zip(starts, [*starts[1:], len(used)], strict=True))
    for start, end in stretches[:_MOST_ROWS]:
        skipped = int(trace.skipped[start:end].sum())
        after, before = trace.loss_scale_after[end - 1], used[end - 1]
        then = "grows" if after > before else "backs off" if after < before else "ends"
        table.add_row(f"{start}–{end - 1}", scale_text(before), str(end - start - skipped), str(skipped), then)
    if len(stretches) > _MOST_ROWS:
        table.caption = f"{len(stretches) - _MOST_ROWS} more changes of the scale are not shown"
    return table


def _summary(scaling: ScalingPolicy, trace: testing.Trace) -> list[str]:
    applied = np.flatnonzero(~trace.skipped)
    last = {name: column[-1] for name, column in trace._asdict().items()}
    state: Any = SimpleNamespace(**last, loss_scale=trace.loss_scale_after[-1])
    limit = getattr(scaling, "max_overflow_streak", None) or math.inf
    reached = np.flatnonzero(trace.overflow_streak >= limit)
    return [
        *([f"max_overflow_streak={limit} is reached at step {reached[0]}: training may stop"] if len(reached) else []),
        f"skipped: {trace.skipped.mean():.1%} of {len(trace.skipped)} steps",
        f"first applied step: {applied[0] if len(applied) else 'none'}",
        f"final scale: {scale_text(trace.loss_scale_after[-1])}",
        diagnose(scaling, state),
    ]


def _picture(trace: testing.Trace, suffix: str) -> bytes:
    from lossscale.cli._pictures import as_picture, draw_scale, new_figure  # imported late: matplotlib takes a second

    figure = new_figure(8, 4)
    draw_scale(figure.subplots(), trace.loss_scale_used, trace.skipped, "#0072b2", "loss scale")
    return as_picture(figure, suffix)

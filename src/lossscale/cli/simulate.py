"""The subcommand `lossscale simulate`: try a policy on a recorded run, without training."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.table import Table

from lossscale.cli._shared import (
    AS_JSON,
    FILE,
    OVERWRITE,
    console,
    example,
    print_json,
    require_picture,
    typed_policy,
)
from lossscale.cli._trace_file import read_gradient_max, read_overflow
from lossscale_core import BaseScaling, ScalingPolicy, diagnose, policy_to_dict, testing
from lossscale_core.adapters import shown_number, write_whole

_MOST_ROWS = 40


@click.command(
    "simulate",
    short_help="Try a policy on a recorded run, without training.",
    epilog=example("lossscale simulate lossscale-demo/policy.toml --gradient-max lossscale-demo/trace.json"),
)
@click.argument("policy")
@click.option("--overflow", type=FILE, help="A file with 0 or 1 for each step: whether it overflowed.")
@click.option("--gradient-max", type=FILE, help="A file with each step's largest gradient magnitude, unscaled.")
@click.option("--dtype", type=click.Choice(tuple(testing.LARGEST_NUMBER)), default="float16", show_default=True)
@click.option("--plot", type=FILE, help="Also draw the loss scale over the steps, into this file.")
@AS_JSON
@OVERWRITE
def command(
    policy: str,
    overflow: Path | None,
    gradient_max: Path | None,
    dtype: str,
    plot: Path | None,
    as_json: bool,
    overwrite: bool,
) -> None:
    """Try POLICY on a recorded run, without training.

    POLICY is a .toml or .json file, "dynamic", "none" or a number (a fixed scale). The run comes from --overflow or
    --gradient-max; the demo's trace.json serves for both. A picture needs the `plot` extra.
    """
    if (overflow is None) == (gradient_max is None):
        raise click.UsageError("pass one of --overflow FILE and --gradient-max FILE")
    if plot is not None:
        require_picture(plot, "--plot", overwrite)
    scaling = typed_policy(policy, "POLICY")
    if overflow is not None:
        trace = testing.simulate(scaling, [not flag for flag in read_overflow(overflow)])
    else:
        trace = testing.simulate_gradients(scaling, read_gradient_max(gradient_max or Path()), dtype)
    picture = None if plot is None else _picture(trace, plot.suffix[1:])
    stretches, summary = _stretches(trace), _summary(scaling, trace)
    if as_json:
        print_json({"policy": policy_to_dict(scaling), **summary, "stretches": stretches})
    else:
        _print(stretches, summary)
    if plot is not None and picture is not None:
        write_whole(plot, picture, overwrite=overwrite)
        if not as_json:
            console().print(f"wrote {plot}", soft_wrap=True)


def _stretches(trace: testing.Trace) -> list[dict[str, Any]]:
    """Return a row for each stretch of steps under one loss scale."""
    used = trace.loss_scale_used
    starts = [0, *(np.flatnonzero(np.diff(used)) + 1).tolist()]
    return [_stretch(trace, start, end) for start, end in zip(starts, [*starts[1:], len(used)], strict=True)]


def _stretch(trace: testing.Trace, start: int, end: int) -> dict[str, Any]:
    skipped = int(trace.skipped[start:end].sum())
    before, after = float(trace.loss_scale_used[end - 1]), float(trace.loss_scale_after[end - 1])
    then = "grows" if after > before else "backs off" if after < before else "ends"
    return {
        "first_step": start,
        "last_step": end - 1,
        "loss_scale": before,
        "applied": end - start - skipped,
        "skipped": skipped,
        "then": then,
    }


def _summary(scaling: ScalingPolicy, trace: testing.Trace) -> dict[str, Any]:
    applied = np.flatnonzero(~trace.skipped)
    last = {name: column[-1] for name, column in trace._asdict().items()}
    # A policy may add counters of its own, which the trace has as columns, too.
    state: Any = SimpleNamespace(**last, loss_scale=trace.loss_scale_after[-1])
    limit = BaseScaling.of(scaling).max_overflow_streak
    reached = np.flatnonzero(trace.overflow_streak >= (limit or math.inf))
    return {
        "steps": len(trace.skipped),
        "skipped_steps": int(trace.skipped.sum()),
        "first_applied_step": int(applied[0]) if len(applied) else None,
        "max_overflow_streak": limit,
        "max_overflow_streak_reached_at": int(reached[0]) if len(reached) else None,
        "final_loss_scale": float(trace.loss_scale_after[-1]),
        "diagnosis": diagnose(scaling, state),
    }


def _print(stretches: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    table = Table("steps", "loss scale", "applied", "skipped", "then")
    for row in stretches[:_MOST_ROWS]:
        steps = f"{row['first_step']}–{row['last_step']}"
        table.add_row(steps, shown_number(row["loss_scale"]), str(row["applied"]), str(row["skipped"]), row["then"])
    if len(stretches) > _MOST_ROWS:
        table.caption = f"{len(stretches) - _MOST_ROWS} more changes of the scale are not shown"
    terminal = console()
    terminal.print(table)
    for line in _summary_lines(summary):
        terminal.print(line, soft_wrap=True, highlight=False)


def _summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    first, reached = summary["first_applied_step"], summary["max_overflow_streak_reached_at"]
    if reached is not None:
        yield f"max_overflow_streak={summary['max_overflow_streak']} is reached at step {reached}: training may stop"
    yield f"skipped: {summary['skipped_steps'] / summary['steps']:.1%} of {summary['steps']} steps"
    yield f"first applied step: {'none' if first is None else first}"
    yield f"final scale: {shown_number(summary['final_loss_scale'])}"
    yield summary["diagnosis"]


def _picture(trace: testing.Trace, suffix: str) -> bytes:
    from lossscale.cli._pictures import as_picture, draw_scale, new_figure  # imported late: matplotlib takes a second

    figure = new_figure(8, 4)
    draw_scale(figure.subplots(), trace.loss_scale_used, trace.skipped, "loss scale", color="#0072b2")
    return as_picture(figure, suffix)

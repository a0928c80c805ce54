"""The subcommand `lossscale simulate`: try a policy on a recorded run, without training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from lossscale.cli._shared import AS_JSON, FILE, example, parse_policy, print_json, print_table, say
from lossscale.cli._trace import Trace, read_trace
from lossscale_core import BaseScaling, ScalingPolicy, diagnose, policy_to_dict, testing
from lossscale_core.adapters import format_number

_ONLY_FLAGS = "without gradient magnitudes the overflows do not react to the scale; a real run may differ"
_WITH_MAGNITUDES = (
    "gradients overflow above {dtype}'s largest number, or where the trace overflowed at this scale or below"
)


@click.command("simulate", epilog=example("lossscale simulate policy.toml scale.csv"))
@click.argument("policy")
@click.argument("trace", type=FILE)
@click.option("--dtype", type=click.Choice(tuple(testing.LARGEST_NUMBER)), default="float16")
@AS_JSON
def command(policy: str, trace: Path, dtype: str, as_json: bool) -> None:
    """Try POLICY on the recorded run TRACE, without training.

    POLICY is a .toml or .json file, "dynamic", "none" or a number (a fixed scale). TRACE is a CSV file of lossscale run
    or of the demo.
    """
    scaling, run = parse_policy(policy), read_trace(trace)
    counted = Trace._make(column[run.applied | run.overflowed] for column in run)  # without steps that a guard skipped
    simulated, basis = _simulate(scaling, counted, dtype)
    numbers = counted.step.astype(int)
    stretches, summary = _stretches(simulated, numbers), _summary(scaling, simulated, numbers)
    if as_json:
        print_json({"policy": policy_to_dict(scaling), "basis": basis, **summary, "stretches": stretches})
        return
    rows = [("steps", "loss scale", "skipped", "then")]
    for row in stretches:
        steps, scale = f"{row['first_step']}-{row['last_step']}", format_number(row["loss_scale"])
        rows.append((steps, scale, str(row["skipped"]), row["then"]))
    print_table(rows)
    if (reached := summary["max_overflow_streak_reached_at"]) is not None:
        say(f"max_overflow_streak is reached at step {reached}: training may stop")
    say(f"{summary['diagnosis']} In the trace {int((~run.applied).sum())} of {len(run.step)} steps were skipped.")
    say(f"{basis}.")


def _simulate(scaling: ScalingPolicy, run: Trace, dtype: str) -> tuple[testing.Trace, str]:
    """Return the policy's run, and a sentence about its overflows."""
    if not np.isfinite(run.gradient_max[~run.overflowed]).any():
        return testing.simulate(scaling, ~run.overflowed), _ONLY_FLAGS
    at_limit = testing.LARGEST_NUMBER[dtype] / run.scale * (1.0 + 2.0**-40)
    magnitudes = np.where(run.overflowed, at_limit, np.nan_to_num(run.gradient_max, posinf=0.0))
    return testing.simulate_gradients(scaling, magnitudes, dtype), _WITH_MAGNITUDES.format(dtype=dtype)


def _stretches(trace: testing.Trace, numbers: Any) -> list[dict[str, Any]]:
    """Return a row for each stretch of steps under one loss scale; `numbers` has the numbers of the recorded steps."""
    starts = [0, *(np.flatnonzero(np.diff(trace.loss_scale_used)) + 1).tolist()]
    rows = []
    for start, end in zip(starts, [*starts[1:], len(trace.skipped)], strict=True):
        skipped = int(trace.skipped[start:end].sum())
        before, after = float(trace.loss_scale_used[end - 1]), float(trace.loss_scale_after[end - 1])
        then = "grows" if after > before else "backs off" if after < before else "ends"
        row = {"first_step": int(numbers[start]), "last_step": int(numbers[end - 1]), "loss_scale": before}
        rows.append({**row, "applied": end - start - skipped, "skipped": skipped, "then": then})
    return rows


def _summary(scaling: ScalingPolicy, trace: testing.Trace, numbers: Any) -> dict[str, Any]:
    """Return the counts, the last scale and the diagnosis of a simulated run."""
    # The trace also has columns for a policy's own counters.
    columns = {**trace._asdict(), "loss_scale": trace.loss_scale_after}
    last: Any = SimpleNamespace(**{name: column[-1] for name, column in columns.items()})
    limit = BaseScaling.of(scaling).max_overflow_streak
    applied, reached = np.flatnonzero(~trace.skipped), np.flatnonzero(trace.overflow_streak >= (limit or np.inf))
    return {
        "steps": len(trace.skipped),
        "skipped_steps": int(trace.skipped.sum()),
        "first_applied_step": int(numbers[applied[0]]) if len(applied) else None,
        "max_overflow_streak_reached_at": int(numbers[reached[0]]) if len(reached) else None,
        "final_loss_scale": float(last.loss_scale),
        "diagnosis": diagnose(scaling, last),
    }

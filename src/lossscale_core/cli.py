"""The `lossscale` command: watch the demo, try a policy on a recorded run, check and convert policies and checkpoints.

Needs the `demo` extra. On bad input every command prints one sentence and exits with status 2.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lossscale_core import dialects, testing
from lossscale_core._checkpoint import state_from_dict, state_to_dict
from lossscale_core._config import (
    as_policy,
    load_policy,
    policy_as_text,
    policy_from_dict,
    policy_to_dict,
    policy_to_toml,
)
from lossscale_core._files import write_whole
from lossscale_core._foreign_files import read_checkpoint, read_config
from lossscale_core._policy import ScalingPolicy
from lossscale_core._report import diagnose
from lossscale_core._schema import policy_schema
from lossscale_core._settings import rules_of
from lossscale_core._trace_file import read_gradient_max, read_overflow
from lossscale_core._words import shown
from lossscale_core.errors import LossScaleError

_FRAMEWORKS = {
    "numpy": "lossscale_core",
    "torch": "lossscale_torch",
    "jax": "lossscale_jax",
    "tensorflow": "lossscale_tf",
}
_MOST_ROWS = 40
_PICTURES = (".png", ".pdf", ".svg")
_RESULTS = ("demo.png", "trace.json", "policy.toml")
_FILE = click.Path(path_type=Path)
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace results that are there already.")


def run(arguments: list[str] | None = None) -> None:
    """Run the command on `arguments` (`sys.argv` when left out) and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × and – is no reason to fail
    try:
        sys.exit(lossscale.main(arguments, prog_name="lossscale", standalone_mode=False))
    except click.Abort:
        _fail("stopped", status=130)
    except click.ClickException as error:
        _fail(error.format_message())
    except LossScaleError as error:
        _fail(str(error))
    except (RecursionError, MemoryError) as error:
        _fail(f"what is in the file is too large or nested too deeply ({type(error).__name__}); pass a smaller file")
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _example(command: str) -> str:
    """Return the end of a command's help: `command`, set apart so that it can be copied."""
    return f"\b\nExample:\n  {command}"


def _fail(message: str, status: int = 2) -> None:
    click.echo(f"lossscale: {message}", err=True)
    sys.exit(status)


@click.group(
    epilog=_example("lossscale demo"),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lossscale")
@click.pass_context
def lossscale(context: click.Context) -> None:
    """Loss scaling for float16 training: a demo, a simulator, and policies and checkpoints of this and other tools."""
    _help_if_alone(context)


@lossscale.command(epilog=_example("lossscale demo --steps 300 --out lossscale-demo"))
@click.option(
    "--framework", type=click.Choice(tuple(_FRAMEWORKS)), default="numpy", show_default=True, help="What trains."
)
@click.option("--policy", "policy_file", type=_FILE, help="A policy file (.toml or .json) for the dynamic regime.")
@click.option("--weight", type=click.FloatRange(1e-9, 1.0), default=1e-5, show_default=True, help="Weighs the loss.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seeds weights and batches.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Training steps of each run.")
@click.option("--out", type=_FILE, default="lossscale-demo", show_default=True, help="Where the results go.")
@_OVERWRITE
def demo(
    framework: str, policy_file: Path | None, weight: float, seed: int, steps: int, out: Path, overwrite: bool
) -> None:
    """Train a small network in real float16, with and without loss scaling.

    Four runs side by side, then the same over a sweep of the loss's weight. Prints a table and leaves demo.png,
    trace.json and policy.toml in the --out folder. Files that are there are left alone, unless --overwrite is given;
    a --policy that is itself the folder's policy.toml stays as it is.
    """
    if math.isnan(weight):
        raise click.UsageError("--weight nan must be a number from 1e-9 to 1; pass 1e-5 or leave it out")
    if importlib.util.find_spec(_FRAMEWORKS[framework]) is None or importlib.util.find_spec(framework) is None:
        raise click.UsageError(
            f"--framework {framework} needs its adapter, which this installation lacks; "
            f"run: pip install --upgrade 'lossscale[{framework}]'"
        )
    from lossscale_core import demo as demonstration  # here, since it needs scikit-learn and matplotlib

    results = [out / name for name in _RESULTS if not _is_same_file(policy_file, out / name)]
    if not overwrite:
        _require_new(*results, mend="name another folder, or pass --overwrite")
    policy = demonstration.DEFAULT_POLICY if policy_file is None else load_policy(policy_file)
    settings = demonstration.Settings(framework, policy, weight, seed, steps)
    out.mkdir(parents=True, exist_ok=True)
    console = _console()
    with _progress(console) as progress:
        experiment = demonstration.run_experiment(settings, lambda name, total: _advancing(progress, name, total))
    console.print(_results_table(experiment))
    contents: dict[str, str | bytes] = {
        "demo.png": demonstration.as_png(experiment),
        "trace.json": json.dumps(demonstration.as_json(experiment), indent=1) + "\n",
        "policy.toml": policy_to_toml(policy),
    }
    for path in results:
        write_whole(path, contents[path.name], overwrite=overwrite)
    console.print(f"wrote demo.png, trace.json and policy.toml to {out}", soft_wrap=True)


@lossscale.command(
    epilog=_example("lossscale simulate lossscale-demo/policy.toml --gradient-max lossscale-demo/trace.json")
)
@click.argument("policy")
@click.option("--overflow", type=_FILE, help="A file that says of each step whether it overflowed: 0 or 1.")
@click.option("--gradient-max", type=_FILE, help="A file with each step's largest gradient magnitude, unscaled.")
@click.option("--dtype", type=click.Choice(tuple(testing.LARGEST_NUMBER)), default="float16", show_default=True)
@click.option("--plot", type=_FILE, default="simulation.png", show_default=True, help="Where the picture goes.")
@_OVERWRITE
def simulate(
    policy: str, overflow: Path | None, gradient_max: Path | None, dtype: str, plot: Path, overwrite: bool
) -> None:
    """Try POLICY on a recorded run, without training.

    POLICY is a .toml or .json file, "dynamic", "none" or a number (a fixed scale). The run comes from --overflow or
    --gradient-max; the demo's trace.json serves for both.
    """
    if (overflow is None) == (gradient_max is None):
        raise click.UsageError("pass one of --overflow FILE and --gradient-max FILE")
    if plot.suffix.lower() not in _PICTURES:
        raise click.UsageError(f"--plot {plot} must end in {', '.join(_PICTURES)}")
    if not overwrite:
        _require_new(plot, mend="name another file with --plot, or pass --overwrite")
    scaling = as_policy(_number_or_text(policy))
    if overflow is not None:
        trace = testing.simulate(scaling, [not flag for flag in read_overflow(overflow)])
    else:
        trace = testing.simulate_gradients(scaling, read_gradient_max(gradient_max or Path()), dtype)
    console = _console()
    console.print(_stretches_table(trace))
    for line in _summary(scaling, trace):
        console.print(line, soft_wrap=True, highlight=False)
    write_whole(plot, _picture(trace, plot.suffix[1:]), overwrite=overwrite)
    console.print(f"wrote {plot}", soft_wrap=True)


@lossscale.group(epilog=_example("lossscale policy check policy.toml"), invoke_without_command=True)
@click.pass_context
def policy(context: click.Context) -> None:
    """Check, show and convert policy files."""
    _help_if_alone(context)


@policy.command(epilog=_example("lossscale policy check policy.toml"))
@click.argument("file", type=_FILE)
def check(file: Path) -> None:
    """Say whether FILE holds a valid policy."""
    kind = policy_to_dict(load_policy(file))["kind"]
    click.echo(f"{file}: a valid policy of kind {kind!r}")


@policy.command(epilog=_example("lossscale policy show policy.toml"))
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Show every setting of the policy in FILE, defaults included, with its rule."""
    scaling = load_policy(file)
    table = Table("setting", "value", "rule", title=f"{file}: {type(scaling).__name__}")
    for field, rule in rules_of(scaling):
        table.add_row(field.name, str(getattr(scaling, field.name)), rule.text)
    _console().print(table)


@policy.command(epilog=_example("lossscale policy schema lossscale-policy.schema.json"))
@click.argument("file", type=_FILE, required=False)
def schema(file: Path | None) -> None:
    """Write the JSON Schema of policy files to a new FILE, or print it."""
    text = json.dumps(policy_schema())
    if file is None:
        click.echo(text)
    else:
        _require_new(file)
        write_whole(file, text + "\n")
        click.echo(f"wrote {file}")


@policy.command(epilog=_example("lossscale policy convert --from deepspeed ds_config.json --to policy.toml"))
@click.argument("file", type=_FILE)
@click.option("--from", "peer", required=True, metavar="TOOL", help="Whose config it is; see below.")
@click.option("--to", "out", type=_FILE, help="A new .toml or .json file for the policy; printed when left out.")
def convert(file: Path, peer: str, out: Path | None) -> None:
    """Turn another tool's config, in JSON or TOML, into a policy file.

    TOOL is torch, torch-sharded, accelerate, apex, apex-fp16-utils, apex-hysteresis, deepspeed (the fp16 block, or the
    JSON that holds it), megatron, megatron-v1, fairseq, colossalai, keras, keras-experimental, keras3, tf-v1,
    tf-contrib, jmp, flax, paddle, paddle-static or mindspore. What it does otherwise is said on stderr.
    """
    _require_new(out)
    with _warnings_as_lines():
        scaling = dialects.from_peer(peer, read_config(file))
    if out is None:
        click.echo(policy_to_toml(scaling), nl=False)
    else:
        write_whole(out, policy_as_text(scaling, out))
        click.echo(f"wrote {out}: a policy of kind {policy_to_dict(scaling)['kind']!r}")


_CHECKPOINT_OPTIONS = (
    click.argument("file", type=_FILE),
    click.option("--from", "peer", metavar="TOOL", help="Whose checkpoint it is; guessed when left out."),
    click.option("--policy", "policy_file", type=_FILE, help="The policy (.toml or .json) that will go on with it."),
    click.option("--key", help="Where in FILE the scaler is: scaler, or optimizer.grad_scaler."),
)


def _with_checkpoint_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_CHECKPOINT_OPTIONS):
        command = option(command)
    return command


@lossscale.group(epilog=_example("lossscale checkpoint show scaler.pt"), invoke_without_command=True)
@click.pass_context
def checkpoint(context: click.Context) -> None:
    """Show and convert saved scalers, ours and other tools'."""
    _help_if_alone(context)


@checkpoint.command("show", epilog=_example("lossscale checkpoint show scaler.pt"))
@_with_checkpoint_options
def show_checkpoint(file: Path, peer: str | None, policy_file: Path | None, key: str | None) -> None:
    """Show the saved scaler in FILE: JSON, or what torch.save wrote (needs torch 2.10 or later)."""
    source, state, scaling = _read_state(file, peer, policy_file, key)
    click.echo(f"{file}: {source}")
    table = Table("field", "value")
    for name, value in state_to_dict(state).items():
        table.add_row(name, _scale_text(value) if name == "loss_scale" else f"{value:g}")
    for name, value in ({} if scaling is None else policy_to_dict(scaling)).items():
        table.add_row(f"policy: {name}", _scale_text(value) if name.endswith("_scale") else str(value))
    _console().print(table)
    if scaling is not None and state.steps > 0:  # other tools do not save how many steps there were
        _console().print(diagnose(scaling, state), soft_wrap=True, highlight=False)


@checkpoint.command("convert", epilog=_example("lossscale checkpoint convert scaler.pt --to state.json"))
@_with_checkpoint_options
@click.option("--to", "out", type=_FILE, help="A new .json file for the state; printed when left out.")
def convert_checkpoint(
    file: Path, peer: str | None, policy_file: Path | None, key: str | None, out: Path | None
) -> None:
    """Turn the saved scaler in FILE into the JSON that `state_from_dict` reads in every framework.

    The policy is saved beside it where --policy names it or the checkpoint holds all of it.
    """
    _require_new(out)
    source, state, scaling = _read_state(file, peer, policy_file, key)
    text = json.dumps(state_to_dict(state, scaling), indent=2)
    if out is None:
        click.echo(text)
    else:
        write_whole(out, text + "\n")
        click.echo(f"wrote {out}: {source}, {'with' if scaling is not None else 'without'} its policy")


def _read_state(
    file: Path, peer: str | None, policy_file: Path | None, key: str | None
) -> tuple[str, Any, ScalingPolicy | None]:
    """Return in words what a checkpoint file holds, its state, and the policy given with it or saved in it."""
    with _warnings_as_lines():
        where, saved = read_checkpoint(file, key)
        scaling = None if policy_file is None else load_policy(policy_file)
        place = f" at {shown(where)}" if where else ""
        if peer is None and "version" in saved:
            scaling = _saved_policy(saved) if scaling is None else scaling
            return f"a state of this library{place}", state_from_dict(saved, scaling), scaling
        peer = _guessed(file, saved) if peer is None else peer
        state = dialects.state_from_peer(peer, saved, scaling)
        scaling = dialects.policy_in(peer, saved) if scaling is None else scaling
        return f"the scaler of {peer}{place}", state, scaling


def _saved_policy(saved: Mapping[str, Any]) -> ScalingPolicy | None:
    return policy_from_dict(saved["policy"]) if "policy" in saved else None


def _guessed(file: Path, saved: Mapping[str, Any]) -> str:
    try:
        return dialects.guess_peer(saved)
    except LossScaleError as error:
        raise click.UsageError(f"{file}: {error}; pass --from TOOL, or --key with the place of the scaler") from error


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Say each warning in a line of its own on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        click.echo(f"lossscale: warning: {warning.message}", err=True)


def _require_new(*paths: Path | None, mend: str = "name a new file") -> None:
    """Say before the work that a file will not be written over; a link counts, even one that leads nowhere."""
    for path in paths:
        if path is not None and os.path.lexists(path):
            raise click.UsageError(f"{path} exists and is not overwritten; {mend}")


def _is_same_file(one: Path | None, other: Path) -> bool:
    return one is not None and one.exists() and other.exists() and one.samefile(other)


def _console() -> Console:
    """Return a console that prints names from files as they are: `[/x]` and `:x:` are markup to rich."""
    return Console(markup=False, emoji=False)


def _help_if_alone(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _number_or_text(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _advancing(progress: Progress, name: str, total: int) -> Callable[[], Any]:
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)


def _results_table(experiment: Any) -> Table:
    settings = experiment.settings
    table = Table(title=f"Digits in float16: loss × {settings.weight:g}, {settings.steps} steps, seed {settings.seed}")
    table.add_column("regime", no_wrap=True)
    for column in ("accuracy", "flushed", "skipped", "final scale"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, run_ in experiment.runs.items():
        flushed, skipped = f"{run_.flushed:.1%}", str(run_.skipped_steps)
        table.add_row(name, f"{run_.accuracy:.1%}", flushed, skipped, _scale_text(run_.final_scale))
    table.caption = "accuracy on test images; flushed: gradient elements lost to zero; skipped: steps that overflowed"
    return table


def _scale_text(scale: float) -> str:
    """Return a large or tiny power of two as one, since nobody knows it by its digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and not -9 < exponent <= 17 else f"{scale:g}"


def _stretches_table(trace: Any) -> Table:
    """Return a table with a row for each stretch of steps under one loss scale."""
    table = Table("steps", "loss scale", "applied", "skipped", "then")
    used = trace.loss_scale_used
    starts = [0, *(np.flatnonzero(np.diff(used)) + 1).tolist()]
    stretches = list(zip(starts, [*starts[1:], len(used)], strict=True))
    for start, end in stretches[:_MOST_ROWS]:
        skipped = int(trace.skipped[start:end].sum())
        after, before = trace.loss_scale_after[end - 1], used[end - 1]
        then = "grows" if after > before else "backs off" if after < before else "ends"
        table.add_row(f"{start}–{end - 1}", _scale_text(before), str(end - start - skipped), str(skipped), then)
    if len(stretches) > _MOST_ROWS:
        table.caption = f"{len(stretches) - _MOST_ROWS} more changes of the scale are not shown"
    return table


def _summary(scaling: ScalingPolicy, trace: Any) -> list[str]:
    applied = np.flatnonzero(~trace.skipped)
    last = {name: column[-1] for name, column in trace._asdict().items()}
    state: Any = SimpleNamespace(**last, loss_scale=trace.loss_scale_after[-1])
    limit = getattr(scaling, "max_overflow_streak", None) or math.inf
    reached = np.flatnonzero(trace.overflow_streak >= limit)
    return [
        *([f"max_overflow_streak={limit} is reached at step {reached[0]}: training may stop"] if len(reached) else []),
        f"skipped: {trace.skipped.mean():.1%} of {len(trace.skipped)} steps",
        f"first applied step: {applied[0] if len(applied) else 'none'}",
        f"final scale: {_scale_text(trace.loss_scale_after[-1])}",
        diagnose(scaling, state),
    ]


def _picture(trace: Any, suffix: str) -> bytes:
    from matplotlib.figure import Figure

    from lossscale_core.demo import draw_scale

    figure, picture = Figure(figsize=(8, 4), layout="constrained"), io.BytesIO()
    draw_scale(figure.subplots(), trace.loss_scale_used, trace.skipped, "#0072b2", "loss scale")
    figure.savefig(picture, format=suffix.lower(), dpi=110)
    return picture.getvalue()

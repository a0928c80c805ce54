"""`lossscale run`: run a training script as it is, with this library's scaler in the place of torch's."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click

from lossscale import tracing
from lossscale.cli._shared import FILE, OVERWRITE, example, require_new, typed_policy
from lossscale_core import policy_to_dict


@click.command(
    "run",
    short_help="Run a PyTorch script with this library's scaler.",
    epilog=example("lossscale run --policy policy.toml --trace scale.csv -- python train.py --fp16"),
    context_settings={"allow_interspersed_args": False},
)
@click.option("--policy", help="The policy of the run; without it, the settings that the script gives.")
@click.option("--trace", type=FILE, help="A CSV file for a row per update; each of several ranks writes its own.")
@OVERWRITE
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(policy: str | None, trace: Path | None, overwrite: bool, program: tuple[str, ...]) -> None:
    """Run a PyTorch training script as it is, with this library's scaler in the place of torch's.

    PROGRAM is a command line, such as python train.py or torchrun train.py, or a script that ends in .py. At exit
    it prints a diagnosis to stderr.
    """
    config = None if policy is None else policy_to_dict(typed_policy(policy, "--policy"))
    arguments = [sys.executable, *program] if program[0].endswith(".py") else list(program)
    # Found before the traces of an earlier run are removed, so that a misspelt program costs nothing.
    place = shutil.which(arguments[0])
    if place is None:
        raise click.UsageError(f"{arguments[0]} is not a program that can be run; pass one, such as python train.py")
    if trace is not None:
        _make_room(trace, overwrite)
    _replace_process(place, arguments, tracing.environment(config, trace))


def _make_room(trace: Path, overwrite: bool) -> None:
    """Refuse, or remove, the traces that an earlier run left under this name, those of its ranks included."""
    if trace.suffix.lower() != ".csv":
        raise click.UsageError(f"--trace {trace} must end in .csv")
    if not trace.absolute().parent.is_dir():
        raise click.UsageError(f"--trace {trace}: the folder {trace.parent} does not exist; create it first")
    own = re.compile(rf"{re.escape(trace.stem)}(\.rank\d+)?(\.process\d+\.\d+)?{re.escape(trace.suffix)}")
    earlier = sorted(each for each in trace.absolute().parent.iterdir() if own.fullmatch(each.name))
    if not overwrite:
        require_new(*earlier, hint="name another file with --trace, or pass --overwrite")
    for each in earlier:
        each.unlink()


def _replace_process(place: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Replace this process by the program, which then has its terminal, its signals and its exit status."""
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(place, arguments, environment)
    done = subprocess.run([place, *arguments[1:]], env=environment, check=False)  # elsewhere exec leaves a new process
    sys.exit(done.returncode)

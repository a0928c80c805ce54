"""Options, checks and texts that several subcommands use."""

import contextlib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from lossscale_core import FixedScaling, ScalingPolicy, as_policy
from lossscale_core.adapters import describe

_MOST_PARTS = 2**19
FILE = click.Path(path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace results that are there already.")


def example(command: str) -> str:
    """Return the last paragraph of a command's help: an example on its own line."""
    return f"\b\nExample:\n  {command}"


def help_if_alone(context: click.Context) -> None:
    """Print a group's help if no subcommand is given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def say(line: str) -> None:
    """Print a sentence for a person to stderr; stdout is for data."""
    click.echo(line, err=True)


def print_json(content: Any) -> None:
    """Print the result of a subcommand as one JSON value. A value that JSON does not have becomes text."""
    # If a list contains one list twice at each level, its text is too long, so it is written in parts and cut.
    encoder = json.JSONEncoder(indent=2, skipkeys=True, check_circular=False, default=_to_plain)
    parts = encoder.iterencode(content)
    sys.stdout.writelines(itertools.islice(parts, _MOST_PARTS))
    click.echo()
    if next(parts, None) is not None:
        raise click.UsageError(f"the result has more than {_MOST_PARTS} parts and was cut; pass a part of the file")


def _to_plain(value: Any) -> Any:
    """Return a small array as a list or number, and any other object as text."""
    with contextlib.suppress(Exception):  # other objects have no `nbytes`, or raise any error
        if value.nbytes <= 2**16:
            return value.tolist()
    return describe(value)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length as columns. The first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def require_new(*paths: Path, overwrite: bool = False) -> None:
    """Raise `UsageError` if a file exists, before the work begins. A broken symbolic link counts as a file."""
    for path in paths:
        # `exists` is False for a broken link; the write would then fail after all the work.
        if not overwrite and os.path.lexists(path):
            raise click.UsageError(f"{path} exists and is not overwritten; name another file, or pass --overwrite")


def parse_policy(text: str) -> ScalingPolicy:
    """Return the policy for an argument of the command; a number is a fixed scale."""
    try:
        number = float(text)
    except ValueError:
        return as_policy(text)
    return FixedScaling(number)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line on stderr."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield
    for warning in records:
        say(f"lossscale: warning: {warning.message}")

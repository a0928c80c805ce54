"""Options, checks and texts that several subcommands use."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lossscale_core import FixedScaling, ScalingPolicy, as_policy
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE, shown_number
from lossscale_core.errors import PolicyError

FILE = click.Path(path_type=Path)
_PICTURES = (".png", ".pdf", ".svg")
TOOLS_HELP = "`lossscale policy convert --help` lists the tools."
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace results that are there already.")


def example(command: str) -> str:
    """Return the last paragraph of a command's help, an example on a line of its own."""
    return f"\b\nExample:\n  {command}"


def help_if_alone(context: click.Context) -> None:
    """Print a group's help if no subcommand is given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def require_new(*paths: Path | None, hint: str = "name a new file") -> None:
    """Refuse to overwrite a file before the work begins; a broken symbolic link counts as a file."""
    for path in paths:
        # Not `exists`, which is False for a broken link; the write would then fail after all the work.
        if path is not None and os.path.lexists(path):
            raise click.UsageError(f"{path} exists and is not overwritten; {hint}")


def require_picture(path: Path, option: str, overwrite: bool) -> None:
    """Refuse a picture's path before the work begins: another suffix, or, without `overwrite`, a file that is there."""
    if path.suffix.lower() not in _PICTURES:
        raise click.UsageError(f"{option} {path} must end in {', '.join(_PICTURES)}")
    if not overwrite:
        require_new(path, hint=f"name another file with {option}, or pass --overwrite")


def console() -> Console:
    """Return a console that prints names from files unchanged; rich otherwise reads `[/x]` and `:x:` as markup."""
    return Console(markup=False, emoji=False)


def typed_policy(text: str, name: str) -> ScalingPolicy:
    """Return the policy that was typed for the option or argument of this name; a number is a fixed scale."""
    try:
        return FixedScaling(float(text))
    except PolicyError as error:
        bounds = f"{shown_number(SMALLEST_SCALE)} to {shown_number(LARGEST_SCALE)}"
        raise click.UsageError(
            f"{name} {text}: a fixed loss scale must be a number from {bounds}; pass one such as 65536, or dynamic, "
            "none or a policy file"
        ) from error
    except ValueError:
        return as_policy(text)


def print_json(content: Any) -> None:
    """Print the result of a subcommand as one JSON value."""
    click.echo(json.dumps(content, indent=2))


def value_text(value: Any) -> str:
    """Return the value of a setting or counter as text."""
    return shown_number(value) if isinstance(value, float) else str(value)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        click.echo(f"lossscale: warning: {warning.message}", err=True)

"""Options, checks and texts that several subcommands use."""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

FILE = click.Path(path_type=Path)
_PICTURES = (".png", ".pdf", ".svg")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace results that are there already.")


def example(command: str) -> str:
    """Return the last paragraph of a command's help, an example on a line of its own."""
    return f"\b\nExample:\n  {command}"


def help_if_alone(context: click.Context) -> None:
    """Print a group's help if no subcommand is given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def require_new(*paths: Path | None, mend: str = "name a new file") -> None:
    """Refuse to overwrite a file before the work begins; a broken symbolic link counts as a file."""
    for path in paths:
        if path is not None and os.path.lexists(path):
            raise click.UsageError(f"{path} exists and is not overwritten; {mend}")


def require_picture(path: Path, option: str, overwrite: bool) -> None:
    """Refuse a picture's path before the work begins: another suffix, or, without `overwrite`, a file that is there."""
    if path.suffix.lower() not in _PICTURES:
        raise click.UsageError(f"{option} {path} must end in {', '.join(_PICTURES)}")
    if not overwrite:
        require_new(path, mend=f"name another file with {option}, or pass --overwrite")


def console() -> Console:
    """Return a console that prints names from files unchanged; rich otherwise reads `[/x]` and `:x:` as markup."""
    return Console(markup=False, emoji=False)


def number_or_text(text: str) -> float | str:
    """Return a policy as it was typed: a number is a fixed scale."""
    try:
        return float(text)
    except ValueError:
        return text


def scale_text(scale: float) -> str:
    """Return a scale as text, a large or tiny power of two as `2**n`."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and not -9 < exponent <= 17 else f"{scale:g}"


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        click.echo(f"lossscale: warning: {warning.message}", err=True)

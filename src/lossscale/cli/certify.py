"""`lossscale certify`: check a training loop with planned overflows, and write a page for a pull request."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lossscale._certificate import environment_variable, json_of
from lossscale._install import how_to_install
from lossscale.cli._shared import FILE, OVERWRITE, example, require_page
from lossscale_core.adapters import shown


@click.command(
    "certify",
    short_help="Check a PyTorch training loop, and write a page.",
    epilog=example("lossscale certify train:build --page certificate.md"),
)
@click.argument("loop", metavar="MODULE:BUILD")
@click.option("--page", type=FILE, default=Path("certificate.md"), show_default=True, help="The page to write.")
@OVERWRITE
def command(loop: str, page: Path, overwrite: bool) -> None:
    """Check a PyTorch training loop with planned overflows, and write a page for a pull request.

    BUILD is a function or class in MODULE that takes a scaler and returns the loop, as for
    lossscale_torch.testing.check_training_loop. The page is Markdown, with a JSON file next to it. Exit status: 0 if
    all that was tried has held, 1 if something has not, 2 if nothing was tried. Under torchrun, one rank overflows.
    """
    try:
        from lossscale._certify_loop import certified_loop, process_group
    except ModuleNotFoundError as error:
        hint = how_to_install("torch")
        raise click.UsageError(f"this command needs {error.name}, which is not installed; {hint}") from error
    rank = environment_variable("RANK", 0)
    if rank == 0:
        require_page(page, overwrite)
    build = _build_of(loop)
    with process_group():
        certificate = certified_loop(build, loop, "--page", str(page), "--overwrite")
        if rank == 0:
            certificate.write(page, overwrite)
            click.echo(f"{certificate.summary()}; wrote {page} and {json_of(page)}")
            faults = [line for line in certificate.lines if line.held is False]
            for reason in dict.fromkeys(line.reason for line in faults):
                requirements = [f"\n  {line.what}" for line in faults if line.reason == reason]
                click.echo(f"not held: {reason}{''.join(requirements)}")
    sys.exit(certificate.status)


def _build_of(loop: str) -> Callable[[Any], Any]:
    """Import the module, from the present folder or installed, and return the function that builds the loop."""
    module, _, name = loop.partition(":")
    if module.endswith(".py"):
        raise click.UsageError(f"{loop} names a file; pass the module, such as {Path(module).stem}:{name or 'build'}")
    if not module or not name:
        raise click.UsageError(f"{loop} does not name a function of a module; pass one such as train:build")
    sys.path.append(os.getcwd())  # at the end, so that no file in this folder replaces one of Python's own modules
    try:
        build = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything, and may end the process
        raise click.UsageError(f"{loop}: {type(error).__name__}: {error}; name a function of a module here") from error
    if not callable(build):
        raise click.UsageError(f"{loop} is {shown(build)}; name a function or class that takes a scaler")
    return build  # type: ignore[no-any-return]
